"""Calls into native libraries that block, in threads of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def started(fn: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `fn` in a daemon thread of its own: it may block for long, and nobody must wait for it at exit."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = fn()
        except BaseException as error:  # noqa: BLE001  - it belongs to the code that waits for `future`
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name="aiodist-native-call", daemon=True).start()
    return future


async def in_thread(fn: Callable[[], T]) -> T:
    """Return what `fn` does, once its thread is over."""
    return await asyncio.wrap_future(started(fn))
