"""C11, H1, H2, H9 on devices: a thousand handles on three streams, dropped handles, and calls that fail."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiodist import (
    AiodistError,
    BackendError,
    BufferInFlight,
    Communicator,
    CommunicatorAborted,
    Handle,
    MismatchError,
    gather,
)
from aiodist.types import Impl
from tests.support.fake_nccl.core import FakeNccl
from tests.support.simulated_cuda.device import SimulatedCuda

if TYPE_CHECKING:
    from tests.conftest import NcclOnDevices


@pytest.fixture
def fake(fake_nccl: NcclOnDevices) -> FakeNccl:
    return fake_nccl.library


@pytest.mark.thorough
@pytest.mark.ranks(2)
async def test_c11_a_thousand_handles_on_three_streams(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-5
    dice = random.Random(coll.size)
    comms = [coll, await coll.dup()]
    streams = [torch.cuda.Stream(device=coll.device) for _ in range(3)]
    handles: list[Handle[torch.Tensor]] = []
    for i in range(1000):
        with torch.cuda.stream(streams[i % 3]):
            t = torch.full((dice.choice([1, 7, 300]),), float(i + coll.rank), device=coll.device)
            impl: Impl = dice.choice(["staged", "cuda_ipc", "direct"])
            handles.append(comms[dice.randrange(2)].allreduce(t, impl=impl))
    async with asyncio.timeout(100):
        results = await gather(*handles)
    assert [set(t.tolist()) for t in results] == [{2.0 * i + 1} for i in range(1000)]


@pytest.mark.ranks(2)
async def test_h2_dropped_memory_is_not_reused_before_the_end(
    coll: Communicator, simulated_cuda: SimulatedCuda
) -> None:
    """The test drops the tensors of the first 20 operations; other tensors show their results, if any do."""
    kept = []
    for i in range(20):
        t = torch.full((3000,), float(i), device=coll.device)
        coll.allreduce(t, impl=("staged", "cuda_ipc", "ring")[i % 3]).detach()
        coll.send(torch.full((3000,), float(i), device=coll.device), 1 - coll.rank, i).detach()
        del t
        torch.zeros(3000, device=coll.device)
        kept.append(coll.recv(None, 1 - coll.rank, i))
    assert [set(t.tolist()) for t in await gather(*kept)] == [{float(i)} for i in range(20)]
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_h9_a_refused_call_gives_its_slot_back(coll: Communicator, fake_nccl: NcclOnDevices) -> None:
    """The error is kept alive: with NCCL, later operations must not wait for the slot of the refused call."""
    kept = []
    for _ in range(3):
        t = torch.full((5,), coll.rank + 1.0).to(coll.device)
        with fake_nccl.device.paused():
            first = coll.allreduce(t, impl="nccl")
            with pytest.raises(BufferInFlight) as refused:
                coll.allreduce(t, impl="nccl")
        kept.append(refused.value)
        later = coll.allreduce(torch.ones(3).to(coll.device), impl="nccl")
        async with asyncio.timeout(60):
            assert (await later).tolist() == [2.0] * 3
            assert (await first).tolist() == [3.0] * 5
    assert len(kept) == 3
    sub = await coll.dup()
    await sub.aclose()
    with pytest.raises(AiodistError, match="closed"):
        sub.allreduce(torch.ones(3).to(coll.device))


@pytest.mark.ranks(2)
async def test_c8_nccl_on_the_same_devices_in_another_order(coll: Communicator, fake: FakeNccl) -> None:
    """Each device of a rank has a place among the groups of NCCL: if ranks differ in the order, NCCL hangs.

    Queued work of NCCL cannot be withdrawn, so the communicator is aborted.
    """
    work = await coll.dup()
    places = [f"cuda:{coll.rank}", f"cuda:{1 - coll.rank}"]
    for order in (places, places[::-1]):
        ts = [torch.ones(3, device=place) for place in order]
        assert [t.tolist() for t in await work.allreduce(ts, across=True, impl="nccl")] == [[4.0] * 3] * 2
    ts = [torch.ones(3, device=place) for place in ("cuda:0", "cuda:1")]
    with pytest.raises(MismatchError, match="allreduce float32 on cuda"):
        await work.allreduce(ts, across=True, impl="nccl")
    await asyncio.sleep(1)  # waiting tasks are notified first
    with pytest.raises(CommunicatorAborted, match="allreduce float32 on cuda"):
        work.allreduce(ts, across=True, impl="nccl")


@pytest.mark.ranks(2)
async def test_h7_given_up_and_closed_with_work_on_devices(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    producer = torch.cuda.Stream(device=coll.device)
    for impl in ("staged", "cuda_ipc", "ring"):
        given_up, closed = await coll.dup(), await coll.dup()
        with simulated_cuda.paused(producer), torch.cuda.stream(producer):
            late = torch.ones(500, device=coll.device)
            handle = given_up.allreduce(late, impl=impl)
            given_up.abort("no time")
            with pytest.raises(AiodistError, match="no time"):
                await handle
            with pytest.raises(AiodistError, match="no time"):
                given_up.allreduce(torch.ones(3), impl="auto")
            kept = closed.allreduce(torch.ones(500, device=coll.device), impl=impl)
            closing = asyncio.create_task(closed.aclose())
            await coll.barrier()
            assert not kept.done()
        async with asyncio.timeout(60):
            await closing
        assert (await kept).tolist() == [2.0] * 500
        await coll.barrier()


@pytest.mark.ranks(2)
async def test_c7_lists_over_devices_keep_their_order(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    """Messages of one list share a tag, whichever device is ready first."""
    simulated_cuda.delay = 1e-3
    places = ["cuda:0", "cpu", "cuda:1", "cuda:0"]
    for impl in ("ring", "direct", "staged"):
        ts = [torch.full((9,), 10.0 * i + coll.rank).to(place) for i, place in enumerate(places)]
        gathered = await coll.allgather(ts, impl=impl)
        for i, of_all in enumerate(gathered):
            assert [t.tolist() for t in of_all] == [[10.0 * i + rank] * 9 for rank in range(2)]
        await coll.allreduce(ts, impl=impl)
        assert [t.tolist() for t in ts] == [[20.0 * i + 1] * 9 for i in range(len(places))]


@pytest.mark.ranks(2)
async def test_c1_a_message_to_a_busy_device_holds_nobody_up(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    """A message from the CPU to a device whose stream is held does not block the host."""
    busy, other = torch.cuda.Stream(device=coll.device), 1 - coll.rank
    for numel in (3, 5000):
        with simulated_cuda.paused(busy):
            with torch.cuda.stream(busy):
                into = torch.zeros(numel, device=coll.device)
                receive = coll.recv(into, other)
            sent = coll.send(torch.full((numel,), 1.0 + coll.rank), other)
            await coll.barrier()
            await coll.barrier()
            assert not receive.done()
        async with asyncio.timeout(60):
            assert (await receive).tolist() == [1.0 + other] * numel
            await sent


@pytest.mark.ranks(2)
@pytest.mark.parametrize("impl", ["staged", "ring", "cuda_ipc"])
async def test_s2_a_device_that_is_lost_is_a_backend_error(
    coll: Communicator, simulated_cuda: SimulatedCuda, impl: Impl
) -> None:
    """On the rank that has it too, where torch raises what it calls an AcceleratorError."""
    work = await coll.dup()
    ts = [torch.ones(3000).to(coll.device) for _ in range(4)]
    await work.allreduce(ts[0], impl=impl)
    await coll.barrier()
    stream: Any = torch.cuda.current_stream(coll.device)
    stream.hold()
    ts[1].add_(1)
    handles = [work.allreduce(t, impl=impl) for t in ts[1:3]]
    await coll.barrier()
    if coll.rank == 0:
        simulated_cuda.fail(coll.device.index, "an illegal memory access was encountered")
    await coll.barrier()
    stream.release()
    if coll.rank == 0:
        for handle in handles:
            with pytest.raises(BackendError, match="illegal memory access"):
                await handle
        with pytest.raises(AiodistError):
            await work.allreduce(ts[3], impl=impl)
        work.abort("its device is lost")
    else:
        for handle in handles:
            with pytest.raises(AiodistError):
                await handle
    with suppress(AiodistError):
        await work.aclose()
