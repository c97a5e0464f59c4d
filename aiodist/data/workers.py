"""Workers: they apply the consumer's `transform` to what was read, several at a time, in threads or processes."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import Any

from anyio import CapacityLimiter, from_thread, to_process, to_thread

from aiodist.data.items import Item, Made
from aiodist.data.nesting import nbytes_of
from aiodist.data.reading import Deliver, WorkQueue
from aiodist.handles.tracing import span
from aiodist.streams import Modes


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
        """Be ready for work."""
        limiter = CapacityLimiter(self._count)

        async def work() -> None:
            await to_thread.run_sync(self._serve, limiter=limiter)

        self._tasks = [asyncio.create_task(work(), name=f"aiodist-{name}-{i}") for i in range(self._count)]

    def put(self, item: Item, made: Made) -> None:
        """Transform what was read; from any thread."""
        if made.error is None:
            self._inbox.put((item, made))
        else:
            self._deliver(item, made)

    def cancel(self) -> None:
        """Have the threads go when they have finished what they do."""
        self._inbox.cancel(self._count)

    async def aclose(self) -> None:
        """Wait until nothing runs; `cancel` comes first."""
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.result()

    def _serve(self) -> None:
        context = copy_context()  # of the code that entered the block
        while (job := self._inbox.get()) is not None:
            item, read = job
            with self._modes.applied():
                made = context.copy().run(self._make, read.value)
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
    except (StopIteration, StopAsyncIteration) as error:  # it would end the stream without a word (PEP 479)
        ended = RuntimeError(f"transform raised {type(error).__name__}")
        ended.__cause__ = error
        made = Made(error=ended)
    except BaseException as error:  # noqa: BLE001  - any error belongs to the consumer
        made = Made(error=error)
    made.transforming = perf_counter() - began
    return made


def _portable(error: BaseException) -> BaseException:
    """Return `error`, or one that says the same where it cannot travel; the traceback, which cannot, is a note."""
    text = "".join(traceback.format_exception(error)).rstrip()
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            error.add_note(f"raised in a worker process:\n{text}")
            return error
    return RuntimeError(f"raised in a worker process:\n{text}")
