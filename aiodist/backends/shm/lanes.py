"""Collectives among the ranks of a host, in the compiled core. A lane is an ordered sequence of collectives.

`core/` describes the lanes. This module opens lanes and joins these with the lanes of the other ranks. Each rank has a
block for its state in its arena. The rank sends the name and place of the block to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from time import perf_counter
from zlib import crc32

from torch import dtype

from aiodist import _core
from aiodist.backends.base import Done, PeerGone, Primitive, Stopped, Wanted, again, dtype_code
from aiodist.backends.shm.neighbours import Neighbour, Neighbourhood, memory_of
from aiodist.errors import BackendError, MismatchError
from aiodist.handles import Progress
from aiodist.types import ReduceOp

_STAGE_BYTES = 1 << 20
_BLOCK_BYTES = -(-_core.BLOCK_BYTES // 4096) * 4096
_NOWHERE = (0xFFFFFFFF, 0)


class LaneKind(IntEnum):
    """Operations of a lane, equal to `core_kind` in core.h."""

    BARRIER = 0
    ALLREDUCE = 1
    REDUCE = 2
    SCAN = 3
    BROADCAST = 4
    REDUCE_SCATTER = 5
    ALLGATHER = 6
    ALLTOALL = 7


KINDS = {kind.name.lower(): kind for kind in LaneKind}
op_code = {op: code for code, op in enumerate(ReduceOp)}.__getitem__


class Lanes:
    """All lanes of one loop, a poller of `Progress`."""

    rings = True
    of_ranks = True

    def __init__(self, progress: Progress, near: Neighbourhood) -> None:
        self.progress = progress
        self.near = near
        self.completions = _core.Completions(near.doorbell)
        self._unmet: list[ShmLane] = []
        progress.add_poller(self)
        progress.driven.append(self)
        progress.loop.add_reader(self.completions.event, self._woken)
        progress.own_files.add(self.completions.event)
        near.wake_by(self.completions.event)

    def __len__(self) -> int:
        return self.completions.pending

    @property
    def heavy(self) -> bool:
        """True if the engine, a thread of the core, moves the bytes in flight."""
        return self.completions.heavy

    def meet(self, lane: ShmLane) -> None:
        """Join `lane` with the lanes of the other ranks when those lanes are open."""
        if not lane.meet():
            self._unmet.append(lane)

    def poll(self, until: float = 0.0) -> bool:
        """Advance the operations and call the callbacks of finished ones. Return True if one finished."""
        if self._unmet:
            self._unmet = [lane for lane in self._unmet if not lane.meet()]
        return self.completions.poll(until - perf_counter() if until else 0.0)

    def sleep(self) -> bool:
        """Request a wake-up of the loop at the next end of an operation. Return False if the loop must poll instead."""
        return not self._unmet and self.completions.sleep()

    def _woken(self) -> None:
        self.progress.last_ran = perf_counter()
        if self.completions.woken():
            self.progress.resume()

    def close(self) -> None:
        self.progress.remove_poller(self)
        self.progress.driven.remove(self)
        self.progress.loop.remove_reader(self.completions.event)
        self.progress.own_files.discard(self.completions.event)


class ShmLane:
    """An ordered sequence of operations among some ranks of this host (transport lock held)."""

    def __init__(self, lanes: Lanes, name: str, ranks: Sequence[int], rank: int, *, led: bool = False) -> None:
        """`ranks` are the world ranks in the lane's order. `rank` is the index of this rank.

        All ranks submit in the same order unless the lane is `led`. In a led lane the first rank chooses the order of
        the operations, which have different keys.
        """
        self.near = near = lanes.near
        self.rank, self.size = rank, len(ranks)
        self._name = name
        self._completions = lanes.completions
        self._others = {i: near.neighbours[r] for i, r in enumerate(ranks) if i != rank}
        stage_bytes = max(_STAGE_BYTES, self.size * _core.STAGE_BYTES_PER_RANK)
        self._memory = near.place(name, _BLOCK_BYTES + stage_bytes, [other.rank for other in self._others.values()])
        place = near.locate(self._memory)
        assert place is not None
        memory = memory_of(self._memory)
        self._cause: list[BaseException] = []  # the error that closed the lane, if any
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
            partial(_error_of, name, self._cause),
        )
        self._unmet = dict(self._others)
        self._closed = False
        lanes.meet(self)

    def meet(self) -> bool:
        """Join the lanes that other ranks have opened. Return True if all lanes are joined."""
        for rank, other in list(self._unmet.items()):
            block = other.named_memory(self._name, _core.BLOCK_BYTES)
            if self._closed or block is not None:
                del self._unmet[rank]
            if block is not None and not self._closed:
                self.core.join(rank, block, other.core, other.engine_doorbell)
        return not self._unmet

    def submit(self, operation: Primitive, word: int, key: int, done: Done) -> _core.LaneOperation:
        """Submit a collective with the fingerprint `word`. `Lanes.poll` calls `done` at the end."""
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
    def submitted_bytes(self) -> tuple[int, int]:
        """Bytes of the submitted tensors in the arena and outside."""
        return self.core.arena_bytes, self.core.ordinary_bytes

    def compare(self, word: int, done: Done) -> _core.LaneOperation:
        """Submit a barrier, which fails with `MismatchError` unless all ranks have the same `word`."""
        return self.core.submit(LaneKind.BARRIER, 1, 0, 0, word, 0, 0, 0, 0, None, None, *_NOWHERE, done, None)

    def call_ended(self) -> None:
        """Call `done` of the operations that have ended, in all lanes of the loop.

        Does nothing inside such a call of `done`, since other operations have ended before.
        """
        if not self._completions.telling:
            self._completions.tell()

    def stop(self, key: int) -> None:
        """Take no further part in operations of `key`.

        Operations that not all ranks have joined end with `Stopped` on all ranks. All ranks must make this call, since
        an operation that the first rank has not submitted waits on the others. After two calls at the same time, each
        rank that learns of the other call must call again.
        """
        self.core.stop(key)

    def close(self, error: BaseException) -> None:
        """Stop using other ranks' memory: operations in flight end with `error`."""
        if self._closed:
            return
        self._closed = True
        self._cause.append(error)
        self.core.abandon()
        # Other ranks may still read the block and the tensors of aborted operations. Both are kept until the others
        # leave.
        self.near.leave(self._name, [other.rank for other in self._others.values()], (self._memory, self.core))
        del self._memory

    def release(self) -> None:
        """Detach the lane from the engine, after the callbacks of all its operations."""
        self.core.close()


