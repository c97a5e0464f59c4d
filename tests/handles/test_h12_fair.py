"""H12: a parked wait is cheap, and the loop stays responsive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiodist.handles import Handle, Progress, from_future
from aiodist.handles import progress as module
from aiodist.streams import HostStream

pytestmark = pytest.mark.timeout(30)
ENOUGH = 15  # 80 to 100 on a machine with nothing else to do; a starved ticker gets 2 to 5


async def _ticks_during(storm: Callable[[], Awaitable[None]], seconds: float = 0.2) -> int:
    """Return how often a ticker of one millisecond ticked, of 200 times, while the storm took so much CPU time."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticker = asyncio.create_task(tick())
    until = time.thread_time() + seconds  # a busy machine gives it later
    while time.thread_time() < until:
        await storm()
    ticker.cancel()
    return ticks


async def test_h12_a_storm_of_finished_awaits_lets_a_ticker_tick(transport: Any) -> None:
    handle: Handle[int] = Handle(transport.progress, "done")
    handle.resolve(1)

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


async def test_h12_a_parked_wait_costs_little(bench: Any) -> None:
    operation = await bench.issue()
    waiting = asyncio.ensure_future(operation.handle)
    await asyncio.sleep(0.05)
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(0.4)
    used = (time.process_time() - cpu) / (time.monotonic() - began)
    operation.finish()
    await waiting
    assert used < 0.25  # 0.02 to 0.05 on a machine with nothing else to do


async def test_h12_a_parked_handle_is_polled_by_the_thread_alone(transport: Any, until: Any) -> None:
    request = transport.issue(go=False)
    waiting = asyncio.ensure_future(request.handle)
    await until(lambda: transport.progress.parked)
    began, polls = time.monotonic(), request.polls
    await asyncio.sleep(0.1)
    assert request.polls - polls < 4000 * (time.monotonic() - began)  # the pauses grow to a millisecond
    request.go = True
    await asyncio.wait_for(waiting, 10)


async def test_h12_completions_reach_the_loop_in_batches(transport: Any) -> None:
    """A wake-up costs as much as twenty completions."""
    progress = Progress.current()
    wakes = 0
    run = progress._run_posted

    def counted() -> None:
        nonlocal wakes
        wakes += 1
        run()

    progress._run_posted = counted  # type: ignore[method-assign]
    handles: list[Handle[int]] = [Handle(progress, "small") for _ in range(500)]
    waiting = [asyncio.ensure_future(h) for h in handles]
    await asyncio.sleep(0)

    def settle() -> None:
        for handle in handles:
            handle.resolve(1)

    await asyncio.to_thread(settle)
    assert await asyncio.gather(*waiting) == [1] * 500
    assert wakes < 100


@pytest.fixture
def wakeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ticks for ever where nothing computes; it knows of no other test's loop."""
    monkeypatch.setattr(module, "_thread", module._ProgressThread())
    monkeypatch.setattr(module, "_LINGER_SECONDS", float("inf"))


async def test_h12_the_progress_thread_leaves_a_stream_that_computes_alone(wakeful: None, transport: Any) -> None:
    """A tick takes the GIL; what is issued meanwhile wakes the thread."""
    ended = threading.Event()

    def compute() -> bool:
        until = time.monotonic() + 20
        while not module._thread.asleep and time.monotonic() < until:
            time.sleep(1e-4)
        return module._thread.asleep and ended.wait(20)

    await transport.issue(after=2).handle
    async with HostStream() as stream:
        computed = stream.submit(compute)
        await asyncio.sleep(0.05)
        await transport.issue(after=2).handle
        ended.set()
        assert await computed
