"""Each way to end a wait for an operation that stays in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiodist import Handle

__all__ = ["cancelled_task", "gathered", "task_group", "wait_for"]


async def cancelled_task(handle: Handle[Any]) -> None:
    task = asyncio.ensure_future(handle)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def wait_for(handle: Handle[Any]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle, 0.005)


async def gathered(handle: Handle[Any]) -> None:
    together = asyncio.gather(handle, asyncio.Event().wait())
    await asyncio.sleep(0)
    together.cancel()
    with pytest.raises(asyncio.CancelledError):
        await together


async def task_group(handle: Handle[Any]) -> None:
    async def value() -> None:
        await handle

    with pytest.raises(ExceptionGroup):  # noqa: PT012  - the test needs the group
        async with asyncio.TaskGroup() as group:
            group.create_task(value())
            await asyncio.sleep(0)
            raise ValueError
