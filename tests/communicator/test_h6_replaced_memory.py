"""H6: an operation owns the memory that its tensors had at the call, though the program gives them other memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator, Handle

Issue = Callable[[Communicator, Tensor], Handle[Any]]

CALLS: dict[str, Issue] = {
    "direct": lambda coll, t: coll.allreduce(t),
    "named": lambda coll, t: coll.allreduce(t, name="x"),
    "list": lambda coll, t: coll.allreduce([t, torch.ones(3)]),
    "broadcast": lambda coll, t: coll.broadcast(t, root=1),
    "broadcast named": lambda coll, t: coll.broadcast(t, root=1, name="x"),
    "scan": lambda coll, t: coll.scan(t),
}
EXPECTED = {"broadcast": [2.0, 2.0], "broadcast named": [2.0, 2.0], "scan": [1.0, 3.0]}


async def in_flight(coll: Communicator, issue: Issue, t: Tensor, replace: Callable[[Tensor], object]) -> list[Tensor]:
    """Replace the memory of `t` on rank 0 before rank 1 comes; return the tensors that are allocated meanwhile."""
    await coll.barrier()
    others: list[Tensor] = []
    if coll.rank:
        await coll.recv_object(0)
        await issue(coll, t)
    else:
        handle = issue(coll, t)
        await asyncio.sleep(0)
        replace(t)
        others = [torch.zeros_like(t, dtype=torch.float32) for _ in range(3)]
        await coll.send_object("replaced", 1)
        await handle
    await coll.barrier()
    return others


@pytest.mark.ranks(2, backend=("local", "gloo", "openmpi", "shm"))
@pytest.mark.parametrize("numel", [4, 100_001, 3_000_000])
@pytest.mark.parametrize("kind", CALLS)
async def test_h6_memory_that_was_replaced_is_nobody_elses(coll: Communicator, kind: str, numel: int) -> None:
    t = torch.full((numel,), coll.rank + 1.0)

    def replace(t: Tensor) -> None:
        t.data = torch.zeros(1)

    others = await in_flight(coll, CALLS[kind], t, replace)
    assert all(other.eq(0).all() for other in others)
    assert coll.rank or t.numel() == 1
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(2, backend=("local", "gloo", "openmpi", "shm"))
@pytest.mark.parametrize("kind", CALLS)
async def test_h6_the_result_is_where_the_tensor_was_at_the_call(coll: Communicator, kind: str) -> None:
    net = nn.Linear(1000, 3, bias=False)
    with torch.no_grad():
        net.weight.fill_(coll.rank + 1.0)
    weight, was = net.weight, net.weight.detach()
    with torch.no_grad():
        await in_flight(coll, CALLS[kind], weight, lambda _: net.half())
    assert was.eq(EXPECTED.get(kind, [3.0, 3.0])[coll.rank]).all()
    assert coll.rank or weight.dtype is torch.float16


@pytest.mark.ranks(2, backend="shm")
async def test_h6_where_shapes_differ_it_goes_on_in_the_memory_of_the_call(coll: Communicator) -> None:
    """The lane finds that an allgather is none for it, and hands it on."""
    t = torch.full((1000 + coll.rank,), coll.rank + 1.0)
    gathered: list[Handle[Any]] = []

    def issue(coll: Communicator, t: Tensor) -> Handle[Any]:
        gathered.append(coll.allgather(t))
        return gathered[0]

    def replace(t: Tensor) -> None:
        t.data = torch.zeros(7)

    await in_flight(coll, issue, t, replace)
    first, second = await gathered[0]
    assert (first.numel(), second.numel()) == (1000, 1001)
    assert first.eq(1).all()
    assert second.eq(2).all()
