"""N15: how a prefetch ends: errors, leaving early, cancellation; nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import anyio
import psutil
import pytest
import torch
import uvloop
from torch.utils.data import DataLoader, Dataset

import aiodist
from aiodist.data import prefetch
from aiodist.handles import Scheduler

pytestmark = pytest.mark.timeout(60)

Until = Callable[[Callable[[], object]], Awaitable[None]]
Main = Callable[[], Coroutine[Any, Any, None]]


def failing(position: int, error: BaseException) -> Iterator[int]:
    yield from range(position)
    raise error


async def async_failing(position: int, error: BaseException) -> AsyncIterator[int]:
    for i in range(position):
        yield i
    raise error


def nothing_in_flight() -> bool:
    return Scheduler.current().in_flight == 0


class Source:
    """A generator whose `block`-th item comes when the test says so; it tells how it ended."""

    def __init__(self, block: int = -1) -> None:
        self.block = block
        self.begun, self.go = threading.Event(), threading.Event()
        self.closed_on: str | None = None

    def items(self) -> Iterator[int]:
        try:
            for i in range(100):
                if i == self.block:
                    self.begun.set()
                    assert self.go.wait(20)
                yield i
        finally:
            self.closed_on = threading.current_thread().name


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("where", ["source", "async source", "transform", "workers"])
async def test_n15_an_error_is_raised_at_its_item(position: int, where: str) -> None:
    error = LookupError(f"item {position}")

    def transform(x: int) -> int:
        if x == position:
            raise error
        return x

    opened = {
        "source": lambda: prefetch(failing(position, error)),
        "async source": lambda: prefetch(async_failing(position, error), depth=3),
        "transform": lambda: prefetch(range(10), transform=transform),
        "workers": lambda: prefetch(range(10), transform=transform, depth=4, workers=3),
    }[where]()
    seen = []
    async with asyncio.timeout(20):
        with pytest.raises(LookupError) as raised:  # noqa: PT012  - the iteration is under test
            async with opened as items:
                with contextlib.suppress(ZeroDivisionError):
                    async for item in items:
                        seen.append(item)  # noqa: PERF401  - what came before the error counts
        assert raised.value is error
        assert seen == list(range(position))
        assert items.statistics().items == position
    assert nothing_in_flight()


@pytest.mark.parametrize(
    "kind", [ValueError, StopAsyncIteration, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
@pytest.mark.parametrize("where", ["source", "transform"])
async def test_n15_errors_of_every_kind_reach_the_consumer_alone(kind: type[BaseException], where: str) -> None:
    def transform(x: int) -> int:
        if where == "transform":
            raise kind("mine")
        return x

    class Failing:
        def __iter__(self) -> Failing:
            return self

        def __next__(self) -> int:
            if where == "source":
                raise kind("mine")
            return 1

    async with asyncio.timeout(20), prefetch(Failing(), transform=transform) as items:
        expected = RuntimeError if kind is StopAsyncIteration else kind
        with pytest.raises(expected):
            await anext(items)
        with pytest.raises(StopAsyncIteration):  # the iteration has ended
            await anext(items)
    assert nothing_in_flight()


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
async def test_n15_stop_iteration_of_a_transform_does_not_end_the_stream_in_silence(kind: type[Exception]) -> None:
    def transform(x: int) -> int:
        if x == 2:
            raise kind
        return x

    async with asyncio.timeout(20), prefetch(range(5), transform=transform) as items:
        assert [await anext(items), await anext(items)] == [0, 1]
        with pytest.raises(RuntimeError, match=f"transform raised {kind.__name__}") as raised:
            await anext(items)
        assert isinstance(raised.value.__cause__, kind)


async def test_n15_stop_async_iteration_of_a_source_does_not_end_the_stream_in_silence() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise StopAsyncIteration("inner")

    async with asyncio.timeout(20), prefetch(source()) as items:
        assert await anext(items) == 1
        with pytest.raises(RuntimeError, match="the source raised StopAsyncIteration") as raised:
            await anext(items)
        assert isinstance(raised.value.__cause__, StopAsyncIteration)


@pytest.mark.parametrize(("kind", "expected"), [(LookupError, LookupError), (StopIteration, RuntimeError)])
async def test_n15_an_error_of_iter_is_the_first_item_s(kind: type[Exception], expected: type[Exception]) -> None:
    class Source:
        def __iter__(self) -> Iterator[int]:
            raise kind("no data")

    async with asyncio.timeout(20), prefetch(Source()) as items:
        with pytest.raises(expected, match=r"no data|iter\(source\) raised StopIteration"):
            await anext(items)


async def test_n15_an_error_of_closing_the_source_is_raised_by_the_block() -> None:
    def source() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            raise LookupError("close")

    async def async_source() -> AsyncIterator[int]:
        try:
            for i in range(10):
                yield i
        finally:
            raise LookupError("close")

    for make in (source, async_source):
        async with asyncio.timeout(20):
            with pytest.raises(LookupError, match="close"):
                async with prefetch(make()) as items:
                    await anext(items)
        assert nothing_in_flight()


@pytest.mark.parametrize("how", ["break", "error"])
async def test_n15_leaving_early_closes_a_generator_on_its_thread(how: str) -> None:
    source = Source()
    expected = pytest.raises(ZeroDivisionError) if how == "error" else contextlib.nullcontext()
    async with asyncio.timeout(20):
        with expected:
            async with prefetch(source.items(), transform=float, workers=2) as items:
                async for item in items:
                    if item == 3:
                        if how == "break":
                            break
                        raise ZeroDivisionError
    assert source.closed_on == "aiodist-prefetch"
    assert nothing_in_flight()


async def test_n15_leaving_early_cancels_an_async_source_and_closes_it() -> None:
    ends: list[str] = []

    async def source(waits: bool) -> AsyncIterator[int]:
        task = asyncio.current_task()
        try:
            yield 0
            if waits:
                await asyncio.Event().wait()
            yield 1
            yield 2
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)  # it may still await
            assert asyncio.current_task() is task  # so a timeout or a task group around its yields works
            ends.append("closed")

    for waits in (True, False):
        async with asyncio.timeout(20), prefetch(source(waits)) as items:
            assert await anext(items) == 0
            for _ in range(5):
                await asyncio.sleep(0)
    assert ends == ["cancelled", "closed", "closed"]
    assert nothing_in_flight()


async def test_n15_a_source_that_swallows_its_cancellation_is_closed_all_the_same() -> None:
    closed = []

    async def source() -> AsyncIterator[int]:
        try:
            yield 0
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            yield 1
        finally:
            closed.append(True)

    async with asyncio.timeout(20), prefetch(source()) as items:
        await anext(items)
        for _ in range(5):
            await asyncio.sleep(0)
    assert closed


async def test_n15_items_that_nobody_took_are_dropped_with_their_errors(reports: list[dict[str, object]]) -> None:
    async with asyncio.timeout(20), prefetch(failing(2, LookupError("nobody saw it")), depth=5) as items:
        assert await anext(items) == 0
    gc.collect()
    await asyncio.sleep(0)
    assert not reports
    assert nothing_in_flight()


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise LookupError(f"item {index}")
        return torch.tensor(index)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create")
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("how", ["whole", "early", "error"])
async def test_n15_the_workers_of_a_data_loader_end(how: str) -> None:
    loader = DataLoader(
        Numbers(bad=20 if how == "error" else -1), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    before = set(psutil.Process().children())
    error: BaseException | None = None
    async with asyncio.timeout(40):
        async with prefetch(loader) as batches:
            seen = [await anext(batches)]
            assert set(psutil.Process().children()) - before
            if how == "whole":
                seen += [batch async for batch in batches]
            elif how == "error":
                try:
                    async for batch in batches:
                        seen.append(batch)
                except LookupError as raised:
                    error = raised  # its traceback holds the loader's iterator
    assert [int(batch[0]) for batch in seen] == list(range(0, {"whole": 64, "early": 4, "error": 20}[how], 4))
    assert (error is not None) is (how == "error")
    assert not set(psutil.Process().children()) - before


async def test_n15_nothing_is_lost_when_a_wait_is_cancelled() -> None:
    source = Source(block=2)
    async with asyncio.timeout(20), prefetch(source.items()) as items:
        assert [await anext(items), await anext(items)] == [0, 1]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(items), 0.01)
        source.go.set()
        assert [await anext(items) for _ in range(3)] == [2, 3, 4]
    assert nothing_in_flight()


@pytest.mark.parametrize("where", ["next", "transform"])
@pytest.mark.parametrize("how", ["task", "scope", "twice"])
async def test_n15_leaving_waits_for_the_call_that_runs_also_when_cancelled(where: str, how: str, until: Until) -> None:
    source = Source(block=1 if where == "next" else -1)
    running = []

    def transform(x: int) -> int:
        if where == "transform" and x == 1:
            source.begun.set()
            assert source.go.wait(20)
        running.append(x)
        return x

    scope = anyio.CancelScope()
    ended: list[str] = []

    async def consume() -> None:
        with scope:
            async with prefetch(source.items(), transform=transform) as items:
                async for _ in items:
                    pass
        ended.append("after the scope")

    task = asyncio.create_task(consume())
    await until(source.begun.is_set)
    await asyncio.sleep(0)
    scope.cancel() if how == "scope" else task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    if how == "twice":
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
    assert not task.done()
    source.go.set()
    async with asyncio.timeout(20):
        await asyncio.wait([task])
    assert task.cancelled() is (how != "scope")
    assert ended == (["after the scope"] if how == "scope" else [])
    assert source.closed_on == "aiodist-prefetch"
    assert nothing_in_flight()


async def test_n15_cancelled_while_the_scheduler_holds_it_back(until: Until) -> None:
    scheduler = Scheduler.current()
    scheduler.limit = 10
    other = scheduler.lane("other").request(5, lambda: None)

    async def consume() -> None:
        async with prefetch((bytes(100) for _ in range(10)), depth=4) as items:
            await anext(items)
            await anext(items)
            await anext(items)
            await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await until(lambda: scheduler.in_flight >= 105)
    task.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([task])
    assert scheduler.in_flight == 5
    other.release()


async def test_n15_cancelled_before_anything_was_read() -> None:
    for source in (range(10), async_failing(10, LookupError())):
        async with asyncio.timeout(20), prefetch(source, transform=float):
            pass
    assert nothing_in_flight()


async def test_n15_a_task_that_waits_while_another_leaves_is_told() -> None:
    source = Source(block=0)
    opened = prefetch(source.items())
    items = await opened.__aenter__()
    waiting = asyncio.create_task(anext(items))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(opened.__aexit__(None, None, None))
    await asyncio.sleep(0)
    source.go.set()
    async with asyncio.timeout(20):
        await leaving
        with pytest.raises(RuntimeError, match="was closed while this task waited"):
            await waiting


def by_asyncio(main: Main) -> None:
    asyncio.run(main())


def by_aiodist(main: Main) -> None:
    aiodist.run(main)


def by_runner(main: Main) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def identity(x: int) -> int:
    return x


def until_gone(before: set[threading.Thread]) -> None:
    """Join what is left: each must end by itself."""
    for thread in set(threading.enumerate()) - before:
        if thread.name != "aiodist-progress":  # the process's own
            thread.join(10)
            assert not thread.is_alive(), thread


@pytest.mark.drawn(1)
@pytest.mark.parametrize("run", [by_asyncio, by_aiodist, by_runner])
@pytest.mark.parametrize("how", ["whole", "early", "error", "processes"])
def test_n15_no_thread_and_no_process_is_left_once_the_loop_is_closed(run: Callable[[Main], None], how: str) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"workers": 2, "transform": identity}
        if how == "processes":
            options["kind"] = "process"
        async with asyncio.timeout(40), prefetch(range(20), **options) as items:
            async for item in items:
                if item == 3 and how == "error":
                    raise ZeroDivisionError
                if item == 3 and how == "early":
                    break
        assert nothing_in_flight()

    threads = set(threading.enumerate())
    processes = set(psutil.Process().children())
    with pytest.raises(ZeroDivisionError) if how == "error" else contextlib.nullcontext():
        run(main)
    until_gone(threads)
    assert not set(psutil.Process().children()) - processes


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")  # whenever the collector comes to it
def test_n15_a_pass_that_was_never_left_ends_with_its_loop() -> None:
    async def main() -> None:
        items = await prefetch(range(10), transform=identity).__aenter__()
        assert await anext(items) == 0

    threads = set(threading.enumerate())
    asyncio.run(main())
    until_gone(threads)
    gc.collect()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_n15_the_thread_of_the_source_is_gone_when_the_block_is() -> None:
    async with asyncio.timeout(20), prefetch(itertools.count(1), name="short") as items:
        assert await anext(items) == 1
        assert "aiodist-short" in {thread.name for thread in threading.enumerate()}
    assert "aiodist-short" not in {thread.name for thread in threading.enumerate()}


async def test_n15_the_loop_goes_on_while_a_source_blocks(until: Until) -> None:
    entered, go = threading.Semaphore(0), threading.Semaphore(0)

    def source() -> Iterator[int]:
        for i in range(3):
            entered.release()
            assert go.acquire(timeout=10)
            yield i

    async with asyncio.timeout(20), prefetch(source(), depth=1) as items:
        for i in range(3):
            item = asyncio.ensure_future(anext(items))
            await until(partial(entered.acquire, blocking=False))
            assert not item.done()
            go.release()
            assert await item == i


async def test_n15_a_second_epoch_of_one_block_is_refused() -> None:
    """It would train on nothing, in silence; a loop that was left early continues with the next item."""
    epochs = prefetch(range(5))
    async with epochs as items:
        async for item in items:
            if item == 2:
                break
        assert [item async for item in items] == [3, 4]
        with pytest.raises(RuntimeError, match=r"no items left: open .* again for each epoch"):
            [item async for item in items]
    async with epochs as items:
        assert [item async for item in items] == [0, 1, 2, 3, 4]