def _map(others: Mapping[int, Neighbour], rank: int, segment: int) -> None:
    """Map a segment of the memory of `rank` for the core."""
    others[rank].listen()
    others[rank].mapped(segment)


def _error_of(name: str, cause: list[BaseException], state: int, rank: int) -> BaseException:
    """Return the error of a failed operation of lane `name`, which `rank` caused."""
    if state == _core.DIFFERENT:
        return MismatchError(f"ranks disagree on an operation in shared memory: rank {rank} issued another one")
    if state == _core.STOPPED:
        return Stopped(f"rank {rank} takes no part in an operation of {name!r}")
    if cause:
        return again(cause[0])
    if state == _core.ABANDONED:
        return PeerGone(f"rank {rank} has left the shared memory of {name!r}")
    return BackendError(f"shared memory of rank {rank} for {name!r} is corrupted: it was overwritten")


class ShmNative:
    """The lanes of some ranks of this host (transport lock held).

    The operations of a communicator use the lane `ordered`, in the order of issue. Steps of programs may come in a
    different order on each rank, so they use a lane whose order the first rank chooses.
    """

    finishes = True
    in_order = False
    recallable = True

    def __init__(self, lanes: Lanes, name: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are the world ranks in the communicator's order. `rank` is the index of this rank."""
        self.size = len(ranks)
        self._lanes = lanes
        self._place = ranks, rank
        self._name = name
        self._lanes_open: list[ShmLane] = []
        self.ordered = self.open("issued")
        self._led: ShmLane | None = None
        self._closed: BaseException | None = None
        self._before = 0, 0  # bytes submitted to closed lanes

    def open(self, what: str, *, led: bool = False) -> ShmLane:
        """Open another lane, as all of these ranks do (see `ShmLane`)."""
        lane = ShmLane(self._lanes, f"{self._name}: {what}", *self._place, led=led)
        self._lanes_open.append(lane)
        return lane

    @property
    def submitted_bytes(self) -> tuple[int, int]:
        """Bytes of the submitted tensors in the arena and outside."""
        arena, ordinary = zip(self._before, *[lane.submitted_bytes for lane in self._lanes_open], strict=True)
        return sum(arena), sum(ordinary)

    @property
    def lent_bytes(self) -> int:
        """Bytes that this rank has copied for the others to read, in the open lanes."""
        return sum(lane.core.lent_bytes for lane in self._lanes_open)

    def supports(self, wanted: Wanted) -> bool:
        """Return True for the collectives of lanes, with every dtype and operator."""
        return wanted.operation in KINDS

    def start(self, operation: Primitive, key: int, done: Done) -> None:
        o = operation
        if self._closed is not None:
            done(again(self._closed))
            return
        # Only two ranks know the size of each block of an alltoall, so the counts are not compared.
        counts = () if o.kind == "alltoall" else tuple(o.counts)
        numel = 0 if o.kind in ("allgather", "alltoall") else o.t.numel()
        facts = (o.kind, dtype_code(o.t.dtype), op_code(o.op), o.root, numel, counts)
        self.steps().submit(o, crc32(repr(facts).encode()), key, done)

    def stop(self, key: int) -> None:
        """Take no further part in the steps of an operation, with `key` and the next keys (see `ShmLane.stop`)."""
        if self._closed is None:
            self.steps().stop(key)

    def steps(self) -> ShmLane:
        """Return the lane for steps of programs, opened at first use."""
        if self._led is None:
            self._led = self.open("steps", led=True)
        return self._led

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> None:
        """Return None, since the compiled core issues these allreduces."""

    def abort(self, error: BaseException) -> None:
        """Stop using other ranks' memory: operations in flight end with `error` before this returns."""
        if self._closed is None:
            self._closed = error
            for lane in self._lanes_open:
                lane.close(error)
            self._lanes.completions.tell()
            self._before = self.submitted_bytes
            while self._lanes_open:
                self._lanes_open.pop().release()
