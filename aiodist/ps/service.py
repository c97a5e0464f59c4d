"""The service thread of a parameter server, for long work and for functions of the user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from aiodist.backends.base import Done, ignore
from aiodist.handles import Progress
from aiodist.threads import Worker

LIGHT_BYTES = 256 << 10
"""Most bytes of work that runs inline, on the thread that makes progress."""

Work = Callable[[], object]

_IDLE_SECONDS = 1e-3  # in which an idle thread ends
_BUSY_SECONDS = 5.0  # a rule of the user may never return


class Service:
    """One thread, started at the first work, which runs work in order (transport lock held, unless noted)."""

    def __init__(self, progress: Progress, name: str, flush: Callable[[], None]) -> None:
        """`flush` is called after each work, and sends the entries that its end has put into the coalescer."""
        self._progress = progress
        self._name = name
        self._flush = flush
        self._worker: Worker[tuple[Work, Done]] | None = None
        self._closed = False

    def do(self, nbytes: int, work: Work, then: Done) -> None:
        """Do `work` on `nbytes`, and call `then(error)`: inline if light, else as `run`."""
        if nbytes <= LIGHT_BYTES:
            then(error_of(work))
        else:
            self.run(work, then)

    def run(self, work: Work, then: Done) -> None:
        """Run `work` in the thread, then `then(error)` with the transport lock held. Do neither once closed."""
        if self._closed:
            return
        if self._worker is None:
            self._worker = Worker(self._name, self._run, drop=self._cancel)
        self._progress.offloaded += 1
        self._worker.submit((work, then))

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Make a call after `seconds`, on the loop, with the transport lock held, unless closed by then."""
        progress, due = self._progress, partial(self._due, call)
        progress.post(lambda: progress.loop.call_later(seconds, progress.start, due))

    def _due(self, call: Callable[[], object]) -> None:
        if not self._closed:
            call()
            self._flush()

    def close(self) -> None:
        """End the thread after the running work. Do not wait."""
        self._closed = True
        if self._worker is not None:
            self._worker.abort()

    async def ended(self) -> None:
        """Return when the running work has ended, but after 5 s at most (loop's thread)."""
        if self._worker is not None and not self._worker.join(_IDLE_SECONDS):
            await asyncio.to_thread(self._worker.join, _BUSY_SECONDS)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self, job: tuple[Work, Done]) -> None:
        work, then = job
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  - `then` takes the error
            error = raised
        self._progress.start_in_thread(self._finish, then, error)
        del job, work, then, error  # the error holds this frame, which must not hold tensors

    def _cancel(self, job: tuple[Work, Done]) -> None:
        self._progress.start_in_thread(self._finish, ignore, None)

    def _finish(self, then: Done, error: BaseException | None) -> None:
        self._progress.offloaded -= 1
        then(error)
        self._flush()


def error_of(work: Work) -> Exception | None:
    """Do `work`, and return its error, which belongs to the client that asked for the work."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  - the client gets the error
        return error
    return None
