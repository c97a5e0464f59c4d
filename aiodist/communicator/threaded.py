"""Communicators that threads other than the loop's may use too: `dup(thread=True)`.

[Note: shared state of an issuing call] The state that threads share, with the reason for its safety:

| state | writers | reason |
|---|---|---|
| `ClaimedBytes` | threads that issue or end operations | a claim or release is one step in C under the GIL |
| `OpLog`, the plans | the thread that issues, or the loop with the lock of `Issuing` | one writer at a time |
| `Pending` | a call adds; the thread that ends an operation removes | single steps of a dict |
| `Watch.watching` | a call sets it after `Pending`; the loop clears it, then reads `Pending` | one sees the other |
| `Timers` | the loop, by a posted call | a waiting thread checks the clock itself |
| the inbox | any thread appends; the holder of the transport lock takes | an entry stays until it has run |
| a handle's state | one thread, once | no thread switch between check and step; an abort holds the transport lock |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from aiodist.communicator import Communicator
from aiodist.communicator.base import parts_of

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

Call = TypeVar("Call", bound=Callable[..., Any])


def _issues(call: Call) -> Call:
    """Return `call`, restricted to one thread at a time."""

    @wraps(call)
    def issue(self: Communicator, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        issuing = self._dispatcher.lifetime.issuing
        if issuing is None:  # a forked child, which may not call
            return call(self, *args, **kwargs)
        issuing.begin()
        try:
            return call(self, *args, **kwargs)
        finally:
            issuing.end()

    return cast(Call, issue)


def _by_portal(call: Call) -> Call:
    """Return a function that makes `call` on the loop's thread, from other threads through the portal."""

    @wraps(call)
    def make(self: Communicator, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        portal = parts_of(self).registry.portal
        if portal is not None and not parts_of(self).dispatcher.progress.owns_thread():
            return portal.call(_returned, partial(make, self, *args, **kwargs))
        return call(self, *args, **kwargs)

    return cast(Call, make)


def _makes(call: Call) -> Call:
    """Return a function that makes `call`, which creates communicators, on the loop's thread."""
    issue = _issues(call)

    @wraps(call)
    def make(self: Communicator, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        parts_of(self).dispatcher.check_on_loop(f"{call.__name__}()")
        return issue(self, *args, **kwargs)

    return _by_portal(cast(Call, make))


async def _returned(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Return the result of `call` without an await, as a portal would."""
    return call()


class ThreadedCommunicator(Communicator):
    """A communicator that any thread may call, one at a time (see `Communicator.dup`)."""

    @property
    def portal(self) -> BlockingPortal:
        """Portal to the loop's thread: `coll.portal.call(fn, *args)` calls `fn` there and returns its awaited result.

        Raises RuntimeError unless `aiodist.start` opened the world.
        """
        portal: BlockingPortal | None = parts_of(self).registry.portal
        if portal is None:
            raise RuntimeError(f"communicator {self.name!r} has no portal: only a world of aiodist.start() has one")
        return portal

    allreduce = _issues(Communicator.allreduce)
    reduce = _issues(Communicator.reduce)
    reduce_scatter = _issues(Communicator.reduce_scatter)
    scan = _issues(Communicator.scan)
    exscan = _issues(Communicator.exscan)
    stopping = _issues(Communicator.stopping)

    broadcast = _issues(Communicator.broadcast)
    gather = _issues(Communicator.gather)
    allgather = _issues(Communicator.allgather)
    scatter = _issues(Communicator.scatter)
    alltoall = _issues(Communicator.alltoall)
    alltoall_single = _issues(Communicator.alltoall_single)
    barrier = _issues(Communicator.barrier)
    shared_table = _issues(Communicator.shared_table)

    send = _issues(Communicator.send)
    recv = _issues(Communicator.recv)
    sendrecv = _issues(Communicator.sendrecv)

    broadcast_object = _issues(Communicator.broadcast_object)
    gather_object = _issues(Communicator.gather_object)
    allgather_object = _issues(Communicator.allgather_object)
    scatter_object = _issues(Communicator.scatter_object)
    alltoall_object = _issues(Communicator.alltoall_object)
    send_object = _issues(Communicator.send_object)
    recv_object = _issues(Communicator.recv_object)

    dup = _makes(Communicator.dup)
    group = _makes(Communicator.group)
    split = _makes(Communicator.split)
    hierarchy = _makes(Communicator.hierarchy)
    grow = _makes(Communicator.grow)
    shrink = _by_portal(Communicator.shrink)  # the communicator no longer accepts calls then

    def abort(self, reason: str = "abort() was called") -> None:
        """Abort as `Communicator.abort`. A call of another thread takes effect when the loop runs."""
        self._dispatcher.progress.on_loop(lambda: super(ThreadedCommunicator, self).abort(reason))
