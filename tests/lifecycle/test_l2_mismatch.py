"""Ranks that disagree on what comes next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import aiodist
from aiodist.testing import run_ranks
from tests.lifecycle.conftest import slowness

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

pytestmark = pytest.mark.drawn(1)

LIVENESS_SECONDS = 2.0

KINDS = (
    "other_op",
    "other_count",
    "other_dtype",
    "other_root",
    "other_kind",
    "other_order",
    "other_long",
    "other_moves",
)


@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
def test_l2_mismatch_is_told_to_all_ranks_within_a_second(run: Run, shares: bool) -> None:
    """Ranks that share no memory count as hosts of their own: what they sent one another is taken off the wire."""
    ended = run("faults.py", n=3, options=() if shares else ("-x", "AIODIST_SHM=0"))
    assert (ended.code, ended.codes()) == (0, [0, 0, 0]), ended
    for rank in range(3):
        expected = [f"{size} {kind}" for kind in KINDS for size in ((3, 2) if rank < 2 else (3,))]
        said = ended.said(rank)
        assert sorted(said) == sorted([*(f"{case}: both sides within a second" for case in expected), "went on: yes"])


@pytest.mark.parametrize("size", [2, 3])
def test_l2_mismatch_in_one_process(size: int) -> None:
    async def main() -> list[str]:
        said = []
        async with aiodist.init() as world:
            for count in (4, 5):
                coll = await world.dup()
                try:
                    await coll.allreduce(torch.ones(count if coll.rank == size - 1 else 3))
                except aiodist.MismatchError as error:
                    said.append(str(error))
            assert await world.allreduce(1) == size
        return said

    for said in run_ranks(size, main):
        assert len(said) == 2
        for text in said:
            assert f"rank {size - 1}: allreduce float32[" in text
            assert "allreduce float32[3] sum at" in text


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
def test_l2_a_rank_killed_in_a_dispute_keeps_no_rank_waiting(run: Run, shares: bool) -> None:
    """The others learn that ranks differ, or that one of them is lost; later calls are refused."""
    ended = run("dispute.py", n=3, options=() if shares else ("-x", "AIODIST_SHM=0"))
    assert ended.code, ended
    for rank in range(2):
        assert ended.value(rank, "told") != "late", ended


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
def test_l2_every_operation_against_every_other(run: Run, shares: bool) -> None:
    """Each rank gets the error, no message is left, tensors are free immediately, and the next sum is right."""
    ended = run("pairs.py", n=3, options=() if shares else ("-x", "AIODIST_SHM=0"))
    assert (ended.code, ended.codes()) == (0, [0, 0, 0]), ended
    assert [ended.said(rank) for rank in range(3)] == [["faults: 0 0"]] * 3, ended.text


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
def test_l2_those_that_differ_do_not_wait_for_a_third(run: Run, shares: bool) -> None:
    ended = run("third.py", n=3, options=() if shares else ("-x", "AIODIST_SHM=0"))
    assert (ended.code, ended.codes(), ended.errors) == (0, [0, 0, 0], ""), ended
    for rank in range(3):
        assert ended.value(rank, "told") == "True", ended.text
        kinds = ended.value(rank, "then").split()
        count = kinds.count("MismatchError")
        assert kinds == ["MismatchError"] * count + ["MismatchAborted"] * (4 - count), ended.text
        assert count == 3 if rank == 1 else count <= 3, ended.text  # others may come when it is aborted


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize(
    ("case", "side"),
    [("stopped", "did not answer within 2 s"), ("before", "has not issued it: the last is "), ("after", "")],
)
def test_l2_a_rank_that_is_stopped_or_busy_delays_no_verdict(run: Run, case: str, side: str, shares: bool) -> None:
    """A control thread answers while the loop is busy; a stopped process is named after the liveness bound."""
    ended = run("verdicts.py", case, n=3, options=() if shares else ("-x", "AIODIST_SHM=0"))
    assert (ended.code, ended.codes(), ended.errors) == (0, [0, 0, 0], ""), ended
    for rank in range(3):
        text = ended.value(rank, "error")
        assert text.startswith("MismatchError: "), ended.text
        assert "float32[9] sum at" in text, ended.text
        assert "float32[9] max at" in text, ended.text
        assert ended.value(rank, "then") == "3"
    for rank in range(2):
        assert f"rank 2 {side}" in ended.value(rank, "error") or not side, ended.text
        longest = (LIVENESS_SECONDS if case == "stopped" else 0.0) + 1.0 * slowness()
        assert float(ended.value(rank, "seconds")) < longest, ended.text


@pytest.mark.thorough
def test_h7_where_nothing_drives_a_rank_any_more_all_are_told(run: Run) -> None:
    ended = run("broken.py")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    for rank in range(2):
        assert ended.value(rank, "raised").endswith(" True"), ended.text
