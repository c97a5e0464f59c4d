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
    counts: list[int]
    """How many are in each group."""
    shape: torch.Size
    """Of the call's ids."""

    def sum(self, values: Tensor, into: Tensor) -> None:
        """Write the sum of the rows of each id into `into`, `(len(ids), dim)`; `values` are `(numel, dim)`."""
        if self.ids.numel() == self.places.numel():  # each is there once
            self.last(values, into)
        else:
            into.zero_().index_add_(0, self.places, values)

    def last(self, values: Tensor, into: Tensor) -> None:
        """Write the last row of each id into `into`, `(len(ids), dim)`."""
        last = torch.empty_like(self.ids)
        last.scatter_reduce_(0, self.places, torch.arange(self.places.numel()), "amax", include_self=False)
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
        unique, places = flat.unique(return_inverse=True)
        if servers == 1:
            return GroupedIds(unique, places, [unique.numel()], ids.shape)
        owner = owners(unique, servers)
        order = owner.argsort(stable=True)
        moved = torch.empty_like(order)
        moved[order] = torch.arange(order.numel())
        counts = torch.bincount(owner, minlength=servers).tolist()
        return GroupedIds(unique[order], moved[places], counts, ids.shape)
