"""H10: what other threads may do. H11: ordering a stream after a handle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import warnings
from typing import Any

import pytest

from aiodist.errors import OperationTimeout
from aiodist.handles import Operation, Progress
from aiodist.streams import HostStream
from aiodist.testing.seams.progress import transport_lock
from tests.support.blocking import blocked_until, rounds

pytestmark = pytest.mark.timeout(30)


async def test_h10_wait_blocks_another_thread(bench: Any) -> None:
    operation = await bench.issue()
    waiting = [asyncio.create_task(asyncio.to_thread(operation.handle.wait, 10)) for _ in range(4)]
    await asyncio.sleep(0)
    operation.finish("x")
    assert await asyncio.gather(*waiting) == ["x"] * 4


async def test_h10_wait_raises_what_the_operation_raised(bench: Any) -> None:
    operation = await bench.issue()
    waiting = asyncio.create_task(asyncio.to_thread(operation.handle.wait, 10))
    operation.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await waiting


async def test_h10_wait_on_the_loop_raises(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(RuntimeError, match="would block the event loop"):
        operation.handle.wait()
    operation.finish()
    await operation.handle
    with pytest.raises(RuntimeError, match="would block the event loop"):
        operation.handle.wait()


async def test_h10_a_wait_that_runs_out_leaves_the_operation(bench: Any) -> None:
    operation = await bench.issue()
    for seconds in (0.0, 0.01):
        with pytest.raises(OperationTimeout, match=f"within {seconds:g} s and continues"):
            await asyncio.to_thread(operation.handle.wait, seconds)
    assert not operation.handle.done()
    operation.finish("x")
    assert await asyncio.to_thread(operation.handle.wait, 10) == "x"
    assert await operation.handle == "x"


async def test_h10_wait_needs_no_turn_of_the_loop(bench: Any) -> None:
    """A layer on the compute thread waits for its parameters while the loop's thread is busy."""
    operation = await bench.issue()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(operation.handle.wait(10)))
    thread.start()
    operation.finish("x")
    thread.join(10)  # on the loop's thread
    assert seen == ["x"]


async def test_h10_two_threads_that_begin_to_wait_at_once(monkeypatch: pytest.MonkeyPatch, until: Any) -> None:
    """Both threads use one event; with an event each, one thread would never wake."""
    both = threading.Barrier(2)
    seen: list[int] = []
    operation: Operation[int] = Operation(Progress.current(), "raced", polled=False)
    handle = operation.handle

    def waits(thread: threading.Thread) -> bool:
        return sys._current_frames()[thread.ident or 0].f_code is threading.Condition.wait.__code__

    class SlowEvent(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            with contextlib.suppress(threading.BrokenBarrierError):
                if both.wait(0.2) == 0:  # the other thread makes one too, if it can, and this one comes last
                    blocked_until(lambda: any(map(waits, threads)))

    threads = [threading.Thread(target=lambda: seen.append(handle.wait(50))) for _ in range(2)]
    monkeypatch.setattr("aiodist.handles.handle.threading.Event", SlowEvent)
    for thread in threads:
        thread.start()
    await until(lambda: all(map(waits, threads)))
    monkeypatch.undo()
    operation.resolve(1)
    for thread in threads:
        thread.join(10)
    assert seen == [1, 1]


async def test_h10_a_pending_handle_has_neither_result_nor_exception(bench: Any) -> None:
    operation = await bench.issue()
    for ask in (operation.handle.result, operation.handle.exception):
        with pytest.raises(asyncio.InvalidStateError, match="is not done: await it"):
            ask()
    operation.finish("x")
    await operation.handle
    assert operation.handle.result() == "x"
    assert operation.handle.exception() is None


async def test_h10_another_thread_may_ask_but_neither_cancel_nor_call_back(bench: Any) -> None:
    operation = await bench.issue()

    def ask() -> None:
        assert not operation.handle.done()
        assert not operation.handle.cancelled()
        assert operation.handle.op
        for call in (operation.handle.cancel, lambda: operation.handle.add_done_callback(print)):
            with pytest.raises(RuntimeError, match="call it on the thread of its event loop"):
                call()

    await asyncio.to_thread(ask)
    operation.finish()
    await operation.handle


async def test_h10_another_loop_is_refused_a_pending_handle(bench: Any) -> None:
    operation = await bench.issue()

    async def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await operation.handle

    await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    operation.finish()
    await operation.handle


async def test_h11_wait_stream_orders_a_host_stream(bench: Any) -> None:
    operation = await bench.issue()
    async with HostStream() as stream:
        before = stream.submit(str, "before")
        operation.handle.wait_stream(stream)
        after = stream.submit(operation.handle.done)
        assert await before == "before"
        assert not after.done()
        operation.finish()
        assert await after


async def test_h11_an_error_orders_as_well_and_poisons_nothing(bench: Any) -> None:
    operation = await bench.issue()
    async with HostStream() as stream:
        operation.handle.wait_stream(stream)
        after = stream.submit(int)
        operation.fail(ValueError("no"))
        assert await after == 0
    with pytest.raises(ValueError, match="no"):
        await operation.handle


async def test_h11_a_passed_deadline_neither_lets_the_stream_go_nor_is_lost(bench: Any) -> None:
    operation = await bench.issue()
    Operation.of(operation.handle).set_deadline(0.0)
    async with HostStream() as stream:
        operation.handle.wait_stream(stream)
        after = stream.submit(int)
        await rounds()
        assert not after.done()
        with pytest.raises(OperationTimeout):
            await operation.handle
        operation.finish()
        await after


async def test_h11_goes_on_while_the_loop_is_busy(bench: Any) -> None:
    operation = await bench.issue()
    done = threading.Event()
    async with HostStream() as stream:
        operation.handle.wait_stream(stream)
        handle = stream.submit(done.set)
        operation.finish()
        assert done.wait(10)  # blocks the loop's thread
        await handle


async def test_h11_no_stream_to_order_is_an_error(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(RuntimeError, match="no CUDA stream"):
        operation.handle.wait_stream()
    operation.finish()
    await operation.handle
    operation.handle.wait_stream()  # it is over: there is nothing left to wait for


# --- forks -----------------------------------------------------------------------------------------------------------


def _forked() -> int:
    """Fork, and return 0 if the child finds the transport lock free."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with other threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        os._exit(0 if transport_lock.acquire(False) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_h10_a_fork_beside_a_long_native_call_warns_and_the_child_has_a_lock() -> None:
    begun, ends = threading.Event(), threading.Event()

    def call() -> None:
        with transport_lock:
            begun.set()
            ends.wait(30)

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(10)
    try:
        with pytest.warns(RuntimeWarning, match=r"os\.fork: a native call has not ended within 1 s"):
            assert _forked() == 0
    finally:
        ends.set()
        thread.join()
    assert _forked() == 0  # without a warning
    with transport_lock:
        assert _forked() == 1  # the child of the holder holds the lock, and releases it as the parent does
    assert not transport_lock.locked()
