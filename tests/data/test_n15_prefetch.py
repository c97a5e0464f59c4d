"""N15: `prefetch`, what comes out of it, in which order, and when it is made. How it ends is in test_n15_endings.py."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from anyio import BrokenWorkerProcess
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from aiodist import Communicator
from aiodist.data import Prefetched, prefetch
from aiodist.data.nesting import nbytes_of
from aiodist.handles import Scheduler

pytestmark = pytest.mark.timeout(60)

Until = Callable[[Callable[[], object]], Awaitable[None]]


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


async def async_numbers(count: int) -> AsyncIterator[int]:
    for i in range(count):
        await asyncio.sleep(0)
        yield i


class Sequence:
    """Iterable by the old protocol alone."""

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise IndexError
        return index


def double(x: int) -> int:
    return 2 * x


def exit_or_call(x: Any) -> Any:
    return x(0) if callable(x) else os._exit(x)


def process_of(_: object) -> int:
    return os.getpid()


def fail_at_one(x: int) -> int:
    if x == 1:
        raise LookupError(f"no {x}")
    return x


class Awkward(Exception):
    """Cannot be unpickled, and is raised where it is made."""

    def __init__(self, x: int) -> None:
        if x is not None:
            raise Awkward(None)  # type: ignore[arg-type]
        super().__init__("not so easy", lambda: None)


async def taken(batches: Prefetched[Any]) -> list[Any]:
    return [batch async for batch in batches]


@pytest.mark.parametrize(
    "source",
    [lambda: range(7), lambda: list(range(7)), lambda: numbers(7), lambda: async_numbers(7), Sequence],
    ids=["range", "list", "generator", "async generator", "getitem"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 1},
        {"depth": 20},
        {"transform": double},
        {"transform": double, "depth": 5, "workers": 3},
    ],
    ids=["defaults", "depth 1", "depth 20", "transform", "workers"],
)
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_n15_every_item_in_order(source: Callable[[], Any], options: dict[str, Any]) -> None:
    async with asyncio.timeout(40), prefetch(source(), **options) as items:
        factor = 2 if "transform" in options else 1
        assert await taken(items) == [factor * i for i in range(7)]
        with pytest.raises(StopAsyncIteration):
            await anext(items)


@pytest.mark.parametrize("source", [[], numbers(0), async_numbers(0)])
async def test_n15_an_empty_source(source: Any) -> None:
    async with asyncio.timeout(20), prefetch(source, transform=double) as items:
        assert await taken(items) == []
        assert items.statistics().hidden == 0


async def test_n15_a_data_loader_pass_after_pass() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10) * 2)
    loader = DataLoader(data, batch_size=4)
    batches = prefetch(loader)
    assert len(batches) == 3
    for _ in range(2):
        async with asyncio.timeout(20), batches as found:
            assert len(found) == 3
            seen = []
            async for x, y in found:
                assert torch.equal(x * 2, y.float())
                seen += x.tolist()
        assert seen == list(range(10))


@pytest.mark.thorough
@pytest.mark.asyncio(loop_factories=["asyncio"])  # a process takes seconds to start
async def test_n15_processes() -> None:
    async with asyncio.timeout(50):
        opened = prefetch(range(9), depth=1, workers=2, transform=double, kind="process")
        for _ in range(2):
            async with opened as items:
                assert await taken(items) == [2 * i for i in range(9)]
        async with prefetch(async_numbers(3), workers=2, transform=process_of, kind="process") as items:
            processes = await taken(items)
        assert os.getpid() not in processes
        async with prefetch(range(3), transform=fail_at_one, kind="process") as items:
            assert await anext(items) == 0
            with pytest.raises(LookupError, match="no 1") as raised:
                await anext(items)
            assert "in fail_at_one" in raised.value.__notes__[0]  # where it was raised over there
            assert await taken(items) == []
        async with prefetch(range(3), transform=lambda x: x, kind="process") as items:
            with pytest.raises(Exception, match="pickle"):
                await anext(items)
        async with prefetch([0], transform=Awkward, kind="process") as items:
            with pytest.raises(RuntimeError, match=r"raised in a worker process:\n(.*\n)*.*not so easy"):
                await anext(items)
        async with prefetch([process_of, 5], transform=exit_or_call, kind="process") as items:
            await anext(items)
            with pytest.raises(BrokenWorkerProcess, match=r"had item 1, counted from 0, has ended: os\._exit"):
                await anext(items)
        assert Scheduler.current().in_flight == 0


async def test_n15_len_where_the_source_has_none() -> None:
    with pytest.raises(TypeError):
        len(prefetch(numbers(3)))


async def test_n15_depth_items_are_read_ahead_and_no_more(until: Until) -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for i in range(10):
            read.append(i)
            yield i

    async with asyncio.timeout(20), prefetch(source(), depth=3) as items:
        for item in range(8):
            await until(lambda item=item: len(read) == item + 3)  # type: ignore[misc]
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(read) == item + 3
            assert await anext(items) == item


@pytest.mark.parametrize("transform", [None, double])
async def test_n15_the_next_item_is_made_while_the_consumer_holds_the_loop(
    transform: Callable[[int], int] | None,
) -> None:
    """The loop does not run at all between one item and the next: no task of it is needed."""
    made = [threading.Event() for _ in range(6)]

    def source() -> Iterator[int]:
        for i, event in enumerate(made):
            yield i
            event.set()  # the next item is requested, so this one was read and passed on

    async with asyncio.timeout(20), prefetch(source(), depth=2, transform=transform) as items:
        await anext(items)
        for event in made[1:4]:
            await anext(items)
            assert event.wait(10)


async def test_n15_workers_transform_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def meet(x: int) -> int:
        together.wait(10)
        return x

    async with asyncio.timeout(20), prefetch(range(9), workers=3, transform=meet) as items:  # depth is raised to 3
        assert await taken(items) == list(range(9))


async def test_n15_the_source_is_read_on_one_thread_of_its_own() -> None:
    def source() -> Iterator[threading.Thread]:
        for _ in range(20):
            yield threading.current_thread()

    async with asyncio.timeout(20), prefetch(source(), depth=4, name="mine") as items:
        threads = set(await taken(items))
    assert [thread.name for thread in threads] == ["aiodist-mine"]


class Gates:
    """A transform whose calls end in an order that the test chooses."""

    def __init__(self, count: int) -> None:
        self.open = [threading.Event() for _ in range(count)]
        self.waiting: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()

    def __call__(self, x: int) -> int:
        self._loop.call_soon_threadsafe(self._arrive, x)
        assert self.open[x].wait(20)
        return x

    def _arrive(self, x: int) -> None:
        self.waiting.add(x)
        self._arrived.set()

    async def release(self, choose: Callable[[list[int]], int]) -> None:
        for _ in self.open:
            while not self.waiting:
                self._arrived.clear()
                await self._arrived.wait()
            item = choose(sorted(self.waiting))
            self.waiting.remove(item)
            self.open[item].set()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 1 << 32))
def test_n15_order_is_kept_however_long_each_takes(count: int, workers: int, depth: int, seed: int) -> None:
    async def main() -> None:
        gates = Gates(count)

        async with asyncio.timeout(30), prefetch(range(count), depth=depth, workers=workers, transform=gates) as items:
            releasing = asyncio.create_task(gates.release(Random(seed).choice))
            assert await taken(items) == list(range(count))
            await releasing
        assert Scheduler.current().in_flight == 0

    asyncio.run(main())


def modes(_: object = None) -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.empty(1).device.type,
    )


@pytest.mark.parametrize(
    "block",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta")],
    ids=["no_grad", "inference", "autocast", "device"],
)
async def test_n15_threads_have_the_modes_of_the_code_that_enters(block: Callable[[], Any]) -> None:
    plain = modes()
    with block():
        here = modes()
        opened = prefetch((modes() for _ in range(3)), transform=lambda seen: (seen, modes()))
        items = await opened.__aenter__()
    assert here != plain
    async with asyncio.timeout(20):
        assert await taken(items) == [(here, here)] * 3
        await opened.__aexit__(None, None, None)
    async with prefetch(range(2), transform=modes) as after:
        assert await taken(after) == [plain] * 2


async def test_n15_a_generator_keeps_its_own_modes_and_a_transform_leaves_none() -> None:
    def source() -> Iterator[bool]:
        with torch.no_grad():
            for _ in range(3):
                yield torch.is_grad_enabled()

    def careless(seen: bool) -> tuple[bool, bool]:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        return seen, before

    async with asyncio.timeout(20), prefetch(source(), transform=careless) as items:
        assert await taken(items) == [(False, True)] * 3
    assert torch.is_grad_enabled()


async def test_n15_context_variables_go_along() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    variable.set("given")

    def source() -> Iterator[str]:
        for i in range(3):
            yield variable.get()
            variable.set(f"item {i}")  # a generator's context is one from its first item to its last

    def transform(seen: str) -> tuple[str, str]:
        before = variable.get()
        variable.set("transform")
        return seen, before

    async with asyncio.timeout(20), prefetch(source(), transform=transform) as items:
        assert await taken(items) == [("given", "given"), ("item 0", "given"), ("item 1", "given")]
    assert variable.get() == "given"


async def test_n15_what_is_ready_counts_in_the_scheduler_until_it_is_taken(until: Until) -> None:
    scheduler = Scheduler.current()
    sizes = [100, 200, 300, 400, 500]
    async with asyncio.timeout(20), prefetch(map(bytearray, sizes), depth=2) as items:
        for i, size in enumerate(sizes):
            await until(lambda i=i: scheduler.in_flight == sum(sizes[i : i + 2]))  # type: ignore[misc]
            assert len(await anext(items)) == size
        assert items.statistics().nbytes == sum(sizes)
        assert await taken(items) == []
        assert scheduler.in_flight == 0


async def test_n15_the_limit_on_bytes_holds_items_back_but_never_the_first(until: Until) -> None:
    scheduler = Scheduler.current()
    scheduler.limit = 250
    read: list[int] = []

    def source() -> Iterator[bytes]:
        for i in range(6):
            read.append(i)
            yield bytes(100 if i < 3 else 1000)

    async with asyncio.timeout(20), prefetch(source(), depth=5) as items:
        await until(lambda: len(read) == 5 and scheduler.in_flight == 2300)  # the first are taken for small
        seen = [len(await anext(items)) for _ in range(3)]
        assert scheduler.in_flight == 2000
        assert len(read) == 5
        seen.append(len(await anext(items)))
        await until(lambda: scheduler.in_flight == 1000)
        assert len(read) == 5
        seen += [len(item) async for item in items]
    assert seen == [100] * 3 + [1000] * 3
    assert scheduler.in_flight == 0


async def test_n15_a_more_urgent_lane_goes_first(until: Until) -> None:
    scheduler = Scheduler.current()
    scheduler.limit = 300
    read: list[int] = []
    reduced: list[bool] = []

    def source() -> Iterator[bytes]:
        for i in range(6):
            read.append(i)
            yield bytes(100)

    lane = scheduler.lane("reductions", 10)
    async with asyncio.timeout(20), prefetch(source(), depth=3) as items:
        await until(lambda: scheduler.in_flight == 300)
        first = await lane.acquire(200)  # the first of its lane
        second = lane.request(200, lambda: reduced.append(True))
        await anext(items)
        await anext(items)
        assert scheduler.in_flight == 300
        assert (len(read), reduced) == (3, [])  # one more would find no room before the reduction does
        first.release()
        assert reduced
        second.release()
        assert len(await taken(items)) == 4
    assert scheduler.in_flight == 0


@dataclass
class Batch:
    x: torch.Tensor
    y: np.ndarray[Any, Any]
    note: str = ""


def test_n15_bytes_of_nested_items() -> None:
    x = torch.zeros(10)
    shared = [x, x]
    cycle: list[object] = [bytes(5)]
    cycle.append(cycle)
    sparse = torch.eye(3).to_sparse()
    for value, nbytes in (
        (x, 40),
        ((x, {"a": [np.zeros(3), b"abc"]}), 40 + 24 + 3),
        (shared, 40),
        (cycle, 5),
        (memoryview(bytes(9)), 9),
        ({1: bytearray(4), 2: frozenset({b"12"})}, 6),
        ([3, 2.5, "text", None, object(), Any], 0),
    ):
        assert nbytes_of(value) == nbytes, value
    assert nbytes_of([sparse, bytes(1)]) >= 1  # its own word is not needed, the others count


async def test_n15_nothing_keeps_an_item_that_was_taken(until: Until) -> None:
    for options in ({}, {"transform": lambda x: x}, {"transform": torch.clone, "workers": 2}):
        read: list[Any] = []

        def source(read: list[Any] = read) -> Iterator[torch.Tensor]:
            for i in range(4):
                yield torch.full((10,), i)
            read.append(True)

        async with asyncio.timeout(20), prefetch(source(), depth=1, **options) as items:
            item = await anext(items)
            gone = ref(item)
            del item
            await anext(items)
            gc.collect()
            await until(lambda gone=gone: gone() is None)  # type: ignore[misc]  # a worker may still return it


async def test_n15_statistics_tell_what_was_hidden(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    seconds, go, made = 0.0, threading.Semaphore(0), 0

    def source() -> Iterator[bytes]:
        nonlocal seconds
        for _ in range(4):
            assert go.acquire(timeout=10)
            seconds += 0.01
            yield bytes(8)

    def transform(item: bytes) -> bytes:
        nonlocal seconds, made
        seconds += 0.01
        made += 1
        return item

    for module in ("items", "prefetch", "reading"):
        monkeypatch.setattr(sys.modules[f"aiodist.data.{module}"], "perf_counter", lambda: seconds)
    async with asyncio.timeout(20), prefetch(source(), transform=transform) as items:
        for _ in range(4):
            item = asyncio.ensure_future(anext(items))
            await asyncio.sleep(0)  # it waits
            go.release()
            await item
        waiting = items.statistics()
    go.release(4)
    async with asyncio.timeout(20), prefetch(source(), transform=transform, depth=4) as items:
        await until(lambda: made == 8)  # all is ready
        await taken(items)
    hidden = items.statistics()
    for found in (waiting, hidden):
        assert (found.items, found.nbytes) == (4, 32)
        assert found.reading_seconds >= 0.039
        assert found.transforming_seconds >= 0.039
    assert waiting.waited_seconds == pytest.approx(0.08)
    assert hidden.waited_seconds == 0
    assert 0 <= waiting.hidden < hidden.hidden == 1


@pytest.mark.parametrize("wrong", [0, 1.5, float("inf"), "2", None])
def test_n15_depth_and_workers_are_numbers(wrong: Any) -> None:
    """With an infinite depth items were ordered until memory was full."""
    for option in ("depth", "workers"):
        with pytest.raises((TypeError, ValueError), match=f"{option}={wrong!r}: expected .*at least 1"):
            prefetch([1], **{option: wrong})


async def test_n15_a_loop_without_the_block_says_what_to_write() -> None:
    with pytest.raises(RuntimeError, match="use `async with prefetch"):
        async for _ in prefetch([1]):
            pass


async def _async_double(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"source": 3}, TypeError, "source=3"),
        ({"depth": 0}, ValueError, "depth=0"),
        ({"workers": 0}, ValueError, "workers=0"),
        ({"kind": "fibre"}, ValueError, "kind='fibre'.*thread, process"),
        ({"transform": 3}, TypeError, "transform=3"),
        ({"transform": _async_double}, TypeError, "coroutine function"),
    ],
)
def test_n15_wrong_arguments_are_told_at_the_call(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        prefetch(**{"source": [1], **arguments})


async def test_n15_one_pass_at_a_time_and_one_consumer() -> None:
    go = threading.Event()

    def source() -> Iterator[int]:
        assert go.wait(20)
        yield 1

    opened = prefetch(source())
    async with asyncio.timeout(20):
        async with opened as items:
            with pytest.raises(RuntimeError, match="open already"):
                await opened.__aenter__()
            waiting = asyncio.create_task(anext(items))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="one at a time"):
                await anext(items)
            go.set()
            assert await waiting == 1
        with pytest.raises(RuntimeError, match="is closed"):
            await anext(items)


@pytest.mark.ranks(2)
async def test_n15_beside_reductions(coll: Communicator) -> None:
    async with prefetch(range(coll.rank, 20, coll.size), transform=float) as items:
        total = 0.0
        async for item in items:
            total += await coll.allreduce(item)
    assert total == sum(range(20))
