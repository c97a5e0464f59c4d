"""A9: `to_arena_` among processes: what was ordinary is reduced in place; one rank may do it alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import BufferInFlight, Communicator
from aiodist.communicator import CommunicatorStatistics, parts_of
from aiodist.nn import DataParallel
from tests.support.moving import needs_moving

pytestmark = needs_moving
NUMEL = 100_000
processes = pytest.mark.ranks(2, backend=("openmpi", "shm"))


def inside(coll: Communicator, t: Tensor) -> bool:
    near = parts_of(coll).registry.resources.near
    return near is not None and near.locate(t) is not None


@processes
@pytest.mark.parametrize("sharing", [(0, 1), (0,), (1,), ()])
async def test_a9_statistics_tell_which_way_bytes_went(coll: Communicator, sharing: tuple[int, ...]) -> None:
    own = await coll.dup()
    t, other = torch.full((NUMEL,), 1.0 + own.rank), torch.ones(NUMEL // 2)
    view = t[10:20]
    shares = own.rank in sharing
    if shares:
        assert own.to_arena_(t) is t
    assert (inside(own, t), inside(own, view), inside(own, other)) == (shares, shares, False)
    assert own.statistics() == CommunicatorStatistics(0, 0, 0, 0, named=0)
    await own.allreduce(t, impl="shm")
    assert t.eq(3).all()
    assert view.eq(3).all()
    await own.broadcast(view, 1, impl="shm")
    await own.allreduce(other, impl="shm")
    short = view.nbytes  # travels whole, wherever it lies
    ways = (t.nbytes, short + other.nbytes) if shares else (0, t.nbytes + short + other.nbytes)
    assert own.statistics() == CommunicatorStatistics(3, 0, *ways, named=0)
    await own.aclose()


@processes
async def test_a9_what_an_operation_owns_stays_where_it_is(coll: Communicator) -> None:
    net = nn.Linear(30, 40)
    before = [p.data_ptr() for p in net.parameters()]
    with torch.no_grad():
        if coll.rank == 1:
            await coll.recv(torch.empty(1), 0)  # so that rank 0's allreduce waits for this one's
        handle = coll.allreduce(net.bias.detach())
        if coll.rank == 0:
            with pytest.raises(BufferInFlight, match=r"to_arena_\(\) .*allreduce.* still owns"):
                coll.to_arena_(net)
            assert [p.data_ptr() for p in net.parameters()] == before
            await coll.send(torch.ones(1), 1)
        await handle
    assert coll.to_arena_(net) is net
    assert all(inside(coll, p) for p in net.parameters())
    await coll.barrier()


@processes
async def test_a9_a_shared_module_is_trained_as_any_other(coll: Communicator) -> None:
    def loss(net: DataParallel, x: Tensor) -> Tensor:
        found: Tensor = net(x).square().mean()
        return found

    async def trained(share: bool) -> list[Tensor]:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(30, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
        if share:
            assert coll.to_arena_(module) is module
        net = await DataParallel.create(module, coll)
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(3):
            x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + coll.rank))
            await net.step(partial(loss, net, x), optimizer)
        await net.aclose()
        assert all(inside(coll, t) == share for t in [*module.parameters(), *module.buffers()])
        return [p.detach().clone() for p in module.parameters()]

    ordinary, shared = await trained(False), await trained(True)
    assert all(torch.equal(a, b) for a, b in zip(ordinary, shared, strict=True))


@processes
async def test_a9_anything_else_is_refused(coll: Communicator) -> None:
    wrong: Any
    for wrong in ([torch.ones(3)], "t", None, torch.ones(3).untyped_storage()):
        with pytest.raises(TypeError, match=f"t is {type(wrong).__name__}: expected a tensor or a module"):
            coll.to_arena_(wrong)
    t = torch.ones(3)
    t.numpy()
    with pytest.raises(ValueError, match="t has memory that torch does not own"):
        coll.to_arena_(t)


@pytest.mark.ranks(1, 2, backend="local")
async def test_a9_who_shares_memory_with_nobody_keeps_what_he_has(coll: Communicator) -> None:
    t = torch.ones(30)
    t.numpy()
    net, before = nn.Linear(3, 3), t.data_ptr()
    assert coll.to_arena_(t) is t
    assert coll.to_arena_(net) is net
    assert t.data_ptr() == before
    with pytest.raises(TypeError, match="t is list: expected a tensor or a module"):
        coll.to_arena_([t])  # type: ignore[type-var]
