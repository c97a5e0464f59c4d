"""Operations of every kind that need no transport: polled ones, concurrent futures, work on a `HostStream`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from aiodist.handles import Handle, Operation, Origin, Progress, from_future
from aiodist.streams import HostStream

Until = Callable[[Callable[[], object]], Awaitable[None]]


@dataclass
class Request:
    """A native request that finishes after a number of polls, and not before the test releases it."""

    handle: Handle[Any]
    after: int
    go: bool
    polls: int = 0
    outcome: Any = None

    def over(self) -> bool:
        self.polls += 1
        return self.go and self.polls >= self.after


class Transport:
    """A poller over requests that the test completes."""

    rings = False

    def __init__(self) -> None:
        self.progress = Progress.current()
        self.requests: list[Request] = []
        self.polled_by: list[str] = []
        self.progress.add_poller(self)

    def __len__(self) -> int:
        return len(self.requests)

    def poll(self, until: float = 0.0) -> bool:
        self.polled_by.append(threading.current_thread().name)
        over = [request for request in self.requests if request.over()]
        for request in over:
            self.requests.remove(request)
            if isinstance(request.outcome, BaseException):
                Operation.of(request.handle).reject(request.outcome)
            else:
                Operation.of(request.handle).resolve(request.outcome)
        return bool(over)

    def issue(
        self,
        after: int = 0,
        outcome: object = None,
        *,
        go: bool = True,
        in_thread: bool = False,
        handle: Handle[Any] | None = None,
    ) -> Request:
        """Return a request that finishes after `polls` polls, or, without `go`, when the test releases it."""
        if handle is None:
            handle = Handle(self.progress, "allreduce", origin=Origin.here(1))
        request = Request(handle, after, go, outcome=outcome)
        start = self.progress.start_in_thread if in_thread else self.progress.start
        start(lambda: self.requests.append(request))
        return request


@dataclass
class Issued:
    """An operation in flight, with the means to end it."""

    handle: Handle[Any]
    end: Callable[[object], None]
    owned: Any = field(default=None)

    def finish(self, value: object = None) -> None:
        self.end(value)

    def fail(self, error: BaseException) -> None:
        self.end(error)


class Bench:
    """Issues operations of one kind."""

    def __init__(self, kind: str, stack: AsyncExitStack, until: Until) -> None:
        self.kind = kind
        self._stack = stack
        self._until = until
        self.transport = Transport()
        self._futures: list[concurrent.futures.Future[Any]] = []

    async def issue(self) -> Issued:
        """Return an operation that runs until the test ends it."""
        operation: Issued = await getattr(self, f"_{self.kind}")()
        return operation

    async def ended(self, value: object = None) -> Handle[Any]:
        """Return the handle of a finished operation."""
        operation = await self.issue()
        operation.end(value)
        await self._until(operation.handle.done)
        return operation.handle

    async def _polled(self) -> Issued:
        request = self.transport.issue(go=False)

        def end(outcome: object) -> None:
            request.outcome = outcome
            request.go = True

        return Issued(request.handle, end)

    async def _future(self) -> Issued:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def end(outcome: object) -> None:
            settle = future.set_exception if isinstance(outcome, BaseException) else future.set_result
            threading.Thread(target=settle, args=(outcome,)).start()

        return Issued(from_future(future), end)

    async def _stream(self) -> Issued:
        stream = await self._stack.enter_async_context(HostStream("bench"))
        begun, go = threading.Event(), threading.Event()
        outcomes: list[object] = []

        def work() -> object:
            begun.set()
            go.wait()
            if isinstance(outcomes[0], BaseException):
                raise outcomes[0]
            return outcomes[0]

        def end(outcome: object) -> None:
            outcomes.append(outcome)
            go.set()

        self._stack.callback(end, None)  # should the test not come to it
        handle = stream.submit(work)
        await asyncio.to_thread(begun.wait, 10)
        return Issued(handle, end)


@pytest.fixture
async def transport() -> Transport:
    return Transport()


@pytest.fixture(params=["polled", "future", "stream"])
async def bench(request: pytest.FixtureRequest, until: Until) -> AsyncIterator[Bench]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        yield Bench(request.param, stack, until)
