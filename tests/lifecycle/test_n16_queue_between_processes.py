"""N16: a rank of a queue of shards leaves, or is killed, and others get its records; each rank is a process."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Run

RECORDS, TAKEN = 3000, 40


def used(ended: Ended, *ranks: int) -> list[Counter[int]]:
    return [Counter(map(int, ended.value(rank, "used").split())) for rank in ranks]


@pytest.mark.drawn(1)
def test_n16_others_get_what_a_process_that_leaves_has_not_used(run: Run) -> None:
    ended = run("shards.py", "leaves", n=3)
    assert ended.code == 0, ended
    first, second, left = used(ended, 0, 1, 2)
    assert left.total() == TAKEN
    assert first + second + left == Counter(range(RECORDS))
    assert [ended.value(rank, "barrier") for rank in range(3)] == ["over"] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["none"], indirect=True)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_n16_others_get_what_a_killed_process_has_not_used(run: Run, backend: str) -> None:
    """Their communicator is lost with it, and the queue is not."""
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("shards.py", "killed", n=3, options=("--keep-going",))
    assert (ended.code, ended.codes()) == (137, [0, 0, -9]), ended
    first, second, killed = used(ended, 0, 1, 2)
    assert killed.total() == TAKEN
    assert first + second + killed == Counter(range(RECORDS))
    assert [ended.value(rank, "barrier") for rank in range(2)] == ["lost rank 2"] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["none"], indirect=True)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_n16_the_queue_ends_with_the_process_that_keeps_it(run: Run, backend: str) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("shards.py", "first", n=3, options=("--keep-going",))
    assert (ended.code, ended.codes()) == (137, [-9, 0, 0]), ended
    for rank in (1, 2):
        assert ended.value(rank, "the queue") == "lost with rank 0"
        assert ended.value(rank, "barrier") == "lost rank 0"
