"""Collectives of CUDA tensors, staged through the host in pinned chunks.

A chunk is copied to the host, reduced there and copied back, while those before and behind it are at other stages: what
takes longest is all that is waited for. For the streams of the copies see `device_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, dtype

from aiodist.backends.base import Done, Primitive, Wanted, ignore, once
from aiodist.backends.inplace import copy
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.operations import computed
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.scheduled import on_lane
from aiodist.handles import LARGE_BYTES
from aiodist.handles.kernel import Program, together, transfers
from aiodist.streams import Staging
from aiodist.streams.staging import Copies
from aiodist.types import OPERATIONS


def chunks_of(nbytes: int, limits: Mapping[str, int]) -> int:
    """Return in how many chunks `nbytes` are staged: so that none is longer than a piece.

    >>> [chunks_of(n, {"staged.piece_bytes": 100}) for n in (0, 1, 100, 101, 1000)]
    [1, 1, 1, 2, 10]
    """
    return max(1, -(-nbytes // limits["staged.piece_bytes"]))


def cut(count: int, chunks: int, i: int) -> tuple[int, int]:
    """Return where chunk number `i` of `count` elements begins and ends; chunks differ by one element at most.

    >>> [cut(7, 3, i) for i in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return count * i // chunks, count * (i + 1) // chunks


class _Chunk(NamedTuple):
    """What goes through one buffer of the host."""

    numel: int
    reads: Sequence[tuple[int, Tensor]]
    """(where in the buffer, tensor of the device) that are copied to the host before it begins."""
    writes: Sequence[tuple[int, Tensor]]
    """The same, copied back when it is over."""
    operation: Callable[[Tensor], Primitive]
    """The collective on the buffer."""


@dataclass(eq=False)
class Staged(Implementation):
    """See the module, and `Implementation`. A few chunks are on their way at once, each on a lane of its own.

    16-bit floats cross the bus as they are. Of an allgather my elements stay on the device.
    """

    name = "staged"
    finishes = True
    compares = True  # the device is not held up

    _staging: Staging
    _host: Callable[[Endpoint, bool], Primitives]
    """(ep, together): the host's primitives for any step but an operation's first, since ranks reach it at any time."""
    _limits: Mapping[str, int]
    together: bool = False
    """Other tensors of the same operation share the endpoint: then there is one chunk."""

    def lacks(self, wanted: Wanted) -> str | None:
        if wanted.operation not in OPERATIONS:
            return f"staging has no {wanted}"
        return None if wanted.device == "cuda" else "staging is for tensors on CUDA devices"

    def run(self, ep: Endpoint, operation: Primitive) -> Program[None]:
        o = operation
        if o.kind in ("allgather", "reduce_scatter"):
            return self._by_blocks(ep, o)
        reads = o.kind != "broadcast" or ep.rank == o.root
        writes = {"broadcast": ep.rank != o.root, "reduce": ep.rank == o.root}.get(o.kind, True)
        chunks = self._chunks(o.t.nbytes)

        def chunk(i: int) -> _Chunk:
            first, last = cut(o.t.numel(), chunks, i)
            part = [(0, o.t[first:last])]
            on_host = partial(Primitive, o.kind, op=o.op, root=o.root)
            return _Chunk(last - first, part if reads else [], part if writes else [], on_host)

        return self._run(ep, o.t, chunks, chunk)

    async def _by_blocks(self, ep: Endpoint, o: Primitive) -> None:
        """Run an allgather or a reduce_scatter: of each rank's block a part goes through each chunk."""
        gathers = o.kind == "allgather"
        whole = o.out if gathers else o.t
        blocks = whole.split(list(o.counts))
        if gathers and blocks[ep.rank].data_ptr() != o.t.data_ptr():
            copy(blocks[ep.rank], o.t)
        chunks = self._chunks(whole.nbytes)

        def chunk(i: int) -> _Chunk:
            cuts = [cut(count, chunks, i) for count in o.counts]
            parts = [last - first for first, last in cuts]
            starts = [0, *accumulate(parts)]
            mine = slice(starts[ep.rank], starts[ep.rank + 1])
            of_all = [(start, block[slice(*ends)]) for start, block, ends in zip(starts, blocks, cuts, strict=False)]
            own = [(mine.start, (o.t if gathers else o.out)[slice(*cuts[ep.rank])])]
            if gathers:
                del of_all[ep.rank]
                return _Chunk(starts[-1], own, of_all, lambda host: Primitive(o.kind, host[mine], host, counts=parts))
            operation = partial(Primitive, o.kind, op=o.op, counts=parts)
            return _Chunk(starts[-1], of_all, own, lambda host: operation(host, host[mine]))

        await self._run(ep, whole, chunks, chunk)

    # --- the pipeline -----------------------------------------------------------------------------------------

    def _chunks(self, nbytes: int) -> int:
        return 1 if self.together else chunks_of(nbytes, self._limits)

    async def _run(self, ep: Endpoint, like: Tensor, chunks: int, chunk: Callable[[int], _Chunk]) -> None:
        """Run all chunks, those of each lane one after another."""
        if not like.numel():
            return
        lanes = min(chunks, self._limits["staged.pieces"])
        work = _Work(self._staging, like.device)
        shared = self.together or lanes > 1
        programs = [
            self._lane(self._host(on_lane(ep, lane), shared), like.dtype, work, map(chunk, range(lane, chunks, lanes)))
            for lane in range(lanes)
        ]
        if large := like.nbytes >= LARGE_BYTES:  # the thread alone does the host's part
            self._staging.progress.add_large(1)
        try:
            await together(*programs)
        except Exception:
            work.end()  # what is queued still writes
            raise
        finally:
            if large:
                self._staging.progress.add_large(-1)
        work.end()

    async def _lane(self, p: Primitives, kind: dtype, work: _Work, chunks: Iterable[_Chunk]) -> None:
        behind = True  # other work of the device, which may not be over
        for chunk in chunks:
            host = self._staging.buffer(chunk.numel * kind.itemsize).view(kind)
            reads = [(host[at : at + t.numel()], t) for at, t in chunk.reads if t.numel()]
            # Also where nothing is read: programs in lockstep count their steps.
            await transfers([partial(work.read, reads, behind)] if reads else [])
            behind = behind and not reads
            await computed(p, chunk.operation(host))
            writes = [(t, host[at : at + t.numel()]) for at, t in chunk.writes if t.numel()]
            if writes and behind:
                await transfers([work.begun])
                behind = False
            if writes:
                await transfers([partial(work.write, writes)])


class _Work:
    """The copies of one operation."""

    def __init__(self, staging: Staging, device: torch.device) -> None:
        """With the operation's stream the current one, on which all that it comes behind is queued."""
        self._staging = staging
        self._current = torch.cuda.current_stream(device)
        self._to_host = staging.to_host(device)
        self._to_device = staging.to_device(device)

    def begun(self, done: Done) -> None:
        """Call `done` when all that the operation comes behind is over."""
        self._staging.events.watch(self._current, done)

    def read(self, pairs: Copies, behind: bool, done: Done) -> None:
        """Copy to the host, `behind` what the operation comes behind, unless that is known to be over."""
        self._staging.copies(pairs, self._current if behind else self._to_host, ignore, done)

    def write(self, pairs: Copies, done: Done) -> None:
        """Queue the copies to the device."""
        told = once(done)
        self._staging.copies(pairs, self._to_device, lambda _: told(None), told)

    def end(self) -> None:
        """Let the operation's stream go on behind all copies."""
        self._staging.order(self._current, self._to_device)
