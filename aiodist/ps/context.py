"""What the client and the server of one rank share: counts, buffers, and the thread for what takes long."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Done, ignore
from aiodist.backends.shm import Neighbourhood
from aiodist.backends.shm.memory import Place
from aiodist.backends.shm.neighbours import Neighbour
from aiodist.codecs import Codec
from aiodist.errors import AiodistError, PeerLost
from aiodist.handles import Progress
from aiodist.ps.coalescer import Coalescer
from aiodist.ps.pool import Pool
from aiodist.ps.rules import Rule
from aiodist.ps.settings import Policy
from aiodist.ps.wire import Way
from aiodist.streams import Staging
from aiodist.threads import JobQueue


@dataclass(frozen=True)
class ParameterServerStatistics:
    """Counts since the parameter server was opened, of this rank alone; seconds are wall-clock time."""

    pushes: int = 0
    """Issued by this rank, one for each tensor."""
    pulls: int = 0
    """Issued by this rank, one for each tensor."""
    push_bytes: int = 0
    """What this rank pushed, as tensors."""
    push_sent_bytes: int = 0
    """What left for it: less where a codec or shared memory served; heads are not counted, nor first values."""
    pull_bytes: int = 0
    """What this rank pulled, as tensors."""
    pull_received_bytes: int = 0
    """What came for it, as `push_sent_bytes`."""
    push_seconds: float = 0.0
    """From issue until the server had done what `await push` promises, summed."""
    pull_seconds: float = 0.0
    """From issue until the values were here, summed."""
    encode_seconds: float = 0.0
    """In codecs, as client and as server."""
    decode_seconds: float = 0.0
    """As `encode_seconds`."""
    applied: int = 0
    """Pushes that this rank applied to its shards, as a server; a tensor in several shards counts in each."""
    steps: int = 0
    """Versions that it made of its shards."""
    step_seconds: float = 0.0
    """In rules and server-side optimizers."""
    served: int = 0
    """Reads of its shards."""
    sent_bytes: int = 0
    """All that left this rank, as client and as server: heads, answers and first values too."""
    held_seconds: float = 0.0
    """How long requests lay here, complete, until it was their turn, summed."""
    dropped: int = 0
    """Pushes that came too late and were thrown away, of tensors that this rank leads."""
    scaled: int = 0
    """Pushes that were weighted for coming late, of tensors that this rank leads."""
    incomplete: int = 0
    """Steps of fewer pushes than the consistency asks for, of tensors that this rank leads: the other workers had left
    or died, or waited at a barrier."""
    rows: int = 0
    """Rows that there are in its parts of tables, now."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many pushes were applied so many versions after the one they were made from; of tensors this rank leads."""


LIGHT_BYTES = 256 << 10
"""Work on fewer bytes is done at once, by the thread that makes progress; more is the service thread's."""

Work = Callable[[], object]

_IDLE_SECONDS = 1e-3  # in which a thread ends that has nothing to do
_BUSY_SECONDS = 5.0  # a rule of the user's may never return


class Service:
    """One thread, begun at the first work; work runs in the order in which it was given."""

    def __init__(self, progress: Progress, name: str, flush: Callable[[], None]) -> None:
        """`flush` is called after what was done in the thread, for what `then` has put into the coalescer."""
        self._progress = progress
        self._name = name
        self._flush = flush
        self._queue: JobQueue[tuple[Work, Done] | None] = JobQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def do(self, nbytes: int, work: Work, then: Done) -> None:
        """Do `work`, on so many bytes, then `then(error)`: at once where it is light, else as `run` does."""
        if nbytes <= LIGHT_BYTES:
            then(error_of(work))
        else:
            self.run(work, then)

    def run(self, work: Work, then: Done) -> None:
        """Run `work` in the thread, then `then(error)` with the transport lock held; called with it held.

        Once closed it does neither.
        """
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._progress.offloaded += 1
        self._queue.put((work, then))

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """The loop makes the call after `seconds`, with the transport lock held, unless this is closed by then."""
        progress, due = self._progress, partial(self._due, call)
        progress.post(lambda: progress.loop.call_later(seconds, progress.start, due))

    def _due(self, call: Callable[[], object]) -> None:
        if not self._closed:
            call()
            self._flush()

    def close(self) -> None:
        """End the thread behind the work that it does just now; waits for nothing; with the transport lock held."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)

    async def ended(self) -> None:
        """Return when what the thread was at, when it was closed, is done: at most for some seconds."""
        if self._thread is not None:
            self._thread.join(_IDLE_SECONDS)
            if self._thread.is_alive():
                await asyncio.to_thread(self._thread.join, _BUSY_SECONDS)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, then = item
            error: BaseException | None = None
            if self._closed:
                work, then = _nothing, ignore
            try:
                work()
            except BaseException as raised:  # noqa: BLE001  - `then` is told of it
                error = raised
            self._progress.start_in_thread(lambda then=then, error=error: self._over(then, error))  # type: ignore[misc]
            del work, then, item, error

    def _over(self, then: Done, error: BaseException | None) -> None:
        self._progress.offloaded -= 1
        then(error)
        self._flush()


def _nothing() -> None:
    pass


def error_of(work: Work) -> Exception | None:
    """Do `work`; return what it raised, which belongs to the client that asked for it."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  - told to the client that asked
        return error
    return None


_NOWHERE = Place(0, 0)


@dataclass(eq=False, slots=True)
class Logged:
    """One push: its blocks, in the order of the servers that had them, of a code with the elements that it has."""

    number: int
    rule: int
    alpha: float
    blocks: Sequence[tuple[Tensor, int | None]]


