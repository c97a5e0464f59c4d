"""W12: deadlines stand still while the clock of deadlines has a holder, and continue with the time that was left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import aiodist
from aiodist.errors import OperationTimeout
from aiodist.handles import Operation
from aiodist.handles.deadline import wait_within
from aiodist.pauses import DeadlineClock, deadline_clock

pytestmark = pytest.mark.timeout(60)
SECONDS = 0.15


@pytest.fixture
def held() -> Iterator[object]:
    """The holder of the clock, until the test releases it."""
    holder = object()
    deadline_clock.hold(holder)
    yield holder
    deadline_clock.release(holder)


def past(seconds: float) -> Any:
    """Return a function that is true after `seconds` of real time."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def test_w12_the_clock_counts_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    real = [100.0]
    monkeypatch.setattr("aiodist.pauses.monotonic", lambda: real[0])
    clock = DeadlineClock()
    seen = []
    for seconds, call, holder in (
        (1, clock.release, "a"),  # no holder
        (2, clock.hold, "a"),
        (4, clock.hold, "b"),
        (8, clock.release, "a"),
        (16, clock.release, "c"),  # no holder
        (32, clock.release, "b"),
        (64, clock.release, "b"),
    ):
        real[0] += seconds
        call(holder)
        seen.append((clock.now() - 100, clock.paused(), clock.stands))
    stood = [(3, 0, True), (3, 4, True), (3, 12, True), (3, 28, True)]
    assert seen == [(1, 0, False), *stood, (3, 60, False), (67, 60, False)]
    assert clock.pause_until(-1) == 0
    assert clock.pause_until(5) == 5
    clock.hold("a")
    assert clock.pause_until(-1) > 0


async def test_w12_an_operation_keeps_the_time_that_was_left(bench: Any, until: Any, held: object) -> None:
    operation = await bench.issue()
    Operation.of(operation.handle).set_deadline(SECONDS)
    began = deadline_clock.now()
    waits = [
        asyncio.ensure_future(operation.handle),
        asyncio.ensure_future(asyncio.to_thread(operation.handle.wait, 2 * SECONDS)),
        asyncio.ensure_future(within(operation.handle)),
    ]
    await until(past(3 * SECONDS))
    assert not any(wait.done() for wait in waits)
    deadline_clock.release(held)
    for error in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(error, OperationTimeout)
    assert deadline_clock.now() - began >= SECONDS
    operation.finish("x")
    assert await operation.handle == "x"


async def within(handle: Any) -> None:
    async with aiodist.timeout(SECONDS):
        await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(handle.wait)))


async def test_w12_a_block_that_began_before_the_pause(until: Any) -> None:
    began = deadline_clock.now()
    holder, entered = object(), asyncio.Event()

    async def block() -> None:
        async with aiodist.timeout(SECONDS):
            entered.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(block())
    await entered.wait()
    deadline_clock.hold(holder)
    try:
        await until(past(3 * SECONDS))
        assert task.done() == (deadline_clock.now() - began > SECONDS)  # True only on a machine that stood still
    finally:
        deadline_clock.release(holder)
    with pytest.raises(OperationTimeout):
        await task
    assert deadline_clock.now() - began >= SECONDS


async def test_w12_a_close_waits_without_the_pause(until: Any, held: object) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waits = asyncio.ensure_future(wait_within([future], SECONDS))
    await until(past(2 * SECONDS))
    assert not waits.done()
    deadline_clock.release(held)
    await waits
    assert not future.done()
    future.set_result(None)
    await wait_within([future], 1e6)


def test_w12_threads_may_hold_at_once() -> None:
    holders = [object() for _ in range(8)]

    def hold(holder: object) -> None:
        for _ in range(200):
            deadline_clock.hold(holder)
            deadline_clock.release(holder)

    threads = [threading.Thread(target=hold, args=[holder]) for holder in holders]
    before = time.monotonic() - deadline_clock.now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not deadline_clock.stands
    assert deadline_clock.paused() >= before - 1e-3
