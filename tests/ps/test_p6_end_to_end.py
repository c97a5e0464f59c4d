"""P6: n of m, on a whole parameter server: what is late is accepted, dropped or scaled, and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.ps import ParameterServer, Quorum


def full(value: float) -> Tensor:
    return torch.full((7,), float(value), dtype=torch.float64)


@pytest.mark.ranks(2)
async def test_p6_a_quorum_of_more_workers_than_there_are_is_refused(coll: Communicator) -> None:
    with pytest.raises(ValueError, match=r"a quorum of 3 of workers \[0, 1\]: expected at least 3 workers"):
        async with ParameterServer(coll, {"w": full(0)}, consistency=Quorum(3, "mean")):
            pass


@pytest.mark.ranks(3)
@pytest.mark.parametrize("split", [8, 1 << 20])
@pytest.mark.parametrize(
    ("stale", "values", "dropped", "scaled", "ages"),
    [
        # The first step takes what ranks 0 and 1 pushed. Rank 2 pushes late what it made from version 0, and rank 0
        # something fresh: by "drop" that waits for another fresh push, of rank 1.
        ("accept", [3.0, 3.0 + 4 + 8], 0, 0, {0: 3, 1: 1}),
        ("drop", [3.0, 3.0 + 8 + 16], 1, 0, {0: 4}),
        ("scale", [3.0, 3.0 + 4 / 2 + 8], 0, 1, {0: 3, 1: 1}),
    ],
)
async def test_p6_late_pushes_are_taken_as_the_policy_says(
    coll: Communicator, split: int, stale: Any, values: list[float], dropped: int, scaled: int, ages: dict[int, int]
) -> None:
    policy = Quorum(2, "sum", stale=stale)
    async with ParameterServer(coll, {"w": full(0)}, consistency=policy, split_bytes=split) as ps:
        if coll.rank < 2:
            await ps.push("w", full(coll.rank + 1))
            seen = ps.pull("w", full(0), at_least=1)
            assert ((await seen).tolist(), seen.version) == (full(values[0]).tolist(), 1)
        await coll.barrier()
        if coll.rank == 2:
            await ps.push("w", full(4))
        await coll.barrier()
        if coll.rank == 0:
            await ps.push("w", full(8))
        await coll.barrier()
        if coll.rank == 1 and stale == "drop":
            await ps.push("w", full(16))
        await coll.barrier()
        seen = ps.pull("w", full(0), at_least=2)
        assert ((await seen).tolist(), seen.version) == (full(values[1]).tolist(), 2)
        await coll.barrier()
        statistics = ps.statistics()
        assert int(await coll.allreduce(statistics.dropped)) == dropped
        assert int(await coll.allreduce(statistics.scaled)) == scaled
        counted = {age: int(await coll.allreduce(statistics.staleness[age])) for age in range(3)}
        assert {age: count for age, count in counted.items() if count} == ages


@pytest.mark.ranks(4)
@pytest.mark.parametrize("n", [1, 3])
async def test_p6_with_backup_workers_each_step_is_the_mean_of_n(coll: Communicator, n: int) -> None:
    """Any worker comes first: pushes of one, so each step adds one, whichever were dropped."""
    async with ParameterServer(coll, {"w": full(0)}, consistency=Quorum(n, "mean", stale="drop"), split_bytes=8) as ps:
        w, goal = full(0), 10
        while (await ps.pull("w", w))[0] < goal:
            await ps.push("w", full(1))
        torch.testing.assert_close(w, full(w[0].item()))
        assert w[0] == int(w[0])
        await ps.sync()
        await coll.barrier()
        statistics = ps.statistics()
        pushes = int(await coll.allreduce(statistics.pushes))
        applied = int(await coll.allreduce(sum(statistics.staleness.values())))
        assert applied + int(await coll.allreduce(statistics.dropped)) == pushes
        assert applied == n * int(w[0])


@pytest.mark.ranks(3)
async def test_p6_a_quorum_over_several_tensors_waits_for_nobody(coll: Communicator) -> None:
    tensors = {str(i): full(0) for i in range(4)}
    async with ParameterServer(coll, tensors, consistency=Quorum(2, "mean"), split_bytes=8) as ps:
        for _ in range(10):
            await ps.push_pull(None, [full(1)] * 4)
        await ps.sync()
        await ps.pull()
        assert all((t == t[0]).all() for t in tensors.values())
