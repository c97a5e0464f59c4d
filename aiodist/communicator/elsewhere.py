"""Names that torch, MPI and older versions give the calls of a communicator.

The AttributeError names the call to use.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiodist.types import Elsewhere

_OLD = {"empty": "arena_empty", "share_": "to_arena_"}
_TORCH = {
    "all_gather": "allgather",
    "all_gather_into_tensor": "allgather",
    "all_gather_object": "allgather_object",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
    "all_to_all_single": "alltoall_single",
    "batch_isend_irecv": "send() and recv()",
    "broadcast_object_list": "broadcast_object",
    "destroy_process_group": "aclose",
    "get_backend": "backend",
    "get_rank": "rank",
    "get_world_size": "size",
    "irecv": "recv",
    "is_main_process": "is_root",
    "isend": "send",
    "monitored_barrier": "barrier(timeout=...)",
    "new_group": "group",
    "recv_object_list": "recv_object",
    "reduce_scatter_tensor": "reduce_scatter",
    "scatter_object_list": "scatter_object",
    "send_object_list": "send_object",
    "world_size": "size",
}
_COLLECTIVES = {
    **{name: name for name in ("allgather", "allreduce", "alltoall", "barrier", "exscan", "gather", "reduce", "scan")},
    **{"bcast": "broadcast", "reduce_scatter": "reduce_scatter", "reduce_scatter_block": "reduce_scatter"},
    **{name: name.removesuffix("v") for name in ("allgatherv", "alltoallv", "gatherv", "scatterv")},
    "scatter": "scatter",
}
"""Names of aiodist, by the names of MPI in lower case."""
_MPI = {
    **{name.capitalize(): use for name, use in _COLLECTIVES.items()},
    **{f"I{name}": use for name, use in _COLLECTIVES.items()},
    **{"Dup": "dup", "Split": "split", "Create": "group", "Create_group": "group", "Abort": "abort"},
    **{"Free": "aclose", "Disconnect": "aclose", "Get_rank": "rank", "Get_size": "size", "bcast": "broadcast_object"},
    **{"Send": "send", "Isend": "send", "Recv": "recv", "Irecv": "recv", "Sendrecv": "sendrecv"},
    **dict.fromkeys(("Ssend", "Issend", "ssend", "issend"), "send(..., synchronous=True)"),
    **dict.fromkeys(("Probe", "Iprobe", "probe", "iprobe"), "messages"),
}
_NAMES = _OLD | _TORCH | _MPI


class Elsewheres:
    """Has an `Elsewhere` attribute for each of these names."""


for _name, _use in _NAMES.items():
    setattr(Elsewheres, _name, Elsewhere(_name, _use))


def shown(names: Iterable[str]) -> list[str]:
    """Return `names` without the names of this module."""
    return [name for name in names if name not in _NAMES]
