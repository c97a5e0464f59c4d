"""A1: our own algorithms between processes, each by its name, against NumPy."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiodist import Communicator
from aiodist.schedules import SCHEDULES

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

PROGRAM = Path(__file__).parent / "programs" / "schedules.py"


def test_a1_every_name_is_of_some_operation() -> None:
    known = {name for names in SCHEDULES.values() for name in names}
    assert known == {"ring", "doubling", "halving", "tree", "direct", "chain", "bruck"}


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, backend=("openmpi", "gloo", "shm"))
@pytest.mark.parametrize("operation", SCHEDULES)
async def test_a1_every_schedule_between_processes(coll: Communicator, operation: str) -> None:
    assert await runpy.run_path(str(PROGRAM))["every"](coll, operation) > 1


@pytest.mark.thorough
def test_a1_every_schedule_between_ranks_that_share_no_memory(run: Run) -> None:
    with run.started(run.command("schedules.py", n=3, options=("-x", "AIODIST_SHM=0"))) as process:
        ended = run.finish(process, limit=90)
    assert (ended.code, ended.codes()) == (0, [0, 0, 0]), ended
    for rank in range(3):
        assert ended.value(rank, "shares memory") == "False"
        for operation, names in SCHEDULES.items():
            assert ended.value(rank, operation) == str(len(names))
