"""Runs a schedule (`aiodist.schedules`) on tensors, over an endpoint's messages.

Each lane is a program with a tag of its own, so that lanes go on independently of one another. What arrives to be
combined goes to scratch first, as much as the receives of one step take.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Primitive, Wanted
from aiodist.backends.inplace import copy
from aiodist.collectives.arithmetic import combine
from aiodist.collectives.choice.table import USUAL_LIMITS
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.lockstep import Apart
from aiodist.handles.kernel import Program, Transfer, together, transfers
from aiodist.schedules import SCHEDULES, Blocks, Copy, Recv, Schedule, Send, Step
from aiodist.types import ReduceOp

LANE_TAGS = 1 << 22
"""Between the tags of one lane and the next: above those of all operations. 32 lanes stay below MPICH's limit."""

_APART = {name: lane for lane, name in enumerate(sorted({name for names in SCHEDULES.values() for name in names}), 2)}
"""The lane of each schedule where an endpoint is shared: neither 0 nor 1, which others use beside them."""

_SHORT_BYTES = 64 << 10  # below, making the steps takes as long as running them
_FEW_RANKS = 64
_MOST_KEPT = 256


class SubEndpoint(Endpoint):
    """Some of an endpoint's ranks, numbered anew in the order given, over the same transport and tag.

    Ranks that are in several groups use them one after another. Raises ValueError when this rank is not among them.
    """

    __slots__ = ("ranks",)

    def __init__(self, ep: Endpoint, ranks: Sequence[int]) -> None:
        super().__init__(ep.transport, ep.tag, ep.device_messages, ep.traffic, ep.key, shared=ep.shared)
        if ep.rank not in ranks:
            raise ValueError(f"rank {ep.rank} is not among {list(ranks)}")
        self.rank = ranks.index(ep.rank)
        self.size = len(ranks)
        self.ranks: Sequence[int] = [ep.ranks[rank] for rank in ranks] if isinstance(ep, SubEndpoint) else ranks

    def send(self, t: Tensor, dst: int) -> Transfer:
        return super().send(t, self.ranks[dst])

    def recv(self, t: Tensor, src: int) -> Transfer:
        return super().recv(t, self.ranks[src])


def on_lane(ep: Endpoint, lane: int) -> Endpoint:
    """Return `ep` with the tag and the key of a lane, 0 to `MAX_LANES` - 1.

    A schedule that runs on a lane may have no lanes of its own: give it one chunk. No other schedule is on it.
    """
    if lane == 0:
        return ep
    other = copying.copy(ep)
    other.shared = False
    other.tag = ep.tag + lane * LANE_TAGS
    other.key = ep.key + lane
    return other


