"""What `python -m benchmarks scale --check` measures; travels to the ranks as JSON and imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from aiodist.bench.plan import Errand

__all__ = ["CheckPlan"]


@dataclass(frozen=True)
class CheckPlan(Errand):
    """One run of it."""

    op: str
    counts: tuple[int, ...]
    """Numbers of ranks; as many are started as the largest says."""
    impls: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of one rank's input."""
    json: str | None = None
    width: int = 120
    colour: bool = False
