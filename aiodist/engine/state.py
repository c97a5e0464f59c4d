"""State, hooks and position of a training."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from aiodist.checkpoints.own import set_torch_state, torch_state
from aiodist.handles import Operation, Progress, internals

Event = Literal["start", "sample", "forward", "criterion", "backward", "update", "epoch", "end"]
"""Events that call hooks."""
EVENTS: tuple[Event, ...] = get_args(Event)


@dataclass(slots=True, kw_only=True)
class State:
    """The state of a training or an evaluation, as hooks read and change it.

    A hook may replace `sample` and set `weight` at "sample", replace `output` at "forward" and `loss` at "criterion",
    and set `stop` at any time. Other attributes are only to be read.
    """

    net: Any
    """The `DataParallel`, or the module, of the engine."""
    network: nn.Module
    """The part of the net that makes outputs: `net.module`, or the network of a `WithCriterion`."""
    optimizer: Any
    """The optimizer, driver or client of the engine."""
    rank: int
    """This rank, and `size` ranks in all; 0 of 1 without a communicator."""
    size: int
    training: bool
    """True in `train`, False in `test`."""
    epochs: int = 1
    """Number of epochs to train in all."""
    epoch: int = 0
    """The number of this epoch, from 1 on; 0 before the first."""
    step: int = 0
    """The number of this step, from 1 on, over all epochs."""
    batch: int = 0
    """The number of this batch in its epoch, from 1 on."""
    sample: Any = None
    """The batch from the loader."""
    input: Any = None
    """Input of the network: a tuple of its arguments, a dict of its keywords, or its one argument."""
    target: Any = None
    """Target for the criterion."""
    weight: float | None = None
    """Weight of the batch in means: the length of its first tensor, unless a hook of "sample" sets it."""
    output: Any = None
    """Output of the network for the batch."""
    loss: Tensor | None = None
    """The loss of the batch, one element: a part of the graph at "criterion", detached from "update" on."""
    aux: Any = None
    """The second part of `(loss, aux)`, with its tensors detached; None if the criterion returned only the loss."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the last complete epoch over all ranks: the loss as "loss", and each metric by its name."""
    stop: bool = False
    """Set it to True to end the training on all ranks after the same step."""


@dataclass
class Position:
    """The position of a training on this rank, between two steps."""

    epoch: int = 0
    """Number of finished epochs."""
    step: int = 0
    """Number of steps made."""
    batch: int = 0
    """Number of batches of the current epoch that were trained on."""
    order: Tensor | None = None
    """The state of torch's generator when this epoch began: it gives the order of its data."""
    random: dict[str, Any] | None = None
    """States of torch's generators for the next step, or None to keep the current ones."""

    def follow(self, made: int) -> None:
        """Move by `made` steps of this epoch, or back if it is below 0, since the parameters have them now."""
        self.step += made
        self.batch += made
        self.random = torch_state() if self.batch else None

    def after(self, step: int) -> Position:
        """Return the position after step number `step` of this epoch, with the current generators."""
        batch = self.batch + step - self.step
        return Position(self.epoch, step, batch, self.order, torch_state() if batch else None)

    def furthest(self, others: Sequence[Position]) -> Position:
        """Return the furthest position, with this rank's generators if they are of the same epoch."""
        most = max([self, *others], key=lambda each: (each.epoch, each.step, each.batch))
        same = (most.epoch, bool(most.batch)) == (self.epoch, bool(self.batch))
        return replace(most, order=self.order if same else most.order, random=self.random if same else None)

    def begin_epoch(self) -> None:
        """Restore torch's generators of the beginning of this epoch, if it has begun before."""
        if self.batch == 0:
            self.restore()
            self.order = torch.get_rng_state()
        elif self.order is not None:
            torch.set_rng_state(self.order)

    def restore(self) -> None:
        """Restore torch's generators for the next step."""
        given, self.random = self.random, None
        if given is not None:
            set_torch_state(given)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "order": self.order if self.batch else None, "random": self.random or torch_state()}


# --- hooks ---------------------------------------------------------------------------------------------------------

Hook = Callable[[State], object]
"""A plain function, or a coroutine function."""


class Hooks:
    """Hooks by event; those of `users` come after all that are added here."""

    def __init__(self, users: Hooks | None = None) -> None:
        self._hooks: dict[Event, list[Hook]] = {event: [] for event in EVENTS}
        self._users = users

    def add(self, event: Event, hook: Hook) -> None:
        """Call `hook` at `event`, after those that were added before.

        Raises ValueError for an unknown event, TypeError for a hook that is no function.
        """
        if event not in self._hooks:
            raise ValueError(f"event {event!r}: expected one of {', '.join(EVENTS)}")
        if not callable(hook):
            raise TypeError(f"the hook for {event!r} is {type(hook).__name__}: expected a function of the state")
        self._hooks[event].append(hook)

    def at(self, event: Event) -> list[Hook]:
        mine = self._hooks[event]
        return mine if self._users is None else mine + self._users.at(event)

    async def call(self, event: Event, state: State) -> None:
        """Call the hooks of `event` on the loop, and await coroutines, one after the other."""
        for hook in self.at(event):
            result = hook(state)
            if inspect.isawaitable(result):
                await result

    def call_on_thread(self, event: Event, state: State, progress: Progress) -> None:
        """Call the hooks on this thread, the compute thread, which waits while coroutines run on the loop."""
        for hook in self.at(event):
            result = hook(state)
            if inspect.iscoroutine(result):
                with progress.waiting():
                    _run_on_loop(result, progress)


def _run_on_loop(coroutine: Coroutine[Any, Any, object], progress: Progress) -> None:
    future = asyncio.run_coroutine_threadsafe(coroutine, progress.loop)
    over: Operation[None] = Operation(progress, "hook", polled=False)
    future.add_done_callback(lambda _: over.resolve(None))
    if not internals.block_unless(over.handle, progress.loop.is_closed):
        raise RuntimeError(f"the event loop was closed while {coroutine!r} was running")
    over.handle.detach()
    future.result()
