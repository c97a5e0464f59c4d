"""Collectives among the ranks of a host, in the compiled core: one lane is an ordered sequence of them.

What a lane does, and how ranks meet, is described in `core/`. Here lanes are opened, and joined with those of the other
ranks: the blocks in which ranks say what they do lie in their arenas, under names that they tell one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from time import perf_counter
from zlib import crc32

from torch import dtype

from aiodist import _core
from aiodist.backends.base import Done, PeerGone, Primitive, Refused, Wanted, again, dtype_code
from aiodist.backends.shm.neighbours import Neighbour, Neighbourhood, memory_of
from aiodist.errors import BackendError, MismatchError
from aiodist.handles import Progress
from aiodist.types import ReduceOp

_STAGE_BYTES = 1 << 20
_BLOCK_BYTES = -(-_core.BLOCK_BYTES // 4096) * 4096
_NOWHERE = (0xFFFFFFFF, 0)


class Kind(IntEnum):
    """What a lane can do, as `core_kind` in core.h has it."""

    BARRIER = 0
    ALLREDUCE = 1
    REDUCE = 2
    SCAN = 3
    BROADCAST = 4
    REDUCE_SCATTER = 5
    ALLGATHER = 6
    ALLTOALL = 7


KINDS = {kind.name.lower(): kind for kind in Kind}
op_code = {op: code for code, op in enumerate(ReduceOp)}.__getitem__


class Lanes:
    """All lanes of one loop, as `Progress` polls them."""

    rings = True
    of_ranks = True

    def __init__(self, progress: Progress, near: Neighbourhood) -> None:
        self.progress = progress
        self.near = near
        self.completions = _core.Completions()
        self._unmet: list[Lane] = []
        progress.add_poller(self)
        progress.add_driven(self)
        progress.loop.add_reader(self.completions.event, self._woken)
        progress.own_files.add(self.completions.event)
        near.wake_by(self.completions.event)

    def __len__(self) -> int:
        return self.completions.pending

    @property
    def heavy(self) -> bool:
        """So much is under way that the engine does it."""
        return self.completions.heavy

    def meet(self, lane: Lane) -> None:
        """Join `lane` with those of the other ranks, now or as soon as they have made theirs."""
        if not lane.meet():
            self._unmet.append(lane)

    def poll(self, until: float = 0.0) -> bool:
        """Move what is under way on, and tell what ended; True when something did."""
        if self._unmet:
            self._unmet = [lane for lane in self._unmet if not lane.meet()]
        return self.completions.poll(until - perf_counter() if until else 0.0)

    def sleep(self) -> bool:
        """Have the loop woken when something ends; False where something has ended."""
        return not self._unmet and self.completions.sleep()

    def _woken(self) -> None:
        self.progress.last_ran = perf_counter()
        if self.completions.woken():
            self.progress.resume()

    def close(self) -> None:
        self.progress.remove_poller(self)
        self.progress.remove_driven(self)
        self.progress.loop.remove_reader(self.completions.event)
        self.progress.own_files.discard(self.completions.event)


class Lane:
    """Some ranks of this host and their operations, in order; with the transport lock held."""

    def __init__(self, lanes: Lanes, name: str, ranks: Sequence[int], rank: int, *, led: bool = False) -> None:
        """`ranks` are the world ranks in the lane's order, of which this one is number `rank`.

        All ranks submit in the same order, unless it is `led`: then the first rank chooses it, and operations that are
        under way have different keys.
        """
        self.near = near = lanes.near
        self.rank, self.size = rank, len(ranks)
        self._name = name
        self._others = {i: near.neighbours[r] for i, r in enumerate(ranks) if i != rank}
        stage_bytes = max(_STAGE_BYTES, self.size * _core.STAGE_BYTES_PER_RANK)
        self._memory = near.place(name, _BLOCK_BYTES + stage_bytes, [other.rank for other in self._others.values()])
        place = near.locate(self._memory)
        assert place is not None
        memory = memory_of(self._memory)
        self._why: list[BaseException] = []  # why it was given up
        self.core = _core.Lane(
            lanes.completions,
            near.engine,
            rank,
            self.size,
            led,
            memory[: _core.BLOCK_BYTES],
            memory[_BLOCK_BYTES:],
            place.segment,
            place.offset + _BLOCK_BYTES,
            partial(_map, self._others),
            partial(_error_of, name, self._why),
        )
        self._unmet = dict(self._others)
        self._closed = False
        lanes.meet(self)

    def meet(self) -> bool:
        """Join the lanes of those ranks that have made theirs; True when all have."""
        for rank, other in list(self._unmet.items()):
            block = other.seen(self._name, _core.BLOCK_BYTES)
            if self._closed or block is not None:
                del self._unmet[rank]
            if block is not None and not self._closed:
                self.core.join(rank, block, other.core, other.engine_doorbell)
        return not self._unmet

    def submit(self, operation: Primitive, word: int, key: int, done: Done) -> _core.LaneOperation:
        """Submit a collective of which `word` is the fingerprint; `done` is told its end, by `Lanes.poll`."""
        o = operation
        place = self.near.locate(o.t) or _NOWHERE
        count = sum(o.counts) if o.kind == "allgather" else o.t.numel()
        return self.core.submit(
            KINDS[o.kind],
            dtype_code(o.t.dtype),
            op_code(o.op),
            o.root,
            word,
            key,
            o.t.data_ptr(),
            o.out.data_ptr(),
            count,
            o.counts or None,
            o.received or None,
            *place,
            done,
            (o.t, o.out),
        )

    @property
    def brought(self) -> tuple[int, int]:
        """How many bytes of tensors were submitted that lay in the arena, and how many elsewhere."""
        return self.core.arena_bytes, self.core.ordinary_bytes

    def compare(self, word: int, done: Done) -> _core.LaneOperation:
        """Submit what moves nothing: it ends when all ranks have, or with `MismatchError`."""
        return self.core.submit(Kind.BARRIER, 1, 0, 0, word, 0, 0, 0, 0, None, None, *_NOWHERE, done, None)

    def refuse(self, key: int) -> None:
        """Take no part any more in operations of `key`: what has not been met ends with `Refused` on all ranks.

        All ranks must do so: what the first rank has not submitted waits on the others. Two that do so at once miss
        nothing if each that hears of it from another one does it again.
        """
        self.core.refuse(key)

    def close(self, error: BaseException) -> None:
        """Touch nobody's memory any more: what is under way ends with `error`."""
        if self._closed:
            return
        self._closed = True
        self._why.append(error)
        self.core.abandon()
        # What others still have to see of it stays until they look no more either.
        # So does what they may still work on of operations that were given up, which the lane keeps.
        self.near.leave(self._name, [other.rank for other in self._others.values()], (self._memory, self.core))
        del self._memory

    def release(self) -> None:
        """Have nobody drive it any more: all ends are told."""
        self.core.close()


