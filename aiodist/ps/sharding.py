"""Where a tensor lies: whole on one server, or cut in contiguous blocks over all of them (P1). Pure; no torch.

Every rank works it out by itself from the tensor's name and size, so nothing has to be asked or told.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from aiodist.schedules.steps import cut

__all__ = ["Block", "Placement", "place"]


class Block(NamedTuple):
    """Elements [start, stop) of the flat tensor, on server number `server`."""

    server: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.stop - self.start


class Placement(NamedTuple):
    """The blocks of one tensor, in the order of its elements; none but that of an empty tensor is empty.

    The first is on the leader, the server that decides in which order pushes are applied and reads are served.
    """

    blocks: tuple[Block, ...]

    @property
    def leader(self) -> int:
        """The server that leads the tensor."""
        return self.blocks[0].server

    @property
    def whole(self) -> bool:
        """It lies on the leader alone."""
        return len(self.blocks) == 1

    def on(self, server: int) -> Block | None:
        """Return what `server` has of it: a server has one block at most."""
        return next((block for block in self.blocks if block.server == server), None)


def place(name: str, numel: int, itemsize: int, servers: int, split_bytes: int) -> Placement:
    """Return where the tensor `name`, of `numel` elements of `itemsize` bytes, lies among `servers` servers.

    One of at least `split_bytes` bytes is cut in one block for each server; they differ by one element at most, the
    longer ones first, and block i is on server `(leader + i) % servers`. With fewer elements than servers the last
    servers have none. A smaller or empty tensor lies whole on its leader, which is `crc32(name) % servers`: the same
    on every rank and host, and spread evenly. Raises `ValueError` for fewer than one server, for sizes below 0 and for
    `split_bytes` below 1.

    >>> place("embedding", 7, 4, servers=3, split_bytes=16).blocks
    (Block(server=2, start=0, stop=3), Block(server=0, start=3, stop=5), Block(server=1, start=5, stop=7))
    """
    if servers < 1:
        raise ValueError(f"{servers} servers: expected at least 1")
    if numel < 0 or itemsize < 0:
        raise ValueError(f"{name!r}: {numel} elements of {itemsize} bytes: expected sizes of at least 0")
    if split_bytes < 1:
        raise ValueError(f"split_bytes={split_bytes}: expected at least 1")
    # Lone surrogates are legal in a str; no name may make this fail.
    leader = crc32(name.encode("utf-8", "surrogatepass")) % servers
    if servers == 1 or numel == 0 or numel * itemsize < split_bytes:
        return Placement((Block(leader, 0, numel),))
    parts = enumerate(cut(numel, servers))
    return Placement(tuple(Block((leader + i) % servers, start, stop) for i, (start, stop) in parts))
