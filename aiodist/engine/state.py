"""What hooks are given, the state of a training or of an evaluation, and how far a training has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from aiodist.checkpoints.own import set_torch_state, torch_state

__all__ = ["EVENTS", "Event", "Position", "State"]

Event = Literal["start", "sample", "forward", "criterion", "backward", "update", "epoch", "end"]
"""When hooks are called."""
EVENTS: tuple[Event, ...] = get_args(Event)


@dataclass(slots=True, kw_only=True)
class State:
    """The state of one training, or of one evaluation, as hooks see and change it.

    A hook may replace `sample` and set `weight` at "sample", replace `output` at "forward" and `loss` at "criterion",
    and set `stop` at any time. The rest is to be read.
    """

    net: Any
    """The `DataParallel`, or the module, that was given to the engine."""
    network: nn.Module
    """The part of it that makes outputs: `net.module`, or the network of a `WithCriterion`."""
    optimizer: Any
    """What was given to the engine."""
    rank: int
    """This rank, and `size` ranks in all; 0 of 1 without a communicator."""
    size: int
    training: bool
    """True in `train`, False in `test`."""
    epochs: int = 1
    """How many epochs there are to be in all."""
    epoch: int = 0
    """The number of this epoch, from 1 on; 0 before the first."""
    step: int = 0
    """The number of this step, from 1 on, over all epochs."""
    batch: int = 0
    """The number of this batch in its epoch, from 1 on."""
    sample: Any = None
    """What the loader gave."""
    input: Any = None
    """What the network is called with: a tuple as its arguments, a dict as its keywords, else the one argument."""
    target: Any = None
    """What the criterion compares the output with."""
    weight: float | None = None
    """How much the batch counts in means: unless a hook of "sample" sets it, the length of the first tensor in it."""
    output: Any = None
    """What the network returned for the batch."""
    loss: Tensor | None = None
    """The loss of the batch, one element: a part of the graph at "criterion", detached from "update" on."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last epoch that is over, over all ranks: the mean of the losses, "loss", and each metric by its name."""
    stop: bool = False
    """Set it to end the training on all ranks behind the same step."""


@dataclass
class Position:
    """Where a training is on this rank, between two of its steps."""

    epoch: int = 0
    """How many are over."""
    step: int = 0
    """How many were made."""
    batch: int = 0
    """How many of the current epoch were trained on."""
    order: Tensor | None = None
    """The state of torch's generator when this epoch began: it gives the order of its data."""
    random: dict[str, Any] | None = None
    """The states of torch's generators to go on with; None where training goes on with those that there are."""

    def begin_epoch(self) -> None:
        """Have torch's generators as they were when this epoch began, if it has begun before."""
        if self.batch == 0:
            self.go_on()
            self.order = torch.get_rng_state()
        elif self.order is not None:
            torch.set_rng_state(self.order)

    def go_on(self) -> None:
        """Have torch's generators as they are to be when the next step begins."""
        given, self.random = self.random, None
        if given is not None:
            set_torch_state(given)

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and tensors."""
        return {**vars(self), "order": self.order if self.batch else None, "random": self.random or torch_state()}
