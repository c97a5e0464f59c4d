"""The state of a sharded optimizer: as it is on this rank, and in pieces of that which one process would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints import Piece, StoredTensor
from aiodist.checkpoints.loading import keep_dtypes
from aiodist.nn.buckets import Slot
from aiodist.nn.layout import dims_in_memory
from aiodist.nn.shards import Section

_SAMPLE = 3
"""How many elements a tensor has whose state tells what others have."""


class ShardGroup(NamedTuple):
    """A parameter group."""

    slots: list[Slot]
    """Of all its parameters."""
    sections: dict[int, Section]
    """What this rank has of them, by the index of the slot."""
    options: dict[str, Any]
    """Learning rate and the like, as far as they are the group's own."""

    def for_optimizer(self) -> dict[str, Any]:
        """Return what an optimizer takes."""
        return {**self.options, "params": [section.parameter for section in self.sections.values()]}


class ShardState:
    """What the optimizer of this rank keeps of its `groups`."""

    def __init__(
        self, optimizer: Optimizer, make: Callable[[list[dict[str, Any]]], Optimizer], groups: Sequence[ShardGroup]
    ) -> None:
        self._optimizer = optimizer
        self._make = make
        self._groups = groups
        self._names = [[slot.name for slot in group.slots] for group in groups]
        self.stepped: set[str] = set()
        """The parameters that were updated since they had no state; the same on every rank."""

    # --- as it is -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `ShardedOptimizer`."""
        return {"shard": self._shard(), "stepped": sorted(self.stepped), **self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ShardedOptimizer`."""
        seen, known = list(map(tuple, state["shard"])), self._shard()
        if seen != known:
            differing = next((pair for pair in zip(seen, known, strict=False) if pair[0] != pair[1]), None)
            what = "{} and {}".format(*differing) if differing else f"{len(seen)} and {len(known)} tensors"
            raise ValueError(
                f"the state is of another shard ({what}): expected that of the same rank of as many, with the same "
                "buckets; see pieces()"
            )
        own = {key: state[key] for key in ("state", "param_groups")}
        self._optimizer.load_state_dict(own)
        keep_dtypes(self._optimizer, own)
        self.stepped = set(state["stepped"])

    def _shard(self) -> list[tuple[str, int, int]]:
        return [(s.slot.name, s.start, s.stop) for group in self._groups for s in group.sections.values()]

    # --- in pieces ----------------------------------------------------------------------------------------------

    def pieces(self) -> dict[str, Any]:
        """See `ShardedOptimizer`."""
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
        """Return what the optimizer keeps of a parameter, if this rank has a section of it; `likes` are of another."""
        state = {} if section is None else self._optimizer.state.get(section.parameter, {})
        if unknown := [key for key, value in state.items() if key not in likes and value is not None]:
            raise TypeError(
                f"the optimizer keeps {', '.join(map(str, unknown))} of {slot.name!r}, and nothing of the kind of a "
                "new tensor: its state cannot be saved in pieces"
            )
        return {key: _piece(slot, section, state.get(key), like) for key, like in likes.items()}

    def divided(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `ShardedOptimizer`."""
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
        """Return by group and dtype what is kept of a small tensor behind a step, and what was there before.

        Only so is known what other ranks keep of what this one has no section of.
        """
        kinds = [list(dict.fromkeys(slot.dtype for slot in group.slots)) for group in self._groups]
        tensors = [[nn.Parameter(torch.zeros(_SAMPLE, dtype=dtype)) for dtype in dtypes] for dtypes in kinds]
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
    """Return what this rank has of a `value` that is kept of a parameter, and that is `like` that of a new tensor."""
    number = not isinstance(like, Tensor)
    if number:
        like = torch.tensor(like, dtype=torch.float64 if isinstance(like, float) else None)
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
    """Return what this rank has of a `value` that an optimizer keeps of a whole parameter."""
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
    """Return a copy where it is a tensor."""
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
