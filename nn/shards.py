"""Shards: of the parameters that share a bucket each rank owns a block, and gets the gradient of that alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.nn.buckets import Bucket, Slot
from aiodist.nn.comm_hooks import CommHook
from aiodist.nn.layout import view_like

_IDLE = 4
"""How many flat tensors of one dtype wait for the next buckets; more go back."""


class Section:
    """What one rank owns of a parameter: elements `start` to `stop` of its memory, as a parameter of one dimension."""

    def __init__(self, slot: Slot, start: int, values: Tensor) -> None:
        self.slot = slot
        self.start = start
        self.stop = start + values.numel()
        self.parameter = nn.Parameter(values)


class BucketShard:
    """Some parameters of one dtype, side by side in one flat tensor that is cut in blocks of equal size, one a rank.

    The parameters are views of it from now on. Behind the last of them there may be a rest, so that blocks are equal.
    """

    def __init__(self, slots: Sequence[Slot], coll: Communicator) -> None:
        self.slots = tuple(slots)
        counts = [slot.parameter.numel() for slot in slots]
        self.begins = dict(zip([slot.index for slot in slots], accumulate(counts, initial=0), strict=False))
        """Where each parameter begins, by its index."""
        self.block = -(-sum(counts) // coll.size)
        """How many elements each rank owns."""
        self.alone = coll.size == 1
        """There is no other rank: gradients are used where they are."""
        self.first = coll.rank * self.block
        with torch.inference_mode(False), torch.no_grad():
            self.flat = coll.empty(self.block * coll.size, slots[0].dtype)
            self.flat[sum(counts) :].zero_()
            self._move_in()
            self.own = self.flat[self.first : self.first + self.block]
            self.gradient = torch.empty(0 if self.alone else self.block, dtype=self.own.dtype)
            """Of what this rank owns; in each step it is written anew."""
            self.sections = {section.slot.index: section for section in self._sections()}
        self._gradients: tuple[Tensor | None, list[Tensor]] = None, []
        """What was given to `assign` last, and what the sections have of it."""

    def _move_in(self) -> None:
        for slot in self.slots:
            view = self.view(self.flat, slot)
            view.copy_(slot.parameter)
            slot.parameter.data = view

    def _sections(self) -> Iterator[Section]:
        for slot in self.slots:
            begin = self.begins[slot.index]
            start = max(self.first, begin)
            stop = min(self.first + self.block, begin + slot.parameter.numel())
            if start < stop:
                yield Section(slot, start - begin, self.own[start - self.first : stop - self.first])

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Return the place of a parameter in a flat tensor like that of the parameters."""
        begin = self.begins[slot.index]
        return view_like(flat[begin : begin + slot.parameter.numel()], slot.parameter)

    def assign(self, indices: Container[int], gradient: Tensor) -> None:
        """Give the sections of some parameters, by their index, what is theirs of the `gradient` of this block."""
        if self._gradients[0] is not gradient:
            begins = [self.begins[index] + section.start - self.first for index, section in self.sections.items()]
            sizes = [section.parameter.numel() for section in self.sections.values()]
            self._gradients = gradient, [gradient[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        for (index, section), grad in zip(self.sections.items(), self._gradients[1], strict=True):
            section.parameter.grad = grad if index in indices else None

    def forget(self) -> None:
        """The gradients have served."""
        for section in self.sections.values():
            section.parameter.grad = None
        if self.alone:
            self._gradients = None, []  # new memory in each step


class FlatMemory:
    """A flat tensor, and the places of parameters in it, which to make takes longer than to fill them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._views: WeakKeyDictionary[BucketShard, dict[int, Tensor]] = WeakKeyDictionary()

    def views(self, shard: BucketShard) -> dict[int, Tensor]:
        """Return the places of the parameters of `shard`, by their index."""
        if shard not in self._views:
            self._views[shard] = {slot.index: shard.view(self.tensor, slot) for slot in shard.slots}
        return self._views[shard]


class BucketMemory:
    """Flat memory in which buckets bring their gradients to a reduction, one after the other; from any thread."""

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        self.allocate = allocate
        self._lock = threading.Lock()
        self.idle: dict[torch.dtype, list[FlatMemory]] = {}
        """That which no bucket has, by dtype, in the order in which it came back."""
        self.newest: Tensor | None = None
        """The gradient that was reduced last of those that stayed where autograd had made them."""
        self._last: Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> FlatMemory:
        """Return memory of `numel` elements or more; it is the caller's until `release`."""
        with self._lock:
            idle = self.idle.setdefault(dtype, [])
            fitting = [place for place, flat in enumerate(idle) if flat.tensor.numel() >= numel]
            if fitting:
                return idle.pop(min(fitting, key=lambda place: idle[place].tensor.numel()))
        return FlatMemory(self.allocate(numel, dtype))

    def release(self, flat: FlatMemory) -> None:
        """Have it back; what was idle longest goes where there are enough."""
        with self._lock:
            idle = self.idle.setdefault(flat.tensor.dtype, [])
            idle.append(flat)
            del idle[:-_IDLE]

    def end_pass(self) -> None:
        """Keep the last gradient of each pass until the end of the next one.

        It lies at the end of malloc's memory. If it went when the others are gone, malloc (glibc's) would give all of
        that back to the system, which would zero it anew in each backward: 8 ms for 67 MB.
        """
        self._last = self.newest


class ShardBucket(Bucket):
    """The gradients of the parameters of a shard, until each rank has those of its block: then they are dropped.

    Parameters that are frozen have their places all the same, which nobody looks at.
    """

    def __init__(self, shard: BucketShard, slots: Sequence[Slot], memory: BucketMemory) -> None:
        super().__init__(slots, memory.allocate)
        self.shard = shard
        self.names: list[str] = []
        """The parameters that some rank has used in this pass; known when it is placed."""
        self._pool = memory
        self._taken: FlatMemory | None = None

    @property
    def reduced(self) -> Tensor:
        """See `Bucket`: the gradient of this rank's block, `(block,)`."""
        return self.data if self.shard.alone else self.shard.gradient

    def open(self) -> None:
        """See `Bucket`; what a pass that failed has left is dropped."""
        self._forget()
        self.names = []
        super().open()

    def place(self, used: Callable[[int], object]) -> None:
        """It is reduced: give the sections of this rank their gradients, and drop those of the parameters."""
        idle = {slot.index for slot in self.unused if not used(slot.index)}
        trained = {slot.index: slot.name for slot in self.slots if slot.index not in idle}
        self.names = list(trained.values())
        self.shard.assign(trained, self.reduced)
        if self.shard.alone:
            self._forget()

    def release(self) -> None:
        """See `Bucket`: the gradients of whole parameters."""
        if not self.shard.alone:
            self._forget()

    def _forget(self) -> None:
        for slot in self.slots:
            slot.view = slot.result = slot.earlier = None
        data = self.__dict__.pop("data", None)
        taken, self._taken = self._taken, None
        if taken is None and data is not None:
            self._pool.newest = data
        if taken is not None and not self.shard.alone:
            self._pool.release(taken)

    def _take_whole(self, slot: Slot) -> bool:
        return slot.parameter.numel() == self.shard.flat.numel() and super()._take_whole(slot)

    def _memory(self) -> Tensor:
        if self._taken is None:
            with torch.inference_mode(False), torch.no_grad():
                self._taken = self._pool.take(self.shard.flat.numel(), self.dtype)
            views = self._taken.views(self.shard)
            for slot in self.slots:
                slot.view = views[slot.index]
        return self._taken.tensor[: self.shard.flat.numel()]


class ReduceScatter(CommHook):
    """Reduces buckets of shards, and brings the parameters together again."""

    def __init__(self, data: Communicator, op: Literal["mean", "sum"]) -> None:
        self._data = data
        self._op = op

    def reduce(self, bucket: Bucket) -> Handle[Any]:
        """See `CommHook`: the block of this rank goes to the shard's `gradient`."""
        assert isinstance(bucket, ShardBucket)
        self.nbytes += bucket.data.nbytes
        if bucket.shard.alone:
            return self._data.allreduce(bucket.data, self._op)
        return self._data.reduce_scatter(bucket.data, self._op, out=bucket.shard.gradient)

    def gather(self, shard: BucketShard) -> Handle[Any]:
        """Return the handle of what gives all ranks the blocks of all."""
        return self._data.allgather(shard.own, out=shard.flat)
