"""Readers: they take items from a source, one after the other, each when it is ordered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from threading import get_ident
from time import perf_counter
from typing import Any, Generic, TypeVar

from aiodist.data.items import Item, Made
from aiodist.handles import Handle, Progress
from aiodist.handles.tracing import span
from aiodist.streams import HostStream

T = TypeVar("T")

_LOOK_SECONDS = 0.5  # how soon a thread with nothing to do notices that its loop was closed around it

Deliver = Callable[[Item, Made], None]
"""Takes what was read for an item; called on the reader's thread."""


class WorkQueue(Generic[T]):
    """Work for threads that wait for it; `put` and `stop` may be called from any thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def put(self, work: T) -> None:
        """Leave `work` for the next thread that is free."""
        self._queue.put(work)

    def cancel(self, threads: int = 1) -> None:
        """Have each of `threads` get None instead of what is left."""
        self._stopped = True
        for _ in range(threads):
            self._queue.put(None)

    def get(self) -> T | None:
        """Return the next work, blocking until there is some; None when there is none to come."""
        while not self._stopped:
            try:
                work = self._queue.get(timeout=_LOOK_SECONDS)
            except Empty:
                self._stopped = self._loop.is_closed()
            else:
                return None if self._stopped else work
        return None


class ThreadReader:
    """Reads an iterable on a thread of its own: always the same one, with the modes and context of who opened it."""

    def __init__(self, source: Iterable[Any], deliver: Deliver, name: str) -> None:
        self._source = source
        self._deliver = deliver
        self._stream = HostStream(name)
        self._progress = Progress.current()
        self._orders: WorkQueue[Item] = WorkQueue()
        self._iterator: Iterator[Any] | None = None
        self._over: Handle[None]

    async def open(self) -> None:
        """Start the thread."""
        await self._stream.__aenter__()
        # One piece of work for the whole pass: what a generator does to modes and context variables stays.
        self._over = self._stream.submit(self._run)

    def order(self, item: Item) -> None:
        """Read the next item for `item`."""
        self._orders.put(item)

    def cancel(self) -> None:
        """Read nothing more after what is being read."""
        self._orders.cancel()

    async def aclose(self) -> None:
        """Wait for the thread, which closes a generator."""
        try:
            await self._over
        finally:
            await self._stream.aclose()

    def _run(self) -> None:
        try:
            more = True
            while more and (item := self._next()) is not None:
                more = self._read(item)
                del item  # the next may be long in coming
        finally:
            self._close_source()

    def _next(self) -> Item | None:
        """Return the next order; while there is none the thread does not compute."""
        computing, me = self._progress.computing, get_ident()
        computing.discard(me)
        try:
            return self._orders.get()
        finally:
            computing.add(me)

    def _read(self, item: Item) -> bool:
        """Read one item and return whether there may be more."""
        began = perf_counter()
        try:
            with span("read", item=item.seq):
                if self._iterator is None:
                    self._iterator = iter(self._source)
                made = Made(next(self._iterator))
        except StopIteration:
            made = Made(error=StopAsyncIteration())
        except BaseException as error:  # noqa: BLE001  - any error belongs to the consumer
            made = Made(error=error)
        made.reading = perf_counter() - began
        self._deliver(item, made)
        return made.error is None

    def _close_source(self) -> None:
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, Generator):
            iterator.close()
        elif not getattr(self._source, "persistent_workers", False):
            # A DataLoader's iterator ends its workers when it is collected, but an error may hold it for long.
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()


class TaskReader:
    """Reads an async iterable in a task of its own."""

    def __init__(self, source: AsyncIterable[Any], deliver: Deliver, name: str) -> None:
        self._source = source
        self._deliver = deliver
        self._name = name
        self._orders: asyncio.Queue[Item] = asyncio.Queue()
        self._stopped = False
        self._iterator: AsyncIterator[Any] | None = None
        self._task: asyncio.Task[None]

    async def open(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name=f"aiodist-{self._name}")

    def order(self, item: Item) -> None:
        """Read the next item for `item`."""
        self._orders.put_nowait(item)

    def cancel(self) -> None:
        """Cancel what is being read."""
        if not self._stopped:
            self._stopped = True
            self._task.cancel()

    async def aclose(self) -> None:
        """Wait for the task, which closes a generator."""
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        try:
            while not self._stopped and await self._read(await self._orders.get()):
                pass
        finally:
            if isinstance(self._iterator, AsyncGenerator):
                await self._iterator.aclose()
            self._iterator = None

    async def _read(self, item: Item) -> bool:
        """Read one item and return whether there may be more."""
        began = perf_counter()
        try:
            with span("read", track=f"aiodist-{self._name}", item=item.seq):
                if self._iterator is None:
                    self._iterator = aiter(self._source)
                made = Made(await anext(self._iterator))
        except BaseException as error:
            if self._stopped:  # it comes from being stopped, and nobody takes items any more
                raise
            made = Made(error=error)
        made.reading = perf_counter() - began
        self._deliver(item, made)
        return made.error is None


Reader = ThreadReader | TaskReader


def reader_of(source: Iterable[Any] | AsyncIterable[Any], deliver: Deliver, name: str) -> Reader:
    """Return what reads `source`, on a thread or in a task."""
    if isinstance(source, AsyncIterable):
        return TaskReader(source, deliver, name)
    return ThreadReader(source, deliver, name)
