"""C1: views of one element, or of none, that torch calls contiguous for any strides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.streams.memory import bytes_of, flat, numbers_of
from aiodist.types import Impl, Op

pytestmark = pytest.mark.timeout(60)

Make = Callable[[float, torch.dtype], Tensor]

VIEWS: dict[str, Make] = {
    "column": lambda value, kind: torch.full((1, 5), value).to(kind)[:, 0],
    "expanded": lambda value, kind: torch.tensor(value).to(kind).expand(1),
    "scalar": lambda value, kind: torch.tensor(value).to(kind),
    "element": lambda value, kind: torch.full((5,), value).to(kind)[2],
    "two dimensions": lambda value, kind: torch.full((1, 1, 5), value).to(kind)[:, :, 0],
    "strange strides": lambda value, kind: torch.full((9,), value).to(kind).as_strided((1, 1), (7, 3), 4),
    "none": lambda value, kind: torch.full((0, 5), value).to(kind)[:, 0],
}
KINDS = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.bool,
)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
def test_c1_flat_is_the_same_memory(view: str, kind: torch.dtype) -> None:
    t = VIEWS[view](1, kind)
    assert t.is_contiguous()
    for made in (flat(t), numbers_of(t), bytes_of(t)):
        assert made.data_ptr() == t.data_ptr()
        assert made.stride() == (1,)
        assert made.nbytes == t.nbytes
    flat(t).zero_()
    assert not t.count_nonzero()


def test_c1_flat_has_no_history() -> None:
    t = torch.ones(3, requires_grad=True)
    assert not flat(t * 2).requires_grad
    assert flat(t).data_ptr() == t.data_ptr()


def _alike(seen: object, expected: Tensor) -> None:
    assert isinstance(seen, Tensor)
    assert seen.shape == expected.shape
    assert seen.dtype is expected.dtype
    assert seen.tolist() == expected.tolist()


async def _reductions(coll: Communicator, make: Callable[[float], Tensor], impl: Impl) -> None:
    kind, size, rank = make(0).dtype, coll.size, coll.rank
    op: Op = "max" if kind is torch.bool else "sum"
    total = make(1 if kind is torch.bool else size)
    upto = make(1 if kind is torch.bool else rank + 1)
    before = make(1 if kind is torch.bool else max(rank, 1))
    t, out = make(1), make(0)
    assert await coll.allreduce(t, op=op, impl=impl) is t
    _alike(t, total)
    _alike(await coll.allreduce(make(1), op=op, impl=impl, out=out), total)
    reduced = await coll.reduce(make(1), op=op, root=1)
    assert rank != 1 or reduced is not None
    if reduced is not None:
        _alike(reduced, total)
    _alike(await coll.scan(make(1), op=op), upto)
    _alike(await coll.exscan(make(1), op=op), before)
    if kind.is_floating_point:
        _alike(await coll.allreduce(make(3), op="mean"), make(3))
    if make(1).dim():
        part = await coll.reduce_scatter(make(1), op=op)
        assert part.numel() == (total.numel() if rank == 0 else 0)
        assert part.tolist() == (total.tolist() if part.numel() else part.tolist())


async def _movements(coll: Communicator, make: Callable[[float], Tensor]) -> None:
    size, rank = coll.size, coll.rank
    mine = rank % 2
    theirs = [make(r % 2) for r in range(size)]
    after, before = (rank + 1) % size, (rank - 1) % size
    _alike(await coll.broadcast(make(mine), root=1), make(1))
    for seen, expected in zip(await coll.allgather(make(mine)), theirs, strict=True):
        _alike(seen, expected)
    joined = await coll.allgather(make(mine), out=make(0).new_zeros(0))
    assert joined.numel() == size * make(0).numel()
    gathered = await coll.gather(make(mine), root=0)
    if gathered is not None:
        for seen, expected in zip(gathered, theirs, strict=True):
            _alike(seen, expected)
    _alike(await coll.scatter([make(r % 2) for r in range(size)] if rank == 0 else None, root=0), make(mine))
    _alike(await coll.scatter([make(1)] * size if rank == 0 else None, root=0, out=make(0)), make(1))
    for seen, expected in zip(await coll.alltoall([make(mine) for _ in range(size)]), theirs, strict=True):
        _alike(seen, expected)
    _alike(await coll.sendrecv(make(mine), dst=after, src=before, out=make(0)), make(before % 2))
    got = make(0)
    await asyncio.gather(coll.send(make(mine), after), coll.recv(got, before))
    _alike(got, make(before % 2))
    _, new = await asyncio.gather(coll.send(make(mine), rank), coll.recv(src=rank))
    _alike(new, make(mine))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2, backend=("gloo", "shm", "mpi"))
async def test_c1_every_call_takes_views_of_one_element(coll: Communicator, view: str) -> None:
    for kind in KINDS:

        def make(value: float, kind: torch.dtype = kind) -> Tensor:
            return VIEWS[view](value, kind)

        for impl in ("auto", "ring"):
            await _reductions(coll, make, impl)
        await _movements(coll, make)


@pytest.mark.ranks(2, backend="mpi")
async def test_c1_gradients_of_one_element(coll: Communicator) -> None:
    """The gradient of a sum is an expanded scalar."""
    p = torch.nn.Parameter(torch.ones(1))
    p.sum().backward()
    assert p.grad is not None
    assert (await coll.allreduce(p.grad)).tolist() == [2.0]
    assert (await coll.allreduce([p.grad, torch.ones(3)]))[0].tolist() == [4.0]
