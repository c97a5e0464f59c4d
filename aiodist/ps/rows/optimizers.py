"""Optimizers of rows: only the rows that a push names change, and so does their state.

They do what torch's do for sparse gradients: `SGD`, `Adagrad`, and `SparseAdam` for Adam. Steps are counted for the
table, as torch counts them for a parameter, not for each row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiodist.ps.optimizers import OptimizerRule

Columns = dict[str, Tensor]
"""What lies beside rows, by name: each `(rows, dim)`, as the rows are."""


class RowOptimizer(ABC):
    """How rows change by their gradients; its `settings` may be changed between two steps."""

    kind: ClassVar[type[torch.optim.Optimizer]]
    fixed: ClassVar[tuple[str, ...]] = ()
    """Settings that count only when a row is made."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for settings that rows cannot have, and TypeError for values of another type."""
        self.settings = self._checked({**self.defaults(), **settings})

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings from the next step on; raises as the constructor does, and then changes nothing."""
        for name in self.fixed:
            if name in changes:
                raise ValueError(f"{self.name} of rows: {name} counts only when a row is made")
        self.settings = self._checked({**self.settings, **changes})

    def _checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        name = self.name
        if unknown := sorted(settings.keys() - self.defaults().keys()):
            raise ValueError(f"{name} of rows: {', '.join(unknown)}: expected {', '.join(sorted(self.defaults()))}")
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        for key, value in settings.items():
            like = self.defaults()[key]
            if not _is_like(value, like):
                raise TypeError(f"{name} of rows: {key}={value!r}: expected {_called(like)}")
        with torch.inference_mode(False):
            self.kind([torch.nn.Parameter(torch.zeros(1))], **settings)  # torch knows which values it takes
        return settings

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.kind.__name__

    def fresh(self) -> dict[str, float]:
        """Return what lies beside a new row: a value by name, which all of its elements have."""
        return {}

    @property
    def factor(self) -> float | None:
        """Where a step adds the gradient, times a factor: this one; then `step` need not be called."""
        return None

    def step(self, rows: Tensor, gradient: Tensor, columns: Columns, steps: int) -> None:
        """Change `rows` and what lies beside them, copies of those of the table; all are `(n, dim)`.

        `gradient` is only read. This is step number `steps`, from 1.
        """
        self._step(rows, -gradient if self.settings["maximize"] else gradient, columns, steps)

    @classmethod
    @abstractmethod
    def defaults(cls) -> dict[str, Any]:
        """Return all settings, and their values unless others are given."""

    @abstractmethod
    def _step(self, rows: Tensor, gradient: Tensor, columns: Columns, steps: int) -> None: ...


class RowSGD(RowOptimizer):
    """rows -= lr * gradient."""

    kind = torch.optim.SGD

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return all settings, and their values unless others are given."""
        return {"lr": 1e-3, "maximize": False}

    @property
    def factor(self) -> float:
        """What a step multiplies the gradient by."""
        lr = float(self.settings["lr"])
        return lr if self.settings["maximize"] else -lr

    def _step(self, rows: Tensor, gradient: Tensor, columns: Columns, steps: int) -> None:
        rows.sub_(gradient, alpha=self.settings["lr"])


class RowAdagrad(RowOptimizer):
    """Adagrad, after Duchi, Hazan and Singer, "Adaptive subgradient methods" (JMLR 12, 2011), as torch does it."""

    kind = torch.optim.Adagrad
    fixed = ("initial_accumulator_value",)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return all settings, and their values unless others are given."""
        return {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
            "maximize": False,
        }

    def fresh(self) -> dict[str, float]:
        """Return what lies beside a new row."""
        return {"sum": self.settings["initial_accumulator_value"]}

    def _step(self, rows: Tensor, gradient: Tensor, columns: Columns, steps: int) -> None:
        lr = self.settings["lr"] / (1 + (steps - 1) * self.settings["lr_decay"])
        columns["sum"].addcmul_(gradient, gradient)
        rows.addcdiv_(gradient, columns["sum"].sqrt().add_(self.settings["eps"]), value=-lr)


class RowAdam(RowOptimizer):
    """Adam, after Kingma and Ba (arXiv:1412.6980, 2015), lazily: what torch.optim.SparseAdam does."""

    kind = torch.optim.SparseAdam

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return all settings, and their values unless others are given."""
        return {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}

    def fresh(self) -> dict[str, float]:
        """Return what lies beside a new row."""
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def _step(self, rows: Tensor, gradient: Tensor, columns: Columns, steps: int) -> None:
        first, second = self.settings["betas"]
        columns["exp_avg"].lerp_(gradient, 1 - first)
        columns["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        lr = self.settings["lr"] * math.sqrt(1 - second**steps) / (1 - first**steps)
        rows.addcdiv_(columns["exp_avg"], columns["exp_avg_sq"].sqrt().add_(self.settings["eps"]), value=-lr)


_KINDS: Mapping[type[torch.optim.Optimizer], type[RowOptimizer]] = {
    torch.optim.SGD: RowSGD,
    torch.optim.Adagrad: RowAdagrad,
    torch.optim.Adam: RowAdam,
    torch.optim.SparseAdam: RowAdam,
}
_NEUTRAL = {"momentum": 0, "weight_decay": 0, "nesterov": False, "dampening": 0, "amsgrad": False}
"""Settings that would change rows which nobody pushed; at these values they say nothing."""


def row_optimizer(rule: OptimizerRule) -> RowOptimizer:
    """Return what `rule`, such as `SGD(lr=0.1)`, means for rows.

    Raises TypeError for optimizers other than SGD, Adagrad and Adam, and ValueError for settings that rows cannot have,
    such as `momentum`, which would change rows that nobody pushed.
    """
    if rule.kind not in _KINDS:
        raise TypeError(f"{rule.name} of rows: expected SGD, Adagrad or Adam, which torch has for sparse gradients")
    kind = _KINDS[rule.kind]
    given = dict(rule.settings)
    for key, neutral in _NEUTRAL.items():
        if key in given and given[key] == neutral:
            del given[key]
    return kind(given)


def said_of(optimizer: RowOptimizer | None) -> list[Any] | None:
    """Return it as JSON holds it."""
    return None if optimizer is None else [optimizer.name, optimizer.settings]


def optimizer_from(said: Any) -> RowOptimizer | None:  # noqa: ANN401
    """Return what `said_of` said; raise ValueError or TypeError for what it never says."""
    if said is None:
        return None
    name, settings = said
    for kind in _KINDS.values():
        if kind.kind.__name__ == name:
            return kind(settings)
    raise ValueError(
        f"optimizer {name!r} of rows: expected one of {', '.join(k.kind.__name__ for k in _KINDS.values())}"
    )


def _is_like(value: object, like: object) -> bool:
    if isinstance(like, bool):
        return isinstance(value, bool)
    if isinstance(like, tuple):
        return isinstance(value, tuple) and len(value) == len(like) and all(map(_is_like, value, like))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _called(like: object) -> str:
    return "a bool" if isinstance(like, bool) else f"{len(like)} numbers" if isinstance(like, tuple) else "a number"
