"""Ranks that disagree on what comes next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import aiodist
from aiodist.testing import run_ranks

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

KINDS = ("other_op", "other_count", "other_dtype", "other_root", "other_kind", "other_order")


def test_l2_mismatch_is_told_to_all_ranks_within_a_second(run: Run) -> None:
    ended = run("faults.py", n=3)
    assert (ended.code, ended.codes()) == (0, [0, 0, 0]), ended
    for rank in range(3):
        sizes = {"checked": (3, 2), "unchecked": (3, 2)} if rank < 2 else {"checked": (3,), "unchecked": (3,)}
        expected = [f"{mode} {size} {kind}" for mode in sizes for kind in KINDS for size in sizes[mode]]
        said = ended.said(rank)
        told = "both sides within a second"
        assert sorted(said) == sorted([*(f"{case}: {told}" for case in expected), "went on: yes"])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("checked", [True, False])
def test_l2_mismatch_in_one_process(size: int, checked: bool) -> None:
    async def main() -> list[str]:
        said = []
        async with aiodist.init(checked=checked) as world:
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
