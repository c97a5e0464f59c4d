"""Names of mpi4py that are not implemented, with their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NoReturn

_DERIVED = "a contiguous copy of the elements, made by numpy"

_REPLACEMENTS: Mapping[str, Mapping[str, str]] = {
    "": {
        "WIN_* LOCK_*": "Win.Allocate_shared, `coll.shared_table`, or aiodist.ParameterServer",
        "File MODE_* SEEK_*": "aiodist.save, or numpy.memmap",
        "Group": "`coll.group(ranks)`",
        "Info Errhandler Session INFO_* ERRHANDLER_* ERRORS_*": "the arguments of aiodist.init",
        "COMBINER_* DISTRIBUTE_* ORDER_*": _DERIVED,
        "Cartcomm Graphcomm Distgraphcomm Topocomm Intercomm": "Comm.Split",
        "Prequest Grequest Message": "Request",
        "Pickle pickle": "Python's pickle, as the calls for objects do; send the bytes that another serializer makes",
        "ERR_*": "other classes: nothing raises these",
        "Add_error_class Add_error_code Add_error_string": "an exception of your own",
        "Alloc_mem Free_mem Get_address": "ordinary memory",
        "Publish_name Lookup_name Open_port Close_port": "`aiodist run --hosts`",
    },
    "Comm": {
        "probe iprobe mprobe improbe": "recv() of an object, which need not know the size",
        "Probe Iprobe Mprobe Improbe": "recv() of an object, or `coll.recv()`, which need not know the size",
        "*_init": "Isend(), Iallreduce() and the like each time, which takes a microsecond",
        "Alltoallw Ialltoallw": "alltoall() of objects",
        "Create Create_group Get_group group": "Split(), or `coll.group(ranks)`",
        "Create_cart Create_graph Create_dist_graph Create_dist_graph_adjacent Cart_map Graph_map": "Split()",
        "Set_errhandler Get_errhandler": "try and except: each error is an exception",
        "Create_intercomm Spawn Spawn_multiple Accept Connect Disconnect": "`aiodist run -n`, which starts all ranks",
    },
    "Datatype": {"Create_* Commit Dup Resized Get_*extent Pack* Unpack*": _DERIVED},
    "Win": {
        "Create Allocate Create_dynamic Attach Detach": "Allocate_shared, or aiodist.ParameterServer",
        "Get Put Accumulate Get_accumulate Fetch_and_op Compare_and_swap R*": "messages, or aiodist.ParameterServer",
        "Lock Unlock Start Complete Post Wait Test": "Fence, or a barrier of the communicator",
        "Get_group group Get_attr Set_attr Delete_attr attrs Get_info Set_info info": "its communicator",
    },
}
"""Replacements by class, or "" for the module, and by patterns of names, which are separated by spaces."""


class LeftOut(NotImplementedError, AttributeError):
    """Raised for a name of mpi4py that is not implemented. The message names a replacement."""


def left_out(name: str) -> NoReturn:
    """Raise `LeftOut` for a name such as "Comm.probe" that has a replacement, and AttributeError for another name."""
    kind, _, attribute = name.rpartition(".")
    for patterns, instead in _REPLACEMENTS[kind].items():
        if any(fnmatchcase(attribute, pattern) for pattern in patterns.split()):
            raise LeftOut(f"{name} is not implemented: use {instead}")
    raise AttributeError(f"aiodist.compat.mpi has no {name}")
