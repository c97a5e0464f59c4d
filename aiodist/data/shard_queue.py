"""`ShardQueue`: ranks take records as they use them, each record once an epoch."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.watchdog import Watch
from aiodist.control import disagreement
from aiodist.data.queue_machine import QueueMachine, Range, merged, total
from aiodist.data.queue_messages import Lap, QueueClient, QueueServer, Wires
from aiodist.data.shards import EpochOrder, Part, Shards, Shuffle, check_order, checked_int
from aiodist.errors import AiodistError, CommunicatorAborted, CommunicatorClosed, MismatchError, PeerError
from aiodist.handles import Handle, Progress
from aiodist.handles.calls import located
from aiodist.streams import HostStream
from aiodist.world.agree import agree

T = TypeVar("T")


class _Agreed(NamedTuple):
    """Records of an epoch that all ranks together have used after more than `step` steps."""

    step: int
    epoch: int
    used: list[Range]


class ShardQueue(Generic[T]):
    """A queue of the records of `shards`: each rank takes the next records when it has used its last ones.

    ```python
    queue = data.ShardQueue(data.IndexShards(dataset), coll, batch_size=32, shuffle=True)
    for epoch in range(epochs):
        queue.set_epoch(epoch)
        async with net.join(), data.prefetch(queue, transform=load) as batches:
            async for x, y in batches: ...
    ```
    All ranks of `coll` make it, with the same shards, `shuffle` and `seed`, and as their k-th queue on `coll`. It is an
    async iterable of lists of `batch_size` records, or of single records; an iteration is a *pass*. Over all ranks each
    record comes once in an epoch. A slow rank takes fewer, so passes differ in length: put steps that all ranks make
    together inside `net.join()`. The next records are asked for and read on a thread while the last ones are used. A
    rank's last batch may be short.

    A record counts as used when the pass, or the `prefetch` over it, has given it to the consumer. When a pass is left
    before its end, another one begins, or the communicator closes, the rank gives its unused records back, and other
    ranks get them. If a rank is lost, other ranks get the records that it has not reported as used. A pass ends when
    the queue is empty. With `wait=True` it ends later, when the other ranks have used their last records or given them
    back. Use that for ranks that make no step together, as with a parameter server; others would deadlock.

    With `shuffle=True` seed and epoch give an order of shards, and of the records in each; with "shards" an order of
    shards. Records of a batch then come from few shards.

    Args:
        shards: the records, such as `IndexShards(dataset)`.
        coll: the ranks that share them.
        batch_size: records of a batch; None gives single records.
        shuffle: True, False or "shards".
        seed: seed of the orders.
        wait: True lets a pass wait for the last records of other ranks.

    Raises:
        ValueError: for a wrong argument.
        CommunicatorError: if `coll` is closed.
        RuntimeError: in another thread; in a pass, in an epoch whose pass has ended on this rank.
        MismatchError: in a pass, if ranks differ in shards, order, epoch or loaded states.
        PeerLost: in a pass, if the first rank is lost: it keeps the queue.
        OperationTimeout: in a pass, if an answer takes longer than `coll.timeout`.
        Exception: in a pass, what reading raises.

    Cost: a message to the first rank and back (0.5 ms, while records are used) for each hand-out, and one message every
    20 ms while records are used.

    Source: ElasticDL's dynamic data sharding (github.com/sql-machine-learning/elasticdl,
    docs/designs/dynamic_data_sharding.md); sizes of hand-outs: guided self-scheduling, doi:10.1109/TC.1987.5009495.
    """

    def __init__(
        self,
        shards: Shards[T],
        coll: Communicator,
        *,
        batch_size: int | None = None,
        shuffle: Shuffle = False,
        seed: int = 0,
        wait: bool = False,
    ) -> None:
        check_order(batch_size, shuffle, seed)
        parts_of(coll).dispatcher.check_on_loop("ShardQueue()")
        self._shards = shards
        self._batch_size = batch_size and int(batch_size)  # numbers of numpy cannot travel
        self._shuffle: Shuffle = "shards" if shuffle == "shards" else bool(shuffle)
        self._seed = int(seed)
        self._wait = wait
        self._sizes = [checked_int("size", size) for size in shards.sizes]
        self._settings: dict[str, Any] = {
            "records": sum(self._sizes),
            "shards": len(self._sizes),
            "sizes_crc32": zlib.crc32(np.asarray(self._sizes, "<i8").tobytes()),
            "shuffle": self._shuffle,
            "seed": self._seed,
        }
        self._before: list[Range] = []
        """Records of this epoch that were used before the state was loaded."""
        self._pass: QueuePass[T] | None = None
        self._agreed: list[_Agreed] = []
        """Records that all ranks together had used, in order, as far back as `rebind` may need."""
        self._bound_to: Communicator | None = None
        """Communicator of the last `rebind`."""
        self._attach(coll)

    def _attach(self, coll: Communicator) -> None:
        parts = parts_of(coll)
        self._coll = coll
        self._progress = Progress.current()
        self._closed = False
        self._failure: AiodistError | None = None
        wires = Wires(parts.registry.channel, parts.dispatcher.ranks, parts.registry.next_name(coll, "shards"))
        self.name = wires.name
        """Name in errors, equal on all ranks."""
        terms = ", ".join(f"{what}={value!r}" for what, value in self._settings.items())
        report = Watch.of(Progress.current(), wires.channel).report.after
        self._client = QueueClient(wires, terms, coll.name, timeout=coll.timeout, report=report)
        self._over = asyncio.Event()
        """Set on the first rank when all ranks have closed the queue, or the queue ends without them."""
        self._server: QueueServer | None = None
        if coll.rank == 0:
            over = partial(Progress.current().post, self._over.set)
            self._server = QueueServer(wires, terms, self._machine, over)
        parts.dispatcher.lifetime.on_lost.append(self._lost)
        parts.dispatcher.lifetime.on_abort.append(self._aborted)
        parts_of(coll).registry.members.admit(coll, self)

    # --- epochs ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch; with the seed it determines the order."""
        return self._client.lap.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, at least 0, with all its records; every rank must call it, each when it gets there.

        An open pass gives its unused records back. If `epoch` is the present one, the queue continues: the next pass
        gets the records that others have given back since.
        """
        epoch = checked_int("epoch", epoch)
        self._check_loop()
        self._leave_pass()
        lap = self._client.lap
        if epoch != lap.epoch:
            self._begin(Lap(lap.number + 1, epoch, 0), [])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the epoch, in JSON's types; `load_state_dicts` takes those of all ranks.

        `used` are the records that this rank's consumer has been given when it calls this, so call it between two
        steps; on the first rank also those that were used before a state was loaded. Every rank saves its own, as in
        `aiodist.save(..., per_rank=[queue])`.
        """
        used = merged(self._before if self._coll.rank == 0 else (), self._client.used)
        return {**self._settings, "epoch": self.epoch, "used": [list(each) for each in used]}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], /) -> None:
        """Continue from the `states` of all ranks, on any number of ranks; every rank must load the same list.

        Raises `ValueError`, with nothing changed, for states of other data, of another order or of different epochs.
        """
        self._check_loop()
        for state in states:
            self._check_state(state)
        epochs = [state["epoch"] for state in states]
        if len(set(epochs)) != 1:
            raise ValueError(f"states of ranks in epochs {epochs}: expected those of one epoch")
        each = sorted(Range(*pair) for state in states for pair in state["used"])
        count = self._settings["records"]
        apart = all(before.stop <= after.start for before, after in pairwise(each))
        if not apart or any(not 0 <= start < stop <= count for start, stop in each):
            raise ValueError(f"states with used={each}: expected ranges of {count} records, each record once")
        self._leave_pass()
        self._continue(self._client.lap.number + 1, epochs[0], merged(each))

    # --- other ranks -----------------------------------------------------------------------------------------

    @located
    async def agree(self, step: int) -> int:
        """Return the number of records that all ranks have been given since their last call in this epoch.

        For ranks that make their steps together, in an elastic world. All ranks call it before each step with the
        number of steps made so far, also a rank without more records. 0 means that the epoch has ended. So each rank
        knows the records that a rank had used before it died. Raises `MismatchError` if ranks are in different epochs.
        Cost: an `allgather_object`.
        """
        checked_int("step", step)
        self._check_loop()
        told = await agree(self._coll, f"queue {self.name!r}", self._client.used, same={"epoch": self.epoch})
        used = merged(self._before, *((Range(*each) for each in ranges) for ranges in told))
        last = self._agreed[-1] if self._agreed else None
        before = last.used if last is not None and last.epoch == self.epoch else self._before
        kept = max((i for i, agreed in enumerate(self._agreed) if agreed.step < step), default=0)
        self._agreed = [*self._agreed[kept:], _Agreed(step, self.epoch, used)]
        return total(used) - total(before)

    @located
    async def rebind(self, coll: Communicator, step: int | None = None) -> None:
        """Continue on another communicator, such as the world that `shrink` or `grow` has returned.

        Every rank of `coll` calls it, also a rank that joins, after it has made its queue there. A second call does
        nothing. An open pass ends, and the unused records of the epoch go to the ranks of `coll`.

        Args:
            coll: the new communicator.
            step: the number of steps whose results the ranks have. Records given out after the last `agree` before that
                step count as not used, those of dead ranks too: none is lost or used twice. With None, records count
                as used if a rank of `coll` was given them, or if a lost rank reported them to the first rank and that
                rank is still there.

        Raises:
            PeerError: if another rank is lost; nothing has changed, so call it again.
            MismatchError: on all ranks, if they are in different epochs, or at steps that were not agreed.
        """
        self._check_loop()
        if coll is self._bound_to and not self._closed:
            return
        self._leave_pass()
        known = self._known()
        if coll is not self._coll:
            await self.aclose()
            self._attach(coll)
            self._begin(Lap(0, known.epoch, 0), known.used)
        if step is not None:
            mine = next((agreed for agreed in reversed(self._agreed) if agreed.step < step), None)
        else:
            mine = known if known.used else None
        fact = self._client.lap.number, self.epoch, None if mine is None else (mine.epoch, mine.used)
        told = await agree(coll, f"queue {self.name!r}", fact)
        found = [one for *_, one in told if one is not None]
        number, epoch = max(number for number, *_ in told), max(epoch for _, epoch, _ in told)
        if found:
            epoch = found[0][0]
            if any(one[0] != epoch or (step is not None and one != found[0]) for one in found):
                agreed = ["nothing" if one is None else f"{one[1]} of epoch {one[0]}" for *_, one in told]
                raise MismatchError(disagreement(f"the used records of queue {self.name!r}", agreed))
        used = merged(*((Range(*each) for each in ranges) for _, ranges in found))
        self._continue(number + 1, epoch, used)
        self._bound_to = coll

    def _known(self) -> _Agreed:
        told = self._server.used(self._client.lap) if self._server is not None else []
        return _Agreed(-1, self.epoch, merged(self._before, self._client.used, told))

    def _continue(self, number: int, epoch: int, used: list[Range]) -> None:
        """Begin lap `number` with a state that is the same on all ranks."""
        self._begin(Lap(number, epoch, zlib.crc32(repr(used).encode())), used)
        self._agreed = [_Agreed(-1, epoch, used)]

    def _begin(self, lap: Lap, before: list[Range]) -> None:
        self._before = before
        self._client.begin(lap, before)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        for what, mine in self._settings.items():
            if state.get(what) != mine:
                raise ValueError(f"a state with {what}={state.get(what)!r}: expected {mine!r}, as here")
        checked_int("epoch", state["epoch"])

    # --- passes ----------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._one_by_one()

    async def _one_by_one(self) -> AsyncGenerator[Any, None]:
        """Count each item as used when it is given to the consumer."""
        opened = self.counted_pass()
        try:
            async with aclosing(aiter(opened)) as items:
                async for item in items:
                    opened.taken()
                    yield item
        finally:
            opened.leave()

    def counted_pass(self) -> QueuePass[T]:
        """Begin a pass whose consumer reports taken items itself (`prefetch`)."""
        self._check_loop()
        if self._pass is not None and self._pass.over:
            raise RuntimeError(f"{self}: the pass over epoch {self.epoch} has ended: call set_epoch() before another")
        self._leave_pass()
        order = EpochOrder(self._sizes, self._shuffle, self._seed, self.epoch)
        self._pass = QueuePass(self._client, self._shards, order, self._batch_size, self._wait)
        return self._pass

    def _check_loop(self) -> None:
        self._progress.check_here(f"queue {self.name!r}")

    def _leave_pass(self) -> None:
        if self._pass is not None:
            self._pass.leave()
            self._pass = None

    def _machine(self, epoch: int, used: Iterable[Range]) -> QueueMachine:
        """Return the machine of an epoch (first rank, any thread)."""
        ends = EpochOrder(self._sizes, self._shuffle, self._seed, epoch).ends
        return QueueMachine(ends, self._coll.size, self._batch_size or 1, used)

    # --- the end ---------------------------------------------------------------------------------------------

    @located
    async def aclose(self) -> None:
        """Give unused records back and close the queue. Collective: the first rank waits for all others.

        The communicator's close does this too. A second call does nothing.
        """
        self._check_loop()
        if self._closed:
            return
        self._closed = True
        self._leave_pass()
        self._client.close(CommunicatorClosed(f"{self.name} is closed", comm=self._coll.name), orderly=True)
        if self._server is not None:
            await self._over.wait()
        if self._failure is not None:
            raise self._failure
        self._forget()

    close = aclose
    """See `Guest`."""

    def abort(self) -> None:
        """End without waiting for anything; see `Guest`."""
        self._end(CommunicatorAborted(f"{self.name} was aborted: its communicator ended", comm=self._coll.name))

    def _end(self, error: AiodistError) -> None:
        """End immediately; a wait in `aclose` raises `error`."""
        self._closed = True
        self._failure = error
        self._client.close(error, orderly=False)
        self._over.set()
        self._forget()

    def _forget(self) -> None:
        if self._server is not None:
            self._server.unsubscribe()
        dispatcher = parts_of(self._coll).dispatcher
        parts_of(self._coll).registry.members.discard(self._coll, self)
        for told, mine in ((dispatcher.lifetime.on_lost, self._lost), (dispatcher.lifetime.on_abort, self._aborted)):
            if mine in told:
                told.remove(mine)  # type: ignore[arg-type]

    def _lost(self, rank: int, error: AiodistError) -> None:
        if rank <= 0:
            self._end(error)
        elif self._server is not None:
            self._server.lose(rank)

    def _aborted(self, error: AiodistError) -> None:
        if not isinstance(error, PeerError):  # after which the queue continues with the remaining ranks
            self._end(error)

    def __repr__(self) -> str:
        waits = self._closed and self._server is not None and not self._over.is_set()
        present = f", which ranks {self._server.present} have not closed" if waits and self._server else ""
        return f"<ShardQueue {self.name!r}{present}>"


