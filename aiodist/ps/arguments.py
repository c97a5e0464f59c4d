"""What a call of a parameter server may be given: each check names what was seen and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.backends.inplace import flat
from aiodist.ps.names import NameEntry
from aiodist.ps.rows.store import check_settings as check_row_settings
from aiodist.ps.rules import Rule


class Pushed(NamedTuple):
    """What goes up for one name."""

    entry: NameEntry
    value: Tensor
    """Flat."""
    rule: int


class Out(NamedTuple):
    """Where what comes down for one name goes: nowhere yet, for an object."""

    flat: Tensor | None
    given: Tensor | None


def pushed_of(
    entries: Sequence[NameEntry],
    values: Any,  # noqa: ANN401
    single: bool,
    wanted: tuple[int, Rule] | None,
    alpha: float,
) -> list[Pushed]:
    """Return what goes up, by the rule that is wanted, else that of each; it comes with its number.

    Of several, frozen parameters are left out where their gradients are meant.
    """
    if single:  # what is called most often
        return [_pushed(entries[0], values, *(wanted or (entries[0].rule_number, entries[0].rule)), alpha)]
    given = [values] * len(entries) if values is None else listed("values", values)
    if len(given) != len(entries):
        raise ValueError(f"{len(given)} values for {len(entries)} tensors: expected one for each")
    pushed = []
    for entry, value in zip(entries, given, strict=True):
        number, rule = wanted or (entry.rule_number, entry.rule)
        if value is not None or not (rule.takes_gradients and entry.frozen):
            pushed.append(_pushed(entry, value, number, rule, alpha))
    return pushed


def _pushed(entry: NameEntry, value: Any, number: int, rule: Rule, alpha: float) -> Pushed:  # noqa: ANN401
    if entry.codec is not None:
        if number != entry.rule_number:
            raise ValueError(
                f"rule {rule.name} for the object {entry.name!r}: expected copy, servers look at no object"
            )
        return Pushed(entry, entry.codec.encode(value), number)
    if alpha != 1 or rule is not entry.rule:
        rule.check(entry.dtype, alpha)
    return Pushed(entry, flat(entry.check(_default(entry, rule) if value is None else value)), number)


def _default(entry: NameEntry, rule: Rule) -> Tensor:
    """Return what a push sends that was given no value."""
    t = entry.tensor
    if t is None:  # a table
        return entry.check(None)
    if not rule.takes_gradients:
        return t
    if t.grad is None:
        raise ValueError(f"{entry.name!r} has no .grad: expected one, since rule {rule.name!r} takes gradients")
    return t.grad


def outs_of(entries: Sequence[NameEntry], out: Any, single: bool) -> list[Out]:  # noqa: ANN401
    """Return where tensors go."""
    given = [None] * len(entries) if out is None else ([out] if single else listed("out", out))
    if len(given) != len(entries):
        raise ValueError(f"{len(given)} out tensors for {len(entries)}: expected one for each")
    outs: list[Out] = []
    for entry, t in zip(entries, given, strict=True):
        if entry.codec is not None:
            outs.append(Out(None, None))
        else:
            checked = entry.check(entry.tensor if t is None else t, "out")
            outs.append(Out(flat(checked), checked))
    return outs


def listed(name: str, given: object) -> list[Any]:
    """Return `given` as a list; raise TypeError for what has no parts."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is {type(given).__name__}: expected a list")
    return list(given)


def check_timeout(timeout: object) -> float | None:
    """Return `timeout`, in seconds; raise TypeError or ValueError for what is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is {type(timeout).__name__}: expected seconds, or None")
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout}: expected seconds, at least 0, or None")
    return timeout


def check_version(at_least: object) -> int:
    """Return `at_least`; raise TypeError or ValueError unless it is the number of a version."""
    if isinstance(at_least, bool) or not isinstance(at_least, int):
        raise TypeError(f"at_least is {type(at_least).__name__}: expected a version, an int")
    if not 0 <= at_least < 1 << 63:
        raise ValueError(f"at_least={at_least}: expected a version, 0 to 2^63 - 1")
    return at_least


def check_settings(entry: NameEntry, settings: Mapping[str, float]) -> None:
    """Raise ValueError or TypeError unless the rule of `entry` has these settings and takes these values."""
    if entry.table is not None:
        check_row_settings(entry.table, settings, entry.name)
        return
    with torch.inference_mode(False):
        trial = entry.rule.state(torch.zeros(1, dtype=entry.dtype))
    entry.rule.configure(trial, **settings)
