"""The signatures of torch's `ProcessGroup`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "root": (int,),
        "op": (dist.ReduceOp, dist.ReduceOp.RedOpType),
        "timeout": (timedelta, type(None)),
    }
)
"""Types of the parameters that become options, by name."""


def signatures(options: type, *forms: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that gives a method of `(self, *tensors, opts)` all `forms` of torch's method.

    A form is the names of the parameters. `tensor` is a tensor, `tensors*` a list of tensors, `tensors**` a list of
    lists, `sizes+` a list of integers. The first form is the method's own. In the others, a tensor or a list becomes
    the list, or the list of lists, of the first form, and `op`, `root` and `timeout` become options. A call raises
    TypeError if its arguments fit no form.
    """
    own, *others = (_Form(text.split(), options) for text in forms)
    count = len(own.names)

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def call(self: object, *args: Any, **named: Any) -> T:  # noqa: ANN401
            if len(args) == count and not named and isinstance(args[-1], options):  # as torch's own calls
                return method(self, *args)
            for form in (own, *others):
                if (given := form.match(args, named)) is not None:
                    return method(self, *form.lists(given, own), form.opts(given))
            seen = ", ".join([*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in named.items())])
            taken = " or ".join(f"({', '.join(form.names)})" for form in (own, *others))
            raise TypeError(f"{method.__name__} has no signature for ({seen}): expected {taken}")

        return call

    return decorate


class _Form:
    """One signature: the names and types of its parameters."""

    def __init__(self, words: Sequence[str], options: type) -> None:
        self.names = [word.rstrip("*+") for word in words]
        self._options = options
        self._required = {name for name in self.names if name not in ("op", "timeout", "opts")}
        self._types = {**_TYPES, "opts": (options,)}
        self._depths = [
            (name, word.count("*") + word.count("+"), int if "+" in word else Tensor)
            for name, word in zip(self.names, words, strict=True)
            if name not in self._types
        ]

    def match(self, args: Sequence[object], named: Mapping[str, object]) -> dict[str, Any] | None:
        """Return the arguments by name, or None if they do not fit."""
        given = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names) or given.keys() & named.keys():
            return None
        given.update(named)
        if not self._required <= given.keys() <= set(self.names):
            return None
        if not all(_nested(given[name], depth, kind) for name, depth, kind in self._depths):
            return None
        fits = all(isinstance(given[name], self._types[name]) for name in given.keys() & self._types.keys())
        return given if fits else None

    def lists(self, given: Mapping[str, Any], own: _Form) -> list[Any]:
        """Return the tensors, nested as in the form `own`. An empty list stays empty."""
        return [
            [given[name]] if depth < wanted and (depth == 0 or given[name]) else given[name]
            for (name, depth, _), (_, wanted, _) in zip(self._depths, own._depths, strict=True)
        ]

    def opts(self, given: Mapping[str, Any]) -> Any:  # noqa: ANN401 - one of torch's
        """Return the given options, or options of the other arguments."""
        if "opts" in given:
            return given["opts"]
        made = self._options()
        for name, attribute in (("op", "reduceOp"), ("root", "rootRank"), ("timeout", "timeout")):
            if given.get(name) is not None:
                setattr(made, attribute, given[name])
        return made


def _nested(value: object, depth: int, kind: type) -> bool:
    """Return True if `value` is of `kind`, in lists that are `depth` deep."""
    if depth == 0:
        return isinstance(value, kind)
    return isinstance(value, Sequence) and all(_nested(one, depth - 1, kind) for one in value)


def _shown(value: object) -> str:
    """Return the type of an argument, for an error."""
    if isinstance(value, (list, tuple)):
        return f"[{_shown(value[0])}, …]" if value else "[]"
    return type(value).__name__
