"""The fingerprint of an operation: all that must be equal on every rank, as text and as one word of 64 bits."""

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
    """What all ranks must agree on; None where they need not."""

    kind: str
    dtype: str | None = None
    size: str | None = None
    """The shape, or the number of elements where only that counts, as "[2, 3]"."""
    how: str | None = None
    """The operator, the implementation that was named, the form of what was given."""
    root: int | None = None
    loose: bool = False
    """Not all ranks know the dtype: those that do must agree on it."""
    word: int = field(init=False, repr=False, compare=False)
    """What stands for all of it where ranks compare, see `word_of`."""

    def __post_init__(self) -> None:
        known = (self.kind, None if self.loose else self.dtype, self.size, self.how, self.root)
        object.__setattr__(self, "word", word_of(known, self.dtype if self.loose else None))

    def __str__(self) -> str:
        what = f"{self.dtype or ''}{self.size or ''}"
        root = "" if self.root is None else f"root {self.root}"
        return " ".join(part for part in (self.kind, what, self.how, root) if part)


def described(ts: Sequence[Tensor]) -> str:
    """Return dtypes and sizes as words."""
    return ", ".join(f"{kind_of(t)}[{t.numel()}]" for t in ts)


def kind_of(t: Tensor) -> str:
    """Return what all ranks must agree on of an element of `t`: "float32", or "float32 on cuda"."""
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
    """Return what all ranks must agree on in a call on `ts`; `given` is what the caller gave.

    Dtypes and shapes; of a broadcast only the numbers of elements, of what gathers only the dtypes.
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
    """Return as words what else the caller chose: the operator, the implementation, a list or a number."""
    form = f"list of {len(given)}" if isinstance(given, (list, tuple)) else "number" if is_number(given) else ""
    words = [op or "", extra, form, "across" if across else "", "" if impl == "auto" else f"by {impl}"]
    return " ".join(filter(None, words)) or None


def word_of(known: tuple[object, ...], loose: str | None = None) -> int:
    """Return the word of what `known` says, the same in every process; `loose` is what others may not know."""
    return _hash(known, _BITS) | (0 if loose is None else (_hash((loose,), 64 - _BITS) or 1) << _BITS)


def merged(word: int, other: int) -> int | None:
    """Return what two words of one number say together, None where they differ."""
    if word == other:
        return word
    return None if (word ^ other) & _LOW or (word > _LOW and other > _LOW) else word | other


def _hash(what: tuple[object, ...], bits: int) -> int:
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest()) >> (64 - bits)
