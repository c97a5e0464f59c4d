"""The state of a sharded optimizer: as it is on this rank, and in pieces for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints import Piece
from aiodist.nn.layout import memory_shape
from aiodist.nn.shards import Section

_SAMPLE = 3
"""How many elements a tensor has whose state tells what others have."""


class ShardGroup(NamedTuple):
    """A parameter group."""

    names: list[str]
    """Of all its parameters."""
    sections: list[Section]
    """What this rank has of them."""
    options: dict[str, Any]
    """Learning rate and the like, as far as they are the group's own."""

    def for_optimizer(self) -> dict[str, Any]:
        """Return what an optimizer takes."""
        return {**self.options, "params": [section.parameter for section in self.sections]}


class _StateEntry(NamedTuple):
    """One thing that an optimizer keeps of a section."""

    section: Section
    name: str
    """That of the parameter, and that of the thing."""
    key: str
    like: Any
    """Such a thing of another section."""
    born: bool
    """It is there before the first step."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the thing, of the whole parameter."""
        parameter = self.section.slot.parameter
        if not self.long:
            return ()
        return tuple(parameter.shape) if parameter.is_contiguous() else memory_shape(parameter)

    @property
    def long(self) -> bool:
        """It has an element for each of the section; else it is one number."""
        return isinstance(self.like, Tensor) and self.like.shape == (_SAMPLE,)

    def piece(self, tensor: Tensor) -> Piece:
        """Return a piece of the thing: what `tensor`, flat, holds."""
        return Piece(tensor, self.section.start if self.long else 0, self.shape)

    def blank(self) -> Tensor:
        """Return a flat tensor for it."""
        if self.long:
            return torch.zeros(self.section.parameter.numel(), dtype=self.like.dtype)
        return self.flat(self.like).clone()

    def flat(self, value: Any) -> Tensor:  # noqa: ANN401
        """Return `value` as a flat tensor, with the same memory where it is one."""
        if isinstance(value, Tensor):
            return value.detach().reshape(-1)
        return torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else torch.int64)

    def value(self, flat: Tensor) -> Any:  # noqa: ANN401
        """Return what `flat` holds in the form in which the optimizer keeps it."""
        if self.long:
            return flat
        return flat.reshape(self.like.shape) if isinstance(self.like, Tensor) else type(self.like)(flat.item())


class ShardState:
    """What the optimizer of this rank keeps of its `groups`."""

    def __init__(
        self, optimizer: Optimizer, make: Callable[[list[dict[str, Any]]], Optimizer], groups: Sequence[ShardGroup]
    ) -> None:
        self._optimizer = optimizer
        self._make = make
        self._groups = groups
        self.stepped: set[str] = set()
        """The parameters that were updated since they had no state; the same on every rank."""
        self._filling: list[tuple[_StateEntry, Tensor]] | None = None
        """What `wanted` gave."""

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
        self._optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.stepped = set(state["stepped"])

    def _shard(self) -> list[tuple[str, int, int]]:
        return [(s.slot.name, s.start, s.stop) for group in self._groups for s in group.sections]

    # --- in pieces ----------------------------------------------------------------------------------------------

    def pieces(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        """See `ShardedOptimizer`."""
        found: dict[str, Piece] = {}
        for entry in self._entries():
            state = self._optimizer.state.get(entry.section.parameter, {})
            if entry.long or entry.section.start == 0:
                value = state.get(entry.key)
                found[entry.name] = entry.piece(entry.blank() if value is None else entry.flat(value))
        return found, {"stepped": sorted(self.stepped), "param_groups": self._options()}

    def wanted(self) -> dict[str, Piece]:
        """See `ShardedOptimizer`."""
        self._filling = [(entry, entry.blank()) for entry in self._entries()]
        return {entry.name: entry.piece(flat) for entry, flat in self._filling}

    def load_rest(self, rest: Mapping[str, Any]) -> None:
        """See `ShardedOptimizer`."""
        if self._filling is None:
            raise RuntimeError("there is nothing to be taken: call wanted() first, and fill its tensors")
        saved, known = rest["param_groups"], self._options()
        if [group["params"] for group in saved] != [group["params"] for group in known]:
            raise ValueError(
                f"the state has groups of {[len(group['params']) for group in saved]} parameters, and the optimizer of "
                f"{[len(group['params']) for group in known]}: expected the same parameters in the same groups"
            )
        filled, self._filling = self._filling, None
        self.stepped = set(rest["stepped"])
        for entry, flat in filled:
            state = self._optimizer.state[entry.section.parameter]
            if entry.born or entry.section.slot.name in self.stepped:
                state[entry.key] = entry.value(flat)
            else:
                state.pop(entry.key, None)
        for parameter in [parameter for parameter, state in self._optimizer.state.items() if not state]:
            del self._optimizer.state[parameter]
        for group, options in zip(self._optimizer.param_groups, saved, strict=True):
            group.update(
                {
                    key: tuple(value) if isinstance(group.get(key), tuple) else value
                    for key, value in options.items()
                    if key != "params"
                }
            )

    def _options(self) -> list[dict[str, Any]]:
        """Return the parameter groups with names for parameters."""
        return [
            {**now, "params": list(group.names)}
            for now, group in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]

    def _entries(self) -> Iterator[_StateEntry]:
        """Yield all that the optimizer keeps, or will keep, of this rank's sections."""
        samples = self._samples()
        for number, group in enumerate(self._groups):
            for section in group.sections:
                state = self._optimizer.state.get(section.parameter, {})
                sample, born = samples[number, section.parameter.dtype]
                if unknown := [key for key, value in state.items() if key not in sample and value is not None]:
                    raise TypeError(
                        f"the optimizer keeps {', '.join(map(str, unknown))} of {section.slot.name!r}, and nothing of "
                        "the kind of a new tensor: its state cannot be saved in pieces"
                    )
                for key, like in sample.items():
                    yield _StateEntry(section, f"{section.slot.name}.{key}", key, like, key in born)

    def _samples(self) -> dict[tuple[int, torch.dtype], tuple[dict[str, Any], set[str]]]:
        """Return by group and dtype what is kept of a small tensor behind a step, and what was there before.

        Only so is known what a new optimizer will keep, which is to be loaded before its first step.
        """
        kinds = [list(dict.fromkeys(s.parameter.dtype for s in group.sections)) for group in self._groups]
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
        found = {}
        for number, of_group in enumerate(tensors):
            for p in of_group:
                kept = {key: value for key, value in new.state.get(p, {}).items() if value is not None}
                _check_kinds(new, kept)
                found[number, p.dtype] = kept, born.get(p, set())
        return found


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
