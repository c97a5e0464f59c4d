"""mpi4py's interface: `import aiodist.compat.mpi as MPI` in place of `from mpi4py import MPI`.

`MPI.COMM_WORLD` opens the world when it is first used (`aiodist.start`) and closes it when the program ends. Requests
can be awaited: in an asyncio program `MPI.Comm(coll)` has these calls over a communicator. A name that is left out
raises `LeftOut`, which says what to use. MPI itself need not be there.
"""

from __future__ import annotations

import atexit
import socket
import sys
import threading
from contextlib import ExitStack
from importlib.metadata import version
from time import perf_counter
from typing import Any, Final

from aiodist.compat.comm import COMM_NULL, COMM_TYPE_SHARED, Comm
from aiodist.compat.data import DATATYPE_NULL, DATATYPES, DERIVED, IN_PLACE, OP_NULL, OPS, Datatype, Op
from aiodist.compat.dims import Compute_dims
from aiodist.compat.errors import CLASSES, LeftOut, MPIError, Null, Told, error_class, error_string, left_out
from aiodist.compat.requests import ANY_SOURCE, ANY_TAG, PROC_NULL, REQUEST_NULL, UNDEFINED, Request, Status
from aiodist.compat.windows import WIN_NULL, Win
from aiodist.errors import AiodistError
from aiodist.world.background import start
from aiodist.world.tracebacks import fold_tracebacks, print_error

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "COMM_NULL",
    "COMM_TYPE_SHARED",
    "DATATYPE_NULL",
    "IN_PLACE",
    "OP_NULL",
    "PROC_NULL",
    "REQUEST_NULL",
    "UNDEFINED",
    "WIN_NULL",
    "Comm",
    "Compute_dims",
    "Datatype",
    "LeftOut",
    "Op",
    "Request",
    "Status",
    "Win",
]

GROUP_NULL: Final = Null("GROUP_NULL", "ERR_GROUP")
INFO_NULL: Final = Null("INFO_NULL", "ERR_ARG")
ERRHANDLER_NULL: Final = Null("ERRHANDLER_NULL", "ERR_ARG")
FILE_NULL: Final = Null("FILE_NULL", "ERR_ARG")
MESSAGE_NULL: Final = Null("MESSAGE_NULL", "ERR_REQUEST")
BOTTOM: Final = object()
BSEND_OVERHEAD: Final = 0
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
Intracomm = Comm
Exception = MPIError
Get_error_class, Get_error_string = error_class, error_string
Wtime = perf_counter
Get_processor_name = socket.gethostname

_LEFT_OUT = {
    "WIN_* LOCK_*": "Win.Allocate_shared, `coll.shared_table`, or aiodist.ParameterServer",
    "File MODE_* SEEK_*": "aiodist.save, or numpy.memmap",
    "Group": "`coll.group(ranks)`",
    "Info Errhandler Session INFO_* ERRHANDLER_* ERRORS_*": "the arguments of aiodist.init",
    "COMBINER_* DISTRIBUTE_* ORDER_*": DERIVED,
    "Cartcomm Graphcomm Distgraphcomm Topocomm Intercomm": "Comm.Split",
    "Prequest Grequest Message": "Request",
    "Pickle pickle": "Python's pickle, as the calls for objects do; send the bytes that another serializer makes",
    "ERR_*": "other classes: nothing raises these",
    "Add_error_class Add_error_code Add_error_string": "an exception of your own",
    "Alloc_mem Free_mem Get_address": "ordinary memory",
    "Publish_name Lookup_name Open_port Close_port": "`aiodist run --hosts`",
}


class _World:
    """COMM_WORLD and COMM_SELF, once they are used: the front's only state, as MPI's is the process's."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._lock = threading.Lock()
        self.opened: Comm | None = None
        self.closed = False

    def comm(self) -> Comm:
        with self._lock:
            if self.closed:
                raise MPIError(CLASSES["ERR_COMM"], "COMM_WORLD after Finalize(): expected a world that is open")
            if self.opened is None:
                coll = self._open.enter_context(start())
                self.opened = Comm(coll, coll.split(coll.rank).wait())
                atexit.register(self._at_exit)
                fold_tracebacks()
            return self.opened

    def _at_exit(self) -> None:
        """Close the world; show what that raises as if the program had raised it."""
        try:
            self.close()
        except (AiodistError, RuntimeError, OSError) as error:  # Python would call it ignored, and show frames of ours
            print_error(error)

    def close(self) -> None:
        """Close the world; the others hear of what ended this program, if that was an exception."""
        if self.closed or self.opened is None:
            return
        self.closed = True
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        try:
            self._open.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except BaseException as raised:
            if raised is not error:
                raise


_world = _World()


def Init() -> None:
    """Open the world now."""
    _world.comm()


def Init_thread(required: int = THREAD_SERIALIZED) -> int:
    """Open the world now; return what threads may do: take turns."""
    Init()
    return THREAD_SERIALIZED


def Query_thread() -> int:
    """Return what threads may do: take turns."""
    return THREAD_SERIALIZED


def Finalize() -> None:
    """Close the world now, on all ranks."""
    _world.comm()
    with Told():
        _world.close()


def Is_initialized() -> bool:
    """Return whether the world was opened."""
    return _world.opened is not None


def Is_finalized() -> bool:
    """Return whether it was closed."""
    return _world.closed


def Get_version() -> tuple[int, int]:
    """Return the version of the MPI standard that these calls are named after."""
    return 3, 1


def Get_library_version() -> str:
    """Return what stands where MPI's library names itself."""
    return f"aiodist {version('aiodist')}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return ("aiodist", (0, 0, 0)): no MPI need be here."""
    return "aiodist", (0, 0, 0)


def Attach_buffer(buf: object = None) -> None:
    """Do nothing: `Bsend` needs no buffer."""


Detach_buffer = Attach_buffer


globals().update(CLASSES)
globals().update(DATATYPES)
globals().update(OPS)


def __getattr__(name: str) -> Any:
    if name == "COMM_WORLD":
        return _world.comm()
    if name == "COMM_SELF":
        alone = _world.comm().alone
        assert alone is not None
        return Comm(alone, alone)
    left_out(name, _LEFT_OUT)
