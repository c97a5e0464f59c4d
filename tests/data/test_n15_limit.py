"""N15: the limit on bytes in flight, where others have taken it before the size of an item was known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from aiodist.data import prefetch
from aiodist.handles import Scheduler

Until = Callable[[Callable[[], object]], Awaitable[None]]


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("room", [1500, 2000, 2500])
async def test_n15_items_that_wait_for_leave_count_as_large_as_the_last_one(until: Until, room: int) -> None:
    """All were asked for when none had been read; those that wait still are worth a thousand bytes by now."""
    scheduler = Scheduler.current()
    scheduler.limit = 10
    other = scheduler.lane("other").request(5000, lambda: None)
    read: list[int] = []

    def source() -> Iterator[bytes]:
        for i in range(5):
            read.append(i)
            yield bytes(1000)

    async with asyncio.timeout(20), prefetch(source(), depth=4) as items:
        await until(lambda: scheduler.in_flight == 6000)
        assert read == [0]
        scheduler.limit = room
        other.release()
        await until(lambda: len(read) == room // 1000)
        for left in range(5, 0, -1):
            assert scheduler.in_flight <= room
            assert len(read) == min(5, 5 - left + room // 1000)
            await anext(items)
            await until(lambda left=left: len(read) == min(5, 6 - left + room // 1000))  # type: ignore[misc]
    assert scheduler.in_flight == 0


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_n15_items_that_turn_out_small_let_more_go(until: Until) -> None:
    scheduler = Scheduler.current()
    scheduler.limit = 1000
    sizes = [900, 100, 100, 100, 100]
    read: list[int] = []

    def source() -> Iterator[bytes]:
        for size in sizes:
            read.append(size)
            yield bytes(size)

    other = scheduler.lane("other").request(1001, lambda: None)
    async with asyncio.timeout(20), prefetch(source(), depth=4) as items:
        await until(lambda: scheduler.in_flight == 1901)  # the others wait
        other.release()
        assert read == [900]  # another of nine hundred would be too many
        await anext(items)
        await until(lambda: read == sizes)
        assert [len(item) async for item in items] == sizes[1:]
    assert scheduler.in_flight == 0
