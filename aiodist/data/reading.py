"""Readers take ordered items from a source; workers apply the consumer's `transform` to them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextvars import copy_context
from functools import partial
from queue import Empty
from threading import get_ident
from time import perf_counter
from typing import Any, Generic, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, from_thread, to_process, to_thread

from aiodist.data.items import Item, Made
from aiodist.data.nesting import nbytes_of
from aiodist.handles import Handle, Progress
from aiodist.handles.tracing import span
from aiodist.streams import HostStream, Modes
from aiodist.threads import JobQueue

T = TypeVar("T")

_LOOK_SECONDS = 0.5  # how soon a thread with nothing to do notices that its loop was closed around it

Deliver = Callable[[Item, Made], None]
"""Takes what was read for an item; called on the reader's thread."""


class WorkQueue(Generic[T]):
    """Work for threads that wait for it; `put` and `stop` may be called from any thread."""

    def __init__(self) -> None:
        self._queue: JobQueue[T | None] = JobQueue()
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def put(self, work: T) -> None:
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
                work = self._queue.get(_LOOK_SECONDS)
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
        self._over: Handle[None]

    async def open(self) -> None:
        await self._stream.__aenter__()
        # One piece of work for the whole pass: what a generator does to modes and context variables stays.
        self._over = self._stream.submit(self._run)

    def order(self, item: Item) -> None:
        self._orders.put(item)

    def cancel(self) -> None:
        self._orders.cancel()

    async def aclose(self) -> None:
        try:
            await self._over
        finally:
            await self._stream.aclose()

    def _run(self) -> None:
        iterator: Iterator[Any] | None = None
        more = True
        try:
            while more and (item := self._next()) is not None:
                began = perf_counter()
                try:
                    with span("read", item=item.seq):
                        iterator = iter(self._source) if iterator is None else iterator
                        made = Made(next(iterator))
                except StopIteration as error:
                    made = Made(error=StopAsyncIteration() if iterator is not None else _unended("iter(source)", error))
                except StopAsyncIteration as error:
                    made = Made(error=_unended("the source", error))
                except BaseException as error:  # noqa: BLE001  - any error belongs to the consumer
                    made = Made(error=error)
                made.reading = perf_counter() - began
                more = made.error is None
                self._deliver(item, made)
                del item, made  # the next may be long in coming
        finally:
            if isinstance(iterator, Generator):
                iterator.close()
            elif not getattr(self._source, "persistent_workers", False):
                # A DataLoader's iterator ends its workers when it is collected, but an error may hold it for long.
                getattr(iterator, "_shutdown_workers", lambda: None)()
            del iterator

    def _next(self) -> Item | None:
        """Return the next order; while there is none the thread does not compute."""
        computing, me = self._progress.computing, get_ident()
        computing.discard(me)
        try:
            return self._orders.get()
        finally:
            computing.add(me)


