"""Waits for the effects of other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(true: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Let the loop and the other threads run until it is true, for 15 seconds at most; a clock that jumps waits too."""
    async with asyncio.timeout(15):
        while not true():
            await asyncio.to_thread(lambda: None)  # lets the others have the interpreter
            meanwhile()
