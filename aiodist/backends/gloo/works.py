"""The user's own works, as handles."""

from __future__ import annotations

from aiodist.backends.base import started
from aiodist.backends.gloo.library import Work
from aiodist.handles import Handle, Origin, from_future, from_source


class _WorkSource:
    """A torch Work that can be asked: gloo's collectives, and NCCL's works, whose futures are done too early."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def poll(self) -> bool:
        return self._work.is_completed()

    def result(self) -> None:
        self._work.wait()


def work_handle(work: Work) -> Handle[None]:
    """Return a handle that is done when the user's own `work` is.

    gloo's sends and receives can only be waited for: each takes a thread until it is over.
    """

    def wait() -> None:
        work.wait()

    try:
        work.get_future()
    except RuntimeError:
        return from_future(started(wait), "work")
    return from_source(_WorkSource(work), "work", origin=Origin.here())
