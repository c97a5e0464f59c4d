"""Every schedule by its name, for every operation that has it, on random numbers that differ by rank.

The results are compared with NumPy's on the numbers of all ranks; `ran` are the schedules that ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of
from aiodist.schedules import SCHEDULES
from aiodist.testing.seams.algorithms import Endpoint, Program, Scheduled
from aiodist.testing.seams.transport import Primitive

Array = npt.NDArray[Any]
KINDS = (torch.float64, torch.int64)
LONG = 40_001
MESSAGES = {("alltoall", "direct")}
"""What is made of messages of its own, since sizes may differ."""


def drawn(rank: int, numel: int, kind: torch.dtype) -> Tensor:
    """Return the numbers of a rank: whole ones of 62 bits, whose sums wrap, or floats of both signs."""
    generator = torch.Generator().manual_seed(1 + 1000 * rank + numel)
    if kind is torch.int64:
        return torch.randint(-(1 << 62), 1 << 62, (numel,), generator=generator)
    return torch.randn(numel, generator=generator, dtype=kind)


def lengths(size: int) -> tuple[int, ...]:
    """Return numbers of elements: fewer than ranks, no multiple of them, and enough for the progress thread."""
    return (size - 1, 2 * size + 1, LONG)


def same(seen: Tensor, expected: Array, what: object) -> None:
    """Raise AssertionError unless floats are within rounding, and whole numbers equal."""
    assert seen.numpy().shape == expected.shape, what
    np.testing.assert_allclose(seen.numpy(), expected, rtol=1e-12, atol=1e-12 if seen.is_floating_point() else 0)


async def allreduce(coll: Communicator, impl: Any, parts: list[Tensor]) -> None:
    t = parts[coll.rank].clone()
    await coll.allreduce(t, impl=impl)
    same(t, np.sum([part.numpy() for part in parts], axis=0), impl)
    everywhere = await coll.allgather(t.view(torch.int64))
    assert all(torch.equal(one, everywhere[0]) for one in everywhere), f"{impl}: ranks differ in their last bits"


async def broadcast(coll: Communicator, impl: Any, parts: list[Tensor]) -> None:
    for root in range(coll.size):
        t = parts[coll.rank].clone()
        await coll.broadcast(t, root, impl=impl)
        same(t, parts[root].numpy(), (impl, root))


async def reduce(coll: Communicator, impl: Any, parts: list[Tensor]) -> None:
    for root in range(coll.size):
        t, out = parts[coll.rank].clone(), torch.empty_like(parts[0])
        await coll.reduce(t, root=root, out=out if coll.rank == root else None, impl=impl)
        same(t, parts[coll.rank].numpy(), (impl, root))
        if coll.rank == root:
            same(out, np.sum([part.numpy() for part in parts], axis=0), (impl, root))


async def scan(coll: Communicator, impl: Any, parts: list[Tensor]) -> None:
    t = parts[coll.rank].clone()
    await coll.scan(t, impl=impl)
    same(t, np.cumsum([part.numpy() for part in parts], axis=0)[coll.rank], impl)


async def allgather(coll: Communicator, impl: Any, parts: list[Tensor]) -> None:
    cut = [part[: max(part.numel() - 3 * rank, 0)] for rank, part in enumerate(parts)]
    for given in (parts, cut):
        out = torch.empty(0, dtype=parts[0].dtype)
        await coll.allgather(given[coll.rank], out=out, impl=impl)
        same(out, np.concatenate([part.numpy() for part in given]), impl)


async def reduce_scatter(coll: Communicator, impl: Any, parts: list[Tensor]) -> None:
    numel, size, rank = parts[0].numel(), coll.size, coll.rank
    total = np.sum([part.numpy() for part in parts], axis=0)
    sizes = [numel // size + (r < numel % size) for r in range(size)]
    lopsided = [0] * (size - 1) + [numel]
    for counts in (sizes, lopsided):
        seen = await coll.reduce_scatter(parts[rank].clone(), sizes=counts, impl=impl)
        start = sum(counts[:rank])
        same(seen, total[start : start + counts[rank]], (impl, counts))


async def alltoall(coll: Communicator, impl: Any, parts: list[Tensor]) -> None:
    size, rank = coll.size, coll.rank
    blocks = [[part.roll(7 * to) for to in range(size)] for part in parts]
    received = await coll.alltoall(blocks[rank], impl=impl)
    for source, block in enumerate(received):
        same(block, blocks[source][rank].numpy(), (impl, source))


CHECKS = {one.__name__: one for one in (allreduce, broadcast, reduce, scan, allgather, reduce_scatter, alltoall)}


@contextmanager
def noting(ran: set[tuple[str, str]]) -> Iterator[None]:
    """Add what is run by schedule, as operation and name."""

    run = Scheduled.run

    def noted(self: Scheduled, ep: Endpoint, primitives: Sequence[Primitive]) -> Program[None]:
        ran.update((o.kind, self.name) for o in primitives)
        return run(self, ep, primitives)

    with patch.object(Scheduled, "run", noted):
        yield


async def check(coll: Communicator, operation: str, name: str, numels: Sequence[int]) -> None:
    """Run one schedule on tensors of `numels`; raise AssertionError if the result is wrong, or if another one ran."""
    for numel in numels:
        for kind in KINDS:
            ran: set[tuple[str, str]] = set()
            parts = [drawn(rank, numel, kind) for rank in range(coll.size)]
            with noting(ran):
                await CHECKS[operation](coll, name, parts)
            assert (operation, name) in ran or (operation, name) in MESSAGES, f"{operation} by {name} ran {ran}"


async def every(coll: Communicator, operation: str) -> int:
    """Check every schedule of `operation`, in one piece and in several; return how many there were."""
    cut = await coll.dup()
    await cut.selector.set_limit("chunk_bytes", 4000)
    await cut.selector.set_limit("tree.chunks", 3)
    for name, algorithm in SCHEDULES[operation].items():
        await check(coll, operation, name, lengths(coll.size))
        if algorithm.chunked:
            await check(cut, operation, name, [LONG])
    await cut.aclose()
    return len(SCHEDULES[operation])


async def main() -> None:
    async with aiodist.init() as coll:
        shares = "shm" in parts_of(coll).repertoire.all
        print(f"shares memory: {shares}", flush=True)
        for operation in SCHEDULES:
            print(f"{operation}: {await every(coll, operation)}", flush=True)


if __name__ == "__main__":
    aiodist.run(main)
