"""What a rank does when the block of `init` raised: it tells the others, gives everything up, and leaves in time."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from aiodist.control import Channel
from aiodist.errors import AiodistError, CommunicatorAborted
from aiodist.family import Family

__all__ = ["End", "give_up", "leave_in_time", "the_end"]

_LOOK_SECONDS = 0.05


class End(NamedTuple):
    """Why the block ended, as the other ranks are told."""

    cause: str
    traceback: str
    exitcode: int


async def the_end(error: BaseException) -> End:
    """Return how this rank ends with `error`; what cancelled it tells more than the cancellation."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, asyncio.CancelledError):
        error = await _reason() or error
    return End(f"{type(error).__name__}: {error}".removesuffix(": "), trace, _exit_code(error))


async def _reason() -> BaseException | None:
    """Return what ends the loop, if it is ended: `sys.exit` in one task cancels the others.

    `asyncio.run` cancels them while it is left with that exception, so a callback of the loop sees it being handled;
    a task does not, since each has handled exceptions of its own.
    """
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[BaseException | None] = loop.create_future()

    def look() -> None:
        if not seen.done():
            seen.set_result(sys.exception())

    loop.call_soon(look)
    reason = await seen
    return reason if isinstance(reason, (SystemExit, KeyboardInterrupt)) else None


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python will give this process for `error`."""
    if isinstance(error, BaseExceptionGroup):
        exits = error.subgroup((SystemExit, KeyboardInterrupt))
        return 1 if exits is None else _exit_code(exits.exceptions[0])
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    # Ctrl-C cancels the main task, and is raised by `asyncio.run` only after that has ended.
    return 130 if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else 1


async def give_up(family: Family, channel: Channel, end: End, seconds: float, *, patient: bool) -> None:
    """Tell the others and close what is open, in `seconds` at most; no trouble of it hides the error that led here.

    With `patient`, let the others leave first: an mpirun kills them as soon as this process ends.
    """
    channel.fail(end.cause, end.traceback, end.exitcode)
    with suppress(TimeoutError, AiodistError, RuntimeError, OSError):
        async with asyncio.timeout(seconds):
            await family.abandon(CommunicatorAborted(f"this rank failed: {end.cause}"))
            while patient and len(channel.exits()) < channel.size - 1:  # noqa: ASYNC110  - news of it come on a thread
                await asyncio.sleep(0.02)
            await channel.aclose()


async def leave_in_time(code: int, seconds: float) -> None:
    """Other threads, in native code or of the user's, may keep the process from ending: then end it, with `code`.

    The time runs while asyncio closes the loop, where it waits for the threads of its executor, and from the end of
    the main thread, where Python waits for all others; not before: the program may catch the error and go on.
    """
    closing = threading.Event()
    sign = _sign_of_closing(closing)
    await anext(sign)
    loop = asyncio.get_running_loop()

    def watch(sign: object) -> None:
        main = threading.main_thread()
        left = seconds
        while left > 0:
            started = monotonic()
            closing.wait(_LOOK_SECONDS)
            main.join(_LOOK_SECONDS)
            if not main.is_alive() or (closing.is_set() and not loop.is_closed()):
                left -= monotonic() - started
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)

    # It holds `sign`, which the loop knows only weakly.
    threading.Thread(target=watch, name="aiodist-leave", daemon=True, kwargs={"sign": sign}).start()


async def _sign_of_closing(closing: threading.Event) -> AsyncIterator[None]:
    """Set `closing` when the loop is closed: it ends the asynchronous generators that nobody has ended."""
    try:
        yield
    finally:
        closing.set()
