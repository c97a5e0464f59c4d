"""`prefetch` prepares the next items while one is in use."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sized
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn, Self, TypeVar, cast, get_args, overload

import torch
from anyio import CancelScope

from aiodist.data.items import DeviceLike, Item, Made, ToDevice, device_of
from aiodist.data.nesting import nbytes_of
from aiodist.data.reading import Workers, reader_of
from aiodist.data.shard_queue import ShardQueue
from aiodist.data.shards import checked_int
from aiodist.handles import Operation, Progress, Scheduler, internals
from aiodist.world.pinning import warn_of_one_core

T = TypeVar("T")
U = TypeVar("U")

Kind = Literal["thread", "process"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_PRIORITY = 0  # reductions have 10, since steps wait for them


@dataclass(frozen=True)
class PrefetchedStatistics:
    """Counts of one pass, over the items that its consumer took."""

    items: int
    """How many these are."""
    nbytes: int
    """Bytes of the tensors, arrays and byte strings in them."""
    waited_seconds: float
    """How long the consumer waited for them."""
    reading_seconds: float
    """How long the source took to give them."""
    transforming_seconds: float
    """How long `transform` took for them, added up over the workers."""
    copying_seconds: float
    """How long it took to bring them to the device, each from when it was ready on the host until it was there."""

    @property
    def hidden(self) -> float:
        """The share of reading, transforming and copying that the consumer did not wait for, 0.0 to 1.0."""
        work = self.reading_seconds + self.transforming_seconds + self.copying_seconds
        return max(0.0, 1.0 - self.waited_seconds / work) if work > 0 else 0.0


@overload
def prefetch(
    source: Iterable[T] | AsyncIterable[T],
    *,
    depth: int = 2,
    workers: int = 1,
    transform: None = None,
    kind: Kind = "thread",
    device: DeviceLike | None = None,
    name: str = "prefetch",
) -> Prefetch[T]: ...


@overload
def prefetch(
    source: Iterable[T] | AsyncIterable[T],
    *,
    depth: int = 2,
    workers: int = 1,
    transform: Callable[[T], U],
    kind: Kind = "thread",
    device: DeviceLike | None = None,
    name: str = "prefetch",
) -> Prefetch[U]: ...


def prefetch(
    source: Iterable[Any] | AsyncIterable[Any],
    *,
    depth: int = 2,
    workers: int = 1,
    transform: Callable[[Any], Any] | None = None,
    kind: Kind = "thread",
    device: DeviceLike | None = None,
    name: str = "prefetch",
) -> Prefetch[Any]:
    """Prepare the next items of `source` while the program uses the current one, in order.

    `async with` makes one pass over `source`, and gives an async iterator. Items that are ready or being made count
    among the bytes that the loop's `Scheduler` lets be in flight; at its limit fewer are prepared, at least one.

    Args:
        source: an iterable, such as a torch `DataLoader`, read on a thread of its own; or an async iterable, read in a
            task of its own. A `ShardQueue` learns which items were taken.
        depth: number of items prepared ahead, at least `workers`.
        workers: number of items that `transform` works on at a time.
        transform: a function of an item, called in threads or processes; None leaves items unchanged.
        kind: "thread" or "process", for `transform`. With "process" the function and its items must be picklable; a
            process imports the main module again, and stays until the loop's main task ends. Threads have the context
            variables and torch modes of the code that enters the block.
        device: a CUDA device to which items are copied ahead, through pinned memory; None leaves them where they are.
        name: name in messages and traces.

    Returns:
        A context manager of the async iterator.

    Raises:
        TypeError: at the call, for an argument of a wrong type.
        ValueError: at the call, for an argument of a wrong value.
        RuntimeError: on entering, if a pass of the same object is open, or there is no such CUDA device.
        Exception: in the place of an item, what the source, `transform` or a copy raised; the iteration ends there.

    Example:
        ```python
        async with aiodist.data.prefetch(loader, depth=2) as batches:
            async for x, y in batches:
                loss = await net.step(lambda: loss_fn(net(x), y), opt)
        ```

    Leaving the block drops the items that were not taken, closes generators, and ends the worker processes of a
    `DataLoader` without `persistent_workers`. It waits for a running call of `next` or `transform`, since a thread
    cannot be stopped. No item is lost if waiting for it is cancelled.

    Tensors of an item are copied to the device if they are in lists, tuples and mappings, as torch's `DataLoader` pins
    them. Any stream may read them; a stream other than the current one when the item was taken needs
    `t.record_stream(stream)`, which `DataParallel.step` and `submit` do for their arguments. Tensors of a subclass,
    sparse ones, those that require grad, and objects with `pin_memory()` and `to()` of their own are moved by their
    `to` when they are taken.

    Cost: 10 to 40 us an item, up to 50 with a transform, 200 with one in processes.
    """
    if not isinstance(source, AsyncIterable | Iterable) and not hasattr(type(source), "__getitem__"):
        raise TypeError(f"source={source!r}: expected an iterable or an async iterable")
    if transform is not None and not callable(transform):
        raise TypeError(f"transform={transform!r}: expected a function, or None")
    if inspect.iscoroutinefunction(transform):
        raise TypeError(f"transform={transform!r} is a coroutine function: expected one that a thread can call")
    for option, count in (("depth", depth), ("workers", workers)):
        checked_int(option, count, 1)
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(_KINDS)}")
    return Prefetch(source, _Plan(max(depth, workers), workers, transform, kind, device_of(device), name))


@dataclass(frozen=True)
class _Plan:
    depth: int
    workers: int
    transform: Callable[[Any], Any] | None
    kind: Kind
    device: torch.device | None
    name: str


class Prefetch(Generic[T]):
    """A block of `prefetch`: each `async with` makes one pass over the source, any number of times."""

    def __init__(self, source: Iterable[Any] | AsyncIterable[Any], plan: _Plan) -> None:
        self._source = source
        self._plan = plan
        self._pass: Prefetched[T] | None = None

    async def __aenter__(self) -> Prefetched[T]:
        if self._pass is not None:
            raise RuntimeError(f"{self} is open already: leave its block first")
        opened: Prefetched[T] = Prefetched(self._source, self._plan)
        await opened._open()
        self._pass = opened
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pass is not None:
            try:
                await self._pass._close()
            finally:
                self._pass = None

    @property
    def source(self) -> Iterable[Any] | AsyncIterable[Any]:
        """The source given to `prefetch`."""
        return self._source

    def __len__(self) -> int:
        """Return how many items a pass has; raise `TypeError` where the source does not know."""
        return len(cast(Sized, self._source))

    def __aiter__(self) -> NoReturn:
        raise RuntimeError(
            f"{self} is not open: use `async with prefetch(...) as items`, then `async for item in items`"
        )

    def __repr__(self) -> str:
        return f"<Prefetch {self._plan.name!r} of {type(self._source).__name__}>"


class Prefetched(Generic[T]):
    """The async iterator of one pass, for one consumer at a time.

    An item is ordered when there is room for it: `_fill` asks the scheduler, which tells the reader; the reader or,
    with a transform, a worker brings it to `_deliver`, from where it may go to a device; `__anext__` takes it and
    gives its bytes back.
    """

    def __init__(self, source: Iterable[Any] | AsyncIterable[Any], plan: _Plan) -> None:
        self._source = source
        self._plan = plan
        self._progress = Progress.current()
        self._lane = Scheduler.current().lane(plan.name, _PRIORITY)
        self._device = None if plan.device is None else ToDevice(plan.device)
        self._workers: Workers | None = None
        if plan.transform is not None:
            self._workers = Workers(plan.transform, plan.workers, self._deliver, processes=plan.kind == "process")
        after = self._measure if self._workers is None else self._workers.put
        self._counted = source.counted_pass() if isinstance(source, ShardQueue) else None
        self._reader = reader_of(self._counted or source, after, plan.name)
        self._items: deque[Item] = deque()
        """Ordered and not taken, in order."""
        self._ordered = 0
        self._estimate = 0
        """Bytes of the last item whose size is known."""
        self._exhausted = False
        self._last: Item | None = None
        """The one that ended the stream: nothing comes after it."""
        self._taking = False
        self._closed = False
        self._taken = PrefetchedStatistics(0, 0, 0.0, 0.0, 0.0, 0.0)

    def __aiter__(self) -> Self:
        if self._exhausted and not self._closed:
            raise RuntimeError(f"{self} has no items left: open `async with prefetch(...)` again for each epoch")
        return self

    async def __anext__(self) -> T:
        if self._closed:
            raise RuntimeError(f"{self} is closed: take its items inside the `async with` block")
        if self._taking:
            raise RuntimeError(f"{self} has a consumer that waits already: one at a time")
        if not self._items:
            raise StopAsyncIteration
        began = perf_counter()
        self._taking = True
        try:
            made = await self._items[0].operation.handle
        finally:
            self._taking = False
        waited = perf_counter() - began
        if self._closed:
            raise RuntimeError(f"{self} was closed while this task waited for an item")
        if self._device is not None:
            made = self._device.take(made)
        if self._counted is not None:
            if made.error is None:
                self._counted.taken()
            else:
                self._counted.leave()
        self._take(made, waited)
        self._exhausted = isinstance(made.error, StopAsyncIteration)
        if made.error is None:
            return cast(T, made.value)
        try:
            raise made.error
        finally:
            del made  # else the error's traceback holds the error

    def __len__(self) -> int:
        """Return how many items the pass has in all; raise `TypeError` where the source does not know."""
        return len(cast(Sized, self._source))

    def statistics(self) -> PrefetchedStatistics:
        """Return counts and times of the items taken so far; also after the block."""
        return self._taken

    # --- ordering ------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        await self._reader.open()
        if self._workers is not None:
            warn_of_one_core(self._plan.workers)
            self._workers.open(self._plan.name)
        self._fill()

    def _fill(self) -> None:
        while self._last is None and len(self._items) < self._plan.depth:
            operation: Operation[Made] = Operation(self._progress, self._plan.name, self._ordered, polled=False)
            item = Item(self._ordered, operation, self._settle)
            self._ordered += 1
            self._items.append(item)
            item.permit = self._lane.request(self._estimate, partial(self._reader.order, item))
            internals.add_waiter(item.operation.handle, item)

    def _measure(self, item: Item, made: Made) -> None:
        made.nbytes = nbytes_of(made.value)
        self._deliver(item, made)

    def _deliver(self, item: Item, made: Made) -> None:
        """`item` is ready on the host; on the reader's thread, a worker's or the loop's."""
        if self._device is None:
            item.operation.resolve(made)
        else:
            self._device.put(item, made)

    # --- taking --------------------------------------------------------------------------------------------

    def _settle(self, item: Item, made: Made) -> None:
        """On the loop, when an item is ready and when it is taken, which may fail too.

        The scheduler learns its size, or the stream ends with it.
        """
        if self._closed or (item.settled and made.error is None):
            return
        item.settled = True
        if made.error is None:
            if made.nbytes != self._estimate:  # those that are not ready count as much
                self._estimate = made.nbytes
                for other in reversed(self._items):  # the last first, as an earlier one that is granted lets it go
                    if not other.settled:
                        other.permit.resize(made.nbytes)
            if item.permit.nbytes != made.nbytes:
                item.permit.resize(made.nbytes)
        elif self._last is None or item.seq < self._last.seq:
            self._last = item
            self._reader.cancel()  # what comes before it was read already
            item.permit.release()
            while self._items and self._items[-1].seq > item.seq:
                self._items.pop().release()

    def _take(self, made: Made, waited: float) -> None:
        self._settle(self._items[0], made)
        self._items.popleft().release()
        self._fill()
        taken = self._taken
        self._taken = PrefetchedStatistics(
            taken.items + (made.error is None),
            taken.nbytes + made.nbytes,
            taken.waited_seconds + waited,
            taken.reading_seconds + made.reading,
            taken.transforming_seconds + made.transforming,
            taken.copying_seconds + made.copying,
        )

    # --- the end -------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        self._closed = True
        self._reader.cancel()
        if self._counted is not None:
            self._counted.leave()
        if self._workers is not None:
            self._workers.cancel()
        await _to_the_end(self._end())

    async def _end(self) -> None:
        try:
            await self._reader.aclose()
        finally:
            if self._workers is not None:
                await self._workers.aclose()
            if self._device is not None:
                await self._device.aclose()
            while self._items:
                item = self._items.popleft()
                item.release()
                if not item.operation.handle.done():  # a task that is not the one that left may wait for it
                    item.operation.resolve(Made(error=StopAsyncIteration()))

    def __repr__(self) -> str:
        return f"<Prefetched {self._plan.name!r}>"


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, and be cancelled only then."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    with CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None:
        task.result()
        return
    if (failed := task.exception()) is not None:
        loop.call_exception_handler({"message": "closing a prefetch failed", "exception": failed})
    raise cancelled
