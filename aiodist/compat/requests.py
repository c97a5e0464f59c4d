"""`Request` and `Status`: an operation in flight, shaped like mpi4py's, which can be awaited too."""

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
    """Where a message came from, and how long it was."""

    source: int = ANY_SOURCE
    tag: int = ANY_TAG
    count: int = 0
    """Bytes."""
    error: int = 0

    def Get_source(self) -> int:
        """Return the rank that sent it."""
        return self.source

    def Get_tag(self) -> int:
        """Return its tag."""
        return self.tag

    def Get_count(self, datatype: Datatype = DATATYPES["BYTE"]) -> int:
        """Return how many elements of `datatype` it had, UNDEFINED where it is not a whole number of them."""
        whole, rest = divmod(self.count, datatype.size)
        return UNDEFINED if rest else whole

    Get_elements = Get_count


def _without(call: Any, told: Callable[[Any], Any]) -> Any:
    """Return the form of `call`, of several requests, for buffers: it returns what is `told`, without the objects."""

    @wraps(call.__func__)
    def form(cls: type, *args: Any, **kwargs: Any) -> Any:
        return told(call.__func__(cls, *args, **kwargs))

    return classmethod(form)


class Request:
    """What `Isend`, `irecv`, `Iallreduce` and the like return: wait for it, test it, or `await` it on the loop.

    It is true until its outcome was seen; then it is null, and equal to `REQUEST_NULL`, as with MPI.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        handle: Handle[Any] | None,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        """`finish` makes the result of what the handle returns; there is none of a message from or to PROC_NULL.

        A request without a loop is null.
        """
        self.handle = handle
        self._loop = loop
        self._finish = finish
        self._result: Any = None
        self._seen = loop is None

    def __bool__(self) -> bool:
        return not self._seen

    def __eq__(self, other: object) -> bool:
        """Return True for the same request; all null ones are equal."""
        return self is other or (isinstance(other, Request) and not (self or other))

    __hash__ = object.__hash__

    def __await__(self) -> Generator[Any, None, Any]:
        if self.handle is not None and not self._seen:
            with Outcome():
                yield from self.handle.__await__()
        return self._see(None)

    def wait(self, status: Status | None = None) -> Any:
        """Return the object that came, None of other operations, blocking this thread; raise what went wrong."""
        if self.handle is not None and not self._seen:
            with Outcome():
                self.handle.wait()
        return self._see(status)

    def Wait(self, status: Status | None = None) -> bool:
        """Block this thread until it is over; return True."""
        self.wait(status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return (True, what `wait` returns), or (False, None) where it goes on."""
        return (True, self._see(status)) if self._over else (False, None)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether it is over."""
        return self.test(status)[0]

    def Cancel(self) -> None:
        """Withdraw a receive that nothing has matched; of others nothing changes."""
        self._check_not_null()
        if self.handle is not None and self._loop is not None:
            on_loop(self._loop, self.handle.cancel)

    cancel = Cancel

    def Free(self) -> None:
        """Forget it; the operation goes on."""
        self._check_not_null()
        if self.handle is not None:
            self.handle.detach()
        self._seen = True

    def _check_not_null(self) -> None:
        if not self:
            raise MPIError(CLASSES["ERR_REQUEST"], "the request is null: expected one whose outcome was not seen yet")

    @property
    def _over(self) -> bool:
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
        """Return the results of all, once all are over."""
        return [request.wait(status) for request, status in zip(requests, _each(statuses, requests), strict=True)]

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Return (True, the results) where all are over, else (False, None)."""
        return (True, cls.waitall(requests, statuses)) if all(r._over for r in requests) else (False, None)

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Return the indices of those that are over, one at least, and their results; (None, None) where none is left.

        A request counts once.
        """
        _block_until_one_is_over(requests)
        return cls.testsome(requests, statuses)

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Return as `waitsome` does, at once: perhaps empty lists."""
        if not any(requests):
            return None, None
        indices = [i for i, r in enumerate(requests) if r and r._over]
        given = _each(statuses, indices)
        return indices, [requests[i].wait(status) for i, status in zip(indices, given, strict=True)]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Return the index of one that is over, and its result; (UNDEFINED, None) where none is left."""
        _block_until_one_is_over(requests)
        index, _, result = cls.testany(requests, status)
        return index, result

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """Return (index, True, result) of one that is over, (UNDEFINED, whether none is left, None) without."""
        for index, request in enumerate(requests):
            if request and request._over:
                return index, True, request.wait(status)
        return UNDEFINED, not any(requests), None

    Waitall, Testall = _without(waitall, lambda _: True), _without(testall, lambda found: found[0])
    Waitsome, Testsome = _without(waitsome, lambda found: found[0]), _without(testsome, lambda found: found[0])
    Waitany, Testany = _without(waitany, lambda found: found[0]), _without(testany, lambda found: found[:2])


REQUEST_NULL = Request(None, None)


def _each(statuses: list[Status] | None, requests: Sequence[object]) -> list[Status | None]:
    """Return a status for each request, of `statuses`, which grows to their number."""
    if statuses is None:
        return [None] * len(requests)
    statuses.extend(Status() for _ in range(len(requests) - len(statuses)))
    return list(statuses[: len(requests)])


def _block_until_one_is_over(requests: Sequence[Request]) -> None:
    """Block this thread until one of those that count is over; at once where none does."""
    left = [request for request in requests if request]
    if left and not any(request._over for request in left):
        handles = [request.handle for request in left if request.handle is not None]
        loop = left[0]._loop
        assert loop is not None
        block_on(loop, lambda: _first(handles))


async def _first(handles: Sequence[Handle[Any]]) -> None:
    """Return when one of them is over, however it ended."""
    over = asyncio.Event()
    for handle in handles:
        handle.add_done_callback(lambda _: over.set())
    await over.wait()


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Return what `call` returns on the thread of `loop`, which may be this one."""

    async def made() -> T:
        return call()

    return call() if _get_running_loop() is loop else block_on(loop, made)


def block_on(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what a coroutine returns on `loop`, blocking this thread; raise RuntimeError where `loop` runs in it."""
    if _get_running_loop() is loop:
        raise RuntimeError("this would block the event loop: await the request, or `coll.aclose()` in place of Free()")
    return result_of(asyncio.run_coroutine_threadsafe(work(), loop))
