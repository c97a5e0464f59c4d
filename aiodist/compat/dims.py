"""`Compute_dims` returns the sides of a grid of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt, prod

from aiodist.compat.errors import CLASSES, MPIError


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return the sides of a grid of `nnodes` ranks, as equal as possible, in descending order.

    `dims` is the number of dimensions, or a list of sides with 0 for each side to compute. Raises `MPI.Exception` of
    ERR_DIMS unless `nnodes` is positive, and a multiple of the given sides.

    >>> Compute_dims(12, 2), Compute_dims(12, [0, 2, 0])
    ([4, 3], [3, 2, 2])
    """
    sides = [0] * dims if isinstance(dims, int) else [int(side) for side in dims]
    given = prod(side for side in sides if side)
    if nnodes < 1 or min(sides, default=0) < 0 or nnodes % given or (sides and 0 not in sides and given != nnodes):
        said = f"a grid of {nnodes} ranks with sides {sides}"
        raise MPIError(CLASSES["ERR_DIMS"], f"{said}: expected a positive multiple of the sides that are not 0")
    free = sides.count(0)
    grids = _grids(nnodes // given, free) if free else iter([()])
    computed = iter(min(grids, key=lambda grid: (sum(grid), grid)))
    return [side or next(computed) for side in sides]


def _grids(number: int, dims: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield each product of `dims` factors in descending order, of at most `most`, that equals `number`."""
    if dims == 1:
        if most is None or number <= most:
            yield (number,)
        return
    small = [side for side in range(1, isqrt(number) + 1) if number % side == 0]
    for first in {*small, *(number // side for side in small)}:
        if most is None or first <= most:
            yield from ((first, *rest) for rest in _grids(number // first, dims - 1, first))
