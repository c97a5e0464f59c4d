"""Collectives in shared memory, for ranks of one host, as a backend's native ones."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from torch import dtype

from aiodist.backends.base import Done, Operation, Wanted, again, dtype_code
from aiodist.backends.shm.lanes import KINDS, Lane, Lanes, op_code
from aiodist.types import ReduceOp


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

    def supports(self, wanted: Wanted) -> bool:
        """Return True for each of its collectives: it takes every dtype and operator."""
        return wanted.operation in KINDS

    def start(self, operation: Operation, key: int, done: Done) -> None:
        o = operation
        if self._closed is not None:
            done(again(self._closed))
            return
        # What ranks of an alltoall send, and how much they have in all, only two of them know.
        counts = () if o.kind == "alltoall" else tuple(o.counts)
        numel = 0 if o.kind in ("allgather", "alltoall") else o.t.numel()
        facts = (o.kind, dtype_code(o.t.dtype), op_code(o.op), o.root, numel, counts)
        self._steps().submit(o, crc32(repr(facts).encode()), key, done)

    def refuse(self, key: int) -> None:
        """Take no part any more in steps that have `key`, or those above it that are for parts; see `Lane.refuse`."""
        if self._closed is None:
            self._steps().refuse(key)

    def _steps(self) -> Lane:
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
