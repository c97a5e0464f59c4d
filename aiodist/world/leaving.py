"""A rank's end after a signal or an error."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from os import _exit as exit_at_once
from time import monotonic
from typing import Any, NamedTuple

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.registry import Registry
from aiodist.control import HUB, Channel
from aiodist.errors import AiodistError, CommunicatorAborted, ConfigError
from aiodist.handles import Origin
from aiodist.threads import OwnThread
from aiodist.world.tracebacks import folded

_LOOK_SECONDS = 0.05
_STILL_SECONDS = 2.0  # after a signal; a launcher that has no other `--kill-after` kills a second later
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_over = threading.Event()
_watchers: list[threading.Thread] = []


@contextmanager
def stopping_by_signals(current: Callable[[], Communicator]) -> Iterator[None]:
    """In this block the first SIGTERM or SIGINT of this process calls `request_stop()` of the `current` world.

    A second signal has its usual effect. Raises `ConfigError` outside of the main thread, which gets all signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("stop_on_signal=True in another thread than the main one, which alone hears signals")
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}

    def restore() -> None:
        for signum, handler in before.items():
            if signal.getsignal(signum) is heard:  # else other code has set a handler since
                signal.signal(signum, handler)

    def heard(signum: int, _frame: Any) -> None:  # noqa: ANN401
        restore()
        world = current()
        world.request_stop()
        told = f"rank {world.rank} was asked to stop by {signal.Signals(signum).name}, and asks all: at their next look"
        progress = parts_of(world).dispatcher.progress
        # Not here: what was interrupted may hold the lock of a handler of logging.
        progress.post(partial(logging.getLogger("aiodist").warning, told))
        later = partial(_tell_where, current, signal.Signals(signum).name)
        progress.post(partial(progress.loop.call_later, _STILL_SECONDS, later))

    for signum in _SIGNALS:
        signal.signal(signum, heard)
    try:
        yield
    finally:
        restore()


def _tell_where(current: Callable[[], Communicator], name: str) -> None:
    """Log where this rank is some time after a signal: the launcher may be about to kill it."""
    world = current()
    dispatcher = parts_of(world).dispatcher
    if dispatcher.lifetime.refusal is None:
        told = f"rank {world.rank} has not ended {_STILL_SECONDS:g} s after {name}: {dispatcher.watch.here()}"
        logging.getLogger("aiodist").warning(told)


class End(NamedTuple):
    """Reason for the end of the block, as the other ranks get it."""

    cause: str
    traceback: str
    exitcode: int


async def the_end(error: BaseException) -> End:
    """Return the end of this rank with `error`. The reason of a cancellation precedes the cancellation."""
    trace = folded(error, programs=True)
    if isinstance(error, asyncio.CancelledError):
        reason = await _what_ends_the_loop()
        error = reason if isinstance(reason, (SystemExit, KeyboardInterrupt)) else error
    elif isinstance(error, GeneratorExit):
        error = await _what_ends_the_loop() or error
        trace = folded(error, programs=True)
    cause = error
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    return End(f"{type(cause).__name__}: {cause}".removesuffix(": "), trace, _exit_code(error))


