"""`gather` and `as_completed` wait for many handles with one waiter. The runtime itself uses `all_over`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from aiodist.handles.handle import Handle
from aiodist.handles.internals import check_loop
from aiodist.handles.operation import Operation
from aiodist.handles.origin import Origin
from aiodist.handles.posted import Posted, PostedOperation, own
from aiodist.handles.progress import Progress
from aiodist.handles.sources import join
from aiodist.handles.state import RETURNED, error_of

if TYPE_CHECKING:
    from aiodist.errors import OperationTimeout

T = TypeVar("T")


class EndWaiter:
    """Waits for handles on the loop, and calls `then` with each handle when it is done.

    If the deadline of a handle passes first, the waiter calls `late` with the handle and the error, and continues.
    """

    __slots__ = ("_late", "_then")

    def __init__(
        self, then: Callable[[Handle[Any]], None], late: Callable[[Handle[Any], OperationTimeout], object]
    ) -> None:
        self._then = then
        self._late = late

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        """See `Waiter`."""
        if late is not None and not handle.done():
            self._late(handle, late)
            handle._add_waiter(self)
        else:
            self._then(handle)


class _Gathering:
    """The owner of a handle that `gather` returned, see `Stoppable`."""

    def __init__(self, outer: PostedOperation[list[Any]], members: tuple[Handle[Any], ...], keep_errors: bool) -> None:
        self.members = members
        self.keep_errors = keep_errors
        self.paused = False
        self.late: dict[Handle[Any], OperationTimeout] = {}
        self._waits: set[Handle[Any]] = set()
        """Members that are not finished, or whose end is not handled yet."""
        self._posted = _not_retrieved(members)
        """Operations of the members that can be paused and that no other code waits for, by member."""
        self._held: Posted[Any] | None = outer.handle if not self._posted else None
        self._outer: ref[Posted[Any]] | None = None
        self._unseen: list[PostedOperation[Any]] = []
        """Operations in `_posted` whose outcome no code had retrieved when the last member ended."""
        self._progress = outer.handle._progress
        if self._posted:
            self._follow(outer.handle)

    def _follow(self, outer: Posted[Any]) -> None:
        self._outer = ref(outer, self._dropped)

    def _dropped(self, _: object) -> None:
        """Pause the members soon, since the program has dropped the gathered handle.

        The garbage collector may call this.
        """
        self._progress.post(self._pause_members)

    def _pause_members(self) -> None:
        self._outer = None
        for member in self._posted.values():  # a message that one member returns may end another
            member.leave_early(self)

    def begin(self, members: Iterable[Handle[Any]]) -> None:
        """Wait for the members that have not ended well already."""
        waits, posted = [], self._posted
        for member in members:
            if member._is_pending or member in posted or member._status is not RETURNED:
                waits.append(member)
            else:
                member._consumed = True
        self._waits.update(waits)
        for member in waits:
            if not member._is_pending:
                self.wake(member, None)
            elif member in posted:
                posted[member].join(self)
            else:
                member._add_waiter(self)
        if not waits and self._held is not None:
            self._end(self._held)

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        self._waits.discard(handle)
        held = self._held or (None if self._outer is None else self._outer())
        if self.paused or held is None or not held._is_pending:
            return
        if late is not None:
            self.late[handle] = late
        error = self._posted[handle].peek() if handle in self._posted else error_of(handle)
        if not self.keep_errors and (failure := late or error) is not None:
            self._outer = None
            Operation.of(held).reject(failure)
            for member in self._posted.values():
                member.set_consumed()
        elif not self._waits:
            self._end(held)

    def _end(self, outer: Posted[Any]) -> None:
        """Resolve `outer`, the gathered handle, since all members have ended."""
        self._outer = None
        self._unseen = [member for member in self._posted.values() if not member.consumed]
        results = (
            [self.late.get(h) or _value(h) for h in self.members]
            if self.keep_errors
            else [h._value if type(h) is Handle else h.result() for h in self.members]
        )
        Operation.of(outer).resolve(results)

    def hold(self, handle: Posted[Any] | None, /) -> None:
        """See `Stoppable`. If no member can be paused, the members always keep the handle alive."""
        if self._posted:
            self._held = handle

    def settled(self) -> None:
        """See `Stoppable`."""
        self._held = None

    def pause(self, handle: Posted[Any], /) -> None:
        """See `Stoppable`. The members leave their messages to other receives."""
        outer = PostedOperation.of(handle)
        if not (self._posted and (outer.is_pending or outer.succeeded)):
            return
        if not outer.is_pending:
            outer.revoke()
            outer.set_parts(self.members)
            for member in self._unseen:
                member.set_consumed(False)
        self.paused = True
        self._pause_members()

    def resume(self, handle: Posted[Any], /) -> None:
        """See `Stoppable`."""
        self.paused = False
        self._follow(handle)
        self.begin(self._posted)


def _not_retrieved(members: Iterable[Handle[Any]]) -> dict[Handle[Any], PostedOperation[Any]]:
    """Return the operations of `members` that can be paused, and whose outcome no code has or waits for."""
    posted = {member: PostedOperation.of(member) for member in members if isinstance(member, Posted)}
    return {member: operation for member, operation in posted.items() if not operation.retrieved}


def _progress_of(call: str, members: Sequence[Handle[Any]]) -> Progress:
    """Return the `Progress` of the running loop, or raise unless all `members` are handles of this loop."""
    progress = Progress.current()
    for member in members:
        if not isinstance(member, Handle):
            instead = f"write {call}(*handles)" if isinstance(member, (list, tuple)) else f"use asyncio.{call}"
            raise TypeError(f"aiodist.{call} takes handles, got {type(member).__name__}: {instead}")
        check_loop(member, progress)
    return progress


def gather(*handles: Handle[Any], return_exceptions: bool = False) -> Handle[list[Any]]:
    """Return a handle of the list of results, in the order of `handles`.

    The returned handle raises the first error, or the first timeout. All operations continue, also one that timed out.
    Unlike `asyncio.gather`, this function creates no tasks: 1,000 handles cost one waiter.

    Args:
        *handles: handles of this event loop. Use `asyncio.gather` for other awaitables.
        return_exceptions: True puts errors into the list.

    Returns:
        A handle of the list.

    Raises:
        TypeError: at the call, for an argument that is no handle.
        RuntimeError: at the call, for a handle of another event loop.

    Example:
        ```python
        total, largest = await aiodist.gather(coll.allreduce(1.0), coll.allreduce(1.0, "max"))
        ```
    """
    progress = _progress_of("gather", handles)
    nbytes = sum(handle.nbytes for handle in handles)
    outer: PostedOperation[list[Any]] = PostedOperation(progress, "gather", nbytes=nbytes, origin=Origin.here())
    outer.set_parts(handles)
    gathering = _Gathering(outer, handles, return_exceptions)
    own(outer.handle, gathering)
    gathering.begin(handles)
    return outer.handle


class _Queue:
    def __init__(self) -> None:
        self.finished: deque[tuple[Handle[Any], OperationTimeout | None]] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        self.finished.append((handle, late))
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


async def as_completed(handles: Iterable[Handle[T]]) -> AsyncGenerator[Handle[T], None]:
    """Yield each handle once its operation has ended. Awaiting a yielded handle does not suspend.

    Args:
        handles: handles of this event loop.

    Yields:
        Each finished handle.

    Raises:
        OperationTimeout: when the timeout of a handle passes.
        TypeError: when the loop begins, for an argument that is no handle.
        RuntimeError: when the loop begins, for a handle of another event loop.

    Example:
        ```python
        handles = [coll.allreduce(torch.ones(n)) for n in (10, 1000)]
        async for handle in aiodist.as_completed(handles):
            print(handle.op, (await handle).sum())
        ```
    """
    queue = _Queue()
    members = list(handles)
    loop = _progress_of("as_completed", members).loop
    posted = _not_retrieved(members)
    for member in members:
        if member in posted:
            posted[member].join(queue)
        else:
            member._add_waiter(queue)  # also for a finished member: this counts as an await
    try:
        for _ in members:
            while not queue.finished:
                queue.waiter = loop.create_future()
                await queue.waiter
            handle, late = queue.finished.popleft()
            if late is not None:
                raise late
            posted.pop(handle, None)  # the code that iterates retrieves the outcome
            yield handle
    finally:
        for member in members:
            if member not in posted:
                member._remove_waiter(queue)
        for left in posted.values():
            left.leave_early(queue)


def all_over(handles: Sequence[Handle[Any]], loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
    """Return a future that is done when all `handles` are done. The outcomes do not count as retrieved."""
    over: asyncio.Future[None] = loop.create_future()
    one_over = join(len(handles), lambda _: None if over.done() else over.set_result(None))
    waiter = EndWaiter(lambda _: one_over(None), lambda *_: None)
    for handle in handles:
        handle._add_observer(waiter)
    return over


def _value(handle: Handle[Any]) -> Any:  # noqa: ANN401
    error = error_of(handle)
    return handle.result() if error is None else error
