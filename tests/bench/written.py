"""Records, read from the JSON of a benchmark."""

from __future__ import annotations

import json

from aiodist.bench.records import Record

__all__ = ["loads"]


def loads(text: str) -> list[Record]:
    """Return what `aiodist.bench.records.dumps` made."""
    return [
        Record(**{**entry, "affinity": entry["affinity"] and tuple(entry["affinity"])}) for entry in json.loads(text)
    ]
