"""Where a tensor lies: whole on one server, or cut in contiguous blocks over all of them. Pure; no torch.

Every rank works it out by itself from the tensor's name and size, so nothing has to be asked or told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from aiodist.schedules.plan import cut


class Span(NamedTuple):
    """Elements [start, stop) of the flat tensor, on the server with this rank."""

    rank: int
    start: int
    stop: int


def place(name: str, numel: int, itemsize: int, servers: Sequence[int], split_bytes: int) -> tuple[Span, ...]:
    """Return where the tensor `name`, of `numel` elements of `itemsize` bytes, lies: the first span is its leader's.

    One of at least `split_bytes` bytes is cut in one block for each server; they differ by one element at most, the
    longer ones first, and block i is on server number `(leader + i) % len(servers)`. With fewer elements than servers
    the last servers have none. A smaller or empty tensor lies whole on its leader, which is number `crc32(name) %
    len(servers)`: the same on every rank and host, and spread evenly.

    >>> place("embedding", 7, 4, servers=(0, 1, 2), split_bytes=16)
    (Span(rank=2, start=0, stop=3), Span(rank=0, start=3, stop=5), Span(rank=1, start=5, stop=7))
    """
    leader = _leader(name, servers)
    if len(servers) == 1 or numel == 0 or numel * itemsize < split_bytes:
        return (Span(servers[leader], 0, numel),)
    parts = enumerate(cut(numel, len(servers)))
    return tuple(Span(servers[(leader + i) % len(servers)], start, stop) for i, (start, stop) in parts)


def spread(name: str, servers: Sequence[int]) -> tuple[Span, ...]:
    """Return where the table `name` lies: on all servers, its leader first. Which has a row, the row's id says."""
    leader = _leader(name, servers)
    return tuple(Span(servers[(leader + i) % len(servers)], 0, 0) for i in range(len(servers)))


def _leader(name: str, servers: Sequence[int]) -> int:
    # Lone surrogates are legal in a str; no name may make this fail.
    return crc32(name.encode("utf-8", "surrogatepass")) % len(servers)
