"""Ids of rows: which server has each, what it draws, each of a call once, and their form on the way to a server.

On the way stand how many there are, the ids, then their rows; all little-endian. The ids of a request rise, so that a
server sees in one pass that each is there once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from aiodist.ps.rows.spec import TableSpec, mix, shifted

COUNT_BYTES = ID_BYTES = 8
_OWNER_BITS = 24


def owners(ids: Tensor, servers: int) -> Tensor:
    """Return, for each of `ids`, which of so many servers has its row: they are spread evenly."""
    return shifted(mix(ids), 64 - _OWNER_BITS).remainder_(servers)


class GroupedIds(NamedTuple):
    """What a call means by its ids."""

    ids: Tensor
    """Each once: those of the first server, then those of the second, and so on; in each group they rise."""
    places: Tensor
    """Where in `ids` each of the call's is, `(numel,)`."""
    counts: list[int]
    """How many are in each group."""
    shape: torch.Size
    """Of the call's ids."""

    def blocks(self) -> list[slice]:
        """Return which of `ids` are in each group."""
        return [slice(end - count, end) for end, count in zip(accumulate(self.counts), self.counts, strict=True)]

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of the rows of each id, `(len(ids), dim)`, of the call's `values`, `(numel, dim)`."""
        if self.ids.numel() == self.places.numel():  # reading here and there is quicker than summing so
            return self.last(values)
        return values.new_zeros(self.ids.numel(), values.shape[1]).index_add_(0, self.places, values)

    def last(self, values: Tensor) -> Tensor:
        """Return the last row of each id; else as `summed`."""
        order = torch.arange(self.places.numel())
        return values.index_select(0, torch.zeros_like(self.ids).scatter_reduce_(0, self.places, order, "amax"))


def grouped(ids: object, spec: TableSpec, servers: int) -> GroupedIds:
    """Return what a call means by `ids`, of any shape, for so many servers.

    Raises TypeError unless it is an int32 or int64 tensor on the CPU, ValueError for an id that the table cannot have.
    Cost: a sort.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or not ids.is_cpu:
        seen = f"{ids.dtype} on {ids.device}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids are {seen}: expected a tensor of int64 or int32 on the CPU")
    with torch.inference_mode(False), torch.no_grad():
        flat = ids.detach().reshape(-1).to(torch.int64)
        spec.check_ids(flat)
        unique, places = flat.unique(return_inverse=True)
        if servers == 1:
            return GroupedIds(unique, places, [unique.numel()], ids.shape)
        owner = owners(unique, servers)
        order = owner.argsort(stable=True)
        moved = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
        return GroupedIds(unique[order], moved[places], torch.bincount(owner, minlength=servers).tolist(), ids.shape)


def packed_rows(ids: Tensor, rows: Tensor, room: Callable[[int], Tensor] | None = None) -> Tensor:
    """Return ids and rows as they travel, flat uint8, in new memory or in `room(nbytes)`."""
    start = COUNT_BYTES + ids.nbytes
    nbytes = start + rows.nbytes
    packed = torch.empty(nbytes, dtype=torch.uint8) if room is None else room(nbytes)[:nbytes]
    packed[:COUNT_BYTES].view(torch.int64)[0] = ids.numel()
    packed[COUNT_BYTES:start].view(torch.int64).copy_(ids)
    packed[start:].view(rows.dtype).view_as(rows).copy_(rows)
    return packed


def unpack(packed: Tensor, spec: TableSpec) -> tuple[Tensor, Tensor]:
    """Return the ids and their rows; raise ValueError unless the lengths and the ids can be."""
    if packed.numel() < COUNT_BYTES:
        raise ValueError(f"rows in {packed.numel()} bytes: expected {COUNT_BYTES} or more")
    count = int(packed[:COUNT_BYTES].view(torch.int64)[0])
    start = COUNT_BYTES + count * ID_BYTES
    if count < 0 or packed.numel() != start + count * spec.row_bytes:
        raise ValueError(f"{count} rows in {packed.numel()} bytes: expected {start + count * spec.row_bytes}")
    return ids_in(packed[COUNT_BYTES:start], spec), packed[start:].view(spec.dtype).view(count, spec.dim)


def ids_in(packed: Tensor, spec: TableSpec) -> Tensor:
    """Return flat uint8 as ids; raise ValueError unless they rise, and all are of the table."""
    if packed.numel() % ID_BYTES:
        raise ValueError(f"ids in {packed.numel()} bytes: expected a multiple of {ID_BYTES}")
    ids = packed.view(torch.int64)
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("ids that do not rise: expected each once, in order")
    spec.check_ids(ids[:: max(1, ids.numel() - 1)])  # the least and the most
    return ids