def _map(others: Mapping[int, Neighbour], rank: int, segment: int) -> None:
    """Map a segment of the memory of `rank`, which the core asks for."""
    others[rank].listen()
    others[rank].mapped(segment)


def _error_of(name: str, why: list[BaseException], state: int, rank: int) -> BaseException:
    """Return why an operation of lane `name` did not end well: because of `rank`."""
    if state == _core.DIFFERENT:
        return MismatchError(f"ranks disagree on an operation in shared memory: rank {rank} brought another one")
    if state == _core.REFUSED:
        return Refused(f"rank {rank} takes no part in an operation of {name!r}")
    if why:
        return again(why[0])
    if state == _core.ABANDONED:
        return PeerGone(f"rank {rank} gave the shared memory of {name!r} up")
    return BackendError(f"the memory that rank {rank} shares for {name!r} makes no sense: it was overwritten")


class ShmNative:
    """The lanes of some ranks of this host; with the transport lock held.

    What a communicator issues goes through `ordered`, in the order of issue. The steps of its operations, which may
    come in another order on each rank, go through a lane whose order the first rank chooses.
    """

    finishes = True
    in_order = False
    recallable = True

    def __init__(self, lanes: Lanes, name: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are the world ranks in the communicator's order, of which this one is number `rank`."""
        self.size = len(ranks)
        self._lanes = lanes
        self._place = ranks, rank
        self._name = name
        self._lanes_open: list[Lane] = []
        self.ordered = self.open("issued")
        self._led: Lane | None = None
        self._closed: BaseException | None = None
        self._before = 0, 0  # of lanes that are closed

    def open(self, what: str, *, led: bool = False) -> Lane:
        """Return one more lane of these ranks, which all of them open; see `Lane`."""
        lane = Lane(self._lanes, f"{self._name}: {what}", *self._place, led=led)
        self._lanes_open.append(lane)
        return lane

    @property
    def brought(self) -> tuple[int, int]:
        """How many bytes of tensors were submitted that lay in the arena, and how many elsewhere."""
        arena, ordinary = zip(self._before, *[lane.brought for lane in self._lanes_open], strict=True)
        return sum(arena), sum(ordinary)

    @property
    def lent_bytes(self) -> int:
        """How many bytes this rank has copied so far for the others to read, in the lanes that are open."""
        return sum(lane.core.lent_bytes for lane in self._lanes_open)

    def supports(self, wanted: Wanted) -> bool:
        """Return True for each of its collectives: it takes every dtype and operator."""
        return wanted.operation in KINDS

    def start(self, operation: Primitive, key: int, done: Done) -> None:
        o = operation
        if self._closed is not None:
            done(again(self._closed))
            return
        # What ranks of an alltoall send, and how much they have in all, only two of them know.
        counts = () if o.kind == "alltoall" else tuple(o.counts)
        numel = 0 if o.kind in ("allgather", "alltoall") else o.t.numel()
        facts = (o.kind, dtype_code(o.t.dtype), op_code(o.op), o.root, numel, counts)
        self.steps().submit(o, crc32(repr(facts).encode()), key, done)

    def refuse(self, key: int) -> None:
        """Take no part any more in steps that have `key`, or those above it that are for parts; see `Lane.refuse`."""
        if self._closed is None:
            self.steps().refuse(key)

    def steps(self) -> Lane:
        """Return the lane of what is a step of a program, opened at its first use."""
        if self._led is None:
            self._led = self.open("steps", led=True)
        return self._led

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> None:
        """Return None: what goes from the call on is issued in the compiled core."""

    def give_up(self, error: BaseException) -> None:
        """Touch nobody's memory any more: what is under way ends with `error`, now."""
        if self._closed is None:
            self._closed = error
            for lane in self._lanes_open:
                lane.close(error)
            self._lanes.completions.tell()
            self._before = self.brought
            while self._lanes_open:
                self._lanes_open.pop().release()
