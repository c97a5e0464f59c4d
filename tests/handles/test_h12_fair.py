"""H12: a parked wait is cheap, and the loop stays responsive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from aiodist.handles import Handle, Operation, Progress, from_future
from aiodist.streams import HostStream
from aiodist.testing.seams.progress import alarm, own_thread
from tests.support.blocking import blocked_until, noted_pauses

pytestmark = pytest.mark.timeout(60)
ENOUGH = 15  # one in each millisecond are 200; a starved ticker gets next to none


async def _ticks_during(storm: Callable[[], Awaitable[None]], seconds: float = 0.2) -> int:
    """Return the number of a ticker's turns while the storm used `seconds` of CPU time."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticker = asyncio.create_task(tick())
    until = time.thread_time() + seconds  # a busy machine gives it later
    while time.thread_time() < until:
        await storm()
    ticker.cancel()
    return ticks


async def test_h12_a_storm_of_finished_awaits_lets_a_ticker_tick(transport: Any) -> None:
    handle: Handle[int] = Handle(transport.progress, "done")
    Operation.of(handle).resolve(1)

    async def storm() -> None:
        await handle

    assert await _ticks_during(storm) > ENOUGH


async def test_h12_a_storm_of_handles_that_nothing_outlives() -> None:
    """No communicator, no stream: nothing holds the loop's `Progress` from one to the next."""

    async def storm() -> None:
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        future.set_result(1)
        await from_future(future)

    assert await _ticks_during(storm) > ENOUGH


async def test_h12_a_storm_of_operations_that_end_in_the_spin(transport: Any) -> None:
    async def storm() -> None:
        await transport.issue(after=2).handle

    assert await _ticks_during(storm) > ENOUGH


async def test_h12_a_gather_of_many_lets_a_ticker_tick(bench: Any) -> None:
    handles = [await bench.ended() for _ in range(3)]

    async def storm() -> None:
        await asyncio.gather(*handles)

    assert await _ticks_during(storm) > ENOUGH


async def test_h12_a_parked_wait_costs_little(bench: Any, monkeypatch: pytest.MonkeyPatch, until: Any) -> None:
    """The loop's thread sleeps, and the progress thread polls once per millisecond."""
    pauses = noted_pauses(monkeypatch)
    operation = await bench.issue()
    waiting = asyncio.ensure_future(operation.handle)
    if bench.kind == "polled":
        await until(lambda: bench.transport.progress.pace.name == "PARKED")
        bench.transport.polled_by.clear()
        assert await asyncio.to_thread(blocked_until, lambda: pauses[-20:] == [1e-3] * 20)
        assert set(bench.transport.polled_by) == {"aiodist-progress"}
    else:
        assert await asyncio.to_thread(blocked_until, lambda: alarm.asleep)
    operation.finish()
    await waiting


async def test_h12_a_parked_handle_is_polled_by_the_thread_alone(transport: Any, until: Any) -> None:
    request = transport.issue(go=False)
    waiting = asyncio.ensure_future(request.handle)
    await until(lambda: transport.progress.pace.name == "PARKED")
    transport.polled_by.clear()
    await until(lambda: len(transport.polled_by) > 50)
    assert set(transport.polled_by) == {"aiodist-progress"}
    request.go = True
    await asyncio.wait_for(waiting, 10)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_h12_completions_reach_the_loop_in_batches(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up costs as much as twenty completions."""
    progress = Progress.current()
    wakes, wake = 0, progress.loop.call_soon_threadsafe

    def counted(*call: Any, **context: Any) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return wake(*call, **context)

    monkeypatch.setattr(progress.loop, "call_soon_threadsafe", counted)
    handles: list[Handle[int]] = [Handle(progress, "small") for _ in range(500)]
    waiting = [asyncio.ensure_future(h) for h in handles]
    await asyncio.sleep(0)

    def settle() -> None:
        for handle in handles:
            Operation.of(handle).resolve(1)

    await asyncio.to_thread(settle)
    assert await asyncio.gather(*waiting) == [1] * 500
    assert wakes < 100


@pytest.fixture
def wakeful() -> Iterator[None]:
    """A thread that never sleeps unless a stream computes."""
    with own_thread(linger_seconds=float("inf")):
        yield


async def test_h12_the_progress_thread_leaves_a_stream_that_computes_alone(wakeful: None, transport: Any) -> None:
    """A tick takes the GIL; what is issued meanwhile wakes the thread."""
    slept, ended = threading.Event(), threading.Event()

    def compute() -> bool:
        asleep = blocked_until(lambda: alarm.asleep)
        slept.set()
        return asleep and ended.wait(20)

    await transport.issue(after=2).handle
    async with HostStream() as stream:
        computed = stream.submit(compute)
        assert await asyncio.to_thread(slept.wait, 30)
        await transport.issue(after=2).handle
        ended.set()
        assert await computed
