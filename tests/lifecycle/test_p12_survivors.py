"""P12: a rank is killed, and the transport serves the others: `aiodist run --keep-going` without MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Run

LOST = "fails, names rank 2: True"

pytestmark = [
    pytest.mark.parametrize("run", ["none"], indirect=True),
    pytest.mark.parametrize("backend", ["gloo", "shm"]),
]


@pytest.fixture
def ended(run: Run, backend: str, request: pytest.FixtureRequest) -> Ended:
    """The end of three ranks of a program."""
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("survivors.py", request.param, n=3, options=("--keep-going",))
    assert (ended.code, ended.codes()) == (137, [0, 0, -9]), ended
    assert [line for line in ended.errors.splitlines() if not line.startswith("[")] == ["rank 2: signal SIGKILL"]
    return ended


@pytest.mark.thorough
@pytest.mark.parametrize("ended", ["goes_on"], indirect=True)
def test_p12_the_living_go_on_and_what_needs_the_dead_fails(ended: Ended) -> None:
    for rank in range(2):
        assert ended.said(rank) == [
            f"posted to receive from any: {LOST}",
            f"posted to receive from it: {LOST}",
            f"long send to it: {LOST}",
            f"16 from it: {rank} {1 - rank}",
            f"16 from any: {rank} {1 - rank}",
            f"1048576 from it: {rank} {1 - rank}",
            f"1048576 from any: {rank} {1 - rank}",
            f"then a short send to it: {LOST}",
            f"then a long send to it: {LOST}",
            f"then a receive from it: {LOST}",
            f"what it had only announced: {LOST}",
            "still waiting: True",
            "closed: fails, names rank 2: False",
        ]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ended", ["kept"], indirect=True)
def test_p12_what_the_dead_had_sent_is_received_first(ended: Ended) -> None:
    for rank in range(2):
        assert ended.said(rank) == [
            f"it is gone: {LOST}",
            "from any: 7",
            f"from any: {LOST}",
            f"16 from it: {rank} {1 - rank}",
            f"16 from any: {rank} {1 - rank}",
            f"then from any: {1 - rank}",
            f"16 from it: {rank} {1 - rank}",
            f"16 from any: {rank} {1 - rank}",
        ]
