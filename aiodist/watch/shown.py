"""The output of `aiodist inspect`: late ranks, waiting ranks, and each rank's position. Imports no torch."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from aiodist.control import name_ranks
from aiodist.errors import ConfigError
from aiodist.watch import jobs

_LAST = 3
_LIVE_SECONDS = 1.0
_NAMES = {name: name for name in ("reduce_scatter", "broadcast", "reduce", "gather", "scatter", "barrier")} | {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_single": "all_to_all_single",
}


def late(ranks: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Return the ranks that others wait for, each with the waiting ranks."""
    found: dict[int, set[int]] = {}
    for answer in ranks:
        for wait in answer.get("waits", []):
            for whom in wait["ranks"]:
                found.setdefault(whom, set()).add(answer["rank"])
    return {rank: sorted(waiting - {rank}) for rank, waiting in sorted(found.items()) if waiting - {rank}}


def state(answer: Mapping[str, Any]) -> str:
    """Return a text about the answers of a rank."""
    if "left" in answer:
        return f"has left: {answer['left']}"
    if "thread" not in answer:
        return "does not answer: it is stopped, or native code holds the GIL"
    return "its loop answers" if "tasks" in answer else "its loop does not answer"


def _waits(answer: Mapping[str, Any]) -> list[str]:
    lines = []
    for wait in answer.get("waits", []):
        whom = f"for {name_ranks(wait['ranks'])} " if wait["ranks"] else ""
        lines.append(f"waits {whom}for {wait['seconds']:.1f} s in {wait['what']}")
    return lines


def _where(answer: Mapping[str, Any]) -> list[str]:
    """Return the stack of each task, else that of the main thread."""
    stacks = answer.get("tasks") or ([["main thread", answer["thread"]]] if answer.get("thread") else [])
    return [f"{name}: {' > '.join(stack)}" for name, stack in stacks]


def table(states: Mapping[str, Any]) -> Table:
    """Return a table with a row for each rank."""
    ranks = states["ranks"]
    late_ranks, here = late(ranks), f"{Path.cwd()}/"
    shown = Table(title=f"job {states['job']}", show_lines=True)
    for column in ("rank", "state", "waits", "last operations", "where"):
        shown.add_column(column, overflow="fold")  # a long path would lose its line
    for answer in ranks:
        rank = answer["rank"]
        about = ([f"late for {name_ranks(late_ranks[rank])}"] if rank in late_ranks else []) + [state(answer)]
        last = [
            f"#{op['seq']} {op['text']} on {name}{'' if op['pending'] else ', done'}"
            for name, comm in answer.get("communicators", {}).items()
            for op in comm["operations"][-_LAST:]
        ]
        texts = ("\n".join(part).replace(here, "") for part in (about, _waits(answer), last, _where(answer)))
        shown.add_row(str(rank), *texts, style="bold" if rank in late_ranks else None)
    return shown


def show(job: int | None, *, as_json: bool, live: bool, flight_recorder: Path | None) -> None:
    """Show the state of a job once, or every second until Ctrl-C. Raise ConfigError without an answer."""
    states = jobs.look(job)
    if flight_recorder is not None:
        write_flight(states["ranks"], flight_recorder)
    if as_json:
        print(json.dumps(states, indent=1))  # noqa: T201
    elif not live:
        Console().print(table(states))
    else:
        with Live(table(states), auto_refresh=False) as screen, suppress(KeyboardInterrupt):
            try:
                while True:
                    time.sleep(_LIVE_SECONDS)
                    screen.update(table(jobs.look(states["job"])), refresh=True)
            except ConfigError:
                if states["job"] in jobs.running():
                    raise
                screen.console.print(f"job {states['job']} has ended")


# --- for torchfrtrace --------------------------------------------------------------------------------------------


def write_flight(ranks: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write `rank_0` and so on for `torchfrtrace`, for all ranks that have answered, to a folder for these files alone.

    `torchfrtrace` is PyTorch's analysis of the flight recorder, which has the last operations of each rank. The format
    is that of `torch.distributed.flight_recorder` in torch 2.13, version 2.5. The entries are collectives of tensors.
    Named operations and messages are omitted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for answer in ranks:
        if "communicators" in answer:
            groups = sorted(answer["communicators"].items())
            entries = [_entry(name, op) for name, comm in groups for op in comm["operations"] if op["kind"] in _NAMES]
            for number, entry in enumerate(entries):
                entry["record_id"] = number
            config = {name: {"name": name, "desc": _desc(name), "ranks": str(comm["ranks"])} for name, comm in groups}
            dump = {"version": "2.5", "pg_config": config, "entries": entries}
            (folder / f"rank_{answer['rank']}").write_bytes(pickle.dumps(dump))


def _desc(name: str) -> str:
    return "default_pg" if name == "world" else "undefined"


def _entry(name: str, op: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of one operation, with sizes if the ranks compare sizes."""
    sizes = [[int(n) for n in op["size"].strip("[]").split(",") if n.strip()]] if op["size"] else []
    dtypes = [op["dtype"]] if op["dtype"] else []
    filename, line, function = op["place"]
    return {
        "process_group": (name, _desc(name)),
        "profiling_name": f"gloo:{_NAMES[op['kind']]}",  # only torch's backends are supported
        "collective_seq_id": op["seq"] + 1,
        "p2p_seq_id": 0,
        "op_id": op["seq"] + 1,
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "started" if op["pending"] else "completed",
        "is_p2p": False,
        "retired": not op["pending"],
        "time_created_ns": op["seq"],  # the number in place of the time, which is not recorded
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 0,
        "frames": [{"name": function, "filename": filename, "line": line}],
    }
