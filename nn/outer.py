"""How the centre of a `LocalSGD`, the values that all ranks hold, goes on from an average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.nn.data_parallel import check_one_pass

MakeOuter = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class SlowMo:
    """Slow momentum over the averages of a `LocalSGD`, which is given it as `outer`.

    With x the values at the beginning of a period, y the average at its end and r the learning rate of the local steps:
    u becomes momentum u + (x - y) / r, and x becomes x - lr r u. So momentum=0 with lr=1 is plain averaging. r is that
    of the first step of the period, for each parameter its own. Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving
    communication-efficient distributed SGD with slow momentum", ICLR 2020, doi:10.48550/arXiv.1910.00643, whose beta
    is `momentum`, 0.4 to 0.8, and alpha is `lr`, mostly 1. Raises ValueError unless 0 <= momentum < 1 and lr > 0.
    """

    momentum: float
    lr: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: expected at least 0, and less than 1")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr}: expected more than 0")


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging among the ranks of a `LocalSGD`, which is given it as `outer`.

    At the end of a period a rank goes on from x - alpha (x - centre), with x its parameters, and the centre moves by
    alpha times the sum of x - centre over all ranks. What training found is the centre. Zhang, Choromanska and LeCun,
    "Deep learning with elastic averaging SGD", NIPS 2015, doi:10.48550/arXiv.1412.6651, where alpha is 0.9 / ranks.
    Raises ValueError unless 0 < alpha <= 1.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: expected more than 0, at most 1; the paper's is 0.9 / ranks")


class SlowMomentum(Optimizer):
    """What `SlowMo` says, as an optimizer; a gradient is x - y, and the setting `rates` has r for each parameter."""

    def __init__(self, params: Sequence[nn.Parameter], how: SlowMo) -> None:
        super().__init__(params, {"momentum": how.momentum, "lr": how.lr, "rates": [1.0] * len(params)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Go on from the average."""
        (group,) = self.param_groups
        for p, rate in zip(group["params"], group["rates"], strict=True):
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["slow_momentum"] = torch.zeros_like(p)
                u: Tensor = state["slow_momentum"]
                u.mul_(group["momentum"]).add_(p.grad, alpha=1 / rate)
                p.add_(u, alpha=-group["lr"] * rate)


def made_outer(outer: SlowMo | MakeOuter, params: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer of `params`; raise TypeError unless `outer` is a `SlowMo`, or a function that makes one."""
    if isinstance(outer, SlowMo):
        return SlowMomentum(params, outer)
    if isinstance(outer, Optimizer) or not callable(outer):
        raise TypeError(
            f"outer is {type(outer).__name__}: expected a SlowMo, an Elastic, or a function that makes an optimizer of "
            "a list of parameters"
        )
    made = outer(params)
    if not isinstance(made, Optimizer):
        raise TypeError(f"outer returned {type(made).__name__}: expected an optimizer")
    check_one_pass(made)
    return made


def rates_of(optimizer: Optimizer, params: Sequence[Tensor]) -> list[float]:
    """Return the learning rate with which `optimizer` updates each of `params`, 1.0 where it does not.

    Raises ValueError for one that is not above 0, by which slow momentum would divide.
    """
    known = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    rates = [known.get(id(p), 1.0) for p in params]
    for rate in rates:
        if not rate > 0:
            raise ValueError(f"a learning rate is {rate} where a period begins: SlowMo divides by it, expected above 0")
    return rates


def checked_state(state: Any, names: Sequence[str]) -> dict[str, Any]:  # noqa: ANN401
    """Return `state` if it is a dictionary with just these `names`; raise ValueError else."""
    if not isinstance(state, dict) or sorted(state) != sorted(names):
        seen = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"state has {seen}: expected {sorted(names)}, what state_dict() gave")
    return state
