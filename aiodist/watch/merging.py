"""Merges the records of all ranks into one timeline, a file of trace events for Perfetto and chrome://tracing.

The format is "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMHgjY): with a process
for each rank and a thread for each track. Spans of a track that overlap without nesting get further rows. This module,
which the launcher uses, does not import torch.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aiodist.errors import ConfigError

MERGED = "trace.json"
_FILES = "rank-*.jsonl"


class Recorded(NamedTuple):
    """One span of a rank, in seconds of the first rank's clock."""

    rank: int
    track: str
    name: str
    began: float
    ended: float
    details: dict[str, Any]


@dataclass
class RankClock:
    """Measured differences between a rank's clock and the first rank's."""

    measured: list[tuple[float, float]] = field(default_factory=list)
    """(time by the first rank's clock, offset to add to this rank's time), in seconds."""
    error: float = 0.0
    """Largest error, in seconds."""

    def shared(self, time: float) -> float:
        """Convert a time of this rank to the first rank's clock, with linear drift between the measurements."""
        if not self.measured:
            return time
        (first, offset), (last, then) = self.measured[0], self.measured[-1]
        began, ended = first - offset, last - then  # by this rank's clock
        if ended > began:
            share = min(max((time - began) / (ended - began), 0.0), 1.0)
            offset += share * (then - offset)
        return time + offset


class Merged(NamedTuple):
    """The merged file of a folder."""

    file: Path
    ranks: list[int]
    size: int  # ranks of the job
    error: float  # largest error of the clocks, in seconds, or inf for an unmeasured clock

    def __str__(self) -> str:
        missing = sorted({*range(self.size)} - {*self.ranks})
        lost = f"; no records of ranks {missing}" if missing else ""
        clocks = f"clocks to {self.error * 1e6:.0f} us" if self.error < 1e9 else "clocks not compared"
        return f"{self.file}: {len(self.ranks)} ranks, {clocks}{lost}; open it at https://ui.perfetto.dev"


