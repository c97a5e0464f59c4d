"""The ids of a call: each once, in groups of the servers that have them, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from aiodist.ps.rows.hashing import owners
from aiodist.ps.rows.packing import write_rows
from aiodist.ps.rows.spec import TableSpec


class GroupedIds(NamedTuple):
    """What a call means by its ids."""

    ids: Tensor
    """Each once: those of the first server, then those of the second, and so on; in each group they rise."""
    places: Tensor
    """Where in `ids` each of the call's is, `(numel,)`."""
    first: Tensor
    """Which of the call's is the first of each of `ids`."""
    counts: list[int]
    """How many are in each group."""
    shape: torch.Size
    """Of the call's ids."""

    def gather(self, values: Tensor, into: Sequence[Tensor], *, last: bool = False) -> None:
        """Write the sum, or the last, of the rows of each id into `into`, the rows of each group, `(count, dim)`.

        `values` are the call's, `(numel, dim)`: each is read once.
        """
        again = torch.empty(0, dtype=torch.int64) if last else self._again()
        source = self.first
        if last:
            source = source.scatter_reduce(0, self.places, torch.arange(self.places.numel()), "amax")
        for block, rows in zip(self.blocks(), into, strict=True):
            torch.index_select(values, 0, source[block], out=rows)
            if again.numel():
                at = self.places.index_select(0, again) - block.start
                here = at.ge(0).logical_and_(at < rows.shape[0]).nonzero().flatten()
                rows.index_add_(0, at.index_select(0, here), values.index_select(0, again.index_select(0, here)))

    def scatter(self, number: int, rows: Tensor, into: Tensor) -> None:
        """Write the rows of group `number` to where the call has their ids first, in `into`, `(numel, dim)`."""
        if len(self.counts) == 1:  # reading here and there is quicker than writing so, and this writes all of `into`
            torch.index_select(rows, 0, self.places, out=into)
        else:
            write_rows(into, self.first[self.blocks()[number]], rows)

    def repeat(self, into: Tensor) -> None:
        """Write rows that `scatter` wrote to where the call has their ids again."""
        again = self._again()
        if again.numel() and len(self.counts) > 1:
            source = self.first.index_select(0, self.places.index_select(0, again))
            into.index_copy_(0, again, into.index_select(0, source))

    def _again(self) -> Tensor:
        """Return which of the call's ids are there before."""
        if self.ids.numel() == self.places.numel():
            return torch.empty(0, dtype=torch.int64)
        again = torch.ones(self.places.shape, dtype=torch.bool)
        again[self.first] = False
        return again.nonzero().flatten()

    def blocks(self) -> list[slice]:
        """Return which of `ids` are in each group."""
        ends = list(accumulate(self.counts))
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


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
        unique, places, first = _each_once(flat)
        if servers == 1:
            return GroupedIds(unique, places, first, [unique.numel()], ids.shape)
        owner = owners(unique, servers)
        _, order = _in_order(owner)
        moved = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
        unique, places, first = (t.index_select(0, at) for t, at in ((unique, order), (moved, places), (first, order)))
        counts = torch.bincount(owner, minlength=servers).tolist()
        return GroupedIds(unique, places, first, counts, ids.shape)


def _each_once(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids, each once, rising; where among these each of `ids` is; and the first place of each in `ids`."""
    ordered, order = _in_order(ids)
    new = torch.ones(ids.numel(), dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=new[1:])
    starts = new.nonzero().flatten()
    places = torch.empty_like(order).scatter_(0, order, new.cumsum(0).sub_(1))
    return ordered.index_select(0, starts), places, order.index_select(0, starts)


def _in_order(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of `t`, none negative, sorted, and where each of them is in `t`; equal ones stay in order."""
    count = t.numel()
    bits = count.bit_length()
    if not count or int(t.max()) >> (63 - bits):
        ordered, order = t.sort(stable=True)
        return ordered, order
    # Number and place in one: numpy sorts such numbers in a quarter of the time that torch takes for pairs.
    keys = (t << bits).bitwise_or_(torch.arange(count))
    keys.numpy().sort()
    return keys >> bits, keys.bitwise_and_((1 << bits) - 1)