@dataclass(eq=False)
class QueuePass(Generic[T]):
    """Reads ahead of its consumer, which reports each taken item. Records count as used then.

    open - ended: no more items - over: the consumer has taken all
         - left by the consumer: items that were not taken are returned
    """

    _client: QueueClient
    _shards: Shards[T]
    _order: EpochOrder
    _batch_size: int | None
    _wait: bool
    _prepared: deque[int] = field(default_factory=deque)
    """Number of records in each item that was yielded and not taken."""
    _ended: bool = False
    _left: bool = False

    @property
    def over(self) -> bool:
        """True if the consumer has taken all items."""
        return self._ended and not self._prepared and not self._left

    def taken(self) -> None:
        """Count the next item as taken; raises `RuntimeError` if its records were returned."""
        self._check_not_left()
        self._client.use(self._prepared.popleft())

    def leave(self) -> None:
        """Return records that the consumer has not taken. A second call does nothing."""
        if not self._left and not self.over:
            self._left = True
            self._client.hand_back()

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        """Yield full batches, and a short one if no more records are available now."""
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
        """Yield the records of each part of a shard while other parts are read, or [] before a wait for records."""
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
                    ahead.append(reader.submit(self._records, part).detach())
                    if len(ahead) > len(readers):
                        yield await ahead.popleft()

    def _records(self, part: Part) -> list[T]:
        found = list(self._shards.read(*part))
        if len(found) != len(part.within):
            raise ValueError(f"shard {part.shard} gave {len(found)} records: expected {len(part.within)}, as asked for")
        return found

    def _check_not_left(self) -> None:
        if self._left:
            raise RuntimeError(
                "this pass over a queue of shards was left before its end, by another pass, set_epoch(), "
                "load_state_dicts() or the close of the queue: what it had not used was given back"
            )
