"""`HandleWork`: a `torch.distributed.Work` over handles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import fork
from torch.futures import Future

from aiodist.backends.base import PeerGone
from aiodist.errors import AiodistError, OperationTimeout, PeerLost
from aiodist.handles import Handle, Posted, PostedOperation, internals
from aiodist.pauses import deadline_clock
from aiodist.threads import Worker

_EXIT_SECONDS = 30.0
"""Longest wait for the callbacks of futures at the exit of the interpreter."""


class FutureThreads:
    """Threads that complete futures of torch, and call their callbacks.

    Each job has an idle thread or a new one: the callbacks of torch's PowerSGD hook wait for other futures, so a fixed
    number of threads could deadlock. Idle threads end with the last group. The methods may be called from any thread
    and by the garbage collector. A thread that pops a worker from `_idle` is its only user. A thread that changes
    `groups` or `_idle` then reads the other one, so no idle worker stays.
    """

    def __init__(self) -> None:
        self.groups: set[int] = set()
        """Identities of the open default groups."""
        self._idle: list[_FutureWorker] = []

    def run(self, job: Callable[[], None]) -> None:
        """Run `job` on an idle thread, or on a new one."""
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = Worker("aiodist-future", self._serve, drop=self._serve, exit_seconds=_EXIT_SECONDS)
            if worker.refusal is None:  # otherwise the thread is in the parent of this process
                worker.submit((worker, job))
                return

    def end_idle(self) -> None:
        """End the idle threads, unless a group is open."""
        with suppress(IndexError):
            while not self.groups:
                self._idle.pop().close()

    def _serve(self, given: tuple[_FutureWorker, Callable[[], None]]) -> None:
        worker, job = given
        try:
            job()
        finally:
            self._idle.append(worker)
            self.end_idle()


_FutureWorker = Worker[tuple[Any, Callable[[], None]]]
future_threads = FutureThreads()


def backend_error(error: BaseException) -> dist.DistBackendError:
    """Return the error that torch's programs catch. For a lost peer it begins as gloo's, which programs search for."""
    gone = isinstance(error, (PeerLost, PeerGone))
    return dist.DistBackendError(f"Connection closed by peer: {error}" if gone else str(error))


class HandleWork(dist.Work):
    """Handles that are one operation for torch, and a function that completes their results.

    A `DistBackendError` is raised from an error of aiodist, such as a lost rank or a mismatch.
    """

    def __init__(
        self,
        handles: Sequence[Handle[object]],
        tensors: Sequence[Tensor],
        timeout: float | None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """Call `finish` once when all `handles` are done, in the first thread that learns of their end."""
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
        """Return one work of several."""
        handles = [handle for work in works for handle in work._handles]
        return cls(handles, [t for work in works for t in work._tensors], timeout, lambda: [w._finish() for w in works])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the results are there. On a CUDA device, order the current stream after the operation."""
        seconds = timeout.total_seconds() if timeout else self._timeout
        until = None if seconds is None or len(self._handles) == 1 else deadline_clock.now() + seconds
        try:
            for handle in self._handles:
                if internals.fence_of(handle) is not None:
                    handle.wait_stream()
                else:
                    handle.wait(seconds if until is None else max(0.0, until - deadline_clock.now()))
        except OperationTimeout as error:  # gloo's words, which programs search for
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
        """As `wait`, which orders the current stream after the operation."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the operation has returned or failed, and its future is finished."""
        done = all(handle.done() for handle in self._handles)
        if done and self.exception() is None:
            self._finish()
        return done and (self._future is None or self._future.done())

    def is_success(self) -> bool:
        """Return True if the operation has returned."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None for a pending or successful operation."""
        return next((e for h in self._handles if h.done() and (e := internals.error_of(h)) is not None), None)

    def source_rank(self) -> int:
        """Return the sender's rank in the group, of a receive."""
        internals.block(self._handles[0])  # unlike `wait`, which only orders a stream
        source = self._handles[0].source
        return -1 if source is None else source

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """Return the tensors with the result."""
        return list(self._tensors)

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors, for DDP's reducer and hooks.

        The future of a finished operation is finished, and runs callbacks inline. Otherwise a worker thread waits and
        runs the callbacks, and `wait` returns after the future is finished. True for `blocks` waits for the operation
        and returns a future of C++, which Python can only make of a result.
        """
        if self.blocks:
            self.wait()
            made: Future[list[Tensor]] = fork(self.result)
            return made
        if self._future is None:
            ended: Future[None] = Future()
            self._future = ended.then(self._outcome)
            if all(handle.done() for handle in self._handles):
                ended.set_result(None)
            else:
                future_threads.run(partial(self._complete, ended))
        return self._future

    def _wait_for_future(self) -> None:
        """Block until the worker thread has finished the future, if any. Its callbacks may still run."""
        if self._future is not None and all(handle.done() for handle in self._handles):
            with suppress(RuntimeError):  # the operation's own error, which the caller has
                self._future.wait()

    def _complete(self, ended: Future[None]) -> None:
        for handle in self._handles:
            internals.block(handle, looks=False)  # a computing thread needs the core
        ended.set_result(None)

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
        for handle in self._handles:  # torch's programs may drop a work, so only errors are reported
            if isinstance(handle, Posted):  # a receive without a message is withdrawn, as by gloo
                PostedOperation.of(handle).mark_retrieved()
                receives = True
            else:
                handle.detach()
        if self._finisher is not None and not receives and not self.is_completed():  # the tensors need the results
            future_threads.run(partial(_finish_dropped, self._handles, self._finisher))


def _finish_dropped(handles: Sequence[Handle[object]], finish: Callable[[], object]) -> None:
    for handle in handles:
        internals.block(handle, looks=False)
    if all(internals.error_of(handle) is None for handle in handles):
        with torch.no_grad():
            finish()
