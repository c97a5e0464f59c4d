"""Workers: they apply the consumer's `transform` to what was read, several at a time, in threads or processes."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import copy_context
from time import perf_counter
from typing import Any

from anyio import CapacityLimiter, to_process, to_thread

from aiodist.data.items import Item, Made
from aiodist.data.nesting import nbytes_of
from aiodist.data.reading import Deliver, WorkQueue
from aiodist.handles import Progress
from aiodist.handles.tracing import span
from aiodist.streams import Modes

Job = tuple[Item, Made]


class Workers(ABC):
    """The workers of one pass; each takes the next item that was read when it has finished one."""

    def __init__(self, transform: Callable[[Any], Any], count: int, deliver: Deliver) -> None:
        self._transform = transform
        self._count = count
        self._deliver = deliver
        self._limiter = CapacityLimiter(count)
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, name: str) -> None:
        """Be ready for work."""
        self._tasks = [asyncio.create_task(self._work(), name=f"aiodist-{name}-{i}") for i in range(self._count)]

    def put(self, item: Item, made: Made) -> None:
        """Transform what was read; from any thread."""
        if made.error is None:
            self._hand_over((item, made))
        else:
            self._deliver(item, made)

    async def aclose(self) -> None:
        """Wait until nothing runs; `stop` comes first."""
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.result()

    @abstractmethod
    def cancel(self) -> None:
        """Begin nothing any more."""

    @abstractmethod
    def _hand_over(self, job: Job) -> None: ...

    @abstractmethod
    async def _work(self) -> None: ...


class ThreadWorkers(Workers):
    """Each keeps a thread for the whole pass: to borrow one for each item would cost 200 us."""

    def __init__(self, transform: Callable[[Any], Any], count: int, deliver: Deliver) -> None:
        super().__init__(transform, count, deliver)
        self._inbox: WorkQueue[Job] = WorkQueue()
        self._modes = Modes.capture()

    def cancel(self) -> None:
        """Have the threads go when they have finished what they do."""
        self._inbox.cancel(self._count)

    def _hand_over(self, job: Job) -> None:
        self._inbox.put(job)

    async def _work(self) -> None:
        await to_thread.run_sync(self._serve, limiter=self._limiter)

    def _serve(self) -> None:
        context = copy_context()  # of the code that entered the block
        while (job := self._inbox.get()) is not None:
            item, read = job
            with self._modes.applied():
                made = context.copy().run(_made, self._transform, read.value)
            made.reading = read.reading
            self._deliver(item, made)
            del job, item, read, made  # the next may be long in coming


class ProcessWorkers(Workers):
    """Each has a process of anyio's at work on one item at a time."""

    def __init__(self, transform: Callable[[Any], Any], count: int, deliver: Deliver) -> None:
        super().__init__(transform, count, deliver)
        self._inbox: asyncio.Queue[Job | None] = asyncio.Queue()
        self._progress = Progress.current()
        self._stopped = False

    def cancel(self) -> None:
        """Give the processes nothing more; they stay for the next pass."""
        self._stopped = True
        for _ in self._tasks:
            self._inbox.put_nowait(None)

    def _hand_over(self, job: Job) -> None:
        self._progress.post(lambda: self._inbox.put_nowait(job))

    async def _work(self) -> None:
        while (job := await self._inbox.get()) is not None and not self._stopped:
            item, read = job
            try:
                made = await to_process.run_sync(_in_process, self._transform, read.value, limiter=self._limiter)
            except Exception as error:  # noqa: BLE001  - a process that broke, or what cannot be pickled
                made = Made(error=error)
            made.reading = read.reading
            self._deliver(item, made)
            del job, item, read, made


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
