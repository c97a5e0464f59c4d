"""S3: NCCL below a communicator: opened by the first operation, called in order of issue, aborted when it fails."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiodist import AiodistError, BackendError, Communicator, CommunicatorAborted, OperationTimeout, gather, init
from aiodist.backends import nccl
from aiodist.communicator import parts_of
from aiodist.errors import BackendUnavailable
from aiodist.streams import CudaStream
from aiodist.testing import run_ranks
from aiodist.types import Impl
from tests.support.fake_nccl.core import FakeNccl
from tests.support.simulated_cuda.simulation import simulated_cuda

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.conftest import NcclOnDevices

REDUCED = ("allreduce", "reduce", "reduce_scatter")


@pytest.fixture
def fake(fake_nccl: NcclOnDevices) -> FakeNccl:
    return fake_nccl.library


def mine(coll: Communicator, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + coll.rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def all_of(coll: Communicator, numel: int, seed: int = 0) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(coll.size)]
    return [torch.randn(numel, generator=g, dtype=torch.float64) for g in generators]


@pytest.mark.ranks(1, 2, 3)
async def test_s3_collectives_against_float64(coll: Communicator, fake: FakeNccl) -> None:
    assert coll.availability().of("allreduce", "nccl", "cuda").state == "available"
    for seed, numel in enumerate((1, 7, 1000)):
        everything = all_of(coll, numel, seed)
        total = torch.stack(everything).sum(0)
        x = mine(coll, numel, seed=seed).to(coll.device)
        h = coll.allreduce(x, op="mean", impl="nccl")
        assert await h is x
        torch.testing.assert_close(x.cpu().double(), total / coll.size, atol=1e-5, rtol=1e-5)
        x = mine(coll, numel, seed=seed).to(coll.device)
        gathered = await coll.allgather(x, impl="nccl")
        assert [g.cpu().tolist() for g in gathered] == [e.float().tolist() for e in everything]
        reduced = await coll.reduce(x, root=coll.size - 1, impl="nccl")
        assert (reduced is None) == (coll.rank != coll.size - 1)
        if reduced is not None:
            torch.testing.assert_close(reduced.cpu().double(), total, atol=1e-5, rtol=1e-5)
        b = await coll.broadcast(mine(coll, numel, seed=seed).to(coll.device), root=0, impl="nccl")
        assert b.cpu().tolist() == everything[0].float().tolist()
        block = await coll.reduce_scatter(mine(coll, numel, seed=seed).to(coll.device), impl="nccl")
        rows = [len(part) for part in torch.tensor_split(total, coll.size)]
        expected = total.split(rows)[coll.rank]
        torch.testing.assert_close(block.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    assert coll.size == 1 or len(fake.communicators) == coll.size


@pytest.mark.ranks(2, 3)
async def test_s3_what_it_lacks_goes_another_way(coll: Communicator, fake: FakeNccl) -> None:
    x = torch.full((9,), coll.rank + 1, dtype=torch.int16).to(coll.device)
    assert (await coll.allreduce(x, impl="nccl")).tolist() == [sum(range(1, coll.size + 1))] * 9
    half = torch.full((9,), 0.1, dtype=torch.bfloat16).to(coll.device)
    await coll.allreduce(half, impl="nccl")  # widened to float32, rounded once
    assert half.tolist() == torch.full((9,), coll.size * torch.tensor(0.1).bfloat16().item()).bfloat16().tolist()
    assert (await coll.scan(torch.ones(3).to(coll.device), impl="nccl")).tolist() == [coll.rank + 1.0] * 3


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", range(3))
async def test_s3_many_at_once_in_the_order_of_issue(coll: Communicator, fake: FakeNccl, seed: int) -> None:
    """Operations with a message before their native call do not let later ones overtake them on one rank."""
    dice = random.Random(seed)  # the same on all ranks
    handles, expected = [], []
    for i in range(40):
        x = mine(coll, 16, seed=i).to(coll.device)
        everything = [e.float() for e in all_of(coll, 16, i)]
        if dice.random() < 0.5:
            handles.append(coll.allgather(x, impl=dice.choice(["nccl", "auto"])))
            expected.append(torch.cat(everything))
        else:
            handles.append(coll.allreduce(x, impl=dice.choice(["nccl", "staged", "ring"])))
            expected.append(torch.stack(everything).sum(0))
    for result, wanted in zip(await gather(*handles), expected, strict=True):
        seen = torch.cat([r.cpu() for r in result]) if isinstance(result, list) else result.cpu()
        torch.testing.assert_close(seen, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
async def test_s3_wait_stream_orders_without_the_host(coll: Communicator, fake: FakeNccl) -> None:
    await coll.allreduce(torch.ones(1).to(coll.device), impl="nccl")  # opened
    side = torch.cuda.Stream(device=coll.device)
    for _ in range(20):
        x = torch.full((64,), coll.rank + 1.0).to(coll.device)
        coll.allreduce(x, impl="nccl").wait_stream(side)
        with torch.cuda.stream(side):
            y = x * 2
        await CudaStream(side).record()
        assert y.tolist() == [6.0] * 64
        await coll.barrier()


@pytest.mark.ranks(2, 3)
async def test_s3_split_and_dup_have_their_own(coll: Communicator, fake: FakeNccl) -> None:
    one = await coll.dup()
    odd = await coll.split(coll.rank % 2, coll.rank)
    a = torch.full((5,), coll.rank + 1.0).to(coll.device)
    b = a.clone()
    await gather(one.allreduce(a, impl="nccl"), odd.allreduce(b, impl="nccl"))
    assert a.tolist() == [sum(range(1, coll.size + 1))] * 5
    assert b.tolist() == [sum(r + 1 for r in range(coll.size) if r % 2 == coll.rank % 2)] * 5
    before = len(fake.communicators)
    await one.aclose()
    again = await coll.dup()
    c = torch.ones(5).to(coll.device)
    await again.allreduce(c, impl="nccl")
    assert c.tolist() == [coll.size] * 5
    await coll.barrier()
    assert len(fake.communicators) > before


@pytest.mark.ranks(2)
async def test_s3_an_operation_that_hangs_is_late_and_can_be_aborted(coll: Communicator, fake: FakeNccl) -> None:
    work = await coll.dup()
    await work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
    assert parts_of(coll).registry.resources.accelerator is not None
    (group,) = parts_of(coll).registry.resources.accelerator.groups_of(work.name)
    stream: Any = group.stream
    if coll.rank == 0:
        stream.hold()  # its kernel never begins
    handle = work.allreduce(torch.ones(4).to(coll.device), impl="nccl", timeout=0.3)
    with pytest.raises(OperationTimeout, match="allreduce"):
        await handle
    await coll.barrier()  # the other rank is late too, before its notification
    work.abort("it hangs")
    with pytest.raises(AiodistError, match="it hangs"):
        await handle
    await coll.barrier()  # on the other rank too: a kernel that begins before that could end the operation
    if coll.rank == 0:
        stream.release()
    await coll.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("impl", ["nccl", "staged", "ring", "direct", "cuda_ipc"])
async def test_s3_what_is_issued_later_does_not_hold_up_a_second_step(
    coll: Communicator, fake: FakeNccl, impl: Impl, behind: bool
) -> None:
    """On rank 0 the last operation has its input after another communicator's kernel, which waits for rank 1.

    Rank 1 issues that kernel only after the first operation, in which rank 0 still has its part to do.
    """
    other = await coll.dup()

    def ones() -> torch.Tensor:
        return torch.ones(5000, device=coll.device)

    async with asyncio.timeout(20):
        for each in (coll, other):
            await each.allreduce(ones(), impl="nccl")  # opened
        await coll.barrier()
        first = ones()
        if coll.rank == 0:
            x = coll.allreduce(first, impl=impl)
            z = other.allreduce(ones(), impl="nccl")
            if behind:
                # Not before it is launched: what it waits for has nothing to do with the host.
                await asyncio.to_thread(z.wait_stream, torch.cuda.current_stream(coll.device))
            y = coll.allreduce(ones(), impl="nccl")
            await coll.send(torch.zeros(1), dst=1)  # all is issued
        else:
            await coll.recv(torch.zeros(1), src=0)
            x = coll.allreduce(first, impl=impl)
            await x
            z = other.allreduce(ones(), impl="nccl")
            y = coll.allreduce(ones(), impl="nccl")
        for reduced in await gather(x, z, y):
            assert reduced.eq(2).all().item()


@pytest.mark.ranks(3)
async def test_s3_a_failure_that_comes_later_is_raised_by_the_await(coll: Communicator, fake: FakeNccl) -> None:
    work = await coll.dup()
    await work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
    await coll.barrier()
    if coll.rank == 0:
        for comm in fake.communicators:
            comm.fail_later()
    await coll.barrier()

    async def go_on() -> None:
        for _ in range(1000):
            await work.allreduce(torch.ones(4).to(coll.device), impl="nccl")

    with pytest.raises(AiodistError, match="NCCL"):
        await go_on()
    await coll.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("call", ["init", "allreduce"])
async def test_s3_a_rank_that_fails_alone_gives_up_on_all(
    coll: Communicator, fake: FakeNccl, call: str, until: Any
) -> None:
    """The others, whose kernels would wait for it or who connect without it, hear of it."""
    work = await coll.dup()
    if call == "allreduce":
        await work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
    await coll.barrier()
    fake.refuse[call, 1] = 3
    await coll.barrier()
    expected = BackendError if coll.rank == 1 else CommunicatorAborted
    says = "NCCL: " if coll.rank == 1 else "rank 1: NCCL: "
    async with asyncio.timeout(20):
        with pytest.raises(expected, match=f"^{says}.*internal error"):
            await work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
        with pytest.raises(expected, match=f"^{says}.*internal error"):
            await work.allreduce(torch.ones(4).to(coll.device))
    await until(lambda: not any(comm.is_valid for comm in fake.communicators))  # NCCL aborts in a thread


@pytest.mark.ranks(1)
async def test_s3_a_failure_that_leaves_nothing_pending_is_noticed(
    coll: Communicator, fake: FakeNccl, until: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    """In a process of its own, where no other rank's operation keeps anybody looking."""
    work = await coll.dup()
    await work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
    fake.refuse["allreduce"] = 3
    with pytest.raises(BackendError, match="internal error"):
        await work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
    await asyncio.sleep(0.1)
    await until(lambda: parts_of(work).dispatcher.lifetime.refusal)
    with pytest.raises(BackendError, match="internal error"):
        await work.allreduce(torch.ones(4))  # on the CPU: the communicator was aborted on all ranks


