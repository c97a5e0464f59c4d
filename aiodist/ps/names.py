"""The tensors that this rank knows by name, and what a call means by `what`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aiodist.backends.base import dtype_name
from aiodist.codecs import ObjectCodec
from aiodist.communicator.arguments import check_tensor
from aiodist.ps.rows import TableSpec
from aiodist.ps.rules import Rule
from aiodist.ps.sharding import Span


@dataclass(eq=False, slots=True)
class NameEntry:
    """A name as this rank sees it."""

    name: str
    tensor: Tensor | None
    """Where it lies here; None for an object and a table."""
    rule_number: int
    """That of the rule on the wire."""
    rule: Rule
    spans: tuple[Span, ...] = ()
    codec: ObjectCodec | None = None
    table: TableSpec | None = None
    start: str = "first"
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    key: int = -1
    base: int = 0
    """The version that this rank last read."""
    open: set[int] = field(default_factory=set)
    """The numbers of this rank's pushes and pulls of it that are not over."""
    _watch: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.tensor is not None:
            self.dtype, self.shape = self.tensor.dtype, tuple(self.tensor.shape)
        if self.table is not None:
            self.dtype, self.shape = self.table.dtype, (self.table.rows or -1, self.table.dim)

    @property
    def frozen(self) -> bool:
        """It is a tensor that wants no gradient."""
        return self.tensor is not None and not self.tensor.requires_grad

    def when_over(self, call: Callable[[], None]) -> None:
        """Call `call` when all pushes and pulls of it are over."""
        self._watch = call
        self.part_over(0)

    def part_over(self, number: int) -> None:
        """A push or a pull is over."""
        self.open.discard(number)
        if self._watch is not None and not self.open:
            watch, self._watch = self._watch, None
            watch()

    def check(self, value: object, name: str = "values") -> Tensor:
        """Return `value`; raise TypeError or ValueError unless it is a tensor such as this one."""
        if self.table is not None:
            raise TypeError(f"{self.name!r} is a table of rows: expected its own push(ids, ...) and pull(ids)")
        t = checked(value, name)
        if t.dtype is not self.dtype:
            expected = f"expected {dtype_name(self.dtype)}, as it was init()ed"
            raise TypeError(f"{name} for {self.name!r} holds {dtype_name(t.dtype)}: {expected}")
        if tuple(t.shape) != self.shape:
            raise ValueError(
                f"{name} for {self.name!r} has shape {list(t.shape)}: expected {list(self.shape)}, as it was init()ed"
            )
        return t

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)} {self.name!r}"


class Names:
    """What this rank has init()ed, in order."""

    def __init__(self) -> None:
        self._entries: dict[str, NameEntry | None] = {}
        """In the order of the calls that made them known; None while that is not over."""
        self._names: dict[int, list[str]] = {}  # one tensor may have several
        self.first: tuple[str, ...] = ()
        """What `what=None` means."""
        self.changing: dict[str, str] = {}
        """Names that become known, or are forgotten, and the call that is not over."""

    def announce(self, names: Sequence[str]) -> None:
        """They become known, in this order."""
        self.changing.update(dict.fromkeys(names, "init"))
        self._entries.update(dict.fromkeys(names))

    def settle(self, name: str, entry: NameEntry | None) -> None:
        """The call that changes `name` is over: it is `entry` from now on, or not at all."""
        if entry is None:
            self._entries.pop(name, None)
        else:
            self._entries[name] = entry
            if entry.tensor is not None:
                self._names.setdefault(id(entry.tensor), []).append(name)
        self.changing.pop(name, None)

    def remove(self, entry: NameEntry) -> None:
        """Know it no more; `settle` follows."""
        self._entries[entry.name] = None
        self.changing[entry.name] = "free"
        self.first = tuple(name for name in self.first if name != entry.name)
        if entry.tensor is not None:
            names = self._names[id(entry.tensor)]
            names.remove(entry.name)
            if not names:
                del self._names[id(entry.tensor)]

    @property
    def names(self) -> tuple[str, ...]:
        """In order."""
        return tuple(name for name, entry in self._entries.items() if entry is not None)

    def __contains__(self, name: str) -> bool:
        return self._entries.get(name) is not None

    def __getitem__(self, name: str) -> NameEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(f"unknown name {name!r}: expected one that this rank has init()ed, {self._listed()}")
        return entry

    def resolve(self, what: object) -> tuple[list[NameEntry], bool]:
        """Return what a call means, and whether it is a single one.

        Raises KeyError for a name, ValueError for a tensor that was not init()ed here, TypeError for anything else.
        """
        if isinstance(what, str | Tensor):
            return [self._one(what)], True
        if what is None:
            what = self.first
        elif isinstance(what, nn.Module):
            what = what.parameters()
        if isinstance(what, Iterable):
            return [self._one(one) for one in what], False
        raise TypeError(
            f"what is {type(what).__name__}: expected None, a name, a tensor or parameter, a list of these, or a module"
        )

    def _one(self, one: object) -> NameEntry:
        if isinstance(one, str):
            return self[one]
        if not isinstance(one, Tensor):
            raise TypeError(f"what has {type(one).__name__}: expected names, tensors or parameters in a list")
        names = self._names.get(id(one))
        if names is None:
            shape = f"{one.dtype}{list(one.shape)}"
            raise ValueError(f"a tensor {shape} that was not init()ed: expected one of those, {self._listed()}")
        return self[names[0]]

    def _listed(self) -> str:
        names = ", ".join(map(repr, self.names[:8]))
        return f"which are {names}{', ...' if len(self.names) > 8 else ''}" if names else "of which there are none"


def named(tensors: object) -> dict[str, Tensor]:
    """Return tensors by name: of a module its parameters, of a mapping its own, of an iterable "0", "1" and so on."""
    found: Mapping[Any, Any]
    if tensors is None:
        return {}
    if isinstance(tensors, nn.Module):
        found = dict(tensors.named_parameters())
    elif isinstance(tensors, Mapping):
        found = tensors
    elif isinstance(tensors, Tensor):
        raise TypeError("tensors is a Tensor: expected a module, a list of tensors, or a dict of them by name")
    elif isinstance(tensors, Iterable):
        found = {str(i): t for i, t in enumerate(tensors)}
    else:
        raise TypeError(f"tensors is {type(tensors).__name__}: expected a module, a list of tensors, or a dict of them")
    return {checked_name(name): checked(t, str(name)) for name, t in found.items()}


def checked(t: object, name: str) -> Tensor:
    """Return `t`; raise unless it is a tensor, on the CPU, whose memory is what it means."""
    t = check_tensor(t, name)
    if not t.is_cpu:
        raise ValueError(f"{name} lives on {t.device}: the parameter server takes tensors on the CPU, see .cpu()")
    if (t.dtype.is_complex and t.is_conj()) or t.is_neg():
        raise ValueError(f"{name} is a view that is conj() or negated: expected one that is not, see .resolve_conj()")
    return t


def checked_name(name: object) -> str:
    """Return `name`; raise TypeError for what is no name."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"name {name!r}: expected a str that is not empty")
    return name
