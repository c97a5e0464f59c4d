"""`HostStream`: ordered work on one thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import Empty
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar
from weakref import WeakSet, finalize

from aiodist.handles import Account, Handle, Operation, Origin, Progress, internals
from aiodist.handles.calls import located
from aiodist.handles.combinators import EndWaiter
from aiodist.handles.tracing import span, tracing
from aiodist.handles.waiting import JobQueue
from aiodist.streams.modes import Modes, ModeSwitch

P = ParamSpec("P")
T = TypeVar("T")

_EXIT_SECONDS = 5.0  # how long the end of the program waits for the work of a stream that nobody closed


class HostStream:
    """Work that runs in order on one thread, always the same; each `submit` returns a handle.

    ```python
    async with HostStream("compute") as compute:
        loss = await compute.submit(step, batch)
    ```
    Work that needs one thread, or must not hold the loop up, goes here: forward, backward and the optimizer's step,
    a file, a compressor. The work runs with the context variables and torch modes of the code that submits it.
    The stream belongs to the event loop that it is opened on, and is called from that loop's thread alone.
    """

    def __init__(self, name: str = "stream") -> None:
        self.name = name
        self._seq = 0
        self._refuses: str | None = "is not open: use `async with`"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: _Worker | None = None

    async def __aenter__(self) -> Self:
        if self._worker is not None:
            raise RuntimeError(f"{self} cannot be opened twice")
        self._loop = asyncio.get_running_loop()
        self._progress = Progress.current()
        self._account = account = Account(self._loop, results=False)
        self._worker = worker = _Worker(self.name, self._progress)
        self._put = worker.queue.put
        # Then, and not in `aclose`, which may be cancelled.
        internals.add_waiter(worker.ended.handle, EndWaiter(lambda _: worker.see_out(account), lambda *_: None))
        # It runs too when the program ends, and then waits for what runs.
        self._finalizer = finalize(self, worker.abort)
        worker.thread.start()
        _open.add(self)
        self._refuses = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @located
    async def aclose(self) -> None:
        """Let what is queued run, end the thread, and report handles that were dropped unconsumed; idempotent.

        The loop goes on meanwhile. When this is cancelled the thread still runs what is queued, and then ends.
        """
        worker = self._worker
        if worker is None:
            return
        if self._refuses is None:
            self._check()
            self._refuses = "is closed"
            self._put(None)
        elif not worker.thread.is_alive() and not worker.ended.handle.done():
            self._check()
        await worker.ended.handle
        worker.thread.join()
        _open.discard(self)
        self._finalizer.detach()

    def abort(self) -> None:
        """End the thread after what runs now, and withdraw what is queued: the program failed. Waits for nothing."""
        if self._refuses is None:
            self._refuses = "was given up"
            self._finalizer()
            _open.discard(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, which runs on the thread after all that was submitted before.

        Its error, `SystemExit` too, is raised by the await of this handle and touches no other. `cancel()` of the
        handle withdraws `fn` while it is queued. Raises `RuntimeError` when the stream is not open, or belongs to
        another event loop. Costs 2.5 us, and 25 to 30 until the result is there.
        """
        op = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        return self._enqueue(op, fn, args, kwargs, cancellable=True)

    def sync(self) -> Handle[None]:
        """Return a handle that is done when all that was submitted before is; it covers handles that were dropped.

        Raises and costs as `submit`.
        """
        handle = self._enqueue("sync", _nothing, (), {}, cancellable=False)
        cover = self._account.cover
        internals.add_waiter(handle, EndWaiter(lambda over: cover(over.seq), lambda *_: None))
        return handle

    def wait_handle(self, handle: Handle[Any], /) -> None:
        """Let what is submitted from now on run only when `handle` is over, however it ends."""
        self._check()
        if not handle.done():
            self._put(_Gate(handle))

    def is_current(self) -> bool:
        """Return True on the stream's thread."""
        return self._worker is not None and threading.current_thread() is self._worker.thread

    @property
    def running(self) -> Handle[Any] | None:
        """The handle of what the thread runs just now."""
        return None if self._worker is None else self._worker.running

    def _enqueue(
        self, op: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], *, cancellable: bool
    ) -> Handle[T]:
        self._check()
        origin = Origin.here(3)
        operation: Operation[T] = Operation(self._progress, op, self._seq, 0, origin, self._account, polled=False)
        self._seq += 1
        work = _QueuedCall(operation, fn, args, kwargs)
        operation.keep(work)
        if cancellable:
            operation.set_canceller(work.cancel)
        self._put(work)
        return operation.handle

    def _check(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if self._refuses is not None:
            raise RuntimeError(f"{self} {self._refuses}")
        if loop is not self._loop:
            where = f"thread {threading.current_thread().name!r} with {loop or 'no running event loop'}"
            raise RuntimeError(f"{self} was called in {where}: expected {self._loop}, which it was opened on")

    def __del__(self) -> None:
        if self._refuses is None:
            self._finalizer()  # here, since code that keeps the warning may keep us alive
            warnings.warn(f"{self} was never closed: use `async with`", ResourceWarning, stacklevel=1)

    def __repr__(self) -> str:
        return f"<HostStream {self.name!r}>"


class _Worker:
    """The thread's side of a stream; holds no reference to the stream, which may be dropped."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.queue: JobQueue[_QueuedCall | _Gate | None] = JobQueue()
        self.progress = progress
        self.loop = progress.loop
        self.aborted = False
        self.running: Handle[Any] | None = None
        self.ended: Operation[None] = Operation(progress, "aclose", polled=False)
        self.ended.handle.detach()
        # A daemon, so that a program that forgot to close the stream can end.
        self.thread = threading.Thread(target=self.run, name=f"aiodist-{name}", daemon=True)
        self.base: Modes

    def run(self) -> None:
        self.base = Modes.capture()
        computing, me = self.progress.computing, threading.get_ident()
        while (item := self.queue.get()) is not None:
            computing.add(me)
            item.run(self)
            computing.discard(me)
            del item  # the next may be long in coming, and this one's handle may be all that holds a tensor
            if self.is_abandoned():
                self._cancel_all()
                break
        self.ended.resolve(None)

    def _cancel_all(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                if (item := self.queue.get_nowait()) is not None:
                    item.cancel()

    def is_abandoned(self) -> bool:
        """Return whether its work is no longer needed."""
        return self.aborted or self.loop.is_closed()

    def see_out(self, account: Account) -> None:
        """The thread has ended: tell of what was, or will be, dropped; of a program that failed only the errors."""
        if self.aborted:
            account.cover(sys.maxsize)
        account.judge()

    def abort(self) -> None:
        """Nobody is left to submit or to wait: end after what runs now. Called by the garbage collector."""
        self.aborted = True
        self.queue.put(None)
        if not threading.main_thread().is_alive():  # the program ends, and torch does not survive that in a thread
            self.thread.join(_EXIT_SECONDS)


class _QueuedCall:
    __slots__ = ("args", "claim", "context", "fn", "kwargs", "modes", "operation")

    def __init__(
        self, operation: Operation[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.operation = operation
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.modes = Modes.capture()
        self.context: Context = copy_context()
        self.claim = [True]  # popped by the thread that runs it or the one that withdraws it, not by both

    def cancel(self) -> bool:
        if not self._claimed():
            return False
        self._release()
        self.operation.cancel()
        return True

    def run(self, worker: _Worker) -> None:
        if not self._claimed():
            return
        operation = self.operation
        worker.running = operation.handle
        switch = ModeSwitch(self.modes)
        try:
            switch.outside = worker.base
            switch.enter()
            try:
                value = (
                    self.context.run(self._call)
                    if tracing.to is not None
                    else self.context.run(self.fn, *self.args, **self.kwargs)
                )
            finally:
                switch.leave(last=True)
        except BaseException as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
            with contextlib.suppress(Exception):
                error.add_note(f"raised by {operation}, on {worker.thread.name}")
            self._release()
            operation.reject(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        else:
            self._release()
            operation.resolve(value)
        finally:
            worker.running = None
            # The error holds the frames that it came through, this one too: they must not hold the handle.
            del self, operation

    def _call(self) -> Any:  # noqa: ANN401
        with span(self.operation.handle.op):
            return self.fn(*self.args, **self.kwargs)

    def _claimed(self) -> bool:
        try:
            return self.claim.pop()
        except IndexError:
            return False

    def _release(self) -> None:
        """Let go of the buffers before anybody hears that it is over."""
        del self.fn, self.args, self.kwargs, self.context


class _Gate:
    """Keeps what is behind it from running before a handle is over."""

    __slots__ = ("handle",)

    def __init__(self, handle: Handle[Any]) -> None:
        self.handle = handle

    def run(self, worker: _Worker) -> None:
        internals.block_unless(self.handle, worker.is_abandoned)

    def cancel(self) -> bool:
        return True


def _nothing() -> None:
    pass


_open: WeakSet[HostStream] = WeakSet()


def _after_fork() -> None:
    """A forked child has the streams, but not their threads."""
    for stream in list(_open):
        stream._refuses = "was opened by the process that this one was forked from"
        stream._finalizer.detach()


os.register_at_fork(after_in_child=_after_fork)
