"""The names that this rank has passed to `init`, and the checks of the arguments of calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aiodist import _core
from aiodist.backends.base import dtype_name
from aiodist.codecs import ObjectCodec
from aiodist.communicator.arguments import check_tensor
from aiodist.ps.row_store import optimizer_of
from aiodist.ps.rows import TableSpec
from aiodist.ps.rules import Rule
from aiodist.ps.settings import Span
from aiodist.streams.memory import flat
from aiodist.streams.writes import check_writable

_SMALL_BYTES = 1 << 15
_FORM_DIMS = 6


@dataclass(eq=False, slots=True)
class NameEntry:
    """A name on this rank."""

    name: str
    tensor: Tensor | None
    """This rank's tensor, or None for an object or a table."""
    rule_number: int
    """Number of the rule on the wire."""
    rule: Rule
    spans: tuple[Span, ...] = ()
    servers: tuple[int, ...] = ()
    """Ranks of `spans`, in order."""
    codec: ObjectCodec | None = None
    table: TableSpec | None = None
    start: str = "first"
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    key: int = -1
    base: int = 0
    """Version that this rank last read."""
    open: set[int] = field(default_factory=set)
    """Numbers of this rank's pushes and pulls in flight."""
    form: _core.Form | None = None
    """Form of a small tensor, or None."""
    _watch: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.tensor is not None:
            self.dtype, self.shape = self.tensor.dtype, tuple(self.tensor.shape)
            if 0 < self.tensor.nbytes <= _SMALL_BYTES and len(self.shape) <= _FORM_DIMS:
                like = torch.empty(self.shape, dtype=self.dtype, device="cpu")
                self.form = _core.Form(like, Tensor, nn.Parameter)
        if self.table is not None:
            self.dtype, self.shape = self.table.dtype, (self.table.rows or -1, self.table.dim)

    def place(self, spans: tuple[Span, ...]) -> None:
        """Set the blocks of the name, one for each server."""
        self.spans, self.servers = spans, tuple([span.rank for span in spans])

    @property
    def frozen(self) -> bool:
        return self.tensor is not None and not self.tensor.requires_grad

    def when_over(self, call: Callable[[], None]) -> None:
        """Call `call` once no push or pull of the name is in flight."""
        self._watch = call
        self.part_over(0)

    def part_over(self, number: int) -> None:
        self.open.discard(number)
        if self._watch is not None and not self.open:
            watch, self._watch = self._watch, None
            watch()

    def check(self, value: object, name: str = "values") -> Tensor:
        """Return `value`; raise TypeError or ValueError unless it is a tensor of the dtype and shape of `init`."""
        if self.table is not None:
            raise TypeError(f"{self.name!r} is a table of rows: expected its own push(ids, ...) and pull(ids)")
        return checked_as(value, name, self.name, self.dtype, self.shape, ", as passed to init()")

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)} {self.name!r}"


class Pushed(NamedTuple):
    """The push of one tensor."""

    entry: NameEntry
    value: Tensor
    """Flat."""
    rule: int
    data: bytes | None = None
    """Copy of a small plain tensor's memory, or None."""


