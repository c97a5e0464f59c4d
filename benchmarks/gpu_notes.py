"""What the ranks of `benchmarks gpu` have written down so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Notes", "read_notes"]


@dataclass
class Notes:
    """What is known of a job: rank 0 tells how a case came out, any rank what went wrong."""

    machine: dict[str, object] = field(default_factory=dict)
    began: set[str] = field(default_factory=set)
    """The cases that were begun, or dealt with."""
    running: tuple[str, float] | None = None
    """The case that is measured now, and since when (seconds since the epoch)."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[tuple[str, int, bool, str]] = field(default_factory=list)
    """(case, rank, it speaks of another rank, text)."""

    def error_of(self, case: str) -> str | None:
        """Return what ended a case: of all that ranks say the one that speaks of no other rank, if there is one."""
        said = sorted((of_peer, rank, text) for name, rank, of_peer, text in self.errors if name == case)
        return f"rank {said[0][1]}: {said[0][2]}" if said else None


def read_notes(folder: str | Path) -> Notes:
    """Return what all files of `folder` say."""
    notes = Notes()
    for file in sorted(Path(folder).glob("*.jsonl")):
        rank = int(file.stem)
        for event in _events(file):
            if "machine" in event:
                notes.machine = notes.machine or event["machine"]
            elif "error" in event:
                notes.errors.append((event["case"], rank, event["peers"], event["error"]))
            elif rank == 0:
                _take(notes, event)
    return notes


def _take(notes: Notes, event: dict[str, Any]) -> None:
    name = event["case"]
    notes.began.add(name)
    if "began" in event:
        notes.running = name, event["began"]
    else:
        notes.running = None
        notes.results[name] = event


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Yield whole lines: the last one may be written just now, and never will be by who died at it."""
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
