"""Which slot of a table each id has: a hash table in two tensors, worked on by whole batches."""

from __future__ import annotations

import torch
from torch import Tensor

from aiodist.ps.rows.hashing import cells

_EMPTY = -1
_LEAST_CELLS = 64
_WINDOWS = torch.arange(1, 5), torch.arange(1, 9)
_MANY = 1 << 10


class RowIndex:
    """Ids, int64 and not negative, to slots 0, 1, 2, ... in the order in which they were added.

    Open addressing with linear probing, at most half full: some 24 to 48 bytes for each id, with the list of ids.
    Finding n of them is a few passes of torch over n elements, and passes over the few that are not where the search
    begins. Not to be used by two threads at a time.
    """

    def __init__(self) -> None:
        self._count = 0
        self._ids = torch.empty(0, dtype=torch.int64)  # by slot, with room
        self._make(_LEAST_CELLS)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Tensor:
        """All ids, by slot; a view, which later calls may leave behind."""
        return self._ids[: self._count]

    def find(self, ids: Tensor) -> Tensor:
        """Return the slot of each of `ids`, -1 where it has none."""
        at = cells(ids, self._mask)
        seen = self._keys.index_select(0, at)
        slots = self._slots.index_select(0, at)  # that of an empty cell is -1
        left = (seen != ids).logical_and_(seen != _EMPTY).nonzero().flatten()
        at = at.index_select(0, left)
        while left.numel():  # several cells at a time where few are left: a pass costs more than its elements
            window = (at[:, None] + _WINDOWS[left.numel() < _MANY]).bitwise_and_(self._mask)
            seen = self._keys.index_select(0, window.view(-1)).view_as(window)
            here, which = (seen == ids.index_select(0, left)[:, None]).logical_or_(seen == _EMPTY).max(1)
            found = self._slots.index_select(0, window.gather(1, which[:, None]).view(-1))
            slots.index_copy_(0, left, found)
            on = here.logical_not_().nonzero().flatten()
            left, at = left.index_select(0, on), window[:, -1].index_select(0, on)
        return slots

    def _next(self, at: Tensor) -> Tensor:
        return (at + 1).bitwise_and_(self._mask)

    def add(self, ids: Tensor) -> Tensor:
        """Give slots to `ids`, none of which has one and none of which is there twice; return them: the next ones."""
        first, count = self._count, self._count + ids.numel()
        if count > self._ids.numel():
            grown = torch.empty(max(count, 2 * self._ids.numel()), dtype=torch.int64)
            grown[:first] = self.ids
            self._ids = grown
        self._ids[first:count] = ids
        self._count = count
        if 2 * count > self._mask + 1:
            self._make(1 << (2 * count - 1).bit_length())
            self._enter(self.ids, torch.arange(count))
        else:
            self._enter(ids, torch.arange(first, count))
        return torch.arange(first, count)

    def _make(self, size: int) -> None:
        """Have so many empty cells, a power of two."""
        self._mask = size - 1
        self._keys = torch.full((size,), _EMPTY)
        self._slots = torch.full((size,), _EMPTY)

    def _enter(self, ids: Tensor, slots: Tensor) -> None:
        """Write each id into the first cell that is free: of several that want one, one gets it, the others go on."""
        at = cells(ids, self._mask)
        while ids.numel():
            free = (self._keys[at] == _EMPTY).nonzero().flatten()
            self._keys[at[free]] = ids[free]
            won = self._keys[at] == ids
            self._slots[at[won]] = slots[won]
            lost = (~won).nonzero().flatten()
            ids, slots, at = ids[lost], slots[lost], self._next(at[lost])
