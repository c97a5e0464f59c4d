"""Shards: of the parameters that share a bucket each rank owns a block, with its gradient and the optimizer's state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate, count
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints import Piece, StoredTensor
from aiodist.checkpoints.saving import load_exactly
from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.nn.buckets import Bucket, CommHook, Slot
from aiodist.nn.layout import dims_in_memory, view_like

_IDLE = 4
"""Maximum number of idle flat tensors of one dtype; more are freed."""

_SAMPLE = 3
"""Number of elements of the sample tensor whose state shows the state of others."""


class Section:
    """One rank's part of a parameter: elements `start` to `stop` of its memory, as a parameter of one dimension."""

    def __init__(self, slot: Slot, start: int, values: Tensor) -> None:
        self.slot = slot
        self.start = start
        self.stop = start + values.numel()
        self.parameter = nn.Parameter(values)


class BucketShard:
    """Some parameters of one dtype in one flat tensor, which is cut in blocks of equal size, one for each rank.

    From now on the parameters are views of the tensor. Zeros after the last parameter make the blocks equal.
    """

    def __init__(self, slots: Sequence[Slot], coll: Communicator) -> None:
        self.slots = tuple(slots)
        counts = [slot.parameter.numel() for slot in slots]
        self.begins = dict(zip([slot.index for slot in slots], accumulate(counts, initial=0), strict=False))
        """Start of each parameter, by its index."""
        self.block = -(-sum(counts) // coll.size)
        """Number of elements that each rank owns."""
        self.alone = coll.size == 1
        """True if there is no other rank: gradients stay in place."""
        self.first = coll.rank * self.block
        with torch.inference_mode(False), torch.no_grad():
            self.flat = coll.arena_empty(self.block * coll.size, slots[0].dtype)
            self.flat[sum(counts) :].zero_()
            for slot in slots:
                view = self.view(self.flat, slot)
                view.copy_(slot.parameter)
                slot.parameter.data = view
            self.own = self.flat[self.first : self.first + self.block]
            self.gradient = torch.empty(0 if self.alone else self.block, dtype=self.own.dtype, device="cpu")
            """Gradient of this rank's block, rewritten in each step."""
            self.sections: dict[int, Section] = {}
            for slot in slots:
                begin = self.begins[slot.index]
                start, stop = max(self.first, begin), min(self.first + self.block, begin + slot.parameter.numel())
                if start < stop:
                    mine = self.own[start - self.first : stop - self.first]
                    self.sections[slot.index] = Section(slot, start - begin, mine)
        self._gradients: tuple[Tensor | None, list[Tensor]] = None, []
        """The last gradient given to `assign`, and its parts for the sections."""

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Return the view of a parameter in a flat tensor like that of the parameters."""
        begin = self.begins[slot.index]
        return view_like(flat[begin : begin + slot.parameter.numel()], slot.parameter)

    def assign(self, indices: Container[int], gradient: Tensor) -> None:
        """Give the sections of the parameters `indices` their parts of the `gradient` of this block."""
        if self._gradients[0] is not gradient:
            begins = [self.begins[index] + section.start - self.first for index, section in self.sections.items()]
            sizes = [section.parameter.numel() for section in self.sections.values()]
            self._gradients = gradient, [gradient[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        for (index, section), grad in zip(self.sections.items(), self._gradients[1], strict=True):
            section.parameter.grad = grad if index in indices else None

    def forget(self) -> None:
        for section in self.sections.values():
            section.parameter.grad = None
        if self.alone:
            self._gradients = None, []  # new memory in each step


class FlatMemory:
    """A flat tensor with the views of parameters, since making a view takes longer than filling it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._views: WeakKeyDictionary[BucketShard, dict[int, Tensor]] = WeakKeyDictionary()

    def views(self, shard: BucketShard) -> dict[int, Tensor]:
        """Return the views of the parameters of `shard`, by index."""
        if shard not in self._views:
            self._views[shard] = {slot.index: shard.view(self.tensor, slot) for slot in shard.slots}
        return self._views[shard]


class BucketMemory:
    """Flat memory that buckets use for their reductions, one after the other; from any thread."""

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        self.allocate = allocate
        self._lock = threading.Lock()
        self.idle: dict[torch.dtype, list[FlatMemory]] = {}
        """Memory without a bucket, by dtype, in the order of release."""
        self.newest: Tensor | None = None
        """Newest gradient that was reduced in place."""
        self._last: Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> FlatMemory:
        """Return memory of at least `numel` elements, which the caller owns until `release`."""
        with self._lock:
            idle = self.idle.setdefault(dtype, [])
            fitting = [place for place, flat in enumerate(idle) if flat.tensor.numel() >= numel]
            if fitting:
                return idle.pop(min(fitting, key=lambda place: idle[place].tensor.numel()))
        return FlatMemory(self.allocate(numel, dtype))

    def release(self, flat: FlatMemory) -> None:
        """Keep `flat` for the next bucket; free the oldest memory above `_IDLE`."""
        with self._lock:
            idle = self.idle.setdefault(flat.tensor.dtype, [])
            idle.append(flat)
            del idle[:-_IDLE]

    def end_pass(self) -> None:
        """Keep the last gradient of each pass until the end of the next one.

        This gradient is at the end of malloc's memory. If it were freed after the others, glibc would return all of
        that memory to the system, and the system would zero it in each backward: 8 ms for 67 MB.
        """
        self._last = self.newest


class ShardBucket(Bucket):
    """The gradients of the parameters of a shard. They are dropped when each rank has those of its block.

    Frozen parameters have memory too, which is not read.
    """

    def __init__(self, shard: BucketShard, slots: Sequence[Slot], memory: BucketMemory) -> None:
        super().__init__(slots, memory.allocate)
        self.shard = shard
        self.names: list[str] = []
        """Names of the parameters that some rank has used in this pass, after `place`."""
        self._pool = memory
        self._taken: FlatMemory | None = None

    @property
    def reduced(self) -> Tensor:
        """See `Bucket`: the gradient of this rank's block, `(block,)`."""
        return self.data if self.shard.alone else self.shard.gradient

    def open(self) -> None:
        """See `Bucket`; drop the gradients of a failed pass."""
        self._forget()
        self.names = []
        super().open()

    def place(self, used: Callable[[int], object], *, empty: bool = False) -> None:
        """Give the sections of this rank their reduced gradients, and drop those of the parameters."""
        idle = {slot.index for slot in self.unused if not used(slot.index)}
        trained = {slot.index: slot.name for slot in self.slots if slot.index not in idle}
        self.names = list(trained.values())
        self.shard.assign(trained, self.reduced)
        if self.shard.alone:
            self._forget()

    def release(self) -> None:
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

    def memory(self) -> Tensor:
        if self._taken is None:
            with torch.inference_mode(False), torch.no_grad():
                self._taken = self._pool.take(self.shard.flat.numel(), self.dtype)
            views = self._taken.views(self.shard)
            for slot in self.slots:
                slot.view = views[slot.index]
        return self._taken.tensor[: self.shard.flat.numel()]


class ReduceScatter(CommHook):
    """Reduces buckets of shards, and gathers the parameters."""

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
        """Return the handle of an exchange that gives all ranks the blocks of all."""
        return self._data.allgather(shard.own, out=shard.flat)


# --- the state of the optimizer: of this rank's shard, and as pieces of the state of one process ----------------------


class ShardGroup(NamedTuple):
    """A parameter group."""

    slots: list[Slot]
    """Slots of all parameters."""
    sections: dict[int, Section]
    """This rank's sections, by the index of the slot."""
    options: dict[str, Any]
    """Hyperparameters that the group sets."""


class ShardState:
    """The state of this rank's optimizer for its `groups`."""

    def __init__(
        self, optimizer: Optimizer, make: Callable[[list[dict[str, Any]]], Optimizer], groups: Sequence[ShardGroup]
    ) -> None:
        self._optimizer = optimizer
        self._make = make
        self._groups = groups
        self._names = [[slot.name for slot in group.slots] for group in groups]
        self.stepped: set[str] = set()
        """Names of the parameters with state, the same on every rank."""

    # --- of the shard -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self._shard(), "stepped": sorted(self.stepped), **self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        seen, known = list(map(tuple, state["shard"])), self._shard()
        if seen != known:
            differing = next((pair for pair in zip(seen, known, strict=False) if pair[0] != pair[1]), None)
            what = "{} and {}".format(*differing) if differing else f"{len(seen)} and {len(known)} tensors"
            raise ValueError(
                f"the state is of another shard ({what}): expected that of the same rank of as many, with the same "
                "buckets; see pieces()"
            )
        load_exactly(self._optimizer, {key: state[key] for key in ("state", "param_groups")})
        self.stepped = set(state["stepped"])

    def _shard(self) -> list[tuple[str, int, int]]:
        return [(s.slot.name, s.start, s.stop) for group in self._groups for s in group.sections.values()]

    # --- in pieces ----------------------------------------------------------------------------------------------

    def pieces(self) -> dict[str, Any]:
        samples, number = self._samples(), count()
        state: dict[int, dict[str, Piece]] = {}
        groups = []
        for of_group, group, options in zip(samples, self._groups, self._optimizer.param_groups, strict=True):
            members = [next(number) for _ in group.slots]
            for member, slot in zip(members, group.slots, strict=True):
                if not slot.parameter.numel():  # no rank has a section of it
                    continue
                kept, born = of_group[slot.dtype]
                keys = kept if slot.name in self.stepped else born
                if found := self._pieces(slot, group.sections.get(slot.index), {key: kept[key] for key in keys}):
                    state[member] = found
            groups.append({**options, "params": members})
        return {"state": state, "param_groups": groups, "names": self._names}

    def _pieces(self, slot: Slot, section: Section | None, likes: Mapping[str, Any]) -> dict[str, Piece]:
        """Return the pieces of a parameter's state. `likes` is the state of a sample tensor, by key."""
        state = {} if section is None else self._optimizer.state.get(section.parameter, {})
        if unknown := [key for key, value in state.items() if key not in likes and value is not None]:
            raise TypeError(
                f"the optimizer keeps {', '.join(map(str, unknown))} of {slot.name!r}, and nothing of the kind of a "
                "new tensor: its state cannot be saved in pieces"
            )
        return {key: _piece(slot, section, state.get(key), like) for key, like in likes.items()}

    def divided(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if "param_groups" not in state:
            raise ValueError("the state is not that of an optimizer, which has param_groups")
        saved, own = state["param_groups"], count()
        sizes = [len(options["params"]) for options in saved]
        if sizes != list(map(len, self._names)) or state.get("names", self._names) != self._names:
            raise ValueError(
                f"the state has groups of {sizes} parameters, and the optimizer of {list(map(len, self._names))}: "
                "expected the same parameters in the same groups"
            )
        kept, stepped, groups = {}, [], []
        for group, options in zip(self._groups, saved, strict=True):
            members = []
            for slot, number in zip(group.slots, options["params"], strict=True):
                of_slot = {key: v for key, v in state["state"].get(number, {}).items() if v is not None}
                if of_slot:
                    stepped.append(slot.name)
                if (section := group.sections.get(slot.index)) is not None:
                    members.append(next(own))
                    if of_slot:
                        kept[members[-1]] = {key: _divided(section, key, value) for key, value in of_slot.items()}
            groups.append({key: _read(value) for key, value in options.items()} | {"params": members})
        return {"shard": self._shard(), "stepped": stepped, "state": kept, "param_groups": groups}

    def _samples(self) -> list[dict[torch.dtype, tuple[dict[str, Any], set[str]]]]:
        """Return the state of a sample tensor after a step, and its keys before the step, by group and dtype.

        So this rank knows the form of state that other ranks keep.
        """
        kinds = [list(dict.fromkeys(slot.dtype for slot in group.slots)) for group in self._groups]
        tensors = [
            [nn.Parameter(torch.zeros(_SAMPLE, dtype=dtype, device="cpu")) for dtype in dtypes] for dtypes in kinds
        ]
        new = self._make(
            [{**group.options, "params": of_group} for group, of_group in zip(self._groups, tensors, strict=True)]
        )
        for group, now in zip(new.param_groups, self._optimizer.param_groups, strict=True):
            group.update({key: value for key, value in now.items() if key != "params"})
        born = {p: set(state) for p, state in new.state.items()}
        for of_group in tensors:
            for p in of_group:
                p.grad = torch.zeros_like(p)
        new.step()
        found: list[dict[torch.dtype, tuple[dict[str, Any], set[str]]]] = []
        for of_group in tensors:
            found.append({})
            for p in of_group:
                kept = {key: value for key, value in new.state.get(p, {}).items() if value is not None}
                _check_kinds(new, kept)
                found[-1][p.dtype] = kept, born.get(p, set())
        return found


def _piece(slot: Slot, section: Section | None, value: Any, like: Any) -> Piece:
    """Return this rank's piece of a `value` in the state of a parameter; `like` is that of the sample tensor."""
    number = not isinstance(like, Tensor)
    if number:
        like = torch.tensor(like, dtype=torch.float64 if isinstance(like, float) else None, device="cpu")
        value = None if value is None else like.new_tensor(value)
    long, dims = like.shape == (_SAMPLE,), None
    shape = tuple(like.shape)
    if long:
        order = dims_in_memory(slot.parameter)
        shape = tuple(slot.parameter.shape[d] for d in order)
        dims = None if slot.parameter.is_contiguous() else tuple(map(order.index, range(len(order))))
    if section is None or not (long or section.start == 0):
        return Piece(like.new_empty(0), 0, shape, dims, number)
    if value is None:  # its first step failed
        value = like.new_zeros(section.parameter.numel()) if long else like
    return Piece(value.detach().reshape(-1), section.start if long else 0, shape, dims, number)


def _divided(section: Section, key: str, value: Any) -> Any:
    """Return this rank's part of a `value` in the state of a whole parameter."""
    parameter = section.slot.parameter
    if not isinstance(value, (Tensor, StoredTensor)):
        return value
    if value.shape == parameter.shape:
        value = value.permute(dims_in_memory(parameter))
        if isinstance(value, StoredTensor):
            return value.elements(section.start, section.stop)
        return value.reshape(-1)[section.start : section.stop].clone()
    if value.shape.numel() != 1:
        raise ValueError(
            f"{key} of {section.slot.name!r} has shape {list(value.shape)}: expected that of the parameter, "
            f"{list(parameter.shape)}, or one element"
        )
    return _read(value)


def _read(value: Any) -> Any:
    """Return a copy of a tensor, or another value unchanged."""
    if isinstance(value, StoredTensor):
        return value.whole()
    return value.clone() if isinstance(value, Tensor) else value


def _check_kinds(opt: Optimizer, kept: Mapping[str, Any]) -> None:
    for key, value in kept.items():
        if isinstance(value, Tensor) and (value.shape == (_SAMPLE,) or value.numel() == 1):
            continue
        if not isinstance(value, (bool, int, float)):
            seen = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{type(opt).__name__} keeps {key}, {seen} for a tensor of {_SAMPLE} elements: expected as many "
                "elements, or a number; other state cannot be saved in pieces"
            )
