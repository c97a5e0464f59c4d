"""`HandleWork`: what a call of the process group returns, a `torch.distributed.Work` over handles."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import fork
from torch.futures import Future

from aiodist.backends.base import PeerGone
from aiodist.errors import AiodistError, OperationTimeout, PeerLost
from aiodist.handles import Handle, Posted, PostedOperation, internals
from aiodist.threads import JobQueue

_EXIT_SECONDS = 30.0
"""The longest wait for the callbacks of futures at exit."""


class _Workers:
    """Threads that run jobs, each until it is finished: a job never waits for a thread that another one holds.

    The callbacks of torch's PowerSGD hook wait for other futures, so a fixed number of threads could block for good.
    Idle threads end with the last group.
    """

    def __init__(self) -> None:
        self.queue: JobQueue[Callable[[], None] | None] = JobQueue()
        self._idle = threading.Semaphore(0)
        self._changed = threading.Condition()
        self._groups = 0
        self._unfinished = 0

    def add_group(self) -> None:
        """Keep idle threads until `discard_group`."""
        with self._changed:
            self._groups += 1

    def discard_group(self) -> None:
        """End the idle threads if this was the last group."""
        with self._changed:
            self._groups -= 1
            while self._groups == 0 and self._idle.acquire(blocking=False):
                self.queue.put(None)

    def run(self, job: Callable[[], None]) -> None:
        """Have an idle thread run `job`, or a new one."""
        with self._changed:
            self._unfinished += 1
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve, name="aiodist-future", daemon=True).start()
        self.queue.put(job)

    def finish(self, seconds: float) -> None:
        """Block until all jobs are finished, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished == 0, seconds)

    def _serve(self) -> None:
        while (job := self.queue.get()) is not None:
            try:
                job()
            finally:
                del job  # perhaps the last reference to tensors, whose deletion at exit would abort the process
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()
            with self._changed:
                if self._groups == 0:
                    return
                self._idle.release()


workers = _Workers()
"""Of this process: they run the callbacks of futures."""


def _at_exit(process: int) -> None:
    """Wait for the callbacks of futures that still run when the process exits; a forked child has none of them.

    Their threads are inside torch's C++. A thread that asks for the GIL of a finalized interpreter is unwound, and a
    frame there that allows no exception aborts the process.
    """
    if os.getpid() == process:
        workers.finish(_EXIT_SECONDS)


atexit.register(_at_exit, os.getpid())


def backend_error(error: BaseException) -> dist.DistBackendError:
    """Return what torch's programs catch; of a peer that is gone it begins with gloo's words, which they look for."""
    gone = isinstance(error, (PeerLost, PeerGone))
    return dist.DistBackendError(f"Connection closed by peer: {error}" if gone else str(error))


class HandleWork(dist.Work):
    """Handles that are one operation to torch, and what is left to do with their results.

    A rank that is lost, or a call that differs, is a `DistBackendError` to torch, raised from the error of aiodist.
    """

    def __init__(
        self,
        handles: Sequence[Handle[object]],
        tensors: Sequence[Tensor],
        timeout: float | None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """`finish` is called once when all `handles` are done, by the thread that learns it first."""
        super().__init__()
        self.blocks = False
        self._handles = handles
        self._tensors = tensors
        self._timeout = timeout
        self._finisher = finish
        self._finishing = threading.Lock() if finish is not None else None
        self._future: Future[list[Tensor]] | None = None

    @classmethod
    def of(cls, works: Sequence[HandleWork], timeout: float | None) -> HandleWork:
        """Return several works as one."""
        handles = [handle for work in works for handle in work._handles]
        return cls(handles, [t for work in works for t in work._tensors], timeout, lambda: [w._finish() for w in works])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the results are there; on a CUDA device, when the current stream is behind them."""
        seconds = timeout.total_seconds() if timeout else self._timeout
        until = None if seconds is None or len(self._handles) == 1 else monotonic() + seconds
        try:
            for handle in self._handles:
                if internals.fence_of(handle) is not None:
                    handle.wait_stream()
                else:
                    handle.wait(seconds if until is None else max(0.0, until - monotonic()))
        except OperationTimeout as error:  # in the words of gloo, which programs look for
            raise dist.DistBackendError(f"{error.op}: Timed out waiting {1e3 * (seconds or 0):g}ms: {error}") from error
        except AiodistError as error:
            self._wait_for_future()
            raise backend_error(error) from error
        if self._finishing is not None:
            self._finish()
        self._wait_for_future()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`: what is queued on the current stream from now on begins behind the operation."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if it is finished, well or not, and its future with it."""
        over = all(handle.done() for handle in self._handles)
        if over and self.exception() is None:
            self._finish()
        return over and (self._future is None or self._future.done())

    def is_success(self) -> bool:
        """Return whether it is over and raised nothing."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of aiodist that it ended with; None where there is none, or not yet."""
        return next((e for h in self._handles if h.done() and (e := internals.error_of(h)) is not None), None)

    def source_rank(self) -> int:
        """Return the rank, in the group, that a receive was sent by."""
        internals.block(self._handles[0])  # `wait` returns before, where a stream is to be behind it
        source = self._handles[0].source
        return -1 if source is None else source

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return list(self._tensors)

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors, for DDP's reducer and hooks.

        The future of a finished operation is finished, and runs a callback inline. Else a worker thread waits and runs
        the callbacks; `wait` returns after the future is finished. With `blocks` it is one of C++, which Python makes
        only of what is there: this waits for that.
        """
        if self.blocks:
            self.wait()
            made: Future[list[Tensor]] = fork(self.result)
            return made
        if self._future is None:
            over: Future[None] = Future()
            self._future = over.then(self._outcome)
            if all(handle.done() for handle in self._handles):
                over.set_result(None)
            else:
                workers.run(partial(self._complete, over))
        return self._future

    def _wait_for_future(self) -> None:
        """Block until the worker thread has finished the future, if there is one; its callbacks may still run."""
        if self._future is not None and all(handle.done() for handle in self._handles):
            with suppress(RuntimeError):  # the operation's own error, which the caller has
                self._future.wait()

    def _complete(self, over: Future[None]) -> None:
        for handle in self._handles:
            internals.block(handle, looks=False)  # what computes meanwhile needs the core
        over.set_result(None)

    def _outcome(self, _: Future[None]) -> list[Tensor]:
        if (error := self.exception()) is not None:
            raise backend_error(error) from error
        self._finish()
        return list(self._tensors)

    def _finish(self) -> None:
        if self._finishing is None:
            return
        with self._finishing:
            finish, self._finisher = self._finisher, None
            if finish is not None:
                with torch.no_grad():
                    finish()

    def __del__(self) -> None:
        receives = False
        for handle in self._handles:  # torch's programs may drop what they do not wait for; errors are told
            if isinstance(handle, Posted):  # a receive that nothing has matched is withdrawn, as by gloo
                PostedOperation.of(handle).mark_retrieved()
                receives = True
            else:
                handle.detach()
        if self._finisher is not None and not receives and not self.is_completed():  # results get where they belong
            workers.run(partial(_finish_dropped, self._handles, self._finisher))


def _finish_dropped(handles: Sequence[Handle[object]], finish: Callable[[], object]) -> None:
    for handle in handles:
        internals.block(handle, looks=False)
    if all(internals.error_of(handle) is None for handle in handles):
        with torch.no_grad():
            finish()
