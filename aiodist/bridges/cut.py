"""The division of a state among the ranks that send and the ranks that receive it. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.checkpoints import Piece
from aiodist.checkpoints.parts import Extent, share
from aiodist.checkpoints.values import Json, encode

_ALIGNMENT = 64


class TensorEntry(NamedTuple):
    """A tensor of a state."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def type(self) -> torch.dtype:
        """Return the dtype as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class StateTable:
    """The tensors of a state in order, and the place of each in one block of bytes.

    >>> table = StateTable([TensorEntry("a", "float32", (3,)), TensorEntry("b", "int64", (2, 2))])
    >>> table.starts, table.nbytes
    ([0, 64], 96)
    """

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self.entries = tuple(entries)
        sizes = [entry.numel * entry.type.itemsize for entry in self.entries]
        places = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        self.starts = list(places)[: len(sizes)]
        """First byte of each tensor."""
        self.nbytes = self.starts[-1] + sizes[-1] if sizes else 0

    def runs(self, extents: Sequence[Extent]) -> list[tuple[int, int]]:
        """Return the first byte and the end of each run of bytes that `extents`, in order, fill.

        Two extents with nothing but padding between them are one run.

        >>> entries = ("a", "float32", (3,)), ("b", "int64", (2, 2)), ("c", "int8", (4,))
        >>> table = StateTable([TensorEntry(*entry) for entry in entries])
        >>> table.runs([Extent(0, 1, 3), Extent(1, 0, 4), Extent(2, 2, 3)])
        [(4, 96), (130, 131)]
        """
        found: list[tuple[int, int]] = []
        follows = -1  # the place of the next tensor, if the last extent has filled its own to the end
        for number, start, stop in extents:
            begin, end = (self.starts[number] + at * self.entries[number].type.itemsize for at in (start, stop))
            if begin == end:
                continue
            if begin == follows:
                found[-1] = found[-1][0], end
            else:
                found.append((begin, end))
            follows = -(-end // _ALIGNMENT) * _ALIGNMENT if stop == self.entries[number].numel else end
        return found

    def tensor(self, block: Tensor, number: int) -> Tensor:
        """Return a tensor as a view of a block of bytes with all tensors."""
        entry, start = self.entries[number], self.starts[number]
        flat = block[start : start + entry.numel * entry.type.itemsize]
        return (
            flat.view(entry.type).reshape(entry.shape) if flat.numel() else torch.empty(entry.shape, dtype=entry.type)
        )


@dataclass(frozen=True)
class StatePart:
    """The part of a state that one rank sends."""

    values: Json
    """The state without the elements of its tensors."""
    table: StateTable
    extents: tuple[Extent, ...]
    elements: tuple[Tensor, ...]
    """Flat elements of each extent, in memory of the program."""

    @classmethod
    def of(cls, state: Any, rank: int, size: int) -> StatePart:  # noqa: ANN401
        """Return the part of `rank` of `size` ranks: a share of the tensors that all have, and its own pieces.

        Raises `TypeError`, with the path, for a value that a checkpoint does not take either.
        """
        found: dict[str, Tensor | Piece] = {}
        values = encode(in_pieces(state), "state", found)
        tensors = {name: t.tensor if isinstance(t, Piece) else t for name, t in found.items()}
        table = StateTable(
            [
                TensorEntry(name, str(t.dtype).removeprefix("torch."), tuple(found[name].shape))
                for name, t in tensors.items()
            ]
        )
        whole = [number for number, t in enumerate(found.values()) if isinstance(t, Tensor)]
        sizes = [(table.entries[number].numel, table.entries[number].type.itemsize) for number in whole]
        extents = [extent._replace(tensor=whole[extent.tensor]) for extent in share(sizes, rank, size)]
        extents += [
            Extent(number, t.start, t.start + t.tensor.numel())
            for number, t in enumerate(found.values())
            if isinstance(t, Piece)
        ]
        extents.sort()
        elements = []
        for number, start, stop in extents:
            t, entry = tensors[table.entries[number].name], found[table.entries[number].name]
            flat = t.detach().reshape(-1)
            elements.append(flat if isinstance(entry, Piece) else flat[start:stop])
        return cls(values, table, tuple(extents), tuple(elements))

    def copy(self, into: list[Tensor]) -> list[Tensor]:
        """Copy the elements into blocks of bytes, one for each run of the table, and return the bytes of each run.

        `into` has the blocks of an earlier part with the same table and extents, or is empty and gets the new blocks.
        """
        runs = self.table.runs(self.extents)
        firsts = [begin // _ALIGNMENT * _ALIGNMENT for begin, _ in runs]  # so that each tensor stays aligned
        if not into:
            into += [torch.empty(end - first, dtype=torch.uint8) for first, (_, end) in zip(firsts, runs, strict=True)]
        at = 0
        for (number, start, stop), elements in zip(self.extents, self.elements, strict=True):
            if start == stop:
                continue
            width = self.table.entries[number].type.itemsize
            begin, end = (self.table.starts[number] + each * width for each in (start, stop))
            while end > runs[at][1]:
                at += 1
            into[at][begin - firsts[at] : end - firsts[at]].view(elements.dtype).copy_(elements)
        return [block[begin - first :] for block, first, (begin, _) in zip(into, firsts, runs, strict=True)]


def in_pieces(state: Any) -> Any:  # noqa: ANN401
    """Return `state` with a piece in the place of each DTensor, in containers of dicts, lists and tuples."""
    if isinstance(state, dict):
        return {key: in_pieces(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(in_pieces(value) for value in state)
    return _piece(state) if hasattr(state, "device_mesh") and hasattr(state, "placements") else state


def _piece(t: Any) -> Piece:  # noqa: ANN401 - a DTensor, whose module takes a while to load
    """Return this rank's block of a DTensor. If ranks have equal blocks, the first of them sends."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from aiodist.checkpoints.parts import Cut

    if any(placement.is_partial() for placement in t.placements):
        raise TypeError(f"a DTensor with placements {t.placements}: expected Shard and Replicate, without Partial")
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    block = tuple((start, start + length) for start, length in zip(offset, shape, strict=True))
    if sum(stop - start != whole for (start, stop), whole in zip(block, t.shape, strict=True)) > 1:
        raise TypeError(f"a DTensor divided in several dimensions, {t.placements}: expected one at most")
    place = t.device_mesh.get_coordinate() or ()
    first = all(at == 0 or not placement.is_replicate() for at, placement in zip(place, t.placements, strict=True))
    return Cut(tuple(t.shape), block).piece(t.to_local(), mine=first)
