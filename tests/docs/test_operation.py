"""The drawing of one operation in docs/design/operation.md shows the calls that Python makes."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

import aiodist
import aiodist.testing

PAGE = Path(__file__).parents[2] / "docs/design/operation.md"
NODE = re.compile(r'(\w+)\["([\w.]+)(?:[:,][^"]*)?"\]')
ELSEWHERE = {"core", "general", "issue", "verdict"}
"""Nodes that this allreduce does not reach."""


def drawn() -> list[str]:
    """Return the functions of the drawing, from top to bottom."""
    drawing = re.search(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert drawing is not None
    nodes = dict(NODE.findall(drawing.group(1)))
    return [name for node, name in nodes.items() if node not in ELSEWHERE]


def test_an_allreduce_makes_the_calls_that_are_drawn() -> None:
    entered: dict[str, None] = {}
    recording = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if recording and event == "call" and "/aiodist/" in frame.f_code.co_filename:
            entered.setdefault(frame.f_code.co_qualname)

    async def main() -> None:
        nonlocal recording
        async with aiodist.init() as coll:
            t = torch.ones(1000)
            await coll.allreduce(t)
            await coll.barrier()
            recording = True
            await coll.allreduce(t)
            recording = False

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        aiodist.testing.run_ranks(2, main)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    names = drawn()
    assert len(names) > 12
    assert [name for name in entered if name in names] == names