async def _refusals(coll: Communicator) -> None:
    offer = coll.availability().of("allreduce", "nccl", "cuda")
    assert offer.state == "not possible here"
    assert "share device" in offer.reason
    x = torch.ones(3).to(coll.device)
    assert (await coll.allreduce(x)).tolist() == [coll.size] * 3
    assert [coll.selector.choose("allreduce", nbytes, "cuda") for nbytes in (12, 1 << 20)] == ["staged", "cuda_ipc"]


def test_s3_ranks_that_share_a_device_go_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNccl()
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "load", partial(nccl.Library, library))

    async def main() -> None:
        async with init() as coll:
            await _refusals(coll)

    with simulated_cuda(devices=1):
        run_ranks(2, main)
    assert not library.communicators


def test_s3_nccl_that_one_rank_cannot_load_is_used_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed, so nothing is missing; only importing it tells."""
    broken = iter(["nccl4py cannot be imported: cuda.core has no 'system': pip install it again"])
    monkeypatch.setattr(nccl, "missing", lambda: None)

    def load() -> nccl.Library:
        for why in broken:
            raise BackendUnavailable(why)
        return nccl.Library(FakeNccl())

    monkeypatch.setattr(nccl, "load", load)

    async def main() -> str:
        async with init() as coll:
            x = torch.ones(3).to(coll.device)
            assert (await coll.allreduce(x)).tolist() == [2.0] * 3
            assert (await coll.allreduce(x, impl="staged")).tolist() == [4.0] * 3
            with pytest.raises(BackendUnavailable, match=r"impl='nccl': .*nccl4py cannot be imported"):
                coll.allreduce(x, impl="nccl")
            return coll.availability().of("allreduce", "nccl", "cuda").reason

    with simulated_cuda(devices=2):
        mine, others = sorted(run_ranks(2, main))
    assert mine.startswith("nccl4py cannot be imported: cuda.core has no 'system'")
    assert others in (f"rank {rank}: {mine}" for rank in range(2))
