"""H6: cancelling a wait never touches the transfer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import ref

import anyio
import pytest

import aiodist.handles
from aiodist.handles import Handle, Operation, from_future, internals
from aiodist.streams import HostStream
from tests.support.giving_up import cancelled_task, gathered, task_group, wait_for

pytestmark = pytest.mark.timeout(30)


class Owned:
    """Stands for a buffer."""


async def _timeout(handle: Handle[Any]) -> None:
    with pytest.raises(TimeoutError):
        async with aiodist.handles.timeout(0.005):
            await handle


async def _our_gather(handle: Handle[Any]) -> None:
    await wait_for(aiodist.handles.gather(handle))


async def _anyio(handle: Handle[Any]) -> None:
    with anyio.move_on_after(0.005):
        await handle


@pytest.mark.parametrize("give_up", [cancelled_task, wait_for, _timeout, gathered, _our_gather, task_group, _anyio])
async def test_h6_cancelled_wait_leaves_the_transfer(
    bench: Any, give_up: Callable[[Handle[Any]], Awaitable[None]]
) -> None:
    operation = await bench.issue()
    handle = operation.handle
    owned = Owned()
    gone = ref(owned)
    Operation.of(handle).keep(owned)
    del owned
    await give_up(handle)
    assert not handle.done()
    assert not handle.cancelled()
    assert gone() is not None
    operation.finish("arrived")
    assert await asyncio.wait_for(handle, 10) == "arrived"


async def test_h6_a_cancelled_wait_notes_what_it_waited_for(bench: Any) -> None:
    operation = await bench.issue()
    task = asyncio.ensure_future(operation.handle)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert any("which continues" in note for note in caught.value.__notes__)
    operation.finish()
    await operation.handle


async def test_h6_cancelling_one_awaiter_leaves_the_others(bench: Any) -> None:
    operation = await bench.issue()
    one, other = (asyncio.ensure_future(operation.handle) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    operation.finish("x")
    assert await asyncio.wait_for(other, 10) == "x"
    assert one.cancelled()


async def test_h6_cancel_of_what_runs_is_refused(bench: Any) -> None:
    operation = await bench.issue()
    assert not operation.handle.cancel()
    assert not operation.handle.done()
    operation.finish("x")
    assert await operation.handle == "x"


async def test_h6_cancel_withdraws_what_has_not_begun() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    go = threading.Event()
    async with HostStream() as stream:
        running = stream.submit(go.wait)
        for handle in (from_future(future), stream.submit(int)):
            waiting = asyncio.ensure_future(asyncio.wait_for(handle, 10))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert handle.cancel()
            assert handle.cancelled()
            assert handle.done()
            assert not handle.cancel()
            with pytest.raises(asyncio.CancelledError, match="was withdrawn"):
                await waiting
            with pytest.raises(asyncio.CancelledError):
                handle.result()
            with pytest.raises(asyncio.CancelledError):
                handle.exception()
        go.set()
        await running
    assert future.cancelled()


async def test_h6_a_future_cancelled_by_its_owner_withdraws_the_handle() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    handle = from_future(future)
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handle


async def test_h6_a_thousand_cancelled_waits_leave_nothing_behind(bench: Any) -> None:
    operation = await bench.issue()
    tasks = [asyncio.ensure_future(operation.handle) for _ in range(1000)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not internals.is_awaited(operation.handle)
    operation.finish()
    await operation.handle
