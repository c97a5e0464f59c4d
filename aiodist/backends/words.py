"""The 64 bits that stand for an operation where ranks compare what they issued.

52 bits are a hash of what all ranks know, mixed with the operation's number. The 12 above them are a hash of what some
of them may not know (the dtype of a scatter, outside its root), or 0: those that know it must agree on it.
"""

from __future__ import annotations

from hashlib import blake2b

_BITS = 52
_LOW = (1 << _BITS) - 1


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
