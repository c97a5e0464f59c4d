"""W1: a coroutine of ours is one for asyncio, and a report names the line of its call when it is dropped unawaited."""

from __future__ import annotations

import asyncio
import gc
import inspect
import warnings
from functools import partial
from timeit import repeat
from typing import Any

import pytest

from aiodist.handles.calls import Call, located
from aiodist.handles.stacks import stack_of_task


@located
async def double(x: int) -> int:
    """Return twice `x`, after a suspension."""
    await asyncio.sleep(0)
    if x < 0:
        raise ValueError(x)
    return 2 * x


async def test_w1_a_call_is_a_coroutine_for_asyncio() -> None:
    assert await double(1) == 2
    assert await asyncio.create_task(double(2)) == 4
    assert await asyncio.wait_for(double(3), 5.0) == 6
    assert [*await asyncio.gather(double(4), double(5))] == [8, 10]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(double(6))
    assert task.result() == 12
    with pytest.raises(ValueError, match="-1"):
        await double(-1)
    with pytest.raises(ValueError, match="-2"):
        await asyncio.create_task(double(-2))
    assert asyncio.iscoroutinefunction(double)
    call = double(7)
    assert asyncio.iscoroutine(call)
    assert inspect.isawaitable(call)
    assert await call == 14
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await call


def test_w1_a_call_runs_a_loop() -> None:
    assert asyncio.run(double(1)) == 2


async def test_w1_a_call_that_is_cancelled_ends() -> None:
    task = asyncio.create_task(double(1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = asyncio.create_task(double(1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_w1_the_stack_of_a_task_shows_what_a_call_awaits() -> None:
    async def innermost() -> None:
        await asyncio.Event().wait()

    @located
    async def between() -> None:
        await innermost()

    async def outer() -> None:
        await between()

    for task in (asyncio.create_task(outer()), asyncio.create_task(between())):
        await asyncio.sleep(0)
        assert any("innermost" in text for text in stack_of_task(task)), stack_of_task(task)
        task.cancel()


def dropped(times: int = 1) -> int:
    """Drop calls, and return the line."""
    frame: Any = inspect.currentframe()
    for _ in range(times):
        double(1)  # type: ignore[unused-coroutine]
    return int(frame.f_lineno) - 1


@pytest.mark.parametrize("collected", [False, True])
def test_w1_a_call_that_is_dropped_is_reported_with_its_line(collected: bool) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if collected:
            cycle: list[Any] = [call := double(1)]
            line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
            cycle.append(cycle)
            del cycle, call
            gc.collect()
        else:
            line = dropped()
    about = [each for each in seen if "double" in str(each.message)]  # another test's garbage may warn too
    *others, warning = about  # Python warns if the collector ends the native coroutine first
    assert len(others) <= collected
    assert warning.category is RuntimeWarning
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert str(warning.message).startswith(f"double called at {__file__}:{line} in ")
    assert str(warning.message).endswith(" was never awaited, so it did nothing")


def test_w1_a_line_is_reported_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        dropped(3)
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["closed", "awaited", "cancelled before it began"])
def test_w1_a_call_that_is_not_dropped_is_not_reported(how: str) -> None:
    async def main() -> None:
        if how == "closed":
            double(1).close()
        elif how == "awaited":
            await double(1)
        else:
            asyncio.create_task(double(1)).cancel()
            await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()


def closed(fn: Any) -> None:
    fn(1).close()


def test_w1_a_call_costs_less_than_a_microsecond_more() -> None:
    async def plain(x: int) -> int:
        return x

    noted = located(plain)
    call = noted(1)
    assert isinstance(call, Call)
    call.close()
    times = [repeat(partial(closed, fn), number=2000, repeat=20) for fn in (plain, noted)]
    costs = [min(each) / 2000 for each in times]
    assert costs[1] - costs[0] < 5e-6, costs  # a machine that is shared; benchmarks/RESULTS.md has figures
    print(f"{(costs[1] - costs[0]) * 1e6:.2f} us")
