"""torch's optimizers as rules of a server: a push is a gradient, and each shard has its own state.

Each shard has a torch optimizer, whose only parameter is the shard. So each tensor is a parameter group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from aiodist.ps.rules import COMPLEX, FLOATS, Rule, bare
from aiodist.types import settings_text

_WHOLE = ("LBFGS", "Muon", "Adafactor", "SparseAdam")
"""Optimizers of torch whose step depends on the shape or on all elements of a tensor. Shards cannot use them."""
_HOW = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Settings of the implementation, which do not change results."""
_ONCE = frozenset({"initial_accumulator_value"})
"""Settings that are used only when the state is made."""
_FUSED = frozenset({torch.float32, torch.float64})
"""Dtypes with correct fused steps. Those of torch 2.13 for 16 bits compute momentum wrongly."""


class OptimizerState(NamedTuple):
    """State of a shard: the optimizer, with its moments, and the parameter that shares the shard's memory."""

    optimizer: Optimizer
    parameter: torch.nn.Parameter


class OptimizerRule(Rule):
    """A step of an optimizer of torch for each push, or for the sum of the pushes of a step; `optimizer` makes it.

    The optimizer treats each element by itself, so the blocks of a tensor change as the whole tensor would. An `alpha`
    other than 1 multiplies the gradient. `repr` has the class and the settings, sorted.
    """

    takes = FLOATS | COMPLEX
    takes_gradients = True
    combines = True

    def __init__(self, kind: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self.name = kind.__qualname__
        self.kind = kind
        self.settings = dict(settings)
        """Settings of the call."""
        self._how = {} if _HOW & settings.keys() else _fastest(kind, settings)
        known = signature(kind).parameters
        with torch.inference_mode(False):
            trial = self._make(torch.nn.Parameter(torch.zeros(1, device="cpu")))
            _step(trial)
        anything = any(one.kind is one.VAR_KEYWORD for one in known.values())
        self._known = {  # settings that `configure` can change, with the first values of a shard
            key: value
            for key, value in trial.defaults.items()
            if (key in known or anything) and key not in _HOW and key not in _ONCE
        }

    def state(self, shard: Tensor) -> OptimizerState:
        """Return an optimizer of `shard`; raise `ValueError` for a shard that was made in inference mode."""
        if shard.is_inference():
            raise ValueError(f"rule {self.name}: the shard was made in inference mode, and cannot be updated")
        with torch.inference_mode(False):
            parameter = torch.nn.Parameter(bare(shard))  # shares its memory
            return OptimizerState(self._make(parameter), parameter)

    def move(self, state: OptimizerState, shard: Tensor) -> None:
        """Let the parameter of `state` use the memory `shard`, which has the values of the old memory."""
        with torch.inference_mode(False):
            state.parameter.data = bare(shard)

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: OptimizerState) -> None:
        """Do a step with the gradient `alpha * value`, without a copy for an `alpha` of 1."""
        parameter = state.parameter
        if parameter.data_ptr() != shard.data_ptr():
            raise ValueError(f"rule {self.name}: expected the state of this shard, not of another")
        gradient = bare(value)
        with torch.inference_mode(False), torch.no_grad():
            parameter.grad = gradient if alpha == 1 else gradient * alpha
            try:
                state.optimizer.step()
            finally:
                parameter.grad = None

    def configure(self, state: OptimizerState, **changes: object) -> None:
        """Change settings from the next push on.

        Raises `ValueError` for an unknown setting, for a value that torch refuses, and for a setting that needs state
        which the shard lacks, as Adam's `amsgrad`; `TypeError` for a value of another type. Changes nothing then.
        """
        if unknown := sorted(changes.keys() - self._known.keys()):
            raise ValueError(f"rule {self.name}: {', '.join(unknown)}: expected {', '.join(sorted(self._known))}")
        for key, value in changes.items():
            _check_type(self.name, key, value, self._known[key])
        group = state.optimizer.param_groups[0]
        self._try({key: group[key] for key in self._known}, changes)
        group.update(changes)

    def state_dict(self, state: OptimizerState) -> dict[str, Any]:
        return state.optimizer.state_dict()

    def load_state_dict(self, state: OptimizerState, given: Mapping[str, Any]) -> None:
        """Load a copy of the result of `state_dict`, with its settings."""
        if given.keys() != {"state", "param_groups"}:
            raise ValueError(f"rule {self.name}: {', '.join(map(str, given))}: expected state, param_groups")
        numel = state.parameter.numel()
        with torch.inference_mode(False):
            kept = deepcopy(given["state"])  # torch would use the tensors themselves
            for key, one in kept.get(0, {}).items():
                if isinstance(one, Tensor) and one.dim() and one.numel() != numel:
                    raise ValueError(f"rule {self.name}: {key} of {one.numel()} elements: the shard has {numel}")
            state.optimizer.load_state_dict({"state": kept, "param_groups": given["param_groups"]})

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={settings_text(value)}" for key, value in sorted(self.settings.items()))
        return f"{self.kind.__module__}.{self.kind.__qualname__}({settings})"

    def _make(self, parameter: torch.nn.Parameter, **changes: object) -> Optimizer:
        how = self._how if parameter.dtype in _FUSED else dict.fromkeys(self._how.keys() & {"foreach"}, False)
        make: Any = self.kind
        made: Optimizer = make([parameter], **(self.settings | how | changes))
        return made

    def _try(self, now: dict[str, Any], changes: dict[str, Any]) -> None:
        """Raise unless the class takes the settings, and a shard can continue with them after a step without."""
        with torch.inference_mode(False):
            self._make(torch.nn.Parameter(torch.zeros(1, device="cpu")), **(now | changes))
            trial = self._make(torch.nn.Parameter(torch.zeros(1, device="cpu")), **now)
            _step(trial)
            trial.param_groups[0].update(changes)
            try:
                _step(trial)
            except Exception as error:
                shown = ", ".join(f"{key}={value!r}" for key, value in changes.items())
                raise ValueError(f"rule {self.name}: {shown}: this needs state that the shard lacks") from error