async def _what_ends_the_loop() -> BaseException | None:
    """Return the exception that ends the loop, if one does: `sys.exit` in one task cancels the others.

    `asyncio.run` cancels them, and ends the loop's generators, while it handles that exception. So a callback of the
    loop sees the exception. A task does not, since it has handled exceptions of its own.
    """
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[BaseException | None] = loop.create_future()

    def look() -> None:
        if not seen.done():
            seen.set_result(sys.exception())

    loop.call_soon(look)
    return await seen


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python will give this process for `error`."""
    if isinstance(error, BaseExceptionGroup):
        exits = error.subgroup((SystemExit, KeyboardInterrupt))
        return 1 if exits is None else _exit_code(exits.exceptions[0])
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    # Ctrl-C cancels the main task, and is raised by `asyncio.run` only after that has ended.
    return 130 if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else 1


class Kept:
    """The block of a world that `aiodist.open` keeps open, until the world is closed or the program ends."""

    def __init__(self, registry: Registry[Any], block: AbstractAsyncContextManager[object], seconds: float) -> None:
        """`seconds` are the time of the other ranks for their close, if this rank has forgotten its own."""
        self._registry = registry
        self._block = block
        self._seconds = seconds
        self._origin = Origin.here(3)
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        atexit.register(self._at_exit)

    async def aclose(self) -> None:
        """Leave the block."""
        self._release()
        await self._block.__aexit__(None, None, None)

    def follow(self, registry: Registry[Any]) -> None:
        """Continue with the registry of the next generation."""
        self._registry.kept, registry.kept = None, self
        self._registry = registry

    async def was_forgotten(self) -> bool:
        """Return True, and warn, if the program ended without an exception. The loop is closed."""
        self._release()
        if await _what_ends_the_loop() is not None:
            return False
        self._warn()
        return True

    def _release(self) -> None:
        self._registry.kept = None
        atexit.unregister(self._at_exit)

    def _warn(self) -> None:
        text = "the world that aiodist.open() opened here was never closed: expected `await coll.aclose()`"
        warnings.warn_explicit(text, RuntimeWarning, self._origin.filename, self._origin.lineno)

    def _at_exit(self) -> None:
        """Close the world at the end of a process whose loop was never closed: a prompt, or a notebook."""
        if os.getpid() != self._process or self._registry.kept is not self:  # closed at exit: see `WorldThread`
            return
        self._warn()
        if self._loop.is_running() or self._loop.is_closed():
            self._registry.channel.fail("its program ended, and had not closed what aiodist.open() opened")
            return
        with suppress(Exception):  # the others are notified, and the exit code is known
            self._loop.run_until_complete(asyncio.wait_for(self.aclose(), self._seconds))


async def abort(registry: Registry[Any], channel: Channel, end: End, seconds: float, *, patient: bool) -> None:
    """Notify the others and close the world, in at most `seconds`. Errors of the close are ignored.

    True for `patient` lets the others leave first: an mpirun kills them when this process ends.
    """
    registry.members.expect_abort()
    channel.fail(end.cause, end.traceback, end.exitcode)
    with suppress(TimeoutError, AiodistError, RuntimeError, OSError):
        async with asyncio.timeout(seconds):
            await registry.abort(CommunicatorAborted(f"this rank failed: {end.cause}"))
            while patient and len(channel.exits().keys() - {HUB}) < channel.size - 1:  # noqa: ASYNC110  - news of it come on a thread
                await asyncio.sleep(0.02)
            await registry.close_memory()  # others are notified
            await channel.aclose()


async def leave_in_time(code: int, seconds: float) -> None:
    """End the process with `code` if its other threads, native ones or the user's, do not end in time.

    The time runs while asyncio closes the loop, since it waits for the threads of its executor, and after the end of
    the main thread, since Python waits for all others. Before that the program may catch the error and continue.
    """
    closing = threading.Event()

    async def sign_of_closing() -> AsyncIterator[None]:
        """Notice the close of the loop, which ends the remaining asynchronous generators."""
        try:
            yield
        finally:
            closing.set()

    sign = sign_of_closing()
    await anext(sign)
    loop = asyncio.get_running_loop()

    def watch(sign: object) -> None:
        main = threading.main_thread()
        left = seconds
        while left > 0:
            started = monotonic()
            if _over.wait(_LOOK_SECONDS):
                return
            if not main.is_alive() or (closing.is_set() and not loop.is_closed()):
                left -= monotonic() - started
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        exit_at_once(code)

    # The thread has a reference to `sign`; that of the loop is weak.
    watcher = OwnThread("aiodist-leave", watch, sign)
    watcher.start()
    _watchers.append(watcher)


@atexit.register
def _end_watching() -> None:
    """Stop the watchers at the end of the process, after the later exit functions, as those of worlds.

    CPython 3.11 frees the state of a thread that waits for the GIL at the end of the interpreter, which usually causes
    a SIGSEGV.
    """
    _over.set()
    for watcher in _watchers:
        watcher.join()
