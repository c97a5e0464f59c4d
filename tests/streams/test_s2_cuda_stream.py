"""S2, S6, H11: CUDA streams whose work is a handle, on simulated devices that do everything later."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from aiodist import gather
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Operation, Progress
from aiodist.streams import CudaStream, Events, HostStream, event_handle
from aiodist.testing.seams.progress import transport_lock
from tests.support.simulated_cuda.device import SimulatedCuda

pytestmark = pytest.mark.usefixtures("simulated_cuda")


def fresh(numel: int = 1000) -> torch.Tensor:
    return torch.randn(numel)


async def test_s2_one_stream_for_each_role_and_device() -> None:
    first = CudaStream.of("to-device", 0)
    assert CudaStream.of("to-device", "cuda:0") is first
    assert CudaStream.of("to-device", torch.device("cuda", 1)) is not first
    roles = ("compute", "to-device", "to-host", "local", "global")
    assert len({CudaStream.of(role).stream for role in roles}) == len(roles)
    with pytest.raises(ValueError, match="role='up': expected one of compute, to-device"):
        CudaStream.of("up")
    with pytest.raises(ValueError, match="device cpu: expected a CUDA device"):
        CudaStream.of("compute", "cpu")
    assert repr(first) == "<CudaStream 'to-device' on cuda:0>"


async def test_s2_submit_is_done_when_the_device_is(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("compute")
    data = fresh()
    x = data.to("cuda")
    with simulated_cuda.paused():
        stream.wait()
        handle = stream.submit(torch.mul, x, 2)
        await asyncio.sleep(0)
        assert not handle.done()
    assert torch.equal((await handle).cpu(), data * 2)


async def test_s2_what_submit_raises_is_raised_by_the_call() -> None:
    def wrong() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CudaStream.of("compute").submit(wrong)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("numel", [0, 1, 1000, 3_000_001])
async def test_s2_copies_there_and_back(numel: int, pinned: bool) -> None:
    data = fresh(numel)
    host = data.pin_memory() if pinned else data.clone()
    x = torch.empty(numel, device="cuda")
    assert await CudaStream.of("to-device").copy(x, host) is x
    back = torch.full((numel,), float("nan"), pin_memory=pinned)
    await CudaStream.of("to-host").copy(back, x)
    assert torch.equal(back, data)


async def test_s2_copies_of_other_shapes_and_dtypes_are_errors() -> None:
    stream = CudaStream.of("to-device")
    with pytest.raises(ValueError, match=r"copy of float32 \[3\] into float32 \[4\]: expected the same"):
        stream.copy(torch.empty(4, device="cuda"), torch.ones(3))
    with pytest.raises(ValueError, match=r"into float64"):
        stream.copy(torch.empty(3, device="cuda", dtype=torch.float64), torch.ones(3))


async def test_h9_a_copy_owns_its_buffers(simulated_cuda: SimulatedCuda) -> None:
    x, host = torch.empty(10, device="cuda"), torch.ones(10).pin_memory()
    stream = CudaStream.of("to-device")
    with simulated_cuda.paused():
        first = stream.copy(x, host)
        with pytest.raises(AiodistError, match="copy"):
            stream.copy(x, host)
    await first
    await stream.copy(x, host)


async def test_h11_wait_stream_orders_what_follows_and_the_host_goes_on(simulated_cuda: SimulatedCuda) -> None:
    copies, side, other = CudaStream.of("to-device"), torch.cuda.Stream(), CudaStream.of("local")
    for order in (side, CudaStream(side), other, None):
        host = fresh().pin_memory()
        x = torch.empty(1000, device="cuda")
        named: Any = order
        with simulated_cuda.paused():
            copies.copy(x, host).wait_stream(named)
            target: Any = getattr(order, "stream", order) or torch.cuda.current_stream()
            with torch.cuda.stream(target):
                y = x + 1
        await CudaStream(target).record()
        assert torch.equal(y.cpu(), host + 1)


async def test_h11_a_host_stream_waits_for_the_device(simulated_cuda: SimulatedCuda) -> None:
    x, data = torch.empty(1000, device="cuda"), fresh()
    async with HostStream() as host:
        CudaStream.of("to-device").copy(x, data).wait_stream(host)
        assert torch.equal(await host.submit(x.cpu), data)


async def test_h11_a_finished_operation_orders_nothing() -> None:
    handle = CudaStream.of("compute").record()
    await handle
    handle.wait_stream()
    handle.wait_stream(torch.cuda.Stream())


async def test_h11_what_ends_on_the_host_is_waited_for_elsewhere() -> None:
    handle: Handle[None] = Handle(Progress.current(), "message")
    stream = CudaStream.of("compute")
    with pytest.raises(RuntimeError, match="ends on the host: await it before <CudaStream 'compute'"):
        handle.wait_stream(stream)
    waited = asyncio.create_task(asyncio.to_thread(handle.wait_stream, stream))
    Operation.of(handle).resolve(None)
    await waited


@pytest.mark.thorough
async def test_s2_a_thousand_in_flight_on_three_streams() -> None:
    streams = [CudaStream.of(role) for role in ("compute", "local", "global")]
    dice = random.Random(0)
    inputs = [torch.full((4,), float(i)).to("cuda") for i in range(1000)]
    for stream in streams:
        stream.wait()
    handles = [dice.choice(streams).submit(torch.mul, x, 2) for x in inputs]
    for i, y in enumerate(await gather(*handles)):
        assert y.tolist() == [2.0 * i] * 4


async def test_s2_events_are_reused_and_asked_about_in_order(simulated_cuda: SimulatedCuda) -> None:
    events = Events.of(Progress.current())
    stream = CudaStream.of("compute")
    for _ in range(20):
        await gather(*[stream.record() for _ in range(50)])
    assert 0 < len(events.free[0]) <= 50  # fewer if some completed before others were issued
    assert len(events) == 0


async def test_s2_a_lost_device_is_told_to_everybody(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("compute", 1)
    with simulated_cuda.paused():
        handles = [stream.record() for _ in range(3)]
        simulated_cuda.fail(1, "an illegal memory access was encountered")
    for handle in handles:
        with pytest.raises(AiodistError, match="CUDA device failed"):
            await handle


async def test_s2_another_loop_is_an_error() -> None:
    stream = CudaStream.of("compute")
    errors: list[str] = []

    async def elsewhere() -> None:
        try:
            stream.record()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await asyncio.to_thread(thread.join, 20)
    assert errors == ["<CudaStream 'compute' on cuda:0> belongs to another event loop: call CudaStream.of on this one"]


async def test_s2_the_result_of_submit_is_not_reused_while_the_caller_reads_it(simulated_cuda: SimulatedCuda) -> None:
    stream: Any = CudaStream.of("to-device")
    for _ in range(10):
        data = fresh(4000).pin_memory()
        x = await stream.submit(data.to, "cuda", non_blocking=True)
        with simulated_cuda.paused(torch.cuda.current_stream()):
            y = x * 2
            del x
            await stream.submit(torch.zeros, 4000, device="cuda")  # may take the memory
        assert torch.equal(y.cpu(), data * 2)
    assert not simulated_cuda.hazards


BUSY: list[Callable[[], AbstractContextManager[Any]]] = [
    nullcontext,
    lambda: transport_lock,
]  # a lock of another thread


@pytest.mark.parametrize("lock", BUSY, ids=["free", "taken"])
async def test_s2_what_follows_a_copy_comes_behind_it(lock: Callable[[], AbstractContextManager[Any]]) -> None:
    stream = CudaStream.of("to-device")
    for shape in ((1000,), (20, 50)):
        host, there = torch.full(shape, 5.0, pin_memory=True), torch.zeros(*reversed(shape), device="cuda").t()
        there = there if there.shape == shape else there.t()
        torch.cuda.synchronize()
        with lock():
            copied = stream.copy(there, host)
            doubled = stream.submit(torch.mul, there, 2)
        assert (await doubled).eq(10).all()
        await copied


@pytest.mark.parametrize("lock", BUSY, ids=["free", "taken"])
async def test_s2_a_record_is_of_what_was_queued_by_then(
    simulated_cuda: SimulatedCuda, lock: Callable[[], AbstractContextManager[Any]]
) -> None:
    stream, held = CudaStream.of("compute"), torch.cuda.Stream()
    with simulated_cuda.paused(held):
        with lock():
            recorded = stream.record()
            stream.stream.wait_event(held.record_event())
        async with asyncio.timeout(10):
            await recorded
        last = stream.record()
        assert not last.done()
    await last


async def test_s2_to_order_a_stream_takes_no_lock() -> None:
    stream, side = CudaStream.of("compute"), torch.cuda.Stream()
    host, there = torch.full((1000,), 5.0, pin_memory=True), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with transport_lock:
        for issue in (stream.record, lambda: stream.submit(torch.ones, 3), partial(stream.copy, there, host)):
            issue().wait_stream(side)
    with torch.cuda.stream(side):
        there = there + 1
    side.synchronize()
    assert there.eq(6).all()


async def test_s2_a_callback_that_raises_keeps_no_task_waiting(reports: list[dict[str, Any]]) -> None:
    stream = CudaStream.of("compute")
    progress = Progress.current()

    def wrong(_: BaseException | None) -> None:
        raise ValueError("wrong")

    events = Events.of(progress)
    progress.start(partial(events.add, stream.stream, events.record(stream.stream), wrong))
    handles = [stream.record(), CudaStream.of("local").record(), stream.record()]
    async with asyncio.timeout(10):
        await gather(*handles)
    assert [str(report["exception"]) for report in reports] == ["wrong"]


async def test_s2_what_a_submitted_function_holds_is_kept(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("compute")
    x = torch.full((1000,), 2.0, device="cuda")
    stream.wait()
    with simulated_cuda.paused(stream.stream):
        doubled = stream.submit(lambda x=x: torch.mul(x, 2))  # type: ignore[misc]
        del x
        torch.cuda.default_stream().synchronize()  # other code could reuse the memory now
    assert (await doubled).eq(4).all()


@dataclass
class Batch:
    x: torch.Tensor
    more: dict[str, Any]


async def test_s2_a_nested_result_is_not_reused_while_the_caller_reads_it(simulated_cuda: SimulatedCuda) -> None:
    stream, current = CudaStream.of("compute"), torch.cuda.current_stream()
    nests: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = [
        (lambda t: {"y": [t]}, lambda r: r["y"][0]),
        (lambda t: Batch(torch.ones(1), {"y": (t,)}), lambda r: r.more["y"][0]),
    ]
    for pack, unpack in nests:
        x = torch.full((1000,), 2.0, device="cuda")
        stream.wait()
        result = await stream.submit(lambda x=x, pack=pack: pack(torch.mul(x, 3)))  # type: ignore[misc]
        with simulated_cuda.paused(current):
            read = unpack(result) + 1
            del result
            await stream.record()
        assert read.eq(7).all()


async def test_s2_others_events_are_handles_of_one_poller(
    simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress.current()
    query: Any = torch.cuda.Event.query
    asked: list[torch.cuda.Event] = []

    def counted(event: torch.cuda.Event) -> bool:
        asked.append(event)
        return bool(query(event))

    monkeypatch.setattr(torch.cuda.Event, "query", counted)
    current = torch.cuda.current_stream()
    with simulated_cuda.paused():
        torch.ones(3, device="cuda")
        handles = [event_handle(current.record_event()) for _ in range(100)]
        events = Events.of(progress)
        with transport_lock:
            events.looked = 0.0
            asked.clear()
            events.poll()
        assert len(asked) == 100
    async with asyncio.timeout(10):
        await gather(*handles)
    assert len(events) == 0
