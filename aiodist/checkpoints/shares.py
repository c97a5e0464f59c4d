"""Who writes what: tensors that all ranks have alike are divided among them; each element is written once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

_WHOLE_BYTES = 64 << 10


class Extent(NamedTuple):
    """A tensor's number, and elements `start` … `stop` of it, made flat."""

    tensor: int
    start: int
    stop: int


def share(tensors: Sequence[tuple[int, int]], rank: int, size: int) -> list[Extent]:
    """Return what `rank` of `size` writes of `tensors`, each given as its elements and the bytes of one element.

    The bytes of all tensors in a row are cut into `size` parts of equal length; a tensor below 64 KiB stays whole, with
    the rank in whose part it begins. The same call on every rank gives each element to exactly one.

    >>> share([(100_000, 4), (10, 4)], 1, 2)
    [Extent(tensor=0, start=50005, stop=100000), Extent(tensor=1, start=0, stop=10)]
    """
    total = sum(numel * itemsize for numel, itemsize in tensors)
    bounds = [total * r // size for r in range(size)]  # where the part of each rank begins
    end = bounds[rank + 1] if rank + 1 < size else total
    found = []
    offset = 0
    for number, (numel, itemsize) in enumerate(tensors):
        nbytes = numel * itemsize
        if nbytes < _WHOLE_BYTES:
            start, stop = 0, numel
            mine = bisect_right(bounds, offset) - 1 == rank
        else:
            start, stop = (min(max(0, -(-(bound - offset) // itemsize)), numel) for bound in (bounds[rank], end))
            mine = start < stop
        if mine:
            found.append(Extent(number, start, stop))
        offset += nbytes
    return found
