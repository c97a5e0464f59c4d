"""Collectives of CUDA tensors, staged through the host in pinned chunks.

A chunk is copied to the host, reduced there and copied back, while other chunks are at other stages. So the slowest
stage determines the time. For the streams of the copies see `device_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, dtype

from aiodist.backends.arithmetic import copy
from aiodist.backends.base import Done, Primitive, Wanted, ignore, once
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.implementations import Primitives
from aiodist.handles import LARGE_BYTES
from aiodist.handles.kernel import Transfer, together, transfers
from aiodist.streams import Staging
from aiodist.streams.staging import Copies
from aiodist.types import OPERATIONS


def chunks_of(nbytes: int, limits: Mapping[str, int]) -> int:
    """Return the number of chunks of `nbytes`, none longer than the limit.

    >>> [chunks_of(n, {"staged.piece_bytes": 100}) for n in (0, 1, 100, 101, 1000)]
    [1, 1, 1, 2, 10]
    """
    return max(1, -(-nbytes // limits["staged.piece_bytes"]))


def cut(count: int, chunks: int, i: int) -> tuple[int, int]:
    """Return the bounds of chunk number `i` of `count` elements. Chunks differ by at most one element.

    >>> [cut(7, 3, i) for i in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return count * i // chunks, count * (i + 1) // chunks


class _Chunk(NamedTuple):
    """A part of a tensor, staged in one buffer of the host."""

    work: _Copies
    kind: dtype
    numel: int
    reads: Sequence[tuple[int, Tensor]]
    """Copies to the host before the collective: (offset in the buffer, tensor of the device)."""
    writes: Sequence[tuple[int, Tensor]]
    """Copies back after the collective."""
    primitive: Callable[[Tensor], Primitive]
    """The collective on the buffer."""


@dataclass(eq=False)
class Staged(Implementation):
    """See the module and `Implementation`. A few chunks are in flight at the same time, each on a separate lane.

    16-bit floats are copied without conversion. The rank's own elements of an allgather stay on the device.
    """

    name = "staged"
    finishes = True
    compares = True  # operations on devices do not wait for the agreement

    _staging: Staging
    _host: Callable[[Endpoint], Primitives]
    """Function that returns the host's primitives for later steps (see `Primitives.afterwards`)."""
    _limits: Mapping[str, int]

    def lacks(self, wanted: Wanted) -> str | None:
        if wanted.operation not in OPERATIONS:
            return f"staging has no {wanted}"
        return None if wanted.device == "cuda" else "staging is for tensors on CUDA devices"

    def in_fixed_order(self, operation: str, ranks: int) -> bool:
        return True

    async def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        """Run one collective in chunks that the lanes share, or several collectives in one chunk each."""
        primitives = [o for o in primitives if o.t.numel() or o.out.numel()]
        if not primitives:
            return
        works = {device: _Copies(self._staging, device) for device in dict.fromkeys(o.t.device for o in primitives)}
        sizes = [max(o.t.nbytes, o.out.nbytes) for o in primitives]
        chunks = chunks_of(sizes[0], self._limits) if len(primitives) == 1 and not ep.whole else 1
        rounds = [[_chunk(works[o.t.device], ep.rank, o, chunks, i) for o in primitives] for i in range(chunks)]
        lanes = min(chunks, self._limits["staged.pieces"])
        endpoints = [ep.on_lane(lane) for lane in range(lanes)] if lanes > 1 else [ep]
        if large := max(sizes) >= LARGE_BYTES:  # the progress thread does the host's part
            self._staging.progress.add_large(1)
        try:
            await together(*[self._lane(self._host(one), rounds[i::lanes]) for i, one in enumerate(endpoints)])
        except Exception:
            for work in works.values():
                work.end()  # queued copies still write
            raise
        finally:
            if large:
                self._staging.progress.add_large(-1)
        for work in works.values():
            work.end()

    async def _lane(self, p: Primitives, rounds: Iterable[Sequence[_Chunk]]) -> None:
        """Run rounds of chunks through the host, one after another."""
        begun: set[_Copies] = set()
        for chunks in rounds:
            hosts = [self._staging.buffer(chunk.numel * chunk.kind.itemsize).view(chunk.kind) for chunk in chunks]
            reads: list[Transfer] = []
            writes: dict[_Copies, list[tuple[Tensor, Tensor]]] = {}
            for chunk, host in zip(chunks, hosts, strict=True):
                copies = [(host[at : at + t.numel()], t) for at, t in chunk.reads if t.numel()]
                if copies:
                    reads.append((chunk.work.read, copies, chunk.work not in begun))
                back = [(t, host[at : at + t.numel()]) for at, t in chunk.writes if t.numel()]
                if back:
                    writes.setdefault(chunk.work, []).extend(back)
            if reads:
                await transfers(reads)
            begun.update(chunk.work for chunk in chunks if any(t.numel() for _, t in chunk.reads))
            await p.run([chunk.primitive(host) for chunk, host in zip(chunks, hosts, strict=True)])
            if waiting := [work for work in writes if work not in begun]:
                await transfers([(work.begun,) for work in waiting])
                begun.update(waiting)
            if writes:
                await transfers([(work.write, copies) for work, copies in writes.items()])


def _chunk(work: _Copies, rank: int, o: Primitive, chunks: int, i: int) -> _Chunk:
    """Return chunk number `i` of a collective.

    Chunks of allgather and reduce_scatter have a part of each rank's block.
    """
    if o.kind not in ("allgather", "reduce_scatter"):
        reads = o.kind != "broadcast" or rank == o.root
        writes = {"broadcast": rank != o.root, "reduce": rank == o.root}.get(o.kind, True)
        first, last = cut(o.t.numel(), chunks, i)
        part = [(0, o.t[first:last])]
        on_host = partial(Primitive, o.kind, op=o.op, root=o.root)
        return _Chunk(work, o.t.dtype, last - first, part if reads else [], part if writes else [], on_host)
    gathers = o.kind == "allgather"
    blocks = (o.out if gathers else o.t).split(list(o.counts))
    if gathers and i == 0 and blocks[rank].data_ptr() != o.t.data_ptr():
        copy(blocks[rank], o.t)
    cuts = [cut(count, chunks, i) for count in o.counts]
    parts = [last - first for first, last in cuts]
    starts = [0, *accumulate(parts)]
    mine = slice(starts[rank], starts[rank + 1])
    of_all = [(start, block[slice(*ends)]) for start, block, ends in zip(starts, blocks, cuts, strict=False)]
    own = [(mine.start, (o.t if gathers else o.out)[slice(*cuts[rank])])]
    on_host = partial(_block, o, mine, parts)
    if gathers:
        del of_all[rank]
        return _Chunk(work, o.t.dtype, starts[-1], own, of_all, on_host)
    return _Chunk(work, o.t.dtype, starts[-1], of_all, own, on_host)


def _block(o: Primitive, mine: slice, parts: Sequence[int], host: Tensor) -> Primitive:
    """Return the collective on a buffer of parts of all ranks, in rank order."""
    if o.kind == "allgather":
        return Primitive(o.kind, host[mine], host, counts=parts)
    return Primitive(o.kind, host, host[mine], op=o.op, counts=parts)


class _Copies:
    """The copies of one operation."""

    def __init__(self, staging: Staging, device: torch.device) -> None:
        """The current stream must be the operation's, which may have earlier work."""
        self._staging = staging
        self._current = torch.cuda.current_stream(device)
        self._to_host = staging.to_host(device)
        self._to_device = staging.to_device(device)

    def begun(self, done: Done) -> None:
        """Call `done` when the device has done all work before the operation."""
        self._staging.events.watch(self._current, done)

    def read(self, pairs: Copies, device_busy: bool, done: Done) -> None:
        """Copy to the host. True for `device_busy` means that earlier work of the stream may not have ended."""
        self._staging.copies(pairs, self._current if device_busy else self._to_host, ignore, done)

    def write(self, pairs: Copies, done: Done) -> None:
        """Queue the copies to the device."""
        queued = once(done)
        self._staging.copies(pairs, self._to_device, lambda _: queued(None), queued)

    def end(self) -> None:
        """Let the operation's stream continue after all copies."""
        self._staging.order(self._current, self._to_device)
