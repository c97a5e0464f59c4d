"""Names and types that every layer shares, and common checks of arguments."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import partial, wraps
from hashlib import sha256
from inspect import isroutine
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, runtime_checkable

P = ParamSpec("P")
T = TypeVar("T")

ANY: Final = -1
"""Any source or any tag, for receives only."""

OPERATIONS: Final = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "scan")
"""Collectives with more than one implementation. All others are made of these or of messages."""

REDUCTIONS: Final = ("allreduce", "reduce", "reduce_scatter", "scan")
"""The operations that combine elements."""


class ReduceOp(StrEnum):
    """How a reduction combines elements."""

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    AVG = "mean"
    """Alias of MEAN, torch's name."""
    PRODUCT = "prod"
    """Alias of PROD, torch's name."""

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp | None:
        return OP_ALIASES.get(value) if isinstance(value, str) else None


OP_ALIASES: Final = MappingProxyType({"avg": ReduceOp.MEAN, "product": ReduceOp.PROD})
"""Other spellings that `op=` takes."""

SumOrMean: TypeAlias = Literal["sum", "mean", "avg"]
"""Values of `op=` for gradients."""


def sum_or_mean(op: str) -> Literal["sum", "mean"]:
    """Return `op` of gradients without aliases; raise ValueError for another operator."""
    match op:
        case "sum":
            return "sum"
        case "mean" | "avg":
            return "mean"
        case _:
            raise ValueError(f"op={op!r}: expected 'sum', or 'mean' (torch's 'avg'), of gradients")


Op: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "band", "bor", "bxor", "avg", "product"] | ReduceOp
"""Values of `op=`."""

Impl: TypeAlias = Literal[
    "auto",
    "mpi",
    "gloo",
    "shm",
    "hierarchical",
    "leaders",
    "ring",
    "doubling",
    "halving",
    "tree",
    "direct",
    "chain",
    "bruck",
    "nccl",
    "cuda_ipc",
    "staged",
]
"""Values of `impl=`: the name of an implementation, or "auto" for the selector's choice."""


def check_timeout(timeout: object, *, least: float = 0.0) -> float | None:
    """Return `timeout` if it is None, or seconds of at least `least`. Raise TypeError or ValueError otherwise."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout is {type(timeout).__name__}: expected seconds, or None")
    seconds = float(timeout)
    if not seconds >= least:  # also for a NaN
        raise ValueError(f"timeout={timeout}: expected seconds, at least 0, or None")
    return seconds


def check_period(name: str, seconds: object) -> None:
    """Raise ValueError unless the argument `name` is None or a number of seconds above 0."""
    if seconds is not None and not (isinstance(seconds, Real) and float(seconds) > 0):
        raise ValueError(f"{name}={seconds!r}: expected seconds, more than 0, or None")


def one_of(name: str, value: Any, expected: Sequence[str]) -> Any:  # noqa: ANN401
    """Return `value`, or raise ValueError unless it is in `expected`."""
    if value not in expected:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, expected))}")
    return value


def check_int(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value`, or raise TypeError unless it is an int, and ValueError unless it is in these bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {type(value).__name__}: expected an int")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: expected {f'at least {least}' if most is None else f'{least} to {most}'}")
    return value


def check_trains(optimizer: Any, parameters: Iterable[object], whose: str) -> None:  # noqa: ANN401
    """Raise ValueError if no parameter of `optimizer` is in `parameters`, which belong to `whose`.

    An optimizer whose step is not torch's may have copies of the parameters, and is not checked.
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in given for p in parameters) and type(optimizer).step.__module__.startswith("torch."):
        raise ValueError(
            f"{type(optimizer).__name__}: 0 of its {len(given)} parameters are among those of {whose}, so it would "
            "train nothing: expected one that is made of some of them"
        )


def first_unknown(optimizer: Any, known: Container[int], *, used: bool = False) -> str | None:  # noqa: ANN401
    """Return name, shape and place of the first parameter of `optimizer` whose id is not in `known`, or None.

    True for `used` counts only parameters with a gradient.
    """
    for number, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in known and (p.grad is not None or (p.requires_grad and not used)):
                name = f"{names[i]!r}, " if (names := group.get("param_names")) else ""
                dtype = str(p.dtype).removeprefix("torch.")
                return f"{name}a {dtype}{list(p.shape)}, number {i} of its group {number}"
    return None


@runtime_checkable
class Stateful(Protocol):
    """An object with a state, such as a loader, an optimizer or a scheduler."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Return the whole state."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Set the whole state."""


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEEPEST = 8


def settings_text(value: object, depth: int = 0) -> str:
    """Return the type and the settings of `value` as text, equal on ranks that have made equal values.

    The text is the `repr`, unless that has an address, as of a class without a `__repr__`. The text is then the class
    with its public attributes, the fields of a dataclass, the items of a list, tuple or dict, or the name of a
    function. The items of a set are sorted. A tensor has a hash of its elements, a device its type.
    """
    torch: Any = sys.modules.get("torch")  # the launcher uses other names of this module and loads no torch
    if torch is None:
        return _ADDRESS.sub("", repr(value))

    if isinstance(value, torch.device):
        return str(value.type)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        octets = value.detach().cpu().reshape(-1).resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        return f"{value.dtype} of shape {list(value.shape)}, {sha256(octets.numpy().tobytes()).hexdigest()[:12]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(settings_text(each, depth + 1) for each in value))})"
    text = repr(value)
    kinds = (set, frozenset, torch.Tensor, torch.device)  # their repr depends on the process or is shortened
    apart = is_dataclass(value) and any(isinstance(each, kinds) for _, each in _settings(value))
    if not apart and not _ADDRESS.search(text):
        return text
    return _taken_apart(value, depth) if depth < _DEEPEST else _ADDRESS.sub("", text)


def _taken_apart(value: object, depth: int) -> str:
    """Return the class, and the items or settings as text."""
    if isinstance(value, partial):
        return f"partial({settings_text((value.func, value.args, value.keywords), depth + 1)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(settings_text(each, depth + 1) for each in value)}]"
    if isinstance(value, dict):
        pairs = ((settings_text(key, depth + 1), settings_text(each, depth + 1)) for key, each in value.items())
        return f"{{{', '.join(f'{key}: {each}' for key, each in pairs)}}}"
    if isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    settings = ", ".join(f"{key}={settings_text(each, depth + 1)}" for key, each in _settings(value))
    return f"{type(value).__qualname__}({settings})"


def _settings(value: object) -> list[tuple[str, object]]:
    """Return the names and values of the settings of an object, as its attributes show them."""
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]
    given = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in given for name in ((slots,) if isinstance(slots, str) else slots)]
    found = {name: getattr(value, name) for name in names if not name.startswith("_") and hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return sorted((name, each) for name, each in found.items() if not name.startswith("_"))


class Elsewhere:
    """A name of an older version or another library for an attribute of a class.

    A read raises AttributeError, which names the attribute. Unlike a `__getattr__`, this costs the class nothing.
    """

    def __init__(self, name: str, use: str) -> None:
        self._name = name
        self._use = use

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}: use {self._use}", name=self._name
        )


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose keywords `names` have new names, which a TypeError gives."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in names.keys() & kwargs.keys():
                raise TypeError(f"{function.__name__}() got {old}=: use {names[old]}=")
            return function(*args, **kwargs)

        return checked

    return decorate
