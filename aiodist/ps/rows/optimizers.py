"""torch's optimizers on rows: only the rows that a push names change, and so does their state.

They do what torch's do for sparse gradients: `SGD`, `Adagrad`, and `SparseAdam` for Adam. Steps are counted for the
table, as torch counts them for a parameter, not for each row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiodist.ps.optimizers import OptimizerRule, optimizer

Columns = dict[str, Tensor]
"""What lies beside rows, by name: each `(rows, dim)`, as the rows are."""

_KEPT: Mapping[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
}
_NEUTRAL = {"momentum": 0, "weight_decay": 0, "nesterov": False, "dampening": 0, "amsgrad": False}
"""Settings that would change rows which nobody pushed; at these values they say nothing."""


class RowOptimizer:
    """A rule such as `SGD(lr=0.1)` for the rows of one table, with settings of its own."""

    def __init__(self, rule: OptimizerRule, dtype: torch.dtype) -> None:
        """Raise TypeError for optimizers other than SGD, Adagrad and Adam, ValueError for settings rows cannot have."""
        if rule.kind not in _KEPT:
            raise TypeError(f"{rule.name} of rows: expected SGD, Adagrad or Adam, which torch has for sparse gradients")
        _check_neutral(rule.name, rule.settings)
        self._rule = rule
        with torch.inference_mode(False):
            self._nothing = torch.empty(0, dtype=dtype)
            self._state = rule.state(self._nothing)

    @property
    def settings(self) -> dict[str, Any]:
        """Those of torch's optimizer, as they are now."""
        return self._state.optimizer.param_groups[0]

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings from the next step on; raises as `OptimizerRule.configure`, and then changes nothing."""
        _check_neutral(self._rule.name, changes)
        self._rule.configure(self._state, **changes)

    def fresh(self) -> dict[str, float]:
        """Return what lies beside a new row: a value by name, which all of its elements have."""
        return dict.fromkeys(_KEPT[self._rule.kind], self.settings.get("initial_accumulator_value", 0.0))

    @property
    def factor(self) -> float | None:
        """Where a step adds the gradient, times a factor: this one; then `step` need not be called."""
        if self._rule.kind is not torch.optim.SGD:
            return None
        lr = float(self.settings["lr"])
        return lr if self.settings["maximize"] else -lr

    def step(self, rows: Tensor, gradient: Tensor, columns: Columns, steps: int) -> None:
        """Change `rows` and what lies beside them, copies of those of the table; all are `(n, dim)`.

        `gradient` is only read. This is step number `steps`, from 1.
        """
        made, parameter = self._state
        settings = self.settings
        eps = settings["eps"]
        if "betas" in settings:  # SparseAdam does not divide it, as Adam divides the root that it is added to
            settings["eps"] = eps / math.sqrt(1 - settings["betas"][1] ** steps)
        parameter.data = rows
        made.state[parameter] = {"step": torch.tensor(float(steps - 1)), **columns}
        try:
            self._rule.apply(rows, gradient, 1.0, self._state)
        finally:
            settings["eps"] = eps
            made.state.clear()
            parameter.data = self._nothing


def rule_from(said: list[Any]) -> OptimizerRule:
    """Return the rule of a table from the name and the settings of its optimizer; ValueError for another name."""
    name, settings = said
    kind = next((kind for kind in _KEPT if kind.__name__ == name), None)
    if kind is None:
        raise ValueError(f"optimizer {name!r} of rows: expected one of {', '.join(kind.__name__ for kind in _KEPT)}")
    return optimizer(kind, **settings)


def _check_neutral(name: str, settings: Mapping[str, Any]) -> None:
    unfit = sorted(key for key, neutral in _NEUTRAL.items() if settings.get(key, neutral) != neutral)
    if unfit:
        raise ValueError(f"{name} of rows: {', '.join(unfit)}: it would change rows that nobody pushed")
