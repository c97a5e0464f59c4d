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
    """Return the ranks that others wait for, each with those that do."""
    found: dict[int, set[int]] = {}
    for answer in ranks:
        for wait in answer.get("waits", []):
            for whom in wait["ranks"]:
                found.setdefault(whom, set()).add(answer["rank"])
    return {rank: sorted(waiting - {rank}) for rank, waiting in sorted(found.items()) if waiting - {rank}}


def state(answer: Mapping[str, Any]) -> str:
    """Return whether the rank answers, as words."""
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


def table(told: Mapping[str, Any]) -> Table:
    """Return a table with a row for each rank."""
    ranks = told["ranks"]
    behind, here = late(ranks), f"{Path.cwd()}/"
    shown = Table(title=f"job {told['job']}", show_lines=True)
    for column in ("rank", "state", "waits", "last operations", "where"):
        shown.add_column(column, overflow="fold")  # a long path would lose its line
    for answer in ranks:
        rank = answer["rank"]
        states = ([f"late for {name_ranks(behind[rank])}"] if rank in behind else []) + [state(answer)]
        last = [
            f"#{op['seq']} {op['text']} on {name}{'' if op['pending'] else ', done'}"
            for name, comm in answer.get("communicators", {}).items()
            for op in comm["operations"][-_LAST:]
        ]
        texts = ("\n".join(part).replace(here, "") for part in (states, _waits(answer), last, _where(answer)))
        shown.add_row(str(rank), *texts, style="bold" if rank in behind else None)
    return shown


def show(job: int | None, *, as_json: bool, live: bool, flight_recorder: Path | None) -> None:
    """Look at a job once, or every second until Ctrl-C; raise ConfigError where it does not answer."""
    told = jobs.look(job)
    if flight_recorder is not None:
        write_flight(told["ranks"], flight_recorder)
    if as_json:
        print(json.dumps(told, indent=1))  # noqa: T201
    elif not live:
        Console().print(table(told))
    else:
        with Live(table(told), auto_refresh=False) as screen, suppress(KeyboardInterrupt):
            try:
                while True:
                    time.sleep(_LIVE_SECONDS)
                    screen.update(table(jobs.look(told["job"])), refresh=True)
            except ConfigError:
                if told["job"] in jobs.running():
                    raise
                screen.console.print(f"job {told['job']} has ended")


# --- for torchfrtrace --------------------------------------------------------------------------------------------


def write_flight(ranks: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write `rank_0` and so on for `torchfrtrace`, of all that have answered, where nothing else may lie.

    That is PyTorch's analysis of its flight recorder: what each rank issued last, and how far it is. The format is that
    of `torch.distributed.flight_recorder` in torch 2.13, version 2.5. Collectives of tensors in the order of a
    communicator are told; what has a name, and messages, have no place in it.
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
    """Return one operation; its sizes are known where ranks compare them."""
    sizes = [[int(n) for n in op["size"].strip("[]").split(",") if n.strip()]] if op["size"] else []
    dtypes = [op["dtype"]] if op["dtype"] else []
    filename, line, function = op["place"]
    return {
        "process_group": (name, _desc(name)),
        "profiling_name": f"gloo:{_NAMES[op['kind']]}",  # it knows no backend but torch's own
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
        "time_created_ns": op["seq"],  # when it was issued is not kept; their order is
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 0,
        "frames": [{"name": function, "filename": filename, "line": line}],
    }