def prepare(folder: Path) -> None:
    """Create `folder`, and remove the files of an earlier trace. Raise `ConfigError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (*folder.glob(_FILES), folder / MERGED):
            file.unlink(missing_ok=True)
        (folder / MERGED).touch()
        (folder / MERGED).unlink()
    except OSError as error:
        raise ConfigError(f"a trace cannot be written to {folder}: {error.strerror}") from error


def merge(folder: Path) -> Merged | None:
    """Merge the files of the ranks into `folder/trace.json`. Return None if there are no files.

    The last line of a killed rank may be incomplete. The earlier lines are used.
    """
    said, spans = _read(sorted(folder.glob(_FILES)))
    about = {one["rank"]: one for one in said if one.keys() >= {"rank", "size", "host", "process"}}
    if not about:
        return None
    clocks = _clocks(said, about)
    shared = [
        Recorded(rank, track, name, clocks[rank].shared(began), clocks[rank].shared(ended), details)
        for rank, track, name, began, ended, details in spans
    ]
    shared.sort(key=lambda one: (one.began, -one.ended))
    for group in _together(shared):
        for one in group:  # the wait of the collective for its last rank
            one.details["last_rank"] = group[-1].rank
            one.details["waited_us"] = _us(group[-1].began - one.began)
    error = max(clock.error for clock in clocks.values())
    written = {
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "that of the first rank, in us from the first event",
            "clock_error_us": {str(rank): _us(clock.error) for rank, clock in clocks.items()},
        },
        "traceEvents": list(_events(about, shared)),
    }
    file = folder / MERGED
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(written, separators=(",", ":")))
    os.replace(unfinished, file)
    return Merged(file, sorted(about), max(one["size"] for one in about.values()), error)


def _read(files: Iterable[Path]) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    said: list[dict[str, Any]] = []
    spans: list[list[Any]] = []
    for file in files:
        for text in file.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # the last line of a killed process
                break
            if isinstance(line, dict):
                said.append(line)
            elif isinstance(line, list):
                spans += line
    return said, spans


def _clocks(said: Iterable[dict[str, Any]], ranks: Iterable[int]) -> dict[int, RankClock]:
    clocks = {rank: RankClock() for rank in ranks}
    for one in said:
        for rank, (offset, error) in one.get("offsets", {}).items():
            if (clock := clocks.get(int(rank))) is not None:
                clock.measured.append((one["at"], offset))
                clock.error = max(clock.error, error)
    if len(clocks) > 1:
        for clock in clocks.values():
            clock.error = clock.error if clock.measured else float("inf")
    return clocks


# --- collectives -------------------------------------------------------------------------------------------------


def _together(spans: Iterable[Recorded]) -> Iterator[list[Recorded]]:
    """Yield the spans of each collective, one per rank, in the order of arrival."""
    found: dict[tuple[Any, ...], list[Recorded]] = defaultdict(list)
    times: dict[tuple[Any, ...], int] = defaultdict(int)
    for one in spans:
        if "seq" in one.details and "comm" in one.details:
            key = one.details["comm"], one.details.get("called", ""), one.details["seq"]
            times[one.rank, *key] += 1  # a process may open several worlds in sequence
            found[*key, times[one.rank, *key]].append(one)
    yield from (group for group in found.values() if len(group) > 1)


# --- events --------------------------------------------------------------------------------------------------------


def _us(seconds: float) -> float | None:
    return round(seconds * 1e6, 3) if abs(seconds) < 1e9 else None


def _events(about: dict[int, dict[str, Any]], spans: list[Recorded]) -> Iterator[dict[str, Any]]:
    """Yield the names of ranks and tracks, then all spans and the arrows of each collective, by time."""
    zero = spans[0].began if spans else 0.0
    rows, threads = _rows(spans)
    for rank, known in sorted(about.items()):
        name = f"rank {rank} ({known['host']}, process {known['process']})"
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for (rank, tid), name in sorted(threads.items()):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}
    timed: list[dict[str, Any]] = []
    place: dict[int, dict[str, Any]] = {}
    for one, tid in zip(spans, rows, strict=True):
        begins = _us(one.began - zero) or 0.0
        where = {"pid": one.rank, "tid": tid, "ts": begins}
        dur = max(0.0, round((_us(one.ended - zero) or 0.0) - begins, 3))
        event = {"ph": "X", "name": one.name, "cat": "span", **where, "dur": dur, "args": one.details}
        if "comm" in one.details:
            event["cat"] = "operation"
        place[id(one)] = where
        timed.append(event)
    for number, group in enumerate(_together(spans)):
        for index, one in enumerate(group):
            phase = "s" if index == 0 else "f" if index == len(group) - 1 else "t"
            ends = {"bp": "e"} if phase == "f" else {}
            timed.append({"ph": phase, "name": one.name, "cat": "collective", "id": number, **place[id(one)], **ends})
    timed.sort(key=lambda event: event["ts"])
    yield from timed


def _rows(spans: list[Recorded]) -> tuple[list[int], dict[tuple[int, int], str]]:
    """Return the row of each span, with the names of the rows of each rank. Spans of a row are disjoint or nested.

    `spans` are sorted by start, the longer one first.
    """
    tracks: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    placed = []
    for one in spans:
        rows = tracks[one.rank, one.track]
        number = next((i for i, row in enumerate(rows) if _fits(one, row)), len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(one.ended)
        placed.append((one.rank, one.track, number))
    ids: dict[tuple[int, str, int], int] = {}
    threads: dict[tuple[int, int], str] = {}
    for rank in {rank for rank, _ in tracks}:
        mine = [(track, row) for (r, track), rows in tracks.items() if r == rank for row in range(len(rows))]
        for tid, (track, row) in enumerate(sorted(mine, key=_order), 1):
            ids[rank, track, row] = tid
            threads[rank, tid] = track if row == 0 else f"{track} ({row + 1})"
    return [ids[key] for key in placed], threads


def _fits(one: Recorded, open_ends: list[float]) -> bool:
    """Return True if the span fits on a row with these ends of open spans. Operations are never nested."""
    while open_ends and open_ends[-1] <= one.began:
        open_ends.pop()
    return not open_ends or (one.ended <= open_ends[-1] and "comm" not in one.details)


def _order(row: tuple[str, int]) -> tuple[int, str, int]:
    """Return the sort key of a row: threads that compute, reductions, operations, and then the others."""
    track, number = row
    first = ("MainThread", "aiodist-compute", "reductions", "world")
    return next((i for i, prefix in enumerate(first) if track.startswith(prefix)), len(first)), track, number
