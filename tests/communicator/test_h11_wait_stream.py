"""H11, S6: streams continue after operations on devices without the host; calls raise during a graph's capture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import AiodistError, BufferInFlight, Communicator, Handle, OperationTimeout, gather
from aiodist.streams import CudaStream, HostStream
from tests.support.simulated_cuda.device import SimulatedCuda

NUMEL = 5000


async def in_time(awaitable: Any) -> Any:
    async with asyncio.timeout(60):
        return await awaitable


def mine(coll: Communicator, numel: int = NUMEL) -> Tensor:
    return torch.full((numel,), coll.rank + 1.0).to(coll.device)


def total(coll: Communicator) -> float:
    return coll.size * (coll.size + 1) / 2


@pytest.mark.ranks(1, 2)
async def test_h11_every_kind_of_stream(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    side = torch.cuda.Stream(device=coll.device)
    own = CudaStream.of("compute", coll.device)
    current = torch.cuda.current_stream(coll.device)
    streams: list[tuple[Any, torch.cuda.Stream]] = [(side, side), (own, own.stream), (None, current)]
    for stream, cuda in streams:
        for issue in (
            lambda t: coll.allreduce(t, impl="cuda_ipc"),
            lambda t: coll.allreduce(t, impl="staged"),
            lambda t: coll.allreduce([t, t.new_ones(3)], impl="ring"),
        ):
            t = mine(coll)
            handle: Handle[Any] = issue(t)
            # Another thread waits for operations in which the host takes part.
            await in_time(asyncio.to_thread(handle.wait_stream, stream if stream is not None else cuda))
            with torch.cuda.stream(cuda):
                assert (t * 2).tolist() == [2 * total(coll)] * NUMEL
            await in_time(handle)
            handle.wait_stream(stream)  # it is over
            await coll.barrier()


@pytest.mark.ranks(2)
async def test_h11_a_host_stream_waits_on_its_thread(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    t = mine(coll)
    async with HostStream("reader") as host:
        handle = coll.allreduce(t, impl="staged")
        handle.wait_stream(host)
        assert await in_time(host.submit(lambda: t.cpu().tolist())) == [total(coll)] * NUMEL


@pytest.mark.ranks(2)
async def test_h11_on_the_loop_what_the_host_has_to_begin_is_refused(
    coll: Communicator, simulated_cuda: SimulatedCuda
) -> None:
    side, producer = torch.cuda.Stream(device=coll.device), torch.cuda.Stream(device=coll.device)
    t = mine(coll)
    torch.cuda.synchronize(coll.device)
    with simulated_cuda.paused(producer):
        with torch.cuda.stream(producer):
            t.mul_(2)
            handle = coll.allreduce(t, impl="staged")
        with pytest.raises(RuntimeError, match=r"allreduce #\d+ .*await it, or call wait_stream\(\) in another thread"):
            handle.wait_stream(side)
        await coll.barrier()
        assert not handle.done()
    await in_time(handle)
    assert t.tolist() == [2 * total(coll)] * NUMEL


@pytest.mark.ranks(2)
async def test_h11_messages_have_an_end_on_the_device(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    side, other = torch.cuda.Stream(device=coll.device), 1 - coll.rank
    for into in (torch.empty(NUMEL, device=coll.device), None):
        receive = coll.recv(into, other)
        send = coll.send(mine(coll), other)
        await in_time(asyncio.to_thread(receive.wait_stream, side))
        if into is not None:
            with torch.cuda.stream(side):
                assert (into + 1).tolist() == [other + 2.0] * NUMEL
        assert (await in_time(receive)).tolist() == [other + 1.0] * NUMEL
        await in_time(send)
        both = coll.sendrecv(mine(coll), other, other, into)
        await in_time(asyncio.to_thread(both.wait_stream, side))
        assert (await in_time(both)).tolist() == [other + 1.0] * NUMEL
    withdrawn = coll.recv(torch.empty(3, device=coll.device), other)
    assert withdrawn.cancel()
    withdrawn.wait_stream(side)
    on_host = coll.recv(None, other)  # a device might have been its place
    sent = coll.send(torch.ones(3), other)
    await in_time(asyncio.to_thread(on_host.wait_stream, side))
    assert (await in_time(on_host)).device.type == "cpu"
    await in_time(sent)


@pytest.mark.ranks(2)
async def test_h11_a_failure_orders_streams_all_the_same(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    side = torch.cuda.Stream(device=coll.device)
    work = await coll.dup()
    waits = work.recv(torch.empty(3, device=coll.device), 1 - coll.rank)
    handle = work.allreduce(mine(coll), impl="staged") if coll.rank == 0 else work.recv(mine(coll), 0, 5)
    work.abort("enough")
    for one in (handle, waits):
        with pytest.raises(AiodistError, match="enough"):
            await in_time(one)
        one.wait_stream(side)
    await coll.barrier()


CALLS: dict[str, Callable[[Communicator, Tensor], object]] = {
    "allreduce": lambda c, t: c.allreduce(t),
    "list": lambda c, t: c.allreduce([torch.ones(3), t]),
    "out": lambda c, t: c.scatter(None, 1 - c.rank, out=t),
    "across": lambda c, t: c.allreduce([t], across=True),
    "broadcast": lambda c, t: c.broadcast(t),
    "reduce": lambda c, t: c.reduce(t),
    "scan": lambda c, t: c.scan(t),
    "exscan": lambda c, t: c.exscan(t),
    "allgather": lambda c, t: c.allgather(t),
    "gather": lambda c, t: c.gather(t),
    "scatter": lambda c, t: c.scatter([t] * c.size, c.rank),
    "alltoall": lambda c, t: c.alltoall([t] * c.size),
    "reduce_scatter": lambda c, t: c.reduce_scatter(t),
    "send": lambda c, t: c.send(t, 0),
    "recv": lambda c, t: c.recv(t, 0),
    "recv anything": lambda c, t: c.recv(None, 0),
    "sendrecv": lambda c, t: c.sendrecv(t, 0, 0),
}


@pytest.mark.ranks(2)
async def test_s6_every_call_refuses_while_a_graph_is_captured(
    coll: Communicator, simulated_cuda: SimulatedCuda
) -> None:
    torch.cuda.set_device(coll.device)
    t, before = mine(coll, 4), coll.seq
    event = torch.cuda.Event()
    with simulated_cuda.capturing():
        for name, call in CALLS.items():
            with pytest.raises(RuntimeError, match="captures a CUDA graph"):
                call(coll, t)
            assert coll.seq == before, name
        for x in (event, torch.cuda.current_stream(), CudaStream.of("local")):
            with pytest.raises(RuntimeError, match="captures a CUDA graph"):
                aiodist.as_handle(x)
    for comm in (coll, await coll.dup()):
        again = await in_time(comm.allreduce(t.clone()))  # nothing was left behind
        assert again.tolist() == [total(coll)] * 4


@pytest.mark.ranks(1)
async def test_s6_events_and_streams_as_handles(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    await in_time(aiodist.as_handle(torch.cuda.Event()))  # nothing was recorded
    with simulated_cuda.paused(stream):
        with torch.cuda.stream(stream):
            t = torch.ones(10, device="cuda") * 3
        event = stream.record_event()
        handles = [aiodist.as_handle(x) for x in (event, stream, CudaStream(stream))]
        with torch.cuda.stream(stream):
            t.add_(1)
        await asyncio.sleep(0.01)
        assert not any(handle.done() for handle in handles)
        for handle in handles:
            handle.wait_stream(side)
        with torch.cuda.stream(side):
            assert not side.query()
    assert await in_time(gather(*handles)) == [None] * 3
    late = aiodist.as_handle(stream)
    await in_time(late)
    assert t.tolist() == [4.0] * 10
    simulated_cuda.fail(0, "illegal address")
    with pytest.raises(AiodistError, match="illegal address"):
        await in_time(aiodist.as_handle(event))
    simulated_cuda.errors.clear()


@pytest.mark.ranks(2)
async def test_s6_a_held_stream(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    """An operation on a held stream is late and in flight, and affects no other; its await may be cancelled."""
    producer = torch.cuda.Stream(device=coll.device)
    for impl in ("staged", "cuda_ipc", "ring"):
        t = mine(coll)
        torch.cuda.synchronize(coll.device)
        with simulated_cuda.paused(producer):
            with torch.cuda.stream(producer):
                t.add_(1)
                handle = coll.allreduce(t, impl=impl, timeout=0.05)
            with pytest.raises(OperationTimeout, match="allreduce"):
                await handle
            with pytest.raises(BufferInFlight):
                coll.allreduce(t)
            waits = asyncio.ensure_future(_wait(handle))
            await asyncio.sleep(0)
            waits.cancel()
            other = mine(coll, 100)
            assert (await in_time(coll.allreduce(other, impl=impl))).tolist() == [total(coll)] * 100
            assert not handle.done()
        while not handle.done():  # noqa: ASYNC110 - past its time, awaiting it would raise
            await asyncio.sleep(0.001)
        assert handle.result() is t
        assert t.tolist() == [total(coll) + coll.size] * NUMEL
        await coll.barrier()


async def _wait(handle: Handle[Any]) -> None:
    await handle