class Scheduled(Implementation):
    """The collectives by the schedule called `name`, over the messages of the endpoint; an `Implementation`.

    `chunks` is the number of parts on their way at once, or one behind the other; None leaves it to the size and to
    `limits` (see `LIMITS`). Chunks of a ring or a tree have tags of their own, the same in each program that shares the
    endpoint: programs in lockstep take one chunk. Those of another schedule they do not meet (`Apart`).
    """

    recallable = True

    def __init__(self, name: str, chunks: int | None = None, limits: Mapping[str, int] = USUAL_LIMITS) -> None:
        self.name = name
        self.chunks = chunks
        self._limits = limits
        self._kept: dict[tuple[object, ...], Schedule] = {}

    def lacks(self, wanted: Wanted) -> str | None:
        """Return why it cannot do that, None where it can; so it is for any number of ranks."""
        names = SCHEDULES.get(wanted.operation, {})
        if self.name in names:
            return None
        return f"there is no schedule {self.name!r} of {wanted.operation}, only {', '.join(names) or 'none'}"

    def run(self, ep: Endpoint, operation: Primitive) -> Program[None]:
        """Run an operation; what an allreduce leaves is equal to the bit on all ranks."""
        return self._apart(ep, operation) if ep.shared else self._program(ep, operation)

    async def _apart(self, ep: Endpoint, operation: Primitive) -> None:
        await transfers([Apart(self._program(on_lane(ep, _APART[self.name]), operation), key=self.name)])

    def _program(self, ep: Endpoint, operation: Primitive) -> Program[None]:
        if operation.kind == "allgather":
            return self._allgather(ep, operation)
        if operation.kind == "reduce_scatter":
            return self._reduce_scatter(ep, operation)
        if operation.kind == "alltoall":
            return self._alltoall(ep, operation)
        t = operation.t
        rooted = (operation.root,) if operation.kind in ("broadcast", "reduce") else ()
        return _run(ep, self._elementwise(operation.kind, ep, t, *rooted), (t,), operation.op)

    async def _allgather(self, ep: Endpoint, o: Primitive) -> None:
        blocks = Blocks(o.counts)
        own = o.out[blocks.start(ep.rank) : blocks.stop(ep.rank)]
        if own.data_ptr() != o.t.data_ptr():
            copy(own, o.t)
        await _run(ep, self._plan("allgather", o.out.nbytes, ep.rank, ep.size, blocks), (o.out,))

    async def _reduce_scatter(self, ep: Endpoint, o: Primitive) -> None:
        blocks = Blocks(o.counts)
        apart = o.out.data_ptr() != o.t[blocks.start(ep.rank) :].data_ptr()
        block = o.out if apart else torch.empty_like(o.out)
        await _run(ep, self._plan("reduce_scatter", o.t.nbytes, ep.rank, ep.size, blocks), (o.t, block), o.op)
        if not apart:
            copy(o.out, block)

    async def _alltoall(self, ep: Endpoint, o: Primitive) -> None:
        cuts = Blocks(o.counts), Blocks(o.received)
        await _run(ep, self._plan("alltoall", o.t.nbytes, ep.rank, ep.size, *cuts), (o.t, o.out))

    def _elementwise(self, operation: str, ep: Endpoint, t: Tensor, *root: int) -> Schedule:
        """Return the schedule of an operation on `t`; those of few ranks and short tensors are kept."""
        args = (ep.rank, ep.size, t.numel(), *root)
        if t.nbytes > _SHORT_BYTES or ep.size > _FEW_RANKS:
            return self._plan(operation, t.nbytes, *args)
        key = (operation, *args)
        schedule = self._kept.get(key)
        if schedule is None:
            lazy = self._plan(operation, t.nbytes, *args)
            schedule = Schedule(lazy.room, tuple(partial(iter, tuple(lane())) for lane in lazy.lanes))
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = schedule
        return schedule

    def _plan(self, operation: str, nbytes: int, *args: Any) -> Schedule:  # noqa: ANN401
        algorithm = SCHEDULES[operation][self.name]
        if not algorithm.chunked:
            return algorithm.plan(*args)
        most = self._limits[f"{self.name}.chunks"]
        chunks = self.chunks or min(max(nbytes // self._limits["chunk_bytes"], 1), most)
        return algorithm.plan(*args, chunks=chunks)


async def _run(ep: Endpoint, schedule: Schedule, tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM) -> None:
    """Run a schedule whose working buffer begins with `tensors`."""
    working = _Working(schedule.room, tensors)
    await together(*[_lane(on_lane(ep, i), working, lane(), op) for i, lane in enumerate(schedule.lanes)])


class _Working:
    """A working buffer: the tensors that it is made of, one behind the other, then scratch."""

    __slots__ = ("_parts", "like")

    def __init__(self, room: int, tensors: Sequence[Tensor]) -> None:
        self.like = tensors[0]
        self._parts: list[tuple[int, int, Tensor]] = []
        end = 0
        for t in tensors:
            self._parts.append((end, end + t.numel(), t))
            end += t.numel()
        if room > end:
            self._parts.append((end, room, self.like.new_empty(room - end)))

    def view(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), which lie within one tensor."""
        for first, last, t in self._parts:
            if stop <= last:
                return t if stop - start == last - first else t[start - first : stop - first]
        raise IndexError(f"elements {start} to {stop} of a working buffer of {self._parts[-1][1]}")


class _Scratch:
    """Where a lane keeps what arrives until it is combined: the same memory in each step."""

    __slots__ = ("_like", "_room", "_taken")

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._room: Tensor | None = None
        self._taken = 0

    def take(self, count: int, step: Step) -> Tensor:
        """Return room for `count` elements; what this step's other receives took stays as it is."""
        if not self._taken:
            needed = sum(move.stop - move.start for move in step if isinstance(move, Recv) and move.combine)
            if self._room is None or self._room.numel() < needed:
                self._room = self._like.new_empty(needed)
        assert self._room is not None
        self._taken += count
        return self._room[self._taken - count : self._taken]

    def release(self) -> None:
        self._taken = 0


async def _lane(ep: Endpoint, working: _Working, steps: Iterator[Step], op: ReduceOp) -> None:
    scratch = _Scratch(working.like)
    for step in steps:
        receives: list[Transfer] = []
        sends: list[Transfer] = []
        after: list[tuple[Tensor, Tensor, bool]] = []
        for move in step:
            t = working.view(move.start, move.stop)
            if isinstance(move, Send):
                sends.append(ep.send(t, move.peer))
            elif isinstance(move, Copy):
                after.append((working.view(move.to, move.to + t.numel()), t, move.combine))
            elif move.combine:
                arrived = scratch.take(t.numel(), step)
                receives.append(ep.recv(arrived, move.peer))
                after.append((t, arrived, True))
            else:
                receives.append(ep.recv(t, move.peer))
        # Receives first, so that what comes finds its place. And also when there are none: programs in lockstep
        # count their steps.
        await transfers(receives + sends)
        for into, t, combining in after:
            if combining:
                combine(into, t, op)
            else:
                copy(into, t)
        scratch.release()
