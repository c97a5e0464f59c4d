"""The interface of optimizers that drive a whole step of a net, and checks of the optimizers that a net is given."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from aiodist.nn.compute import Forward
from aiodist.nn.hyperparameters import optimizers_of
from aiodist.nn.passes import Pass
from aiodist.nn.per_rank import SharedState
from aiodist.types import Stateful

T = TypeVar("T")


class Driver:
    """An optimizer that drives the whole step by itself, such as `PipelinedOptimizer`; also a `Stateful`."""

    pass_lag: ClassVar[int | None] = None
    """Number of steps until `train` raises an error of another rank, 0 or 1; None if a step is not one pass of all."""

    @property
    def net(self) -> object:
        """The net that the driver steps, or None if it steps any net."""
        return None

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of torch that make the updates."""
        return ()

    @property
    def pending(self) -> bool:
        """True while some updates are still to be made."""
        return False

    def train(self, forward: Forward) -> object:
        """Do one step on the compute thread, with the settings of `forward`, whose result `net.step` returns."""
        raise NotImplementedError

    def follow(self, reduction: Pass) -> None:
        """Do what other ranks do after a pass to which this rank brought no data (compute thread).

        Only a driver that alone gets the net's gradients is called.
        """

    async def flush(self) -> None:
        """Return when all updates are made."""

    def retreat(self) -> Stateful:
        """Return to the last step whose updates were all made; return the state that ranks share.

        The compute thread has ended. Another `retreat` may follow before `resume`.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """Continue with the state of the net, on another communicator."""

    def state_dict(self) -> Any:
        """See `Stateful`."""
        raise NotImplementedError

    def load_state_dict(self, state: Any, /) -> object:
        """See `Stateful`."""
        raise NotImplementedError


def check_one_pass(opt: Optimizer) -> None:
    """Raise TypeError for an optimizer whose step needs a function that computes the loss, such as LBFGS."""
    _, *kinds = signature(type(opt).step).parameters.values()  # a scheduler replaces `opt.step` by a wrapper
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in kinds):
        raise TypeError(
            f"{type(opt).__name__} runs forward and backward several times by itself (its `closure`), and a step here "
            "runs them once: expected an optimizer whose step() needs no closure, or `await asyncio.to_thread(opt.step,"
            " closure)` with a closure that has the loop evaluate, as in examples/lbfgs.py"
        )


def check_given(state: Sequence[Stateful], last: object, keeper: object) -> None:
    """Raise ValueError unless `state` has the optimizers with which the net continues on other ranks.

    `last` is the optimizer of the last step, and `keeper` the optimizer for which the net keeps its buckets.
    """
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
