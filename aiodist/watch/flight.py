"""Files for `torchfrtrace`, PyTorch's analysis of its flight recorder: what each rank issued last, and how far it is.

The format is that of `torch.distributed.flight_recorder` in torch 2.13, version 2.5. Collectives of tensors in the
order of a communicator are told; what has a name, and messages, have no place in it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_VERSION = "2.5"
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_single": "all_to_all_single",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}


def write(ranks: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write `rank_0` and so on, for all that have answered, where nothing else may lie."""
    folder.mkdir(parents=True, exist_ok=True)
    for answer in ranks:
        if "communicators" in answer:
            (folder / f"rank_{answer['rank']}").write_bytes(pickle.dumps(_dump(answer)))


def _dump(answer: Mapping[str, Any]) -> dict[str, Any]:
    groups = sorted(answer["communicators"].items())
    entries = [_entry(name, op) for name, comm in groups for op in comm["operations"] if op["kind"] in _NAMES]
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    config = {name: {"name": name, "desc": _desc(name), "ranks": str(comm["ranks"])} for name, comm in groups}
    return {"version": _VERSION, "pg_config": config, "entries": entries}


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
