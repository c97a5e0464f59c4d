"""Marks: what ranks tell each other of a pass beside its gradients, as one small sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["Marks"]


@dataclass(frozen=True)
class Marks:
    """What the marks of all ranks say."""

    used: Sequence[float]
    """By parameter, how many ranks had a gradient."""
    failures: tuple[int, ...]
    """The ranks that failed."""
    active: int
    """How many ranks brought data."""
    issued: int
    """How many buckets the rank that is farthest has issued."""

    @staticmethod
    def pack(
        parameters: int, ranks: int, rank: int, *, unused: Iterable[int], failed: bool, active: bool, issued: int
    ) -> Tensor:
        """Return the marks of one rank, to be added to those of the others.

        `unused` are the parameters that had no gradient, `issued` is how many buckets are on their way already.
        """
        used = [1.0] * parameters
        for index in unused:
            used[index] = 0.0
        by_rank = [0.0] * (2 * ranks)
        by_rank[rank] = float(issued)
        by_rank[ranks + rank] = float(failed)
        return torch.tensor([*used, float(active), *by_rank], dtype=torch.float64, device="cpu")

    @classmethod
    def unpack(cls, marks: Tensor, parameters: int, ranks: int) -> Self:
        """Return what the sum of all ranks' marks says.

        >>> marks = Marks.pack(2, 1, 0, unused=[1], failed=False, active=True, issued=3)
        >>> Marks.unpack(marks, 2, 1)
        Marks(used=[1.0, 0.0], failures=(), active=1, issued=3)
        """
        values = marks.tolist()
        by_rank = values[parameters + 1 :]
        return cls(
            used=values[:parameters],
            failures=tuple([r for r, failed in enumerate(by_rank[ranks:]) if failed]),
            active=round(values[parameters]),
            issued=round(max(by_rank[:ranks])),
        )
