"""S6: while a graph is captured nothing of ours gets into it, and what goes on elsewhere has nothing to do with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from aiodist.data.device import ToDevice
from aiodist.data.items import Item, Made
from aiodist.errors import BackendError
from aiodist.handles import Handle, Progress
from aiodist.streams import CudaStream, PinnedPool, capture, check_not_capturing
from aiodist.streams.cuda import event_handle
from tests.support.simulated_cuda.device import SimulatedCuda

pytestmark = pytest.mark.usefixtures("simulated_cuda")

REFUSED = pytest.raises(RuntimeError, match="captures a CUDA graph")


async def test_s6_a_graph_that_is_captured_refuses(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("compute")
    with simulated_cuda.paused():
        handle = stream.submit(lambda: torch.ones(3, device="cuda"))
        event = stream.stream.record_event()
        with simulated_cuda.capturing():
            calls: list[Callable[[], object]] = [
                stream.record,
                partial(stream.submit, torch.ones, 3),
                lambda: stream.copy(*[torch.ones(3)] * 2),
                stream.wait,
                partial(stream.wait_handle, handle),
                handle.wait_stream,
                partial(handle.wait_stream, torch.cuda.Stream()),
                partial(event_handle, event),
            ]
            for call in calls:
                with REFUSED:
                    call()
    await handle
    await stream.record()


async def test_s6_asked_is_the_stream_of_the_device_that_is_meant(simulated_cuda: SimulatedCuda) -> None:
    first, second = CudaStream.of("compute", 0), CudaStream.of("compute", 1)
    with simulated_cuda.capturing(torch.cuda.current_stream(1)):
        await first.record()
        with REFUSED:
            second.record()
        check_not_capturing(0)
        for asked in ((1,), (0, 1)):
            with REFUSED:
                check_not_capturing(*asked)
        assert torch.cuda.current_device() == 0
    await second.record()


def raising(monkeypatch: pytest.MonkeyPatch, text: str, times: int) -> list[torch.cuda.Event]:
    query: Any = torch.cuda.Event.query
    refused: list[torch.cuda.Event] = []

    def forbidden(event: torch.cuda.Event) -> bool:
        if len(refused) < times:
            refused.append(event)
            raise torch.AcceleratorError(f"CUDA error: {text}")
        return bool(query(event))

    monkeypatch.setattr(torch.cuda.Event, "query", forbidden)
    return refused


async def test_s6_a_capture_elsewhere_puts_off_what_it_forbids_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = raising(monkeypatch, "operation not permitted when stream is capturing", 3)
    await asyncio.wait_for(CudaStream.of("compute").record(), 20)
    assert len(refused) == 3


async def test_s6_an_event_of_a_capture_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, "operation not permitted on an event last recorded in a capturing stream", 1)
    async with asyncio.timeout(20):
        with pytest.raises(BackendError, match="last recorded in a capturing stream"):
            await CudaStream.of("compute").record()


class Driver:
    """Stands in for the driver's call: each thread has its mode, at first 0, the "global" one."""

    def __init__(self, code: int = 0) -> None:
        self.modes: list[int] = []
        self._code = code
        self._of = threading.local()

    @property
    def mode(self) -> int:
        return getattr(self._of, "mode", 0)

    def __call__(self, mode: Any) -> int:
        self.modes.append(mode._obj.value)
        if not self._code:
            self._of.mode, mode._obj.value = mode._obj.value, self.mode
        return self._code


async def test_s6_asking_has_nothing_to_do_with_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(capture, "_driver", lambda: driver)
    await CudaStream.of("compute").record()
    assert driver.modes[:2] == [2, 0]
    assert len(driver.modes) % 2 == 0
    before = len(driver.modes)
    PinnedPool().take(100)
    assert driver.modes[before:] == [2, 0]


async def test_s6_a_mode_that_could_not_be_set_is_not_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code=3)
    monkeypatch.setattr(capture, "_driver", lambda: driver)
    with capture.Uncaptured():
        pass
    assert driver.modes == [2]


async def test_s6_room_is_made_in_a_mode_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader's thread makes it, and a copy."""
    driver, modes = Driver(), []
    monkeypatch.setattr(capture, "_driver", lambda: driver)

    def noting(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args: Any, **options: Any) -> torch.Tensor:
            if torch.device(options.get("device") or "cpu").type == "cuda":
                modes.append(driver.mode)
            return make(*args, **options)

        return noted

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, noting(getattr(torch, name)))
    there = torch.zeros(50, 20, device="cuda").t()
    await CudaStream.of("to-device").copy(there, torch.ones(20, 50))
    assert modes == [2]
    assert there.eq(1).all()
    to_device = ToDevice(torch.device("cuda"))
    item = Item(0, Handle(Progress.current(), "item"), lambda *_: None)
    await asyncio.to_thread(to_device.put, item, Made(torch.ones(10)))
    await item.handle
    await to_device.aclose()
    assert modes == [2, 2]
