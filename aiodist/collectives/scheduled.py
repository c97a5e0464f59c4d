"""Runs a schedule (`aiodist.schedules`) on tensors, by messages of an endpoint.

Each lane is a program with a separate tag, so that lanes are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.backends.arithmetic import combine, copy
from aiodist.backends.base import Primitive, Wanted
from aiodist.collectives.choice.table import USUAL_LIMITS
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.handles.kernel import Transfer, together, transfers
from aiodist.schedules import SCHEDULES, Blocks, Copy, Recv, Schedule, Send, Step, in_fixed_order
from aiodist.types import ReduceOp

_SHORT_BYTES = 64 << 10  # for shorter tensors, planning the steps takes as long as running them
_FEW_RANKS = 64
_MOST_KEPT = 256


class Scheduled(Implementation):
    """The `Implementation` by the schedule called `name`, over the messages of the endpoint.

    `chunks` is the number of chunks of a tensor. With None, the size and `limits` (see `LIMITS`) determine the number.
    Chunks that are in flight at the same time have lanes, each with its own tag. Several tensors have one chunk each,
    share the lanes, and take their steps together.
    """

    recallable = True

    def __init__(self, name: str, chunks: int | None = None, limits: Mapping[str, int] = USUAL_LIMITS) -> None:
        self.name = name
        self.chunks = chunks
        self._limits = limits
        self._kept: dict[tuple[object, ...], Schedule] = {}
        """Cached schedules, by the arguments of `_plan`."""

    def lacks(self, wanted: Wanted) -> str | None:
        """Return the reason why there is no such schedule of the operation, or None."""
        names = SCHEDULES.get(wanted.operation, {})
        if self.name in names:
            return None
        return f"there is no schedule {self.name!r} of {wanted.operation}, only {', '.join(names) or 'none'}"

    def in_fixed_order(self, operation: str, ranks: int) -> bool:
        return in_fixed_order(operation, self.name, ranks)

    async def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        """Run collectives of one kind. An allreduce gives all ranks the same bits."""
        whole = len(primitives) > 1 or ep.whole
        works = [self._work(ep, o, whole) for o in primitives]
        lanes = max(len(work.schedule.lanes) for work in works)
        if lanes == 1:
            await _run_lane(ep, works, 0)
        else:
            await together(*[_run_lane(ep.on_lane(i), works, i) for i in range(lanes)])
        for o, work in zip(primitives, works, strict=True):
            if work.block is not None:
                copy(o.out, work.block)

    def _work(self, ep: Endpoint, o: Primitive, whole: bool) -> _Work:
        """Return the schedule of `o` with a working buffer. True for `whole` means one chunk."""
        tensors, block = [o.t], None
        args: list[Any] = []
        if o.kind == "allgather":
            tensors, args = [o.out], [tuple(o.counts)]
            own = o.out[sum(o.counts[: ep.rank]) :][: o.counts[ep.rank]]
            if own.data_ptr() != o.t.data_ptr():
                copy(own, o.t)
        elif o.kind == "reduce_scatter":
            args = [tuple(o.counts)]
            if o.out.data_ptr() == o.t[sum(o.counts[: ep.rank]) :].data_ptr():
                block = torch.empty_like(o.out)
            tensors.append(o.out if block is None else block)
        elif o.kind == "alltoall":
            tensors, args = [o.t, o.out], [tuple(o.counts), tuple(o.received)]
        else:
            args = [o.t.numel(), *([o.root] if o.kind in ("broadcast", "reduce") else [])]
        key = (o.kind, tensors[0].nbytes, whole, ep.rank, ep.size, *args)
        schedule = self._kept.get(key)
        if schedule is None:
            schedule = self._plan(*key)
        parts: list[tuple[int, int, Tensor]] = []
        end = 0
        for t in tensors:
            parts.append((end, end + t.numel(), t))
            end += t.numel()
        if schedule.room > end:
            parts.append((end, schedule.room, o.t.new_empty(schedule.room - end)))
        return _Work(schedule, parts, o.op, block)

    def _plan(self, operation: str, nbytes: int, whole: bool, *args: Any) -> Schedule:  # noqa: ANN401
        """Return the schedule of an operation. Schedules for few ranks and short tensors are cached.

        `args` are the rank, the number of ranks, the numbers of elements (a tuple for blocks), and the root if there is
        one.
        """
        algorithm = SCHEDULES[operation][self.name]
        chunks = {}
        if algorithm.chunked:
            most = 1 if whole else self._limits[f"{self.name}.chunks"]
            chunks["chunks"] = self.chunks or min(max(nbytes // self._limits["chunk_bytes"], 1), most)
        schedule = algorithm.plan(*[Blocks(arg) if isinstance(arg, tuple) else arg for arg in args], **chunks)
        if nbytes <= _SHORT_BYTES and args[1] <= _FEW_RANKS:
            schedule = Schedule(schedule.room, tuple(partial(iter, tuple(lane())) for lane in schedule.lanes))
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[operation, nbytes, whole, *args] = schedule
        return schedule


class _Work(NamedTuple):
    """A schedule with its working buffer: some tensors, one after the other, then scratch."""

    schedule: Schedule
    parts: Sequence[tuple[int, int, Tensor]]
    """Tensors of the buffer, each with its first element there and the end."""
    op: ReduceOp
    block: Tensor | None
    """The result if it must be copied to its place at the end, else None."""

    def view(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), which are in one tensor."""
        for first, last, t in self.parts:
            if stop <= last:
                return t if stop - start == last - first else t[start - first : stop - first]
        raise IndexError(f"elements {start} to {stop} of a working buffer of {self.parts[-1][1]}")


async def _run_lane(ep: Endpoint, works: Sequence[_Work], lane: int) -> None:
    """Run one lane of several schedules of one name, with joined steps.

    All ranks take the same steps, so messages of one tag match by their order.
    """
    steps = [_steps(ep, work, work.schedule.lanes[lane]()) for work in works if lane < len(work.schedule.lanes)]
    for joined in zip_longest(*steps, fillvalue=()):
        await transfers([*chain.from_iterable(joined)])


def _steps(ep: Endpoint, work: _Work, steps: Iterator[Step]) -> Iterator[Sequence[Transfer]]:
    """Yield the transfers of each step. Combine the received data when the next step is taken.

    Data to combine arrive in a buffer that is reused in each step.
    """
    room: Tensor | None = None
    for step in steps:
        receives: list[Transfer] = []
        sends: list[Transfer] = []
        after: list[tuple[Tensor, Tensor, bool]] = []
        taken = 0
        for move in step:
            t = work.view(move.start, move.stop)
            if isinstance(move, Send):
                sends.append(ep.send(t, move.peer))
            elif isinstance(move, Copy):
                after.append((work.view(move.to, move.to + t.numel()), t, move.combine))
            elif move.combine:
                if not taken:
                    needed = sum(one.stop - one.start for one in step if isinstance(one, Recv) and one.combine)
                    if room is None or room.numel() < needed:
                        room = t.new_empty(needed)
                assert room is not None
                arrived = room[taken : taken + t.numel()]
                taken += t.numel()
                receives.append(ep.recv(arrived, move.peer))
                after.append((t, arrived, True))
            else:
                receives.append(ep.recv(t, move.peer))
        # Receives first, so that messages match at arrival. An empty step is yielded too, since joined schedules count
        # steps.
        yield receives + sends
        for into, t, combining in after:
            if combining:
                combine(into, t, work.op)
            else:
                copy(into, t)