class Names:
    """The names of this rank, in the order of the `init` calls."""

    def __init__(self) -> None:
        self._entries: dict[str, NameEntry | str] = {}
        """Entries by name, or "init" or "free" while that call is in flight."""
        self._names: dict[int, list[str]] = {}
        """Names by id of the tensor."""
        self.first: tuple[str, ...] = ()
        """Names that the server was opened with, which `what=None` means."""

    def check_new(self, name: str) -> None:
        known = self._entries.get(checked_name(name))
        if isinstance(known, str):
            raise KeyError(f"{known} of {name!r} is in flight: await it first")
        if known is not None:
            raise KeyError(f"{name!r} is a name already: free() it first")

    def announce(self, names: Sequence[str]) -> None:
        self._entries.update(dict.fromkeys(names, "init"))

    def settle(self, name: str, entry: NameEntry | None) -> None:
        """End the call that changes `name`, which now has that entry, or none."""
        if entry is None:
            self._entries.pop(name, None)
            return
        self._entries[name] = entry
        if entry.tensor is not None:
            self._names.setdefault(id(entry.tensor), []).append(name)

    def remove(self, entry: NameEntry) -> None:
        """Remove a name until `settle`."""
        self._entries[entry.name] = "free"
        self.first = tuple(name for name in self.first if name != entry.name)
        if entry.tensor is not None:
            names = self._names[id(entry.tensor)]
            names.remove(entry.name)
            if not names:
                del self._names[id(entry.tensor)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, entry in self._entries.items() if isinstance(entry, NameEntry))

    def __contains__(self, name: str) -> bool:
        return isinstance(self._entries.get(name), NameEntry)

    def __getitem__(self, one: object) -> NameEntry:
        """Return the entry of a name or of a tensor."""
        if isinstance(one, Tensor):
            names = self._names.get(id(one))
            if names is None:
                shape = f"{one.dtype}{list(one.shape)}"
                raise ValueError(
                    f"a tensor {shape} without a name: expected a tensor passed to init(), {self._listed()}"
                )
            one = names[0]
        elif not isinstance(one, str):
            raise TypeError(f"what has {type(one).__name__}: expected names, tensors or parameters in a list")
        entry = self._entries.get(one)
        if not isinstance(entry, NameEntry):
            raise KeyError(f"unknown name {one!r}: expected a name passed to init() on this rank, {self._listed()}")
        return entry

    def resolve(self, what: object) -> tuple[list[NameEntry], bool]:
        """Return the entries of a call, and True for a single name or tensor.

        Raises KeyError for an unknown name, ValueError for an unknown tensor, TypeError for anything else.
        """
        if isinstance(what, str | Tensor):
            return [self[what]], True
        if what is None:
            what = self.first
        elif isinstance(what, nn.Module):
            what = what.parameters()
        if isinstance(what, Iterable):
            return [self[one] for one in what], False
        raise TypeError(
            f"what is {type(what).__name__}: expected None, a name, a tensor or parameter, a list of these, or a module"
        )

    def plain(self, what: object, value: Any) -> Pushed | None:  # noqa: ANN401
        """Return the push of a small plain tensor on the host by a name and the default rule, which all checks accept.

        Returns None for any other push, for which `resolve` and `pushed_of` have errors that name the difference.
        """
        entry = self._entries.get(what) if type(what) is str else None
        if not isinstance(entry, NameEntry) or entry.form is None or (data := entry.form.bytes(value)) is None:
            return None
        return Pushed(entry, flat(value), entry.rule_number, data)

    def _listed(self) -> str:
        names = ", ".join(map(repr, self.names[:8]))
        return f"such as {names}{', ...' if len(self.names) > 8 else ''}" if names else "but there are none"


def named(tensors: object) -> dict[str, Tensor]:
    """Return tensors by name: a module's parameters, a mapping's items, or an iterable's tensors as "0", "1", ..."""
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
    return {checked_name(name): check_tensor(t, str(name)) for name, t in found.items()}


def checked_as(t: object, name: str, of: str, dtype: torch.dtype, shape: Sequence[int], why: str = "") -> Tensor:
    """Return `t` as `check_tensor`; raise TypeError or ValueError unless it has this dtype and shape."""
    t = check_tensor(t, name)
    if t.dtype is not dtype:
        raise TypeError(f"{name} for {of!r} holds {dtype_name(t.dtype)}: expected {dtype_name(dtype)}{why}")
    if t.shape != shape:
        raise ValueError(f"{name} for {of!r} has shape {list(t.shape)}: expected {list(shape)}{why}")
    return t


def checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"name {name!r}: expected a str that is not empty")
    return name


