"""One mixing function for 64-bit ids: it says on which server a row lies, in which cell, and what it begins with."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as a signed number: what a stream of mixed numbers is counted up by."""
_OWNER_BITS = 24


def mix(t: Tensor) -> Tensor:
    """Return 64 well mixed bits for each int64 of `t`, one to one, in new memory.

    The finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014,
    doi:10.1145/2660193.2660195), with Stafford's constants. int64 wraps around, as uint64 does.
    """
    z = _shifted(t, 30).bitwise_xor_(t).mul_(_FIRST)
    room = torch.empty_like(z)
    z = z.bitwise_xor_(_shifted(z, 27, room)).mul_(_SECOND)
    return z.bitwise_xor_(_shifted(z, 31, room))


def _shifted(t: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Return `t` shifted to the right, with zeros from the left; torch brings copies of the sign."""
    return torch.bitwise_right_shift(t, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def owners(ids: Tensor, servers: int) -> Tensor:
    """Return, for each of `ids`, which of so many servers has its row: they are spread evenly."""
    return _shifted(mix(ids), 64 - _OWNER_BITS).remainder_(servers)


def cells(ids: Tensor, mask: int) -> Tensor:
    """Return the cell of a hash table, 0 to `mask`, where the search for each of `ids` begins.

    Low bits: the ids of one server, which share what the high bits give, do not share these.
    """
    return mix(ids).bitwise_and_(mask)


def uniform(seed: int, ids: Tensor, dim: int) -> Tensor:
    """Return float64 numbers of [0, 1), `(len(ids), dim)`, which depend on seed, id and column alone."""
    streams = mix(ids ^ mix(torch.tensor(seed)))
    columns = torch.arange(1, dim + 1) * GOLDEN
    return _shifted(mix(streams[:, None] + columns), 11).to(torch.float64).mul_(2.0**-53)
