"""A thread with a plain asyncio loop, which listens while the main thread is busy; and the descriptors of a fork.

A forked child, as a loader worker may be, has a copy of every socket. With these copies, the hub would see no end of
file when the parent is killed, and the port of a dead rank 0 would stay in use. So the child replaces each by
/dev/null: the number stays in use, and later uses of the number, also by the garbage collector, are harmless.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, TypeVar
from weakref import WeakSet

from aiodist.threads import OwnThread

T = TypeVar("T")

_PARK_SECONDS = 1.0
_running: WeakSet[LoopThread] = WeakSet()
_guarded: set[int] = set()


class OwnProcess:
    """The process that made an object, which a forked child must not use."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        """Return True in that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `RuntimeError` in a forked child."""
        if not self.is_here():
            raise RuntimeError(f"the control channel belongs to process {self._pid}: a forked child has none")


def guard(fd: int) -> None:
    """Close `fd` in forked children, until `forget`."""
    _install()
    _guarded.add(fd)


def forget(fd: int) -> None:
    """End `guard`, before the close of `fd`, whose number may be used again."""
    _guarded.discard(fd)


@functools.cache
def _install() -> None:
    os.register_at_fork(after_in_child=_release)


def _release() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in _guarded:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _guarded.clear()


class LoopThread:
    """A daemon thread with a loop, and the resources of that loop.

    Only the thread uses `stack`, which has the resources. It is unwound in reverse order when the thread stops.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.stack = AsyncExitStack()
        self.owner = OwnProcess()
        self._work: WeakSet[Coroutine[Any, Any, Any]] = WeakSet()
        self._stopping = asyncio.Event()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # no waiter can cancel it
        self._thread = OwnThread(name, self._main)
        self._thread.start()
        _running.add(self)

    def is_current(self) -> bool:
        """Return True on this thread."""
        return threading.current_thread() is self._thread

    def call(self, fn: Callable[..., object], *args: Any) -> bool:  # noqa: ANN401
        """Post `fn(*args)` to the thread, in the order of these calls. Return False if the thread has ended."""
        try:
            self._check_running()
            self.loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            return False
        return True

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread. Cancelling this call cancels it. Raises `RuntimeError` after the end."""
        self._work.add(work)
        try:
            self._check_running()
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise RuntimeError("the thread of the control channel has ended: it was closed") from None
        return await asyncio.wrap_future(future)

    async def aclose(self) -> None:
        """Unwind the stack and end the thread, without blocking the loop of the caller.

        The thread ends even if the caller is cancelled meanwhile. Raises the exception of the unwinding.
        """
        self.call(self._stopping.set)
        await asyncio.shield(asyncio.wrap_future(self._ended))
        self._thread.join()

    def _main(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001  (`aclose` raises it)
            self.loop.close()
            self._ended.set_exception(error)
        else:
            self.loop.close()
            self._ended.set_result(None)

    def park(self) -> None:
        """Stop the thread at the end of a program without a close: a running thread may crash the interpreter.

        CPython 3.11 frees the state of a thread that waits for the GIL, and uses it when that thread gets the GIL.
        """
        parked = threading.Event()

        def rest() -> None:
            self._ended.set_exception(RuntimeError("the interpreter ends"))
            parked.set()
            threading.Event().wait()

        if self.owner.is_here() and self.call(rest):
            parked.wait(_PARK_SECONDS)

    def _check_running(self) -> None:
        if self._ended.done():
            raise RuntimeError("it has ended")

    async def _serve(self) -> None:
        try:
            async with self.stack:
                await self._stopping.wait()
                # Tasks of `run` only: the stack ends its own tasks.
                await _cancel([task for task in self._others() if task.get_coro() in self._work])
        finally:
            await _cancel(self._others())

    def _others(self) -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:  # noqa: ANN401
    """Set the result or the error of a future, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def settle_soon(future: asyncio.Future[Any], value: Any = None, error: Exception | None = None) -> None:  # noqa: ANN401
    """Settle a future on its loop, from any thread. A closed loop is ignored."""
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(settle, future, value, error)


@atexit.register
def _park_all() -> None:
    """Runs last, since it was registered first: worlds may be closed until then."""
    for thread in list(_running):
        thread.park()
