"""The programs of docs/recovery.md: rank 2 of three is killed in each of them, and the others end as they should."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aiodist.testing import kill_rank, run_ranks
from tests.docs.run_blocks import blocks

FILE = Path(__file__).parents[2] / "docs" / "recovery.md"

PROGRAMS: dict[str, tuple[Any, ...]] = {
    "main": (),
    "train": (),
    "train_pipelined": (30,),
    "train_locally": (30,),
    "train_shards": (30,),
    "train_by_engine": (),
    "train_on_each_once": (),
}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the blocks before those about tests define."""
    found: dict[str, Any] = {"__name__": "recovery"}
    for _, block in blocks(FILE.read_text().partition("## In tests")[0], "python"):
        exec(block, found)
    return found


@pytest.mark.drawn(2)
@pytest.mark.parametrize("turns", [150, 600])
@pytest.mark.parametrize("program", PROGRAMS)
def test_w3_a_program_of_the_page_goes_on(names: dict[str, Any], program: str, turns: int, tmp_path: Path) -> None:
    given = (*PROGRAMS[program], *([str(tmp_path)] if program == "train_shards" else []))
    gone = False

    async def mortal(number: int) -> Any:
        nonlocal gone
        task = asyncio.create_task(names[program](*given))
        if number == 2:
            for _ in range(turns):
                await asyncio.sleep(0)
            gone = not task.done()
            if gone:
                kill_rank()
        return await task

    one, two, three = run_ranks(3, mortal, elastic=(1, 3))
    assert one is not None
    assert one == two
    assert gone is (three is None)
    expected = {"train_locally": 30, "train_shards": 30, "train_on_each_once": 1000}
    if gone and program in expected:
        assert one == expected[program]
