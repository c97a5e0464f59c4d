"""Ranks whose default device is another one than that of the tensors that they give: argv[1] calls, argv[2] is it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import aiodist

Call = Callable[[], Any]


def full(numel: int, value: float) -> Tensor:
    return torch.full((numel,), float(value), device="cpu")


def every(coll: aiodist.Communicator) -> Iterator[tuple[Call, object]]:
    """Yield calls of every kind, each with its result."""
    r, p = coll.rank, coll.size
    total, after, before = sum(range(p)), (r + 1) % p, (r - 1) % p
    for k in (1, 1000, 300_001):
        yield partial(coll.allreduce, full(k, r)), full(k, total)
        yield partial(coll.allreduce, [full(k, r), full(3, 1)]), [full(k, total), full(3, p)]
        yield partial(coll.broadcast, full(k, r), 1), full(k, 1)
        yield partial(coll.reduce, full(k, r), root=0), None if r else full(k, total)
        yield partial(coll.allgather, full(k + r, r)), [full(k + i, i) for i in range(p)]
        yield partial(coll.reduce_scatter, full(k * p, r)), full(k, total)
        yield partial(coll.gather, full(k, r)), None if r else [full(k, i) for i in range(p)]
        yield partial(coll.scatter, None if r else [full(k, i) for i in range(p)]), full(k, r)
        yield partial(coll.alltoall, [full(k, r) for _ in range(p)]), [full(k, i) for i in range(p)]
        yield partial(coll.alltoall_single, full(k * p, r)), torch.cat([full(k, i) for i in range(p)])
        yield partial(coll.scan, full(k, r)), full(k, sum(range(r + 1)))
        yield partial(coll.sendrecv, full(k, r), after, src=before), full(k, before)
    yield partial(coll.allreduce, r), total
    yield partial(coll.allreduce, full(3, r), name="named"), full(3, total)
    yield partial(coll.allgather_object, {"rank": r}), [{"rank": i} for i in range(p)]
    yield partial(coll.broadcast_object, list(range(1000)), root=0), list(range(1000))
    yield partial(coll.scatter_object, None if r else list(range(p))), r
    yield partial(coll.gather_object, r), None if r else list(range(p))
    yield coll.barrier, None


def alike(found: object, expected: object) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and found.is_cpu and torch.equal(found, expected)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(alike, found, expected))
    return found == expected


def in_a_script(device: str) -> None:
    with aiodist.start(timeout=30) as coll:
        with torch.device(device):
            for call, expected in every(coll):
                found = call().wait()
                assert alike(found, expected), (found, expected)
            made = coll.dup().wait(), coll.split(coll.rank).wait()
        print("all alike", [each.size for each in made], flush=True)


async def in_a_loop(device: str) -> None:
    async with aiodist.init(timeout=30) as coll:
        with torch.device(device):
            for call, expected in every(coll):
                found = await call()
                assert alike(found, expected), (found, expected)
            made = await coll.dup(), await coll.split(coll.rank)
        print("all alike", [each.size for each in made], flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "script":
        in_a_script(sys.argv[2])
    else:
        aiodist.run(in_a_loop(sys.argv[2]))
