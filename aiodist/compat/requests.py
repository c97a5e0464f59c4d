"""`Request`, which can also be awaited, and `Status`."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from aiodist.compat.data import DATATYPES, Datatype
from aiodist.compat.errors import CLASSES, MPIError, Outcome
from aiodist.handles import Handle
from aiodist.threads import result_of
from aiodist.types import ANY

T = TypeVar("T")

ANY_SOURCE = ANY_TAG = ANY
PROC_NULL, UNDEFINED = -2, -32766


@dataclass
class Status:
    """Source, tag and length of a received message."""

    source: int = ANY_SOURCE
    tag: int = ANY_TAG
    count: int = 0
    """Length of the message, in bytes."""
    error: int = 0

    def Get_source(self) -> int:
        """Return the sender's rank."""
        return self.source

    def Get_tag(self) -> int:
        """Return the tag."""
        return self.tag

    def Get_count(self, datatype: Datatype = DATATYPES["BYTE"]) -> int:
        """Return the length in elements of `datatype`, or UNDEFINED if it is not a whole number of elements."""
        whole, rest = divmod(self.count, datatype.size)
        return UNDEFINED if rest else whole

    Get_elements = Get_count


def _without(call: Any, part: Callable[[Any], Any]) -> Any:
    """Return the form of `call` for buffers, which returns a `part` of its result, without the objects."""

    @wraps(call.__func__)
    def form(cls: type, *args: Any, **kwargs: Any) -> Any:
        return part(call.__func__(cls, *args, **kwargs))

    return classmethod(form)


def waits(call: Callable[..., Request]) -> Callable[..., None]:
    """Return a call that makes `call` and waits for its request."""

    @wraps(call)
    def made(self: object, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs).wait()

    name = call.__name__[1:]
    made.__name__ = name if call.__name__[0] == "i" else name.capitalize()
    made.__doc__ = f"Make `{call.__name__}` and wait for it."
    return made


