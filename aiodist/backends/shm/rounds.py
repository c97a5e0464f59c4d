"""One operation cut into rounds: which bytes of whose memory are looked at in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from aiodist.backends.inplace import writable
from aiodist.backends.shm.works import Work

__all__ = ["STAGES", "Rounds"]

STAGES = 2
"""In turn: while one is worked on, another is filled or drained."""


class Rounds:
    """A work with the memory of all ranks."""

    def __init__(
        self, work: Work, piece: int, staged: Sequence[bool], memory: Sequence[Tensor], *, cached: bool
    ) -> None:
        """`piece` elements of each part a round; `memory` is each rank's window, or its stage where it is `staged`."""
        self.work = work
        self.staged = staged
        self.memory = memory
        self.cached = cached
        """It holds on to nobody's tensor, and is good for the next operation on the same memory."""
        self.count = -(-work.longest // piece)
        self._piece = piece
        self._views: dict[tuple[int, int, int], Tensor] = {}

    def work_on(self, j: int, out: Tensor) -> None:
        """Do this rank's part of round `j`."""
        first = j * self._piece
        with writable(out):  # in no other mode than the tensor's, and never from one round to the next
            self.work.step(self._known_at if self.cached else self._at, out, first, first + self._piece)

    def fill(self, j: int, stage: Tensor | None) -> None:
        """Copy the pieces of round `j` that others look at into the stage."""
        for mine, staged in self._pieces(j, stage):
            staged.copy_(mine)

    def drain(self, j: int, stage: Tensor | None) -> None:
        """Copy them back."""
        with writable(self.memory[self.work.rank]):
            for mine, staged in self._pieces(j, stage):
                mine.copy_(staged)

    def _pieces(self, j: int, stage: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        rank = self.work.rank
        window = self.memory[rank]
        assert stage is not None
        stage = stage.view(window.dtype)
        for part in self.work.lent():
            first, last = self._range(rank, part, j * self._piece, (j + 1) * self._piece)
            if last > first:
                at = self._in_stage(part, j)
                yield window[first:last], stage[at : at + last - first]

    def _known_at(self, rank: int, part: int, first: int, last: int) -> Tensor:
        view = self._views.get((rank, part, first))
        if view is None:
            view = self._views[rank, part, first] = self._at(rank, part, first, last)
        return view

    def _at(self, rank: int, part: int, first: int, last: int) -> Tensor:
        j = first // self._piece
        first, last = self._range(rank, part, first, last)
        if self.staged[rank] and rank != self.work.rank:
            at = self._in_stage(part, j)
            return self.memory[rank][at : at + last - first]
        return self.memory[rank][first:last]

    def _range(self, rank: int, part: int, first: int, last: int) -> tuple[int, int]:
        start, stop = self.work.part(rank, part)
        return min(start + first, stop), min(start + last, stop)

    def _in_stage(self, part: int, j: int) -> int:
        return (j % STAGES * self.work.parts + part) * self._piece