def pushed_of(
    entries: Sequence[NameEntry],
    single: bool,
    values: Any,  # noqa: ANN401
    wanted: tuple[int, Rule] | None,
    alpha: float,
) -> list[Pushed]:
    """Return the pushes of one call, by the `wanted` rule with its number, or by each tensor's rule.

    A list skips frozen parameters without a value, if the rule takes gradients.
    """
    if single:
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
    if entry.codec is not None and (number != entry.rule_number or alpha != 1):
        given = f"rule {rule.name}, alpha={alpha} for the object {entry.name!r}"
        raise ValueError(f"{given}: expected copy and 1, since servers do not decode objects")
    if type(alpha) is not float or alpha != 1 or rule is not entry.rule:
        rule.check(entry.dtype, alpha)
    if entry.codec is not None:
        return Pushed(entry, entry.codec.encode(value), number)
    t = entry.tensor
    if value is None and t is not None:  # `check` refuses a table
        value = t.grad if rule.takes_gradients else t
        if value is None:
            raise ValueError(f"{entry.name!r} has no .grad: expected one, since rule {rule.name!r} takes gradients")
    return Pushed(entry, flat(entry.check(value)), number)


def check_apart(pushed: Sequence[Pushed], entries: Sequence[NameEntry], outs: Sequence[Tensor | None]) -> None:
    """Raise ValueError if a tensor of `outs` overlaps a pushed one, except the same tensor for the same name.

    The answer of one server could overwrite values that another has not read.
    """
    starts = sorted((each.value.data_ptr(), i) for i, each in enumerate(pushed) if each.value.nbytes)
    ends = list(accumulate((start + pushed[i].value.nbytes for start, i in starts), max))
    for entry, out in zip(entries, outs, strict=True):
        if out is None or not out.nbytes:
            continue
        first, place = out.data_ptr(), bisect_left(starts, (out.data_ptr() + out.nbytes,)) - 1
        while place >= 0 and ends[place] > first:
            start, i = starts[place]
            other, value = pushed[i].entry, pushed[i].value
            itself = other is entry and start == first and value.nbytes == out.nbytes
            if not itself and start + value.nbytes > first:
                raise ValueError(
                    f"out for {entry.name!r} overlaps the values for {other.name!r}, but is not the same tensor: "
                    "expected the values of the same tensor, or other memory"
                )
            place -= 1


def outs_of(entries: Sequence[NameEntry], out: Any, single: bool) -> list[Tensor | None]:  # noqa: ANN401
    """Return the tensor that each pulled tensor is written to, or None for an object.

    Raises RuntimeError for a tensor that autograd records, unless it is a parameter passed to `init`.
    """
    given = [None] * len(entries) if out is None else ([out] if single else listed("out", out))
    if len(given) != len(entries):
        raise ValueError(f"{len(given)} out tensors for {len(entries)}: expected one for each")
    outs: list[Tensor | None] = []
    for entry, t in zip(entries, given, strict=True):
        into = None if entry.codec is not None else entry.check(entry.tensor if t is None else t, "out")
        if into is not None and into.requires_grad and not (into is entry.tensor and into.is_leaf):
            check_writable(into, f"pull of {entry.name!r}", "out")
        outs.append(into)
    return outs


def listed(name: str, given: object) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is {type(given).__name__}: expected a list")
    return list(given)


def check_settings(entry: NameEntry, settings: Mapping[str, float]) -> None:
    """Raise ValueError or TypeError unless the rule of `entry` has these settings and takes these values."""
    if entry.table is not None:
        if (optimizer := optimizer_of(entry.table)) is None:
            raise ValueError(f"the table {entry.name!r} has no optimizer: expected one for {', '.join(settings)}")
        optimizer.configure(settings)
        return
    with torch.inference_mode(False):
        trial = entry.rule.state(torch.zeros(1, dtype=entry.dtype, device="cpu"))
    entry.rule.configure(trial, **settings)
