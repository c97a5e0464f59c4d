"""C1, C2, C3, C5: every operation on every backend, exactly as NumPy says (see `tests.support.conformance`)."""

import pytest
import torch

from aiodist import Communicator
from tests.support.conformance import MOVES, REDUCTIONS, cases, check

# How many cases of an operation each backend is given; 65 pairs of dtype and operator are always among them.
LIMITS = {"local": 260, "mpi": 130, "mpich": 130, "gloo": 130, "shm": 70}


async def run(coll: Communicator, operation: str, seed: int) -> None:
    limit = LIMITS[coll.backend] if coll.size <= 4 else 70 if coll.size <= 8 else 1
    for case in cases(operation, coll.size, limit=limit, seed=seed, large=70_001 if coll.size <= 8 else 3001):
        await check(coll, case)


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3, 4, backend="local")
@pytest.mark.ranks(5, 8, 16, 37, backend="local")
@pytest.mark.ranks(1, 2, 3, 4, backend=("mpi", "mpich", "gloo"))
@pytest.mark.ranks(2, 3, backend="shm")
@pytest.mark.parametrize("operation", REDUCTIONS)
async def test_c2_reductions_conform(coll: Communicator, operation: str) -> None:
    await run(coll, operation, seed=1)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3, 4, backend="local")
@pytest.mark.ranks(5, 8, 16, 37, backend="local")
@pytest.mark.ranks(1, 2, 3, 4, backend=("mpi", "mpich", "gloo"))
@pytest.mark.ranks(2, 3, backend="shm")
@pytest.mark.parametrize("operation", MOVES)
async def test_c1_moves_conform(coll: Communicator, operation: str) -> None:
    await run(coll, operation, seed=2)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend="shm")
@pytest.mark.parametrize("place", ["private", "arena"])
async def test_c1_messages_of_hundreds_of_mebibytes_arrive(coll: Communicator, place: str) -> None:
    numel = 300 << 18
    sent = torch.arange(numel, dtype=torch.int32)
    if coll.rank == 0:
        await coll.send(sent if place == "private" else coll.arena_empty((numel,), dtype=torch.int32).copy_(sent), 1)
    else:
        into = torch.zeros(numel + 1, dtype=torch.int32)
        await coll.recv(into, 0)
        assert torch.equal(into[:-1], sent)
        assert not into[-1]
