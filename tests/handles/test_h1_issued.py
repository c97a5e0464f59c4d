"""H1: what is issued makes progress, no matter what the program does."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from typing import Any

import pytest
import torch

from aiodist.handles import Handle, Operation, Progress, internals
from aiodist.testing.seams.progress import alarm, transport_lock
from tests.support.blocking import blocked_until

pytestmark = pytest.mark.timeout(30)


def _block_until(done: Any, how: str = "sleep") -> bool:
    """Keep the loop's thread busy until it is done, or hope is lost."""
    a = torch.ones(64, 64)
    if how == "sleep":
        return blocked_until(done)
    until = time.monotonic() + 10
    while not done() and time.monotonic() < until:
        if how == "matmul":
            a = (a @ a).clamp(0, 1)
    return bool(done())


async def test_h1_is_over_though_nobody_awaits_it(transport: Any, until: Any) -> None:
    handle = transport.issue(after=5).handle
    await until(handle.done)
    handle.result()


@pytest.mark.parametrize("how", ["sleep", "python", "matmul"])
async def test_h1_makes_progress_while_the_loop_computes(transport: Any, how: str) -> None:
    handle = transport.issue(after=20).handle
    assert _block_until(handle.done, how)


async def test_h1_a_second_operation_in_one_long_stretch(transport: Any) -> None:
    """The progress thread has gone to sleep meanwhile, and the loop has not run."""
    first = transport.issue(after=3).handle
    assert _block_until(first.done)
    assert _block_until(lambda: alarm.asleep)
    second = transport.issue(after=3).handle
    assert _block_until(second.done)


async def test_h1_on_a_loop_that_the_awake_thread_does_not_know(transport: Any) -> None:
    await transport.issue(after=50).handle
    done: list[bool] = []

    async def other() -> None:
        fresh = type(transport)()
        handle = fresh.issue(after=5).handle
        done.append(_block_until(handle.done))

    transport.issue(after=200)  # keeps the thread awake
    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert done == [True]


async def test_h1_large_transfers_are_started_by_the_progress_thread(transport: Any) -> None:
    seen: list[str] = []
    progress = Progress.current()
    handle: Handle[None] = Handle(progress, "allreduce")

    def call() -> None:
        seen.append(threading.current_thread().name)
        Operation.of(handle).resolve(None)

    progress.start_in_thread(call)
    assert _block_until(handle.done)
    assert seen == ["aiodist-progress"]
    await handle


@pytest.mark.parametrize("closed", [False, True])
def test_h1_threads_switch_as_before_when_a_loop_ends_in_a_large_transfer(closed: bool) -> None:
    """The transfer ends after the loop is closed, or just before, so that the loop never hears of it."""
    gc.collect()
    usual, loop = sys.getswitchinterval(), asyncio.new_event_loop()

    async def begin() -> Any:
        return Progress.current().counted(lambda error: None)

    finished = loop.run_until_complete(begin())
    assert sys.getswitchinterval() < usual
    if not closed:
        finished(None)
    loop.close()
    if closed:
        finished(None)
        assert sys.getswitchinterval() == usual
    del finished, loop
    gc.collect()
    assert sys.getswitchinterval() == usual


async def test_h1_threads_switch_sooner_for_a_moment_after_a_large_await(until: Any) -> None:
    gc.collect()
    progress, usual = Progress.current(), sys.getswitchinterval()
    progress.keep_hurrying(4096)
    assert sys.getswitchinterval() == usual
    progress.keep_hurrying(1 << 20)
    progress.keep_hurrying(1 << 20)
    assert sys.getswitchinterval() < usual
    await until(lambda: sys.getswitchinterval() == usual)


async def test_h1_operations_start_in_the_order_of_issue(transport: Any, until: Any) -> None:
    progress = Progress.current()
    order: list[int] = []
    for i in range(200):
        start = progress.start_in_thread if i % 3 == 0 else progress.start
        start(lambda i=i: order.append(i))  # type: ignore[misc]
    await until(lambda: len(order) == 200)
    assert order == list(range(200))


async def test_h1_a_poller_that_fails_is_reported_and_stops_nobody_else(
    transport: Any, reports: list[dict[str, Any]], until: Any
) -> None:
    class Broken:
        rings = False

        def __len__(self) -> int:
            return 1

        def poll(self, until: float = 0.0) -> bool:
            raise ZeroDivisionError("broken")

    Progress.current().add_poller(Broken())
    handle = transport.issue(after=20).handle
    assert _block_until(handle.done)
    await asyncio.wait_for(asyncio.gather(handle, transport.issue(after=20).handle), 10)
    await until(lambda: reports)
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]


async def test_h1_what_a_thread_of_a_transport_begins_is_driven(until: Any) -> None:
    """Nothing was pending, so neither the loop nor the progress thread polls, and no code issues an operation."""
    progress = Progress.current()
    handle: Handle[None] = Handle(progress, "next step")

    class Events:
        rings = False
        pending = 0

        def __len__(self) -> int:
            return self.pending

        def poll(self, until: float = 0.0) -> bool:
            if self.pending:
                self.pending = 0
                Operation.of(handle).resolve(None)
            return True

    events = Events()
    progress.add_poller(events)

    def came() -> None:
        with transport_lock:
            events.pending = 1
            progress.ensure_polled()

    await asyncio.to_thread(came)
    await until(handle.done)  # an await would look for itself
    handle.result()


async def test_h1_a_callback_that_fails_keeps_no_other_from_being_told(
    transport: Any, reports: list[dict[str, Any]]
) -> None:
    class Bad:
        def wake(self, handle: object, late: object, /) -> None:
            raise ZeroDivisionError

    progress = Progress.current()
    first: Handle[int] = Handle(progress, "first")
    second: Handle[int] = Handle(progress, "second")
    internals.add_waiter(first, Bad())
    waiting = asyncio.ensure_future(asyncio.wait_for(second, 10))
    await asyncio.sleep(0)
    for handle in (first, second):
        thread = threading.Thread(target=Operation.of(handle).resolve, args=(1,))
        thread.start()
        thread.join()  # both are in one batch, since the loop has not run
    assert await waiting == 1
    assert len(reports) == 1


async def test_h1_a_call_is_pending_while_it_runs() -> None:
    """A native call may take milliseconds: meanwhile the progress thread must not find that there is nothing to do."""
    seen: list[bool] = []
    progress = Progress.current()
    progress.start_in_thread(lambda: seen.append(progress.pending()))
    assert _block_until(lambda: bool(seen))
    assert seen == [True]