def optimizer(kind: type[Optimizer], /, **settings: object) -> OptimizerRule:
    """Return the rule that updates with `kind`, a class of torch.optim or derived from it, made with `settings`.

    ```python
    rule = optimizer(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95))
    ```
    Settings must be plain values, which ranks can compare: numbers, strings, None and tuples of them. The class must
    treat each element by itself. Raises `TypeError` for other values, for unknown settings, for an object that is no
    class of an optimizer, and for LBFGS, Muon, Adafactor and SparseAdam, which need whole tensors; `ValueError` for
    values that the class refuses; and the error of a first step. Uses torch's fastest implementation, unless the
    settings have `foreach` or `fused`.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"optimizer({kind!r}): expected a class of torch.optim, and its settings by name")
    whole = next((name for name in _WHOLE if issubclass(kind, getattr(torch.optim, name, ()))), None)
    if whole is not None:
        raise TypeError(f"optimizer({kind.__qualname__}): expected an optimizer that treats each element by itself")
    for key, value in settings.items():
        if not _is_plain(value):
            raise TypeError(f"{kind.__qualname__}: {key}={value!r}: expected a number, a string, None, or a tuple")
    return OptimizerRule(kind, settings)


def SGD(
    lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, **more: object
) -> OptimizerRule:
    """Return `optimizer(torch.optim.SGD, ...)`: plain, with momentum, or Nesterov's; `more` are settings of torch's."""
    given: dict[str, object] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return optimizer(torch.optim.SGD, **given, **more)


def Adam(lr: float = 1e-3, **more: object) -> OptimizerRule:
    """Return `optimizer(torch.optim.Adam, lr=lr, ...)`; `more` are torch's: betas, eps, weight_decay..."""
    return optimizer(torch.optim.Adam, lr=lr, **more)


def Adagrad(lr: float = 1e-2, **more: object) -> OptimizerRule:
    """Return `optimizer(torch.optim.Adagrad, lr=lr, ...)`; `more` are torch's: lr_decay, eps..."""
    return optimizer(torch.optim.Adagrad, lr=lr, **more)


def RMSprop(lr: float = 1e-2, **more: object) -> OptimizerRule:
    """Return `optimizer(torch.optim.RMSprop, lr=lr, ...)`; `more` are torch's: alpha, centered, momentum..."""
    return optimizer(torch.optim.RMSprop, lr=lr, **more)


def _fastest(kind: type[Optimizer], settings: Mapping[str, Any]) -> dict[str, bool]:
    """Return the settings of torch's fastest implementation for one flat tensor on a CPU.

    Measured for 1e3 and 1e6 elements: fused takes a twelfth (Adam), a third (Adagrad), two thirds (momentum) of the
    time of the plain loop. Without momentum the plain loop is fastest, and foreach gains nothing with one tensor.
    """
    if not kind.__module__.startswith("torch.optim."):
        return {}
    known = signature(kind).parameters
    if "fused" in known and (kind is not torch.optim.SGD or settings.get("momentum", 0)):
        return {"fused": True}
    return {"foreach": False} if "foreach" in known else {}


def _step(trial: Optimizer) -> None:
    parameter = trial.param_groups[0]["params"][0]
    parameter.grad = torch.zeros_like(parameter)
    trial.step()


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _check_type(name: str, key: str, value: object, like: object) -> None:
    """Raise `TypeError` unless `value` has the type of `like`: a bool, a number, numbers, or another plain value."""
    if isinstance(like, bool):
        fits, expected = isinstance(value, bool), "a bool"
    elif isinstance(like, int | float):
        fits, expected = _is_number(value), "a number"
    elif isinstance(like, tuple | list):
        fits = isinstance(value, tuple | list) and len(value) == len(like) and all(_is_number(one) for one in value)
        expected = f"{len(like)} numbers"
    else:
        fits, expected = _is_plain(value), "a plain value"
    if not fits:
        raise TypeError(f"rule {name}: {key}={value!r}: expected {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