class Log:
    """What a worker has pushed since the last checkpoint, by the names of tensors, for servers that lose what they had.

    A push counts once, also where ranks die: its client and its number name it. A checkpoint has, of each tensor and
    client, all numbers up to its *mark*. After a loss servers begin at the checkpoint, and clients push again what is
    above the mark. Every method runs with the transport lock held.
    """

    def __init__(self) -> None:
        self._pushes: dict[str, dict[int, Logged]] = {}

    def add(self, name: str, push: Logged) -> None:
        self._pushes.setdefault(name, {})[push.number] = push

    def forget(self, name: str, number: int | None = None) -> None:
        """A push was dropped, or refused; or the name is no more."""
        if number is None:
            self._pushes.pop(name, None)
        else:
            self._pushes.get(name, {}).pop(number, None)

    def saved(self, marks: Mapping[str, int]) -> None:
        """A checkpoint has tensors up to these marks."""
        for name, pushes in self._pushes.items():
            self._pushes[name] = {n: push for n, push in pushes.items() if n > marks.get(name, 0)}

    def clear(self) -> None:
        self._pushes.clear()

    def above(self, marks: Mapping[str, int]) -> list[tuple[str, Logged]]:
        """Return the pushes that are above the marks of their tensors, in the order of their numbers."""
        self.saved(marks)
        found = [(name, push) for name, pushes in self._pushes.items() for push in pushes.values()]
        return sorted(found, key=lambda each: each[1].number)


@dataclass(eq=False)
class Context:
    """One rank of a parameter server."""

    name: str
    rank: int
    servers: tuple[int, ...]
    """Ranks, in order."""
    workers: tuple[int, ...]
    world_ranks: Sequence[int]
    """The ranks' numbers in the world."""
    uids: Sequence[str]
    """Names of the ranks' clients, which they keep in other communicators."""
    log: Log | None
    """What this rank pushes, kept for servers that die; None: nothing is."""
    rules: Sequence[Rule]
    """By their numbers on the wire: the same on all ranks."""
    policy: Policy
    codec: Codec | None
    pull_codec: Codec | None
    progress: Progress
    service: Service
    pool: Pool
    near: Neighbourhood | None
    counts: defaultdict[str, Any] = field(default_factory=lambda: defaultdict(int))
    """Of `ParameterServerStatistics`, those that are counted as things happen."""
    saved: tuple[int, str] | None = None
    """How many checkpoints there were, and the folder of the last."""
    gone: dict[int, AiodistError] = field(default_factory=dict)
    """The ranks that died, and how."""
    coalescer: Coalescer = field(init=False)
    _shown: dict[int, Tensor] = field(default_factory=dict, init=False)
    _shown_numbers: count[int] = field(default_factory=count, init=False)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.counts[name] += perf_counter() - began

    def decoded(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return what a client has encoded, as a flat tensor; in any thread. ValueError where nothing is encoded."""
        if self.codec is None:
            raise ValueError("a code, and no codec: expected plain data")
        with self.timed("decode_seconds"):
            return self.codec.decode(code, dtype, numel)

    def staged(self, t: Tensor) -> tuple[Tensor, Callable[[Done], None] | None]:
        """Return what the host has of `t`: itself; or memory, and the call that copies it there from its device.

        It is copied behind what the current stream has by the time of that call.
        """
        if t.is_cpu:
            return t, None
        host, staging = self.host_for(t), Staging.of(self.progress)
        return host, partial(staging.copies, [(host, t)], torch.cuda.current_stream(t.device), ignore)

    def landing(self, host: Tensor, t: Tensor) -> Callable[[Done], None]:
        """Return the call that copies `host` to `t` on its device, likewise."""
        return partial(Staging.of(self.progress).copies, [(t, host)], torch.cuda.current_stream(t.device), ignore)

    def host_for(self, t: Tensor) -> Tensor:
        return t if t.is_cpu else Staging.of(self.progress).buffer(t.nbytes).view(t.dtype)

    def living(self) -> list[int]:
        return [rank for rank in self.servers if rank not in self.gone]

    def way_to(self, rank: int, t: Tensor, *, look: bool = True) -> tuple[Way, Place]:
        """Return how `t` gets to another rank, and where it finds it, if it may `look`: once, where that is this rank.

        That is in this rank's arena, or, for this rank itself, anywhere.
        """
        if t.nbytes <= self.coalescer.inline_bytes:
            return Way.INLINE, _NOWHERE
        if rank == self.rank:
            number = next(self._shown_numbers)
            self._shown[number] = t
            return Way.MEMORY, Place(0, number)
        near = self._neighbour(rank) if look else None
        place = None if near is None or self.near is None else self.near.locate(t)
        return (Way.MESSAGE, _NOWHERE) if place is None else (Way.MEMORY, place)

    def memory(self, rank: int, segment: int, offset: int, nbytes: int) -> Tensor:
        """Return what another rank lets us look at, flat uint8; raise BackendError for a place that it never told."""
        if rank == self.rank:
            return self._shown.pop(offset).view(torch.uint8)[:nbytes]
        near = self._neighbour(rank)
        assert near is not None
        return near.memory(Place(segment, offset), nbytes)

    def _neighbour(self, rank: int) -> Neighbour | None:
        return None if self.near is None else self.near.neighbours.get(self.world_ranks[rank])

    def ring(self, rank: int) -> None:
        """Wake the progress thread of `rank` if it shares memory with us and sleeps."""
        if (near := self._neighbour(rank)) is not None:
            near.ring()

    def lost(self, rank: int) -> AiodistError:
        known = self.gone.get(rank)
        text = f"server {rank} of parameter server {self.name!r} is gone"
        return PeerLost(f"{text}: {known.args[0] if known else 'nothing is known of it'}", lost=rank, rank=self.rank)