class Request:
    """The result of `Isend`, `irecv`, `Iallreduce` and others: wait for it, test it, or `await` it on the loop.

    A request is true until its outcome is retrieved, and then equals `REQUEST_NULL`, as with MPI.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        handle: Handle[Any] | None,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        """`finish` converts the result of `handle`, which is None for PROC_NULL. A request without a loop is null."""
        self.handle = handle
        self._loop = loop
        self._finish = finish
        self._result: Any = None
        self._seen = loop is None

    def __bool__(self) -> bool:
        return not self._seen

    def __eq__(self, other: object) -> bool:
        """Return True for the same request. All null requests are equal."""
        return self is other or (isinstance(other, Request) and not (self or other))

    __hash__ = object.__hash__

    def __await__(self) -> Generator[Any, None, Any]:
        if self.handle is not None and not self._seen:
            with Outcome():
                yield from self.handle.__await__()
        return self._see(None)

    def wait(self, status: Status | None = None) -> Any:
        """Block this thread until the end. Return the received object, or None for other operations."""
        if self.handle is not None and not self._seen:
            with Outcome():
                self.handle.wait()
        return self._see(status)

    def Wait(self, status: Status | None = None) -> bool:
        """Block this thread until the end. Return True."""
        self.wait(status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return (True, the result of `wait`), or (False, None) for a pending request."""
        return (True, self._see(status)) if self._done else (False, None)

    def Test(self, status: Status | None = None) -> bool:
        """Return True if the request is done."""
        return self.test(status)[0]

    def Cancel(self) -> None:
        """Withdraw a receive without a message. Other requests continue."""
        self._check_not_null()
        if self.handle is not None and self._loop is not None:
            on_loop(self._loop, self.handle.cancel)

    cancel = Cancel

    def Free(self) -> None:
        """Release the request. The operation continues."""
        self._check_not_null()
        if self.handle is not None:
            self.handle.detach()
        self._seen = True

    def _check_not_null(self) -> None:
        if not self:
            raise MPIError(CLASSES["ERR_REQUEST"], "the request is null: expected one whose outcome was not retrieved")

    @property
    def _done(self) -> bool:
        return self._seen or self.handle is None or self.handle.done()

    def _see(self, status: Status | None) -> Any:
        handle = self.handle
        if not self._seen:
            self._seen = True
            if handle is None or not handle.cancelled():
                with Outcome():
                    result = None if handle is None else handle.result()
                self._result = result if self._finish is None else self._finish(result)
        if status is not None and handle is None:
            status.source, status.tag, status.count = PROC_NULL, ANY_TAG, 0
        elif status is not None and handle is not None and handle.source is not None:
            status.source, status.tag, status.count = handle.source, handle.tag or 0, handle.nbytes
        return self._result

    # --- several -------------------------------------------------------------------------------------------

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        """Block until all requests are done. Return their results."""
        return [request.wait(status) for request, status in zip(requests, _each(statuses, requests), strict=True)]

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Return (True, the results) if all requests are done, otherwise (False, None)."""
        return (True, cls.waitall(requests, statuses)) if all(r._done for r in requests) else (False, None)

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Block until a request is done. Return the indices and the results of finished requests.

        Each request is returned once. Return (None, None) if all requests are null.
        """
        _block_until_one_is_done(requests)
        return cls.testsome(requests, statuses)

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """As `waitsome`, without blocking. The lists may be empty."""
        if not any(requests):
            return None, None
        indices = [i for i, r in enumerate(requests) if r and r._done]
        given = _each(statuses, indices)
        return indices, [requests[i].wait(status) for i, status in zip(indices, given, strict=True)]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Block until a request is done. Return its index and result, or (UNDEFINED, None) if all are null."""
        _block_until_one_is_done(requests)
        index, _, result = cls.testany(requests, status)
        return index, result

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """Return (index, True, result) of a finished request, or (UNDEFINED, all are null, None) without one."""
        for index, request in enumerate(requests):
            if request and request._done:
                return index, True, request.wait(status)
        return UNDEFINED, not any(requests), None

    Waitall, Testall = _without(waitall, lambda _: True), _without(testall, lambda found: found[0])
    Waitsome, Testsome = _without(waitsome, lambda found: found[0]), _without(testsome, lambda found: found[0])
    Waitany, Testany = _without(waitany, lambda found: found[0]), _without(testany, lambda found: found[:2])


REQUEST_NULL = Request(None, None)


def _each(statuses: list[Status] | None, requests: Sequence[object]) -> list[Status | None]:
    """Return a status for each request, and extend `statuses` to their number."""
    if statuses is None:
        return [None] * len(requests)
    statuses.extend(Status() for _ in range(len(requests) - len(statuses)))
    return list(statuses[: len(requests)])


def _block_until_one_is_done(requests: Sequence[Request]) -> None:
    """Block this thread until a request is done, or return if all are null."""
    left = [request for request in requests if request]
    if left and not any(request._done for request in left):
        handles = [request.handle for request in left if request.handle is not None]
        loop = left[0]._loop
        assert loop is not None
        block_on(loop, lambda: _first(handles))


async def _first(handles: Sequence[Handle[Any]]) -> None:
    """Wait until one handle is done."""
    done = asyncio.Event()
    for handle in handles:
        handle.add_done_callback(lambda _: done.set())
    await done.wait()


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Make `call` on the thread of `loop`, which may be this thread, and return the result."""

    async def made() -> T:
        return call()

    return call() if _get_running_loop() is loop else block_on(loop, made)


def block_on(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on `loop`, blocking this thread, and return the result. Raise RuntimeError on the loop."""
    if _get_running_loop() is loop:
        raise RuntimeError("this would block the event loop: await the request, or `coll.aclose()` in place of Free()")
    return result_of(asyncio.run_coroutine_threadsafe(work(), loop))
