"""S2, S6, H11: CUDA streams whose work is a handle, on simulated devices that do everything later."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import torch

from aiodist import gather
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Progress
from aiodist.streams import CudaStream, Events, HostStream, PinnedPool, capture
from aiodist.testing import SimulatedCuda

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
    with pytest.raises(ValueError, match=r"copy of torch.float32 \[3\] into torch.float32 \[4\]: expected the same"):
        stream.copy(torch.empty(4, device="cuda"), torch.ones(3))
    with pytest.raises(ValueError, match=r"into torch\.float64"):
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
    handle.resolve(None)
    await waited


async def test_s6_a_graph_that_is_captured_refuses(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("compute")
    with simulated_cuda.capturing():
        for call in (stream.record, lambda: stream.submit(torch.ones, 3), lambda: stream.copy(*[torch.ones(3)] * 2)):
            with pytest.raises(RuntimeError, match="captures a CUDA graph"):
                call()
    await stream.record()


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
    await gather(*[stream.record() for _ in range(50)])
    kept = len(events._free[0])
    for _ in range(20):
        await gather(*[stream.record() for _ in range(50)])
    assert len(events._free[0]) == kept <= 50
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


async def test_s6_a_capture_elsewhere_puts_off_what_it_forbids_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    query: Any = torch.cuda.Event.query
    refused: list[torch.cuda.Event] = []

    def forbidden(event: torch.cuda.Event) -> bool:
        if len(refused) < 3:
            refused.append(event)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return bool(query(event))

    monkeypatch.setattr(torch.cuda.Event, "query", forbidden)
    await asyncio.wait_for(CudaStream.of("compute").record(), 20)
    assert len(refused) == 3


async def test_s6_asking_has_nothing_to_do_with_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    def exchange(mode: Any) -> None:
        modes.append(mode._obj.value)
        mode._obj.value = 0  # what it was before

    monkeypatch.setattr(capture, "_driver", lambda: exchange)
    await CudaStream.of("compute").record()
    assert modes[:2] == [2, 0]
    assert len(modes) % 2 == 0
    before = len(modes)
    PinnedPool().take(100)
    assert modes[before:] == [2, 0]
