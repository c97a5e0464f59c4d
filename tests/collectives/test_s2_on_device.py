"""S2, H11: what an operation does on a device comes behind what its caller queued, and asks for no event in vain."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest
import torch

from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.streams import Events
from aiodist.testing.seams.cuda import DeviceWork, on_devices
from aiodist.testing.seams.progress import run, transfers
from aiodist.testing.seams.transport import Done
from tests.support.blocking import rounds
from tests.support.simulated_cuda.device import SimulatedCuda


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[torch.cuda.Stream]:
    """Return on which streams events are recorded from now on."""
    streams: list[torch.cuda.Stream] = []
    record = Events.record

    def noted(events: Events, stream: torch.cuda.Stream) -> torch.cuda.Event:
        streams.append(stream)
        return record(events, stream)

    monkeypatch.setattr(Events, "record", noted)
    return streams


def ended(work: DeviceWork, told: list[BaseException | None]) -> None:
    Progress.current().start(lambda: work.end(told.append))


async def until(told: list[Any]) -> None:
    async with asyncio.timeout(10):
        while not told:  # noqa: ASYNC110  - it sets no event
            await asyncio.sleep(0)


@pytest.mark.usefixtures("simulated_cuda")
async def test_s2_where_nothing_is_queued_there_is_nothing_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    streams = recorded(monkeypatch)
    queued: list[None] = []
    work = DeviceWork(Progress.current(), stream, lambda: queued.append(None))
    with work.current():
        work.begin()
    told: list[BaseException | None] = []
    ended(work, told)
    assert told == [None]
    assert queued == [None]
    assert not streams


async def test_s2_what_is_queued_is_waited_for_on_both_sides(
    simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, caller = torch.cuda.Stream(), torch.cuda.current_stream()
    streams = recorded(monkeypatch)
    told: list[BaseException | None] = []
    with simulated_cuda.paused(caller):
        x = torch.full((1000,), 2.0, device="cuda")
        work = DeviceWork(Progress.current(), stream)
        with work.current():
            work.begin()
            y = x * 3
        ended(work, told)
        await rounds()
        assert not told
    await until(told)
    assert told == [None]
    assert streams == [caller, stream]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert y.eq(6).all()


async def test_s2_what_cannot_be_issued_gives_its_place_back(
    simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    simulated_cuda.fail(0, "an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda.Event, "record", lost)
    given_back = asyncio.Event()
    with pytest.raises(BackendError, match="illegal memory access"):
        DeviceWork(Progress.current(), torch.cuda.Stream(0), given_back.set)
    async with asyncio.timeout(10):
        await given_back.wait()


async def test_s2_a_device_that_failed_is_an_error_of_the_operation(simulated_cuda: SimulatedCuda) -> None:
    stream = torch.cuda.Stream()
    work = DeviceWork(Progress.current(), stream)
    with work.current():
        y = torch.ones(1000, device="cuda")
    work.lend(y)
    del y
    simulated_cuda.fail(0, "an illegal memory access was encountered")
    told: list[BaseException | None] = []
    ended(work, told)
    await until(told)
    assert isinstance(told[0], BackendError)
    assert "illegal memory access" in str(told[0])
    del work
    gc.collect()
    assert not simulated_cuda.hazards


async def test_s2_a_result_is_the_callers_when_it_ends_well(simulated_cuda: SimulatedCuda) -> None:
    stream, caller = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(5):
        work = DeviceWork(Progress.current(), stream)
        with work.current():
            y = torch.ones(1000, device="cuda")
        work.lend({"y": y})
        told: list[BaseException | None] = []
        ended(work, told)
        await until(told)
        with simulated_cuda.paused(caller):
            read = y + 1
            del y
            stream.synchronize()
        assert read.eq(2).all()


@pytest.mark.usefixtures("simulated_cuda")
@pytest.mark.parametrize("dropped", [False, True])
async def test_s2_threads_hand_the_gil_over_sooner_while_it_is_under_way(dropped: bool) -> None:
    gc.collect()  # what an earlier test dropped in flight
    usual, waiting, told = sys.getswitchinterval(), list[Done](), list[Any]()

    async def program() -> None:
        await transfers([(waiting.append,)])

    progress = Progress.current()
    work = DeviceWork(progress, torch.cuda.Stream())
    progress.start(lambda: run(on_devices(program(), [work]), lambda _, error: told.append(error or "over")))
    assert sys.getswitchinterval() < usual
    if dropped:
        waiting.clear()
        gc.collect()
    else:
        progress.start(lambda: waiting.pop()(None))
        await until(told)
    assert sys.getswitchinterval() == usual
