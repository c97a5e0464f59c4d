"""H10: threads that wait hear of the end, of another rank or of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

pytestmark = pytest.mark.drawn(1)

GONE = 15.0
WAYS = ("lane", "large", "steps", "message")
LOST = ("PeerLost", "RemoteError")


@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
@pytest.mark.parametrize("n", [2, 3])
def test_h10_a_rank_that_is_killed_is_told_to_the_threads_that_wait(run: Run, n: int) -> None:
    ended = run("threads.py", "killed", n=n)
    assert ended.codes() == [*[1] * (n - 1), -9], ended
    for rank in range(n - 1):
        assert {ended.value(rank, way) for way in WAYS if way != "message" or rank == 0} <= set(LOST)
        assert ended.gone_after(rank, "mark") < GONE


@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
@pytest.mark.parametrize(("how", "code"), [("interrupted", 130), ("left", 1)])
def test_h10_the_end_of_a_program_is_told_to_the_threads_that_wait(run: Run, how: str, code: int) -> None:
    ended = run("threads.py", how)
    assert ended.code == code, ended
    guilty = 0 if how == "interrupted" else 1
    for rank in range(2):
        expected = {"CommunicatorAborted"} if rank == guilty else set(LOST)
        assert {ended.value(rank, way) for way in WAYS if way != "message" or rank == 0} <= expected
        assert ended.gone_after(rank, "mark") < GONE
