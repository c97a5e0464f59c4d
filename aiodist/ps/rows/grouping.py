"""The ids of a call: each once, in groups of the servers that have them, and the way back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aiodist.ps.rows.hashing import owners
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

    def sum(self, values: Tensor, into: Tensor) -> None:
        """Write the sum of the rows of each id into `into`, `(len(ids), dim)`; `values` are `(numel, dim)`."""
        torch.index_select(values, 0, self.first, out=into)
        if self.ids.numel() < self.places.numel():
            again = torch.ones(self.places.shape, dtype=torch.bool)
            again[self.first] = False
            others = again.nonzero().flatten()
            into.index_add_(0, self.places.index_select(0, others), values.index_select(0, others))

    def last(self, values: Tensor, into: Tensor) -> None:
        """Write the last row of each id into `into`, `(len(ids), dim)`."""
        last = self.first.scatter_reduce(0, self.places, torch.arange(self.places.numel()), "amax")
        torch.index_select(values, 0, last, out=into)

    def blocks(self) -> list[slice]:
        """Return which of `ids` are in each group."""
        found, start = [], 0
        for count in self.counts:
            found.append(slice(start, start + count))
            start += count
        return found


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
