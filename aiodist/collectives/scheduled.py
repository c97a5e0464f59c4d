"""Runs a schedule (`aiodist.schedules`) on tensors, over an endpoint's messages.

Each lane is a program with a tag of its own, so that lanes are independent. Data to combine arrive in a scratch buffer,
which has room for the receives of one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.arithmetic import combine, copy
from aiodist.backends.base import Primitive, Wanted
from aiodist.collectives.choice.table import USUAL_LIMITS
from aiodist.collectives.endpoint import Endpoint, Implementation, on_lane
from aiodist.handles.kernel import Transfer, together, transfers
from aiodist.schedules import SCHEDULES, Blocks, Copy, Recv, Schedule, Send, Step
from aiodist.types import ReduceOp

_SHORT_BYTES = 64 << 10  # planning the steps of shorter tensors takes as long as running them
_FEW_RANKS = 64
_MOST_KEPT = 256


class Scheduled(Implementation):
    """The collectives by the schedule called `name`, over the messages of the endpoint; an `Implementation`.

    `chunks` is the number of parts in flight at the same time, or one after the other; None leaves it to the size and
    to `limits` (see `LIMITS`). Each of the parts in flight at the same time has a tag of its own, a lane. Several
    tensors share the lanes: their steps are joined, and each goes in one chunk.
    """

    recallable = True

    def __init__(self, name: str, chunks: int | None = None, limits: Mapping[str, int] = USUAL_LIMITS) -> None:
        self.name = name
        self.chunks = chunks
        self._limits = limits
        self._kept: dict[tuple[object, ...], Schedule] = {}

    def lacks(self, wanted: Wanted) -> str | None:
        """Return the reason why it cannot run the operation, or None; the same for any number of ranks."""
        names = SCHEDULES.get(wanted.operation, {})
        if self.name in names:
            return None
        return f"there is no schedule {self.name!r} of {wanted.operation}, only {', '.join(names) or 'none'}"

    async def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        """Run collectives of one kind; an allreduce gives all ranks the same bits."""
        whole = len(primitives) > 1 or ep.whole
        works = [self._work(ep, o, whole) for o in primitives]
        lanes = max(len(work.schedule.lanes) for work in works)
        if lanes == 1:
            await _in_step(ep, works, 0)
        else:
            await together(*[_in_step(on_lane(ep, i), works, i) for i in range(lanes)])
        for o, work in zip(primitives, works, strict=True):
            if work.block is not None:
                copy(o.out, work.block)

    def _work(self, ep: Endpoint, o: Primitive, whole: bool) -> _Work:
        """Return the schedule of `o` and its working buffer; `whole`: in one chunk."""
        rank, size = ep.rank, ep.size
        if o.kind == "allgather":
            blocks = Blocks(o.counts)
            own = o.out[blocks.start(rank) : blocks.stop(rank)]
            if own.data_ptr() != o.t.data_ptr():
                copy(own, o.t)
            return _Work(self._plan("allgather", o.out.nbytes, whole, rank, size, blocks), (o.out,))
        if o.kind == "reduce_scatter":
            blocks = Blocks(o.counts)
            inside = o.out.data_ptr() == o.t[blocks.start(rank) :].data_ptr()
            block = torch.empty_like(o.out) if inside else o.out
            plan = self._plan("reduce_scatter", o.t.nbytes, whole, rank, size, blocks)
            return _Work(plan, (o.t, block), o.op, block if inside else None)
        if o.kind == "alltoall":
            cuts = Blocks(o.counts), Blocks(o.received)
            return _Work(self._plan("alltoall", o.t.nbytes, whole, rank, size, *cuts), (o.t, o.out))
        rooted = (o.root,) if o.kind in ("broadcast", "reduce") else ()
        return _Work(self._elementwise(o.kind, ep, o.t, whole, *rooted), (o.t,), o.op)

    def _elementwise(self, operation: str, ep: Endpoint, t: Tensor, whole: bool, *root: int) -> Schedule:
        """Return the schedule of an operation on `t`; those for few ranks and short tensors are cached."""
        args = (ep.rank, ep.size, t.numel(), *root)
        if t.nbytes > _SHORT_BYTES or ep.size > _FEW_RANKS:
            return self._plan(operation, t.nbytes, whole, *args)
        key = (operation, whole, *args)
        schedule = self._kept.get(key)
        if schedule is None:
            lazy = self._plan(operation, t.nbytes, whole, *args)
            schedule = Schedule(lazy.room, tuple(partial(iter, tuple(lane())) for lane in lazy.lanes))
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = schedule
        return schedule

    def _plan(self, operation: str, nbytes: int, whole: bool, *args: Any) -> Schedule:  # noqa: ANN401
        algorithm = SCHEDULES[operation][self.name]
        if not algorithm.chunked:
            return algorithm.plan(*args)
        most = 1 if whole else self._limits[f"{self.name}.chunks"]
        chunks = self.chunks or min(max(nbytes // self._limits["chunk_bytes"], 1), most)
        return algorithm.plan(*args, chunks=chunks)


class _Work:
    """A schedule and its working buffer: some tensors, one after the other, then scratch."""

    __slots__ = ("_parts", "block", "like", "op", "schedule")

    def __init__(
        self, schedule: Schedule, tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, block: Tensor | None = None
    ) -> None:
        self.schedule = schedule
        self.op = op
        self.like = tensors[0]
        self.block = block
        """The result, which is copied to its place at the end."""
        self._parts: list[tuple[int, int, Tensor]] = []
        end = 0
        for t in tensors:
            self._parts.append((end, end + t.numel(), t))
            end += t.numel()
        if schedule.room > end:
            self._parts.append((end, schedule.room, self.like.new_empty(schedule.room - end)))

    def view(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), which are in one tensor."""
        for first, last, t in self._parts:
            if stop <= last:
                return t if stop - start == last - first else t[start - first : stop - first]
        raise IndexError(f"elements {start} to {stop} of a working buffer of {self._parts[-1][1]}")