class TaskReader:
    """Reads an async iterable in a task of its own."""

    def __init__(self, source: AsyncIterable[Any], deliver: Deliver, name: str) -> None:
        self._source = source
        self._deliver = deliver
        self._name = name
        self._orders: asyncio.Queue[Item] = asyncio.Queue()
        self._stopped = False
        self._task: asyncio.Task[None]

    async def open(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"aiodist-{self._name}")

    def order(self, item: Item) -> None:
        self._orders.put_nowait(item)

    def cancel(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._task.cancel()

    async def aclose(self) -> None:
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        iterator: AsyncIterator[Any] | None = None
        more = True
        try:
            while more and not self._stopped:
                item = await self._orders.get()
                began = perf_counter()
                try:
                    with span("read", track=f"aiodist-{self._name}", item=item.seq):
                        iterator = aiter(self._source) if iterator is None else iterator
                        made = Made(await anext(iterator))
                except BaseException as error:
                    if self._stopped:  # it comes from being stopped, and nobody takes items any more
                        raise
                    made = Made(error=error)
                made.reading = perf_counter() - began
                more = made.error is None
                self._deliver(item, made)
                del item, made  # the next may be long in coming
        finally:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()
            del iterator


def reader_of(source: Iterable[Any] | AsyncIterable[Any], deliver: Deliver, name: str) -> ThreadReader | TaskReader:
    if isinstance(source, AsyncIterable):
        return TaskReader(source, deliver, name)
    return ThreadReader(source, deliver, name)


class Workers:
    """The workers of one pass; each takes the next item that was read when it has finished one.

    Each keeps a thread for the whole pass: to borrow one for each item would cost 200 us. With `processes` the thread
    has one of anyio's at work on one item at a time; these stay for the next pass.
    """

    def __init__(self, transform: Callable[[Any], Any], count: int, deliver: Deliver, *, processes: bool) -> None:
        make = partial(_by_process, transform, CapacityLimiter(count)) if processes else partial(_made, transform)
        self._make: Callable[[object], Made] = make
        self._count = count
        self._deliver = deliver
        self._inbox: WorkQueue[tuple[Item, Made]] = WorkQueue()
        self._modes = Modes.capture()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, name: str) -> None:
        limiter = CapacityLimiter(self._count)

        async def work() -> None:
            await to_thread.run_sync(self._serve, limiter=limiter)

        self._tasks = [asyncio.create_task(work(), name=f"aiodist-{name}-{i}") for i in range(self._count)]

    def put(self, item: Item, made: Made) -> None:
        if made.error is None:
            self._inbox.put((item, made))
        else:
            self._deliver(item, made)

    def cancel(self) -> None:
        self._inbox.cancel(self._count)

    async def aclose(self) -> None:
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.result()

    def _serve(self) -> None:
        context = copy_context()  # of the code that entered the block
        while (job := self._inbox.get()) is not None:
            item, read = job
            with self._modes.applied():
                made = context.copy().run(self._make, read.value)
            if isinstance(made.error, BrokenWorkerProcess):
                why = str(made.error) or "os._exit was called, or a signal killed it, as where memory runs out"
                made.error.args = (f"the process that had item {item.seq}, counted from 0, has ended: {why}",)
            made.reading = read.reading
            self._deliver(item, made)
            del job, item, read, made  # the next may be long in coming


def _by_process(transform: Callable[[Any], Any], limiter: CapacityLimiter, value: object) -> Made:
    try:
        return from_thread.run(partial(to_process.run_sync, _in_process, transform, value, limiter=limiter))
    except Exception as error:  # noqa: BLE001  - a process that broke, or what cannot be pickled
        return Made(error=error)


def _in_process(transform: Callable[[Any], Any], value: object) -> Made:
    made = _made(transform, value)
    if made.error is not None:
        made.error = _portable(made.error)
    return made


def _made(transform: Callable[[Any], Any], value: object) -> Made:
    began = perf_counter()
    try:
        with span("transform"):
            result = transform(value)
        made = Made(result, nbytes=nbytes_of(result))
    except (StopIteration, StopAsyncIteration) as error:
        made = Made(error=_unended("transform", error))
    except BaseException as error:  # noqa: BLE001  - any error belongs to the consumer
        made = Made(error=error)
    made.transforming = perf_counter() - began
    return made


def _unended(who: str, error: Exception) -> RuntimeError:
    """Return what stands for `error`, which would end the stream without a word (PEP 479)."""
    raised = RuntimeError(f"{who} raised {type(error).__name__}")
    raised.__cause__ = error
    return raised


def _portable(error: BaseException) -> BaseException:
    """Return `error`, or one that says the same where it cannot travel; the traceback, which cannot, is a note."""
    text = "".join(traceback.format_exception(error)).rstrip()
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            error.add_note(f"raised in a worker process:\n{text}")
            return error
    return RuntimeError(f"raised in a worker process:\n{text}")
