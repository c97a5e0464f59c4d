"""Optimizers that drive a whole step of a net, and checks of the optimizers that a net is given."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from aiodist.nn.compute import Forward
from aiodist.nn.hyperparameters import optimizers_of
from aiodist.nn.per_rank import SharedState
from aiodist.types import Stateful

T = TypeVar("T")


@runtime_checkable
class Driver(Stateful, Protocol):
    """An optimizer that drives the whole step by itself, such as `PipelinedOptimizer`.

    If each `train` makes one pass of all ranks, the attribute `pass_lag` may say so: 0 if that `train` raises an error
    of another rank, 1 if the next one does. Without it, `Engine` has ranks ask each other before a step.
    """

    def train(self, forward: Forward) -> object:
        """Do one step on the compute thread, with the settings of `forward`, whose result `net.step` returns."""

    async def flush(self) -> None:
        """Return when all updates are made."""

    @property
    def pending(self) -> bool:
        """True while some updates are still to be made."""


@runtime_checkable
class Recovering(Driver, Protocol):
    """A driver with which a net can continue on another communicator."""

    def retreat(self) -> Stateful:
        """Return to the last step whose updates were all made; return the state that ranks share.

        The compute thread has ended. Another `retreat` may follow before `resume`.
        """

    def resume(self) -> None:
        """Continue with the state of the net."""


def check_one_pass(opt: Optimizer) -> None:
    """Raise TypeError for an optimizer whose step needs a function that computes the loss, such as LBFGS."""
    _, *kinds = signature(type(opt).step).parameters.values()  # a scheduler replaces `opt.step` by a wrapper
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in kinds):
        raise TypeError(
            f"{type(opt).__name__} runs forward and backward several times by itself (its `closure`), and a step here "
            "runs them once: expected an optimizer whose step() needs no closure, or `await asyncio.to_thread(opt.step,"
            " closure)` with a closure that has the loop evaluate, as in examples/lbfgs.py"
        )


def check_recovers(state: Sequence[Stateful], last: object, keeper: object) -> None:
    """Raise unless the net can continue with `state` on other ranks.

    `last` is the optimizer of the last step, and `keeper` the optimizer for which the net keeps its buckets.
    """
    for each in (*state, last):
        if isinstance(each, Driver) and not isinstance(each, Recovering | Optimizer):
            raise TypeError(
                f"rebind with {type(each).__name__}, which has no `retreat` and `resume` for other ranks: "
                "make a new net and optimizer, and load the last checkpoint"
            )
    for needed, why in ((last, "made the last step"), (keeper, "keeps the buckets")):
        if needed is not None and all(each is not needed for each in state):
            raise ValueError(f"rebind without {type(needed).__name__}, which {why}: expected it")


def shared_states(call: str, state: Sequence[T], per_rank: Sequence[Tensor]) -> list[T | SharedState]:
    """Return the part of each `state` that ranks share: an optimizer without parameters that are `per_rank`.

    Raises ValueError for a driver with such parameters, and an optimizer whose state is not of torch's form.
    """
    own = frozenset(map(id, per_rank))
    found: list[T | SharedState] = []
    for each in state:
        optimizers = optimizers_of(each) if own and isinstance(each, Optimizer | Driver) else []
        mixed = [opt for opt in optimizers if any(id(p) in own for group in opt.param_groups for p in group["params"])]
        if mixed and not (isinstance(each, Optimizer) and type(each).load_state_dict is Optimizer.load_state_dict):
            raise ValueError(
                f"{call}: {type(each).__name__} has parameters that each rank keeps for itself (per_rank), and {call} "
                "gives all ranks one rank's state of it. Give those parameters an optimizer of their own, and step it "
                "after `net.step` with `await net.submit(own.step)`"
            )
        found.append(SharedState(mixed[0], own) if mixed else each)
    return found
