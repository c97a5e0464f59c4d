"""H1: work continues and keeps its buffers after the handle and the loop are dropped; idle objects are collected."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import ref

import pytest

from aiodist.handles import Handle, Operation, Progress
from tests.support.blocking import blocked_until


class Device:
    """Ends operations at the test's command, by a poller of each loop, as devices do."""

    rings = False

    def __init__(self, progress: Progress) -> None:
        self.over = threading.Event()
        self._pending: list[Operation[None]] = []
        progress.add_poller(self)

    def __len__(self) -> int:
        return len(self._pending)

    def poll(self, until: float = 0.0) -> bool:
        if not self._pending or not self.over.is_set():
            return False
        for operation in self._pending:
            operation.resolve(None)
        self._pending.clear()
        return True

    def submit(self, progress: Progress, keep: object) -> Handle[None]:
        operation: Operation[None] = Operation(progress, "work")
        operation.keep(keep)
        progress.start(lambda: self._pending.append(operation))
        return operation.handle


class Buffer:
    pass


def collected(*objects: ref[Any]) -> bool:
    gc.collect()
    return all(each() is None for each in objects)


def parks(progress: ref[Progress]) -> bool:
    return (alive := progress()) is None or alive.pace.name == "PARKED"


Issue = tuple[threading.Event, ref[Buffer], ref[Progress]]


def issued() -> Issue:
    progress, buffer = Progress.current(), Buffer()
    device = Device(progress)
    device.submit(progress, buffer).detach()  # or it warns that it was dropped
    return device.over, ref(buffer), ref(progress)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_h1_what_was_dropped_keeps_its_buffers_until_it_is_over(until: Any) -> None:
    over, buffer, progress = issued()
    await until(lambda: parks(progress))
    gc.collect()
    assert buffer() is not None
    over.set()
    await until(lambda: collected(buffer, progress))


@pytest.mark.parametrize("stop", ["at once", "parked"])
def test_h1_a_loop_that_is_closed_keeps_the_buffers_of_what_goes_on(until: Any, stop: str) -> None:
    async def main() -> Issue:
        found = issued()
        if stop == "parked":
            await until(lambda: parks(found[2]))
        return found

    over, buffer, progress = run(main)
    for _ in range(5):
        gc.collect()
    assert buffer() is not None
    over.set()
    assert blocked_until(lambda: collected(buffer, progress))


def test_h1_a_loop_that_was_stopped_before_its_turn_is_let_go_of() -> None:
    """The loop was about to poll, and nothing is pending, which only the next loop finds out."""

    async def main() -> ref[Progress]:
        progress = Progress.current()
        asyncio.get_running_loop().stop()
        progress.start(lambda: None)
        return ref(progress)

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    loop.run_forever()
    loop.close()
    progress = task.result()
    del task, loop
    gc.collect()
    run(_use)
    assert blocked_until(lambda: collected(progress))


async def _use() -> None:
    progress = Progress.current()
    progress.start(lambda: None)
    await asyncio.sleep(0)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()
