"""One pass of a rank over a queue of shards: what it is handed is read on a thread, and given out in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiodist.data.order import EpochOrder, Part
from aiodist.data.queue_client import QueueClient, Ranges
from aiodist.data.sharded import Expecting, Shards
from aiodist.handles import Handle
from aiodist.streams import HostStream

T = TypeVar("T")

_AHEAD = 1  # part that the thread reads while the loop is busy with another: what is in hand is in no other rank's


@dataclass(frozen=True)
class PassTerms(Generic[T]):
    """What a pass reads, and how."""

    shards: Shards[T]
    order: EpochOrder
    batch_size: int | None
    wait: bool


class QueuePass(Generic[T]):
    """Reads ahead of its consumer, who says of each item when it is taken: only then its records are used.

    open - ended: nothing is to be had any more - over: the consumer has taken all
         - left: what was not taken is given back
    """

    def __init__(self, client: QueueClient, terms: PassTerms[T]) -> None:
        self._client = client
        self._terms = terms
        self._prepared: deque[int] = deque()
        """The numbers of records in each item that was given out and not taken."""
        self._ended = False
        self._left = False

    @property
    def over(self) -> bool:
        """Whether its consumer has taken all there was."""
        return self._ended and not self._prepared and not self._left

    def taken(self) -> None:
        """Note that the consumer has the next item; raises `RuntimeError` when that was given back."""
        self._check_not_left()
        self._client.use(self._prepared.popleft())

    def leave(self) -> None:
        """Give back what the consumer has not taken; again: nothing happens."""
        if not self._left and not self.over:
            self._left = True
            self._client.hand_back()

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._items()

    async def _items(self) -> AsyncGenerator[Any, None]:
        """Yield the items."""
        try:
            async with (
                HostStream("shards") as reader,
                aclosing(self._parts(reader)) as parts,
                aclosing(self._read(parts, reader)) as read,
                aclosing(self._batches(read)) as batches,
            ):
                async for batch in batches:
                    self._check_not_left()
                    self._prepared.append(len(batch))
                    yield batch if self._terms.batch_size is not None else batch[0]
            self._ended = True
        finally:
            if not self._ended:
                self.leave()

    async def _batches(self, read: AsyncIterator[list[T]]) -> AsyncGenerator[list[T], None]:
        """Yield full batches, and a short one where nothing follows for now."""
        size = self._terms.batch_size or 1
        ready: list[T] = []
        async for records in read:
            ready += records
            full = len(ready) - len(ready) % size
            for first in range(0, full, size):
                yield ready[first : first + size]
            ready = ready[full:]
            if ready and not records:
                yield ready
                ready = []
        if ready:
            yield ready

    async def _read(self, parts: AsyncIterator[Part | None], reader: HostStream) -> AsyncGenerator[list[T], None]:
        """Yield the records of each part while the thread reads the next ones; an empty list for None."""
        ahead: deque[Handle[list[T]]] = deque()
        async for part in parts:
            if part is not None:
                ahead.append(reader.submit(self._terms.shards.read, *part).detach())
            while ahead and (part is None or len(ahead) > _AHEAD):
                yield await ahead.popleft()
            if part is None:
                yield []
        while ahead:
            yield await ahead.popleft()

    async def _parts(self, reader: HostStream) -> AsyncGenerator[Part | None, None]:
        """Yield what is handed to this rank; None before it waits for what other ranks hold."""
        asked = self._client.take()
        expected = False
        while True:
            ranges = await asked
            if not ranges:
                if self._terms.wait:
                    yield None  # a rank that waits for others keeps no records
                ranges = await self._client.take(waits=self._terms.wait)
                if not ranges:
                    return
            self._check_not_left()
            if not expected:
                self._expect(ranges, reader)
            asked = self._client.take()  # in hand before these are used up
            expected = False
            for start, stop in ranges:
                for part in self._terms.order.parts(start, stop):
                    yield part
                    if not expected and asked.done():
                        self._expect(await asked, reader)
                        expected = True

    def _expect(self, ranges: Ranges, reader: HostStream) -> None:
        """Have shards that are in hand prepared, where they can be."""
        if isinstance(shards := self._terms.shards, Expecting):
            coming = [shard for start, stop in ranges for shard in self._terms.order.shards(start, stop)]
            reader.submit(shards.expect, coming).detach()

    def _check_not_left(self) -> None:
        if self._left:
            raise RuntimeError(
                "this pass over a queue of shards was left before its end, by another pass, set_epoch(), "
                "load_state_dicts() or the close of the queue: what it had not used was given back"
            )
