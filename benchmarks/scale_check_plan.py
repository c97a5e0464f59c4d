"""What `python -m benchmarks scale --check` measures; travels to the ranks as JSON and imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["CheckPlan"]


@dataclass(frozen=True)
class CheckPlan:
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

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CheckPlan:
        """Return what `to_json` made."""
        fields = json.loads(text)
        for name in ("counts", "impls", "sizes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
