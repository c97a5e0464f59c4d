"""Records, read from the JSON of a benchmark."""

from __future__ import annotations

import json

from benchmarks.figures import Figure

__all__ = ["loads"]


def loads(text: str) -> list[Figure]:
    """Return what `aiodist.bench.records.dumps` made."""
    return [
        Figure(**{**entry, "affinity": entry["affinity"] and tuple(entry["affinity"])}) for entry in json.loads(text)
    ]
