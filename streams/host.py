"""`HostStream`: ordered work on one thread of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from asyncio import _get_running_loop
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from aiodist.handles import Account, Handle, Operation, Progress, internals
from aiodist.handles.calls import located
from aiodist.handles.combinators import EndWaiter
from aiodist.handles.origin import whence
from aiodist.handles.tracing import span, tracing
from aiodist.streams.modes import Modes, ModeSwitch
from aiodist.threads import Worker

P = ParamSpec("P")
T = TypeVar("T")


class HostStream:
    """Work that runs in order on one thread, always the same; each `submit` returns a handle.

    ```python
    async with HostStream("compute") as compute:
        loss = await compute.submit(step, batch)
    ```
    Use a stream for work that needs one thread, or would block the loop: forward, backward and the optimizer's step, a
    file, a compressor. The work runs with the context variables and torch modes of the code that submits it. A stream
    belongs to the event loop that opens it. Only the thread of that loop may call the stream.
    """

    def __init__(self, name: str = "stream") -> None:
        self.name = name
        self._seq = 0
        self._thread: _StreamThread | None = None
        self._ended = False
        """True after `aclose` or `abort`."""

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError(f"{self} cannot be opened twice")
        self._loop = asyncio.get_running_loop()
        self._progress = progress = Progress.current()
        self._account = account = Account(self._loop, results=False)
        self._thread = thread = _StreamThread(self.name, progress)
        thread.worker.ended.add_done_callback(lambda _: progress.post(_report_dropped, thread.worker, account))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @located
    async def aclose(self) -> None:
        """Run the queued work, end the thread, and report handles that were dropped unconsumed; idempotent.

        The loop continues meanwhile. If this call is cancelled, the thread still runs the queued work and then ends.
        """
        if self._thread is None:
            return
        worker = self._thread.worker
        if worker.refusal is None:
            self._check().close()
        self._ended = True
        await asyncio.wrap_future(worker.ended)
        worker.join()

    def abort(self) -> None:
        """Withdraw the queued work and end the thread after the running call, since the program failed. Do not wait."""
        if self._thread is not None:
            self._ended = True
            self._thread.worker.abort()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, which runs on the thread after all work submitted before.

        Only awaiting this handle raises the error of `fn`, also a `SystemExit`. `cancel()` of the handle withdraws `fn`
        while `fn` is queued. Raises `RuntimeError` if the stream is not open or belongs to another event loop. Costs
        2.5 us, and 25 to 30 until the result is there.
        """
        worker = self._check()
        op = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        operation: Operation[T] = Operation(self._progress, op, self._seq, 0, whence(2), self._account, polled=False)
        self._seq += 1
        call = _QueuedCall(operation, [(fn, args, kwargs, copy_context(), Modes.capture())])
        operation.set_canceller(call.cancel)
        worker.submit(call)
        return operation.handle

    def sync(self) -> Handle[None]:
        """Return a handle that is done after all work submitted before, also work whose handle was dropped.

        Raises and costs as `submit`.
        """
        handle = self.submit(_sync)
        Operation.of(handle).set_canceller(lambda: False)
        cover = self._account.cover
        internals.add_waiter(handle, EndWaiter(lambda done: cover(done.seq), lambda *_: None))
        return handle

    def wait_handle(self, handle: Handle[Any], /) -> None:
        """Run later work only after `handle` is done, also if its operation fails."""
        worker = self._check()
        if not handle.done():
            worker.submit(handle)

    def is_current(self) -> bool:
        """Return True on the stream's thread."""
        return self._thread is not None and threading.current_thread() is self._thread.worker.threads[0]

    @property
    def running(self) -> Handle[Any] | None:
        """The handle of the running call, or None."""
        return None if self._thread is None else self._thread.running

    def _check(self) -> Worker[_QueuedCall | Handle[Any]]:
        """Return the worker, or raise `RuntimeError` if the stream refuses calls from here."""
        if self._thread is None:
            raise RuntimeError(f"{self} is not open: use `async with`")
        worker = self._thread.worker
        if worker.refusal is not None:
            raise RuntimeError(f"{self} {worker.refusal}")
        if (loop := _get_running_loop()) is not self._loop:
            where = f"thread {threading.current_thread().name!r} with {loop or 'no running event loop'}"
            raise RuntimeError(f"{self} was called in {where}: expected {self._loop}, which it was opened on")
        return worker

    def __del__(self) -> None:
        if self._thread is not None and not (self._ended or self._thread.worker.forked):
            self._thread.worker.abort()
            warnings.warn(f"{self} was never closed: use `async with`", ResourceWarning, stacklevel=1)

    def __repr__(self) -> str:
        return f"<HostStream {self.name!r}>"


class _StreamThread:
    """The thread's side of a stream. It holds no reference to the stream, which may be dropped."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.progress = progress
        self.running: Handle[Any] | None = None
        """Handle of the running call (written by the thread)."""
        self.base: Modes | None = None
        """Modes of the thread outside the calls (written by the thread)."""
        self.worker: Worker[_QueuedCall | Handle[Any]] = Worker(
            f"aiodist-{name}", self.run, drop=_cancel, computing=progress.computing, gone=progress.loop.is_closed
        )

    def run(self, call: _QueuedCall | Handle[Any]) -> None:
        """Run a call, unless it was withdrawn, or wait for a handle."""
        if not isinstance(call, _QueuedCall):
            with self.progress.waiting():
                internals.block_unless(call, lambda: not self.worker.is_needed())
            return
        operation = call.operation
        try:
            fn, args, kwargs, context, modes = call.parts.pop()
        except IndexError:
            return
        base = self.base = self.base or Modes.capture()
        switch = None
        self.running = operation.handle
        try:
            if modes is not base:
                switch = ModeSwitch(modes, base)
                switch.enter()
            try:
                if tracing.to is None:
                    value = context.run(fn, *args, **kwargs)
                else:
                    value = context.run(_traced, operation.handle.op, fn, args, kwargs)
            finally:
                if switch is not None:
                    switch.leave(last=True)
                elif not base.in_force():
                    ModeSwitch(base, base).leave(last=True)
        except BaseException as error:  # noqa: BLE001  - the error belongs to the task that awaits the handle
            with suppress(Exception):
                error.add_note(f"raised by {operation}, on {threading.current_thread().name}")
            del fn, args, kwargs, context  # the buffers are free before the end is known
            operation.reject(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        else:
            del fn, args, kwargs, context
            operation.resolve(value)
        finally:
            self.running = None
            del call, operation  # the error holds its frames, which must not hold the handle


class _QueuedCall(NamedTuple):
    """A call in the queue. `parts` has one item, which is popped by the thread that runs or withdraws the call."""

    operation: Operation[Any]
    parts: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Context, Modes]]

    def cancel(self) -> bool:
        """Withdraw the call. Return False if the call has begun."""
        try:
            self.parts.pop()
        except IndexError:
            return False
        self.operation.cancel()
        return True


def _cancel(call: _QueuedCall | Handle[Any]) -> None:
    if isinstance(call, _QueuedCall):
        call.cancel()


def _traced(op: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    with span(op):
        return fn(*args, **kwargs)


def _sync() -> None:
    pass


_sync.__qualname__ = "sync"  # the name of its operation


def _report_dropped(worker: Worker[Any], account: Account) -> None:
    """Report the handles that were dropped unconsumed: after an abort, only errors."""
    if worker.aborted:
        account.cover(sys.maxsize)
    account.judge()
