"""The drawing of one operation in docs/design/operation.md shows the calls that Python makes."""

import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import aiodist
import aiodist.testing
from aiodist import Communicator

PAGE = Path(__file__).parents[2] / "docs/design/operation.md"
NODE = re.compile(r'(\w+)\["([\w.]+)(?:[:,][^"]*)?"\]')


def drawn() -> dict[str, str]:
    """Return the Python functions of the drawing by node, from top to bottom."""
    drawing = re.search(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert drawing is not None
    return dict(NODE.findall(drawing.group(1)))


def entered(call: Callable[[Communicator], Any]) -> list[str]:
    """Return the functions that the second `call` of two ranks enters, in order."""
    found: dict[str, None] = {}
    recording = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if recording and event == "call" and "/aiodist/" in frame.f_code.co_filename:
            found.setdefault(frame.f_code.co_qualname)

    async def main() -> None:
        nonlocal recording
        async with aiodist.init() as coll:
            for recorded in (False, True):
                await coll.barrier()
                recording = recorded
                with suppress(aiodist.MismatchError):
                    await call(coll)
                recording = False

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        aiodist.testing.run_ranks(2, main)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


@pytest.mark.parametrize(
    ("make", "unreached"),
    [
        pytest.param(lambda: torch.ones(1000), {"general", "issue", "verdict"}, id="plan"),
        pytest.param(lambda: [torch.ones(1000)], {"program", "verdict"}, id="no plan"),
    ],
)
def test_an_allreduce_makes_the_calls_that_are_drawn(make: Callable[[], Any], unreached: set[str]) -> None:
    names = [name for node, name in drawn().items() if node not in unreached]
    assert len(names) > 12
    assert [name for name in entered(lambda coll: coll.allreduce(make())) if name in names] == names


def test_a_mismatch_makes_the_calls_that_are_drawn() -> None:
    found = entered(lambda coll: coll.allreduce(torch.ones(3), op="sum" if coll.rank else "max"))
    unreached = {"general", "issue", "resolve"}
    assert {name for node, name in drawn().items() if node not in unreached} - set(found) <= {
        "Primitives.run",
        "Scheduled.run",
    }
