"""A5: the collectives of shared memory, forced, conform among processes, for tensors in the arena and elsewhere."""

from __future__ import annotations

import pytest
import torch

from aiodist import Communicator
from aiodist.collectives.choice.table import NAMES
from tests.support import conformance
from tests.support.conformance import MOVES, REDUCTIONS, cases, check

OPERATIONS = tuple(one for one in (*REDUCTIONS, *MOVES) if "shm" in NAMES.get(one, ()))


def test_a5_there_is_something_to_force() -> None:
    assert {"allreduce", "reduce", "scan", "reduce_scatter", "broadcast", "allgather"} <= set(OPERATIONS)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("place", ["arena", "ordinary"])
async def test_a5_collectives_in_shared_memory_conform(
    coll: Communicator, operation: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "arena":
        given = conformance.Case.given

        def shared(case: conformance.Case, rank: int, to: int = 0) -> torch.Tensor:
            t = given(case, rank, to)
            return coll.arena_empty(t.shape, t.dtype).copy_(t)

        monkeypatch.setattr(conformance.Case, "given", shared)
    own = await coll.dup()
    await own.selector.set(operation, "shm")
    assert own.selector.choose(operation, 100) == "shm"
    for case in cases(operation, coll.size, limit=30, seed=5, large=30_001):
        await check(own, case)
    await own.aclose()
