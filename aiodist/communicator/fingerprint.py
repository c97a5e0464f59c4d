"""The fingerprint of an operation: facts that must be equal on every rank, as text and as a hash of 64 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.communicator.arguments import is_number
from aiodist.types import ReduceOp

_BITS = 52
_LOW = (1 << _BITS) - 1
_GATHERS = ("allgather", "gather")


@dataclass(frozen=True)
class Fingerprint:
    """Facts that must be equal on all ranks, or None for a fact that may differ."""

    kind: str
    dtype: str | None = None
    size: str | None = None
    """Shape such as "[2, 3]", or the number of elements if only the number must be equal."""
    how: str | None = None
    """Operator, requested implementation, and form of the argument."""
    root: int | None = None
    loose: bool = False
    """True if only the ranks that know the dtype must agree on the dtype."""
    word: int = field(init=False, repr=False, compare=False)
    """Hash that the ranks compare, see `word_of`."""

    def __post_init__(self) -> None:
        known = (self.kind, None if self.loose else self.dtype, self.size, self.how, self.root)
        object.__setattr__(self, "word", word_of(known, self.dtype if self.loose else None))

    def __str__(self) -> str:
        what = f"{self.dtype or ''}{self.size or ''}"
        root = "" if self.root is None else f"root {self.root}"
        return " ".join(part for part in (self.kind, what, self.how, root) if part)


def described(ts: Sequence[Tensor]) -> str:
    """Return dtypes and sizes as text."""
    return ", ".join(f"{kind_of(t)}[{t.numel()}]" for t in ts)


def kind_of(t: Tensor) -> str:
    """Return the dtype and device type of `t`, on which all ranks must agree: "float32", or "float32 on cuda"."""
    return dtype_name(t.dtype) if t.is_cpu else f"{dtype_name(t.dtype)} on cuda"


def fingerprint_of(
    kind: str,
    ts: Sequence[Tensor],
    op: str | None,
    root: int | None = None,
    impl: str = "auto",
    *,
    given: object = None,
    across: bool = False,
    extra: str = "",
) -> Fingerprint:
    """Return the fingerprint of a call on `ts`. `given` is the caller's argument.

    The fingerprint has dtypes and shapes, for a broadcast the numbers of elements, for allgather and gather only
    dtypes.
    """
    size = None
    if is_number(given):
        dtype = "float" if ts[0].is_floating_point() else "int"
    elif kind == "broadcast":
        dtype = described(ts)
    elif kind in _GATHERS:
        dtype = ", ".join(map(kind_of, ts))
    elif len(ts) == 1:
        dtype, size = kind_of(ts[0]), str(list(ts[0].shape))
    else:
        dtype = " ".join(f"{kind_of(t)}{list(t.shape)}" for t in ts)
    known = None if op is None else ReduceOp(op).value
    return Fingerprint(kind, dtype, size, how(known, impl, given=given, across=across, extra=extra), root)


def how(op: str | None, impl: str, *, given: object = None, across: bool = False, extra: str = "") -> str | None:
    """Return a text of operator, requested implementation and form of the argument, or None if all are empty."""
    form = f"list of {len(given)}" if isinstance(given, (list, tuple)) else "number" if is_number(given) else ""
    words = [op or "", extra, form, "across" if across else "", "" if impl == "auto" else f"by {impl}"]
    return " ".join(filter(None, words)) or None


def word_of(known: tuple[object, ...], loose: str | None = None) -> int:
    """Return the hash of `known`, the same in every process. `loose` is a fact that not all ranks know."""
    return _hash(known, _BITS) | (0 if loose is None else (_hash((loose,), 64 - _BITS) or 1) << _BITS)


def merged(word: int, other: int) -> int | None:
    """Return the union of two hashes of one operation, or None for different hashes."""
    if word == other:
        return word
    return None if (word ^ other) & _LOW or (word > _LOW and other > _LOW) else word | other


def _hash(what: tuple[object, ...], bits: int) -> int:
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest()) >> (64 - bits)
