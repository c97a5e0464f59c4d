"""One pass of a rank over a queue of shards: what it is handed is read on threads, and given out in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Generic, TypeVar

from aiodist.data.order import EpochOrder
from aiodist.data.queue_client import QueueClient
from aiodist.data.sharded import Shards
from aiodist.handles import Handle
from aiodist.streams import HostStream

T = TypeVar("T")


class QueuePass(Generic[T]):
    """Reads ahead of its consumer, who says of each item when it is taken: only then its records are used.

    open - ended: nothing is to be had any more - over: the consumer has taken all
         - left by the consumer: what was not taken is given back
    """

    def __init__(
        self, client: QueueClient, shards: Shards[T], order: EpochOrder, batch_size: int | None, *, wait: bool
    ) -> None:
        self._client = client
        self._shards = shards
        self._order = order
        self._batch_size = batch_size
        self._wait = wait
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

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        """Yield the items: full batches, and a short one where nothing follows for now."""
        size = self._batch_size or 1
        ready: list[T] = []
        async with AsyncExitStack() as stack:
            threads: int = getattr(self._shards, "threads", 1)
            readers = [await stack.enter_async_context(HostStream(f"shards-{i}")) for i in range(threads)]
            read = await stack.enter_async_context(aclosing(self._read(readers)))
            async for records in read:
                ready += records
                full = len(ready) - (len(ready) % size if records else 0)
                for first in range(0, full, size):
                    yield self._given_out(ready[first : first + size])
                ready = ready[full:]
            if ready:
                yield self._given_out(ready)
        self._ended = True

    def _given_out(self, batch: list[T]) -> list[T] | T:
        self._check_not_left()
        self._prepared.append(len(batch))
        return batch if self._batch_size is not None else batch[0]

    async def _read(self, readers: Sequence[HostStream]) -> AsyncGenerator[list[T], None]:
        """Yield the records of each part of a shard while each thread reads another; none where nothing follows."""
        ahead: deque[Handle[list[T]]] = deque()
        asked = self._client.take()
        while True:
            ranges = await asked
            if not ranges:
                while ahead:
                    yield await ahead.popleft()
                if self._wait:
                    yield []  # a rank that waits for others keeps no records
                ranges = await self._client.take(waits=self._wait)
                if not ranges:
                    return
            self._check_not_left()
            asked = self._client.take()  # in hand before these are used up
            for start, stop in ranges:
                for part in self._order.parts(start, stop):
                    reader = readers[part.shard % len(readers)]
                    ahead.append(reader.submit(self._shards.read, *part).detach())
                    if len(ahead) > len(readers):
                        yield await ahead.popleft()

    def _check_not_left(self) -> None:
        if self._left:
            raise RuntimeError(
                "this pass over a queue of shards was left before its end, by another pass, set_epoch(), "
                "load_state_dicts() or the close of the queue: what it had not used was given back"
            )
