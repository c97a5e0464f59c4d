"""The notifications that callbacks get, on any thread."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["News"]


class News:
    """A callback; its calls are taken in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def __call__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(lambda: self._queue.put_nowait(*args))

    async def take(self) -> Any:
        """Return what the next call was given."""
        return await self._queue.get()
