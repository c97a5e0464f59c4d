"""How far a training has come, so that it goes on from there exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiodist.checkpoints.generators import set_torch_state, torch_state
from aiodist.checkpoints.pieces import Redivided
from aiodist.engine.meters import EpochFigures

_KEYS = frozenset({"epoch", "step", "batch", "order", "random", "figures", "data"})


@dataclass
class Position:
    """Where a training is on this rank, between two of its steps."""

    epochs: int = 0
    """How many are over."""
    steps: int = 0
    """How many were made."""
    batches: int = 0
    """How many of the current epoch were trained on."""
    order: Tensor | None = None
    """The state of torch's generator when this epoch began: it gives the order of its data."""
    random: dict[str, Any] | None = None
    """The states of torch's generators to go on with; None where training goes on with those that there are."""
    figures: EpochFigures | None = None
    """What was measured of this epoch."""
    under_way: bool = False
    """An epoch has begun, and is not over."""
    data: list[Any] | None = None
    """States of a queue of shards to go on with, those of all ranks together; None where there are none."""

    def begin_epoch(self) -> None:
        """Have torch's generators as they were when this epoch began, if it has begun before."""
        self.under_way = True
        if self.batches == 0:
            self.go_on()
            self.order = torch.get_rng_state()
        elif self.order is not None:
            torch.set_rng_state(self.order)

    def go_on(self) -> None:
        """Have torch's generators as they are to be when the next step begins."""
        given, self.random = self.random, None
        if given is not None:
            set_torch_state(given)

    def interrupt(self, figures: EpochFigures) -> None:
        """The epoch ends before its data do."""
        self.figures = figures
        self.random = torch_state()

    def end_epoch(self) -> None:
        """The epoch is over."""
        self.epochs += 1
        self.batches = 0
        self.under_way = False
        self.order = self.figures = None

    def state_dict(self, figures: EpochFigures | None, queue: Redivided | None) -> dict[str, Any]:
        """Return numbers, tensors, and dicts and lists of them; `figures` are those of the epoch so far."""
        data = self.data
        if data is None and self.under_way and queue is not None:
            data = [queue.state_dict()]
        measured = self.figures or figures or EpochFigures()
        return {
            "epoch": self.epochs,
            "step": self.steps,
            "batch": self.batches,
            "order": self.order if self.batches else None,
            "random": self.random or torch_state(),
            "figures": {"weight": measured.weight, "sums": dict(measured.sums), "states": dict(measured.states)},
            "data": data,
        }

    @classmethod
    def of_others(cls, states: Sequence[Mapping[str, Any]], rank: int) -> Position:
        """Return the beginning of the epoch that another number of ranks did not end; `rank` is this one's.

        With a queue of shards it is the beginning of what is left of that epoch.
        """
        epochs = min(state["epoch"] for state in states)
        data = None
        if all(state["data"] for state in states):
            data = [each for state in states for each in state["data"]] if rank == 0 else []
        return cls(epochs=epochs, steps=max(state["step"] for state in states), data=data)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """Return what `state_dict` gave; raise ValueError for something else."""
        if set(state) != _KEYS:
            raise ValueError(f"state with {', '.join(sorted(map(str, state)))}: expected {', '.join(sorted(_KEYS))}")
        return cls(
            epochs=state["epoch"],
            steps=state["step"],
            batches=state["batch"],
            order=state["order"],
            random=dict(state["random"]),
            figures=EpochFigures(**state["figures"]) if state["batch"] else None,
            data=state["data"],
        )
