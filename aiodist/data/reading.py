"""Readers take items from a source; workers apply `transform` to them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import Any

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from aiodist.data.items import Item, Made
from aiodist.data.nesting import nbytes_of
from aiodist.handles import Progress
from aiodist.handles.tracing import span
from aiodist.streams import Modes
from aiodist.streams.modes import ModeSwitch
from aiodist.threads import Worker, result_of

Deliver = Callable[[Item, Made], None]
"""Takes what was read for an item; called on the reader's thread."""


class ThreadReader:
    """Reads an iterable on its own thread, with the modes and context variables of the code that opens the reader.

    A generator's changes of modes and context variables stay until the end of the pass.
    """

    def __init__(self, source: Iterable[Any], deliver: Deliver, name: str) -> None:
        self._source = source
        self._deliver = deliver
        self._name = name
        self._iterator: Iterator[Any] | None = None
        self._switch: ModeSwitch | None = None
        self._worker: Worker[Item]

    async def open(self) -> None:
        progress = Progress.current()
        self._context, self._modes = copy_context(), Modes.capture()
        self._worker = Worker(
            f"aiodist-{self._name}",
            self._read,
            finish=self._end,
            computing=progress.computing,
            gone=progress.loop.is_closed,
        )

    def order(self, item: Item) -> None:
        with contextlib.suppress(RuntimeError):  # the reader has ended
            self._worker.submit(item)

    def cancel(self) -> None:
        self._worker.abort()

    async def aclose(self) -> None:
        await asyncio.wrap_future(self._worker.ended)
        self._worker.join()

    def _read(self, item: Item) -> None:
        began = perf_counter()
        if self._switch is None:
            self._switch = ModeSwitch(self._modes, Modes.capture())
            self._switch.enter()
        try:
            made = Made(self._context.run(self._next, item.seq))
        except StopIteration as error:
            ended = self._iterator is not None
            made = Made(error=StopAsyncIteration() if ended else _unended("iter(source)", error))
        except StopAsyncIteration as error:
            made = Made(error=_unended("the source", error))
        except BaseException as error:  # noqa: BLE001  - any error belongs to the consumer
            made = Made(error=error)
        made.reading = perf_counter() - began
        if made.error is not None:
            self._worker.abort()
        self._deliver(item, made)

    def _next(self, seq: int) -> Any:  # noqa: ANN401
        with span("read", item=seq):
            if self._iterator is None:
                self._iterator = iter(self._source)
            return next(self._iterator)

    def _end(self) -> None:
        iterator, self._iterator = self._iterator, None
        try:
            if isinstance(iterator, Generator):
                self._context.run(iterator.close)
            elif not getattr(self._source, "persistent_workers", False):
                # A DataLoader's iterator ends its workers when it is collected, but an error may hold it for long.
                self._context.run(getattr(iterator, "_shutdown_workers", lambda: None))
        finally:
            del iterator
            if self._switch is not None:
                self._switch.leave(last=True)


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
                    if self._stopped:  # the error of a stop, after which no items are taken
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
    """Threads that transform the items of one pass, each the next item that was read.

    With `processes`, each thread lets one of anyio's processes transform the item. These processes stay for the next
    pass.
    """

    def __init__(self, transform: Callable[[Any], Any], count: int, deliver: Deliver, *, processes: bool) -> None:
        self._loop = asyncio.get_running_loop()
        make = partial(_by_process, self._loop, transform, CapacityLimiter(count))
        self._make: Callable[[object], Made] = make if processes else partial(_made, transform)
        self._count = count
        self._deliver = deliver
        self._modes = Modes.capture()
        self._worker: Worker[tuple[Item, Made]]

    def open(self, name: str) -> None:
        self._context = copy_context()
        self._worker = Worker(f"aiodist-{name}", self._work, threads=self._count, gone=self._loop.is_closed)

    def put(self, item: Item, made: Made) -> None:
        if made.error is not None:
            self._deliver(item, made)
        else:
            with contextlib.suppress(RuntimeError):  # the workers have ended
                self._worker.submit((item, made))

    def cancel(self) -> None:
        self._worker.abort()

    async def aclose(self) -> None:
        await asyncio.wrap_future(self._worker.ended)
        self._worker.join()

    def _work(self, job: tuple[Item, Made]) -> None:
        item, read = job
        with self._modes.applied():
            made = self._context.copy().run(self._make, read.value)
        if isinstance(made.error, BrokenWorkerProcess):
            why = str(made.error) or "os._exit was called, or a signal killed it, as where memory runs out"
            made.error.args = (f"the process that had item {item.seq}, counted from 0, has ended: {why}",)
        made.reading = read.reading
        self._deliver(item, made)


def _by_process(
    loop: asyncio.AbstractEventLoop, transform: Callable[[Any], Any], limiter: CapacityLimiter, value: object
) -> Made:
    made = to_process.run_sync(_in_process, transform, value, limiter=limiter)
    try:
        return result_of(asyncio.run_coroutine_threadsafe(made, loop))
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