class _Scratch:
    """Memory for received data of a lane that is combined, reused in each step."""

    __slots__ = ("_like", "_room", "_taken")

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._room: Tensor | None = None
        self._taken = 0

    def take(self, count: int, step: Step) -> Tensor:
        """Return memory for `count` elements, separate from that of the step's other receives."""
        if not self._taken:
            needed = sum(move.stop - move.start for move in step if isinstance(move, Recv) and move.combine)
            if self._room is None or self._room.numel() < needed:
                self._room = self._like.new_empty(needed)
        assert self._room is not None
        self._taken += count
        return self._room[self._taken - count : self._taken]

    def release(self) -> None:
        self._taken = 0


async def _in_step(ep: Endpoint, works: Sequence[_Work], lane: int) -> None:
    """Run one lane of several schedules of one name, their steps joined.

    All ranks take the same steps, so messages of one tag match by their order.
    """
    steps = [_steps(ep, work, work.schedule.lanes[lane]()) for work in works if lane < len(work.schedule.lanes)]
    if len(steps) == 1:
        for step in steps[0]:
            await transfers(step)
    else:
        for joined in zip_longest(*steps, fillvalue=()):
            await transfers(list(chain.from_iterable(joined)))


def _steps(ep: Endpoint, work: _Work, steps: Iterator[Step]) -> Iterator[Sequence[Transfer]]:
    """Yield the transfers of each step; combine what arrived when the next is taken."""
    scratch = _Scratch(work.like)
    for step in steps:
        receives: list[Transfer] = []
        sends: list[Transfer] = []
        after: list[tuple[Tensor, Tensor, bool]] = []
        for move in step:
            t = work.view(move.start, move.stop)
            if isinstance(move, Send):
                sends.append(ep.send(t, move.peer))
            elif isinstance(move, Copy):
                after.append((work.view(move.to, move.to + t.numel()), t, move.combine))
            elif move.combine:
                arrived = scratch.take(t.numel(), step)
                receives.append(ep.recv(arrived, move.peer))
                after.append((t, arrived, True))
            else:
                receives.append(ep.recv(t, move.peer))
        # Receives first, so that messages match at arrival. An empty step is yielded too: joined schedules count steps.
        yield receives + sends
        for into, t, combining in after:
            if combining:
                combine(into, t, work.op)
            else:
                copy(into, t)
        scratch.release()
