"""Rules, by which a server applies pushes: zero, copy, add, axpy, mul, min, max, and those of users.

A rule has no state of its own. `state` makes the state of a shard, and `apply` gets that state, so one rule serves any
number of shards, in any thread. Ranks compare the `repr` of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from aiodist.backends.arithmetic import SUPPORTED
from aiodist.backends.base import dtype_name
from aiodist.types import settings_text

State: TypeAlias = Any
"""State of a shard, of a type that only the rule knows."""

COMPLEX = frozenset({kind for kind in SUPPORTED if kind.is_complex})
FLOATS = frozenset({kind for kind in SUPPORTED if kind.is_floating_point})
_NUMBERS = SUPPORTED - {torch.bool}
_ORDERED = SUPPORTED - COMPLEX
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Rule:
    """The change of a shard by a push.

    Derive a class for a rule with state or settings, and pass an instance. Ranks compare its `repr`, which shows the
    public attributes of the instance unless you define another.
    """

    name: str
    """Name in errors and statistics, by default the name of the class."""
    takes: frozenset[torch.dtype] = SUPPORTED
    """Dtypes of the tensors that it can be used for."""
    takes_gradients: bool = False
    """True pushes the `.grad` of a parameter by default, False the parameter."""
    takes_value: bool = True
    """True if the rule uses the pushed value."""
    combines: bool = False
    """True sums the weighted pushes of one step and applies the sum; False applies them in the order of workers."""
    scales: bool = True
    """True allows an `alpha` other than 1."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__qualname__

    def check(self, dtype: torch.dtype, alpha: float = 1.0) -> None:
        """Raise unless the rule can be used on tensors of `dtype` with this `alpha`.

        `TypeError` for a dtype that it does not take, for an `alpha` that is no number, and for a fraction if the
        tensor has integers; `ValueError` for an `alpha` other than 1 if the rule does not scale, and for one that the
        dtype cannot hold, such as inf and nan.
        """
        if dtype not in self.takes:
            taken = ", ".join(sorted(map(dtype_name, self.takes)))
            raise TypeError(f"rule {self.name} on {dtype_name(dtype)}: expected {taken}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise TypeError(f"rule {self.name}: alpha={alpha!r}: expected a number")
        if alpha == 1:
            return
        if not self.scales:
            raise ValueError(f"rule {self.name}: alpha={alpha}: expected 1, since the rule does not scale")
        if self.takes_value:
            _check_factor(self.name, dtype, alpha)

    def state(self, shard: Tensor) -> State:
        """Return the state of `shard`, flat, before its first push, or None."""
        del shard

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: State) -> None:
        """Change `shard` in place by `alpha` times `value`; both flat, of equal dtype and numel.

        Must not change or keep `value`. `check` was called for this dtype and `alpha`, and `state` made `state`. Called
        from any thread, but never twice at the same time for one shard.
        """
        raise NotImplementedError(f"{type(self).__qualname__}.apply")

    def configure(self, state: State, **changes: object) -> None:
        """Change settings such as `lr` from the next push on.

        Raises `ValueError` for unknown settings and `TypeError` for values of another type, and changes nothing then.
        Never called while `apply` runs for that shard, as `state_dict` and `load_state_dict`.
        """
        del state
        if changes:
            raise ValueError(f"rule {self.name}: {', '.join(changes)}: the rule has no settings")

    def state_dict(self, state: State) -> dict[str, Any]:
        """Return the state for `load_state_dict`: plain values and tensors, which later pushes change.

        Tensors with a dimension are cut as the shard is. Tensors without one are equal for all shards.
        """
        del state
        return {}

    def load_state_dict(self, state: State, given: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` of a shard of equal numel. Raise `ValueError` if it does not fit."""
        del state
        if given:
            raise ValueError(f"rule {self.name}: {', '.join(given)}: the rule has no state")

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{key}={settings_text(value)}"
            for key, value in sorted(vars(self).items())
            if not key.startswith("_") and key not in Rule.__annotations__
        )
        return f"{self.name}({settings})" if settings else self.name


class Function(Rule):
    """A function of the user, `fn(shard, value)`, which changes `shard` in place.

    It runs without autograd, on the server's shards: flat, and each a part of a tensor that is cut. So it must treat
    every element by itself. With an `alpha` other than 1 it gets `alpha * value`. Raises `TypeError` if the function
    returns another object than None or `shard`, since it has probably not changed the shard then.
    """

    def __init__(self, fn: Callable[[Tensor, Tensor], object], name: str) -> None:
        self.fn = fn
        self.name = name

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: None) -> None:
        shard = bare(shard)
        with torch.no_grad():
            found = self.fn(shard, bare(value) if alpha == 1 else bare(value) * factor(shard, alpha))
        if found is not None and found is not shard:
            raise TypeError(f"rule {self.name} returned {type(found).__name__}: expected None, and the shard changed")

    def __repr__(self) -> str:
        return f"Function({self.name})"


class _Known(Rule):
    """A rule without settings, known by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class _Zero(_Known):
    takes_value = False

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: None) -> None:
        bare(shard).zero_()


class _Copy(_Known):
    combines = True  # of several pushes in one step their sum, or mean

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: None) -> None:
        shard, value = bare(shard), bare(value)
        if alpha == 1:
            shard.copy_(value)
        else:
            torch.mul(value, factor(shard, alpha), out=shard)


class _Add(_Known):
    takes = _NUMBERS
    combines = True

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: None) -> None:
        if shard.requires_grad or value.requires_grad:  # otherwise the shard could get a history
            shard, value = shard.detach(), value.detach()
        if alpha == 1:
            shard.add_(value)
        else:
            shard.add_(value, alpha=factor(shard, alpha))


class _Operator(_Known):
    scales = False

    def __init__(self, name: str, operator: Callable[..., Tensor], takes: frozenset[torch.dtype]) -> None:
        super().__init__(name)
        self.operator = operator
        self.takes = takes

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: None) -> None:
        self.operator(bare(shard), bare(value), out=bare(shard))


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        _Zero("zero"),
        _Copy("copy"),
        _Add("add"),
        _Add("axpy"),
        _Operator("mul", torch.mul, _NUMBERS),
        _Operator("min", torch.minimum, _ORDERED),
        _Operator("max", torch.maximum, _ORDERED),
    )
}
"""Rules by name. `add` and `axpy` are the same: shard += alpha * value."""


class Piece(NamedTuple):
    """One push of a step."""

    rule: Rule
    value: Tensor
    """Flat, of the shard's dtype, read only."""
    alpha: float
    weight: float


def apply_step(shard: Tensor, pieces: Sequence[Piece], state_of: Callable[[Rule], Any]) -> None:
    """Change `shard` in place by all `pieces`, in the order of their workers.

    Pushes of one rule that combines are summed first, 16-bit floats in float32. A single push of weight 1 takes no
    memory.
    """
    first = pieces[0]
    if len(pieces) == 1 and first.weight == 1:
        first.rule.apply(shard, first.value, first.alpha, state_of(first.rule))
        return
    if first.rule.combines and all(piece.rule is first.rule for piece in pieces):
        first.rule.apply(shard, _sum(pieces), 1.0, state_of(first.rule))
        return
    for piece in pieces:
        value = piece.value
        if piece.rule.combines and piece.weight != 1:
            value = value * piece.weight
        piece.rule.apply(shard, value, piece.alpha, state_of(piece.rule))


def _sum(pieces: Sequence[Piece]) -> Tensor:
    kind = pieces[0].value.dtype
    total = torch.zeros(pieces[0].value.numel(), dtype=_SUMMED_IN.get(kind, kind), device="cpu")
    for piece in pieces:
        factor = piece.weight * piece.alpha
        total.add_(piece.value, alpha=int(factor) if factor == int(factor) else factor)
    return total.to(kind)


def as_rule(given: str | Rule | Callable[[Tensor, Tensor], object], name: str | None = None) -> Rule:
    """Return a rule: the rule of that name, `given` itself, or a rule that calls the function `given`.

    Errors call a function `name`, or by default by its own name. Raises `ValueError` for an unknown name, `TypeError`
    for other objects, such as a class or a coroutine function.
    """
    if isinstance(given, str):
        try:
            return RULES[given]
        except KeyError:
            raise ValueError(f"rule {given!r}: expected one of {', '.join(RULES)}, a Rule or a function") from None
    if isinstance(given, Rule):
        return given
    expected = "expected a name, a Rule such as aiodist.ps.SGD(lr=0.1), or a function (shard, value) -> None"
    if isinstance(given, type):
        raise TypeError(f"rule: the class {given.__qualname__}: {expected}")
    if iscoroutinefunction(given) or not callable(given):
        raise TypeError(f"rule {given!r}: {expected}")
    return Function(given, name or str(getattr(given, "__qualname__", type(given).__qualname__)))


def bare(t: Tensor) -> Tensor:
    """Return `t` without autograd. This is cheaper than to disable autograd, and changes no mode of the thread."""
    return t.detach() if t.requires_grad else t


def factor(shard: Tensor, alpha: float) -> float:
    """Return `alpha` as a number that torch takes for this dtype: an int for integers."""
    return alpha if shard.dtype.is_floating_point or shard.dtype.is_complex else int(alpha)


def _check_factor(name: str, dtype: torch.dtype, alpha: float) -> None:
    """Raise `ValueError` for an `alpha` that the dtype cannot hold, `TypeError` for a fraction of an integer dtype."""
    if dtype is torch.bool:
        raise TypeError(f"rule {name} on bool: alpha={alpha}: expected 1")
    whole = not (dtype.is_floating_point or dtype.is_complex)
    most = torch.iinfo(dtype).max if whole else torch.finfo(dtype).max
    if not abs(alpha) <= most:  # nan too
        raise ValueError(f"rule {name} on {dtype_name(dtype)}: alpha={alpha}: expected a number from -{most} to {most}")
    if whole and alpha != int(alpha):
        raise TypeError(f"rule {name} on {dtype_name(dtype)}: alpha={alpha}: expected a whole number")
