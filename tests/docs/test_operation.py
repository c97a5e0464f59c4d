"""The drawing of one operation in docs/design/operation.md shows the calls that Python makes."""

import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise, product
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
CALL = re.compile(r" -- [^-]+ --> | --> ")
Calls = set[tuple[str, str]]


def drawing() -> str:
    found = re.search(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def drawn() -> dict[str, str]:
    """Return the Python functions of the drawing by node, from top to bottom."""
    return dict(NODE.findall(drawing()))


def drawn_calls() -> Calls:
    """Return caller and callee of each solid arrow between Python functions."""
    names = drawn()
    found: Calls = set()
    for line in drawing().splitlines():
        ends = [[part.split("[")[0].split("(")[0].strip() for part in end.split(" & ")] for end in CALL.split(line)]
        found.update(pair for callers, callees in pairwise(ends) for pair in product(callers, callees))
    return {(names[a], names[b]) for a, b in found if a in names and b in names}


class Trace:
    """The functions of the drawing that are entered, in order, with their calls of one another."""

    def __init__(self) -> None:
        self.names = set(drawn().values())
        self.entered: dict[str, None] = {}
        self.calls: Calls = set()
        self.recording = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if not (self.recording and event == "call" and self._is_drawn(frame)):
            return
        self.entered.setdefault(frame.f_code.co_qualname)
        caller = frame.f_back
        while caller is not None and not self._is_drawn(caller):
            caller = caller.f_back
        if caller is not None:
            self.calls.add((caller.f_code.co_qualname, frame.f_code.co_qualname))

    def _is_drawn(self, frame: FrameType) -> bool:
        return frame.f_code.co_qualname in self.names and "/aiodist/" in frame.f_code.co_filename


def plan(coll: Communicator) -> Any:
    return coll.allreduce(torch.ones(1000))


def no_plan(coll: Communicator) -> Any:
    return coll.allreduce([torch.ones(1000)])


def mismatch(coll: Communicator) -> Any:
    return coll.allreduce(torch.ones(3), op="sum" if coll.rank else "max")


@cache
def traced(call: Callable[[Communicator], Any]) -> Trace:
    """Trace the second `call` of two ranks."""
    trace = Trace()

    async def main() -> None:
        async with aiodist.init() as coll:
            for recorded in (False, True):
                await coll.barrier()
                trace.recording = recorded
                with suppress(aiodist.MismatchError):
                    await call(coll)
                trace.recording = False

    threading.setprofile(trace.profile)
    sys.setprofile(trace.profile)
    try:
        aiodist.testing.run_ranks(2, main)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


@pytest.mark.parametrize(
    ("call", "unreached"),
    [
        (plan, {"general", "failed", "verdict", "reject"}),
        (no_plan, {"failed", "verdict", "reject"}),
        (mismatch, {"general", "resolve"}),
    ],
)
def test_an_operation_enters_the_functions_that_are_drawn(
    call: Callable[[Communicator], Any], unreached: set[str]
) -> None:
    assert list(traced(call).entered) == [name for node, name in drawn().items() if node not in unreached]


def test_the_arrows_are_the_calls() -> None:
    assert len(drawn_calls()) > 17
    assert set().union(*(traced(call).calls for call in (plan, no_plan, mismatch))) == drawn_calls()


@pytest.mark.ranks(2, backend="shm")
async def test_the_core_runs_no_function_that_is_drawn(coll: Communicator) -> None:
    t = torch.ones(1000)
    for entered in (["Reductions.allreduce", "Plans.issue"], []):
        await coll.barrier()
        trace = Trace()
        trace.recording = True
        sys.setprofile(trace.profile)
        try:
            await coll.allreduce(t)
        finally:
            sys.setprofile(None)
        assert list(trace.entered) == entered
