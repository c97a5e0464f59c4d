"""Checks that Perfetto and chrome://tracing can show a trace, and helpers that read one."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_ROUNDING_US = 0.0021  # times are rounded to nanoseconds, and so are durations


def read(folder: Path) -> list[Event]:
    """Return the events of a trace, after a look whether they keep the rules of the format."""
    trace = json.loads((folder / "trace.json").read_text())
    check(trace)
    events: list[Event] = trace["traceEvents"]
    return events


def check(trace: dict[str, Any]) -> None:
    """Raise AssertionError unless the rules hold: phases, times in order, names of all tracks, rows, arrows."""
    assert trace.keys() >= {"traceEvents", "displayTimeUnit", "otherData"}
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    last = 0.0
    rows: dict[tuple[int, int], list[float]] = defaultdict(list)
    arrows: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXstf", event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            processes |= {event["pid"]} if event["name"] == "process_name" else set()
            named |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            continue
        where = event["pid"], event["tid"]
        assert event["pid"] in processes
        assert where in named
        assert event["ts"] >= last, event  # monotone
        last = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            ends = event["ts"] + event["dur"]
            stack = rows[where]
            while stack and stack[-1] <= event["ts"] + _ROUNDING_US:
                stack.pop()
            assert not stack or ends <= stack[-1] + _ROUNDING_US, f"{event} overlaps what is before it on its row"
            stack.append(ends)
        else:
            assert event["cat"] == "collective"
            arrows[event["id"]].append(event)
    spans = {(e["pid"], e["tid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    for arrow in arrows.values():
        phases = "".join(event["ph"] for event in arrow)
        assert phases == "s" + "t" * (len(arrow) - 2) + "f"
        assert arrow[-1]["bp"] == "e"
        assert all((e["pid"], e["tid"], e["ts"]) in spans for e in arrow)  # each end is at a span


def spans(events: list[Event], name: str = "", rank: int | None = None, track: str = "") -> list[Event]:
    """Return the spans of that name, rank and track, by time; a track has several rows."""
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [
        e
        for e in events
        if e["ph"] == "X"
        and (not name or e["name"] == name)
        and rank in (None, e["pid"])
        and tracks[e["pid"], e["tid"]].startswith(track)
    ]


def overlap(a: Event, b: Event) -> float:
    """Return how long both events lasted at the same time, in microseconds."""
    return max(0.0, float(min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"])))
