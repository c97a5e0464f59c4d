"""What a step does beside forward, backward and update: clipping, scaled losses, learning rates, autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any, Protocol, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from aiodist.communicator import Communicator
from aiodist.nn.rows import with_values
from aiodist.nn.tensor_parallel import total_over
from aiodist.types import Stateful

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups, as an optimizer of torch has them."""


class RateSchedule(Protocol):
    """One of torch's learning rate schedulers, or what steps as they do."""

    def step(self) -> object:
        """The optimizer has made a step."""


class Changes(TypedDict, total=False):
    """The settings that are given; None leaves a thing out."""

    clip_norm: float | None
    scaler: GradScaler | None
    scheduler: RateSchedule | Iterable[RateSchedule] | None
    autocast: torch.autocast | torch.dtype | None


@dataclass(frozen=True)
class StepSettings:
    """How the steps of a net are made, the same on all ranks."""

    clip_norm: float | None = None
    """What the global norm of the reduced gradients is clipped to, behind unscaling."""
    scaler: GradScaler | None = None
    """It scales losses, unscales the reduced gradients, and leaves out a step where one of them is not finite."""
    scheduler: Sequence[RateSchedule] = ()
    """They step after each step that was made."""
    autocast: torch.autocast | None = None
    """Forward runs under it, on the compute thread."""
    divided: Mapping[nn.Parameter, Communicator] = field(default_factory=dict, repr=False, compare=False)
    """The parameters of which this rank has a block, with the ranks that have the others."""

    def changed(self, module: nn.Module, changes: Changes) -> StepSettings:
        """Return these settings with `changes`, of which a dtype of autocast is for the device of `module`.

        Raises ValueError for a `clip_norm` not above 0, TypeError for what is none of what a setting takes.
        """
        given: dict[str, Any] = dict(changes)
        if (unknown := given.keys() - Changes.__annotations__) or isinstance(given.get("clip_norm"), bool):
            raise TypeError(f"{', '.join(sorted(unknown)) or 'clip_norm=bool'}: expected {Changes.__annotations__}")
        clip_norm, scaler, autocast = (given.get(name) for name in ("clip_norm", "scaler", "autocast"))
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm}: expected a norm above 0, or None")
        if not isinstance(scaler, GradScaler | None):
            raise TypeError(f"scaler is {type(scaler).__name__}: expected a torch.amp.GradScaler, or None")
        if isinstance(autocast, torch.dtype):
            given["autocast"] = torch.autocast(next(module.parameters()).device.type, dtype=autocast)
        elif not isinstance(autocast, torch.autocast | None):
            raise TypeError(f"autocast is {type(autocast).__name__}: expected a dtype, a torch.autocast, or None")
        if "scheduler" in given:
            given["scheduler"] = _schedulers(given["scheduler"])
        return replace(self, **given)

    @property
    def whole(self) -> bool:
        """Updates need all gradients: no parameter may be updated before the last gradient is there."""
        return self.clip_norm is not None or self.scaler is not None

    @property
    def stateful(self) -> list[Stateful]:
        """What of it goes on with the steps."""
        return [each for each in (self.scaler, *self.scheduler) if isinstance(each, Stateful)]

    def casting(self) -> AbstractContextManager[object]:
        """Return the block in which forward runs."""
        return nullcontext() if self.autocast is None else copy(self.autocast)  # it remembers the thread's mode

    def update(
        self, groups: Groups, step: Callable[[], object], total: Callable[[Tensor], Tensor] | None = None
    ) -> bool:
        """Call `step` once the gradients in the parameter `groups` are unscaled and clipped; return whether it ran.

        The scaler leaves it out, on all ranks alike, where a reduced gradient is not finite. Where ranks have different
        gradients, shards, `total` returns the sum over all ranks of a tensor; it is called as often on each. Ranks that
        share divided layers clip by the norm of the whole model, and leave out the same steps.
        """
        if self.scaler is None:
            self._clip(groups, total)
            step()
            return True
        target = _Update(groups, step)
        self.scaler.unscale_(cast(Optimizer, target))  # as far as a scaler uses one
        try:
            if total is not None or self.divided:
                target = self._agreed(groups, step, total or partial(total_over, dict.fromkeys(self.divided.values())))
            self._clip(groups, total)
            self.scaler.step(cast(Optimizer, target))
        finally:
            self.scaler.update()
        return target.made

    def _agreed(self, groups: Groups, step: Callable[[], object], total: Callable[[Tensor], Tensor]) -> _Update:
        """Return an update that a scaler leaves out where a gradient of some rank is not finite."""
        assert self.scaler is not None
        bad = sum(not held.grad.isfinite().all() for _, held in _reduced(groups))
        flag = nn.Parameter(torch.zeros(1, device="cpu"))
        found = total(torch.full((1,), float(bad), device="cpu"))
        flag.grad = torch.full_like(flag, torch.inf) if found > 0 else torch.zeros_like(flag)
        agreed = _Update([{"params": [flag]}], step)
        self.scaler.unscale_(cast(Optimizer, agreed))
        return agreed

    def _clip(self, groups: Groups, total: Callable[[Tensor], Tensor] | None) -> None:
        if self.clip_norm is None:
            return
        clipped = [(held, self.divided.get(p)) for p, held in _reduced(groups)]
        norm = nn.utils.get_total_norm(held.grad for held, coll in clipped if coll is None)
        for coll in dict.fromkeys(self.divided.values()):
            of_blocks = nn.utils.get_total_norm(held.grad for held, shared in clipped if shared is coll)
            norm = (norm.square() + total_over([coll], of_blocks.square().reshape(1))[0]).sqrt()
        if total is not None:
            norm = total(norm.double().square().reshape(1)).sqrt()[0].to(norm.dtype)
        nn.utils.clip_grads_with_norm_([held for held, _ in clipped], self.clip_norm, norm)

    def advance(self) -> None:
        """A step was made."""
        for scheduler in self.scheduler:
            scheduler.step()


def _reduced(groups: Groups) -> list[tuple[Any, Any]]:
    """Return the parameters that have a gradient, each with what has the values of that as its own."""
    return [(p, with_values(p)) for group in groups for p in group["params"] if p.grad is not None]


def count_as_stepped(optimizer: Optimizer) -> None:
    """Have torch's schedulers know that `optimizer` steps: else they warn, since nothing has called its `step`."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


class _Update:
    """An update as a GradScaler sees it."""

    def __init__(self, groups: Groups, step: Callable[[], object]) -> None:
        self.param_groups = groups
        self.made = False
        self._step = step

    def step(self) -> None:
        self._step()
        self.made = True


def _schedulers(given: Any) -> tuple[RateSchedule, ...]:
    found = () if given is None else (given,) if hasattr(given, "step") else tuple(given)
    for scheduler in found:
        try:
            signature(scheduler.step).bind()
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"scheduler is {type(scheduler).__name__}: expected one whose step() needs nothing; one that looks at "
                "a metric (ReduceLROnPlateau) is to be stepped by you"
            ) from error
    return found
