"""Settings of steps, compared between ranks: by a hash in each pass status, and in words if that differs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from numbers import Real
from operator import is_
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

Lines = list[tuple[str, str]]
"""Names of settings, with their values in words."""

_PLAIN = (float, int, bool, str, type(None))
_SKIPPED = frozenset(("params", "param_names", "rates", "initial_lr"))


class SettingsHash:
    """Hashes the hyperparameters of optimizers, quickly if they have not changed since the last time.

    Numbers are compared by value, tensors of one element on the CPU too. A tensor on a device, or another object,
    counts by its kind alone. A parameter group does not count if each rank keeps all of its parameters for itself.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Optimizer, list[Any], int]] = {}
        """Hyperparameters and hash of optimizers, by id, if the objects cannot change in place."""

    def of(self, optimizers: Iterable[Optimizer], settings: str, own: Container[int]) -> int:
        """Return a number above 0 and below 2^33, the same for `optimizers` in any order."""
        known, self._known = self._known, {}
        total = crc32(settings.encode())
        for optimizer in optimizers:
            values = [value for group in optimizer.param_groups for value in group.values()]
            found = known.get(id(optimizer))
            if found is not None and len(found[1]) == len(values) and all(map(is_, found[1], values)):
                self._known[id(optimizer)] = found
            else:
                text = repr(described(optimizer, own))
                found = optimizer, values, crc32(text.encode())
                named = (item for group in optimizer.param_groups for item in group.items())
                if all(name in _SKIPPED or _is_fixed(value) for name, value in named):
                    self._known[id(optimizer)] = found
            total += found[2]
        return 1 + total % (1 << 32)


def described(optimizer: Optimizer, own: Container[int]) -> Lines:
    """Return the settings of `optimizer` that ranks compare, without groups of parameters whose ids are `own`."""
    kind = type(optimizer).__name__
    lines = [("the class of the optimizer", kind)]
    groups = [group for group in optimizer.param_groups if not _all_own(group["params"], own)]
    for number, group in enumerate(groups):
        names = sorted(name for name in group if name not in _SKIPPED)
        lines += [(f"{name} of group {number} of {kind}", _text(group[name])) for name in names]
    return lines


def different(by_rank: Sequence[Lines | None]) -> tuple[str, list[str]] | None:
    """Return the first setting that differs between ranks with settings, and the value of each rank.

    >>> different([[("clip_norm", "1.0")], [("clip_norm", "2.0")], None])
    ('clip_norm', ['1.0', '2.0', 'no data left'])
    """
    known = [None if lines is None else dict(lines) for lines in by_rank]
    for name in dict.fromkeys(name for lines in by_rank for name, _ in lines or ()):
        values = [None if each is None else each.get(name, "nothing") for each in known]
        if len({value for value in values if value is not None}) > 1:
            return name, [value or "no data left" for value in values]
    return None


def optimizers_of(driver: Any) -> list[Optimizer]:
    """Return an optimizer of torch, or the optimizers of a driver."""
    return [driver] if isinstance(driver, Optimizer) else list(driver.optimizers)


def _is_fixed(value: object) -> bool:
    """Return True if `value` cannot change in place, as a list or a tensor can."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_fixed, value)))


def _all_own(parameters: Sequence[Tensor], own: Container[int]) -> bool:
    return bool(parameters) and all(id(p) in own for p in parameters)


def _text(value: object) -> str:
    """Return the text of a value, the same on all ranks with that value.

    >>> _text(1), _text(torch.tensor(0.5)), _text((0.9, None)), _text(True), _text(print)
    ('1.0', '0.5', '(0.9, None)', 'True', 'builtin_function_or_method')
    """
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.numel() == 1 and value.layout is torch.strided:
            return repr(value.item())
        return f"a tensor on {value.device.type}"  # reading it would wait for the device
    if isinstance(value, Real):
        try:
            return repr(float(value))
        except OverflowError:
            return str(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__
