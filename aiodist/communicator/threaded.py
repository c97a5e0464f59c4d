"""Communicators on which other threads than the loop's may issue too: `dup(thread=True)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from aiodist.communicator import Communicator

Call = TypeVar("Call", bound=Callable[..., Any])


def _issues(call: Call) -> Call:
    """Return `call`, made by one thread at a time."""

    @wraps(call)
    def issue(self: Communicator, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        issuing = self.parts.dispatcher.issuing
        if issuing is None:  # in a forked child, where the call is refused
            return call(self, *args, **kwargs)
        issuing.begin()
        try:
            return call(self, *args, **kwargs)
        finally:
            issuing.end()

    return cast(Call, issue)


def _makes(call: Call) -> Call:
    """Return `call`, which makes communicators by a task of the loop, for the loop's thread alone."""

    @wraps(call)
    def make(self: Communicator, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self.parts.dispatcher.check_on_loop(f"{call.__name__}()")
        return call(self, *args, **kwargs)

    return _issues(cast(Call, make))


class ThreadedCommunicator(Communicator):
    """A communicator whose collectives and messages any thread may call, one at a time; see `Communicator.dup`."""

    allreduce = _issues(Communicator.allreduce)
    reduce = _issues(Communicator.reduce)
    reduce_scatter = _issues(Communicator.reduce_scatter)
    scan = _issues(Communicator.scan)
    exscan = _issues(Communicator.exscan)

    broadcast = _issues(Communicator.broadcast)
    gather = _issues(Communicator.gather)
    allgather = _issues(Communicator.allgather)
    scatter = _issues(Communicator.scatter)
    alltoall = _issues(Communicator.alltoall)
    alltoall_single = _issues(Communicator.alltoall_single)
    barrier = _issues(Communicator.barrier)

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

    def abort(self, reason: str = "abort() was called") -> None:
        """As of `Communicator`; in another thread, as soon as the loop runs."""
        self._dispatcher.progress.on_loop(lambda: super(ThreadedCommunicator, self).abort(reason))
