"""mpi4py's interface: `import aiodist.compat.mpi as MPI`.

The first use of `MPI.COMM_WORLD` opens the world (`aiodist.start`), which closes when the program ends. In an asyncio
program, `MPI.Comm(coll)` has these calls over a communicator, and requests can be awaited. A name that is not
implemented raises `LeftOut`, which names a replacement. The module does not need MPI.
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
from aiodist.compat.data import DATATYPE_NULL, DATATYPES, IN_PLACE, OP_NULL, OPS, Datatype, Op
from aiodist.compat.dims import Compute_dims
from aiodist.compat.errors import CLASSES, MPIError, Null, Told, error_class, error_string
from aiodist.compat.missing import LeftOut, left_out
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


class _World:
    """COMM_WORLD and COMM_SELF from their first use on, the only state of the module."""

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
        """Close the world, and print an error of the close as an error of the program."""
        try:
            self.close()
        except (AiodistError, RuntimeError, OSError) as error:  # Python would call the error ignored
            print_error(error)

    def close(self) -> None:
        """Close the world. The other ranks get the exception that ended this program, if any."""
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
    """Open the world now, and return the level of threads, which may take turns."""
    Init()
    return THREAD_SERIALIZED


def Query_thread() -> int:
    """Return the level of threads, which may take turns."""
    return THREAD_SERIALIZED


def Finalize() -> None:
    """Close the world now, on all ranks."""
    _world.comm()
    with Told():
        _world.close()


def Is_initialized() -> bool:
    """Return True if the world was opened."""
    return _world.opened is not None


def Is_finalized() -> bool:
    """Return True if the world was closed."""
    return _world.closed


def Get_version() -> tuple[int, int]:
    """Return the version of the MPI standard that defines these calls."""
    return 3, 1


def Get_library_version() -> str:
    """Return the name and the version of aiodist, in place of an MPI library's."""
    return f"aiodist {version('aiodist')}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return ("aiodist", (0, 0, 0)), without MPI."""
    return "aiodist", (0, 0, 0)


def Attach_buffer(buf: object = None) -> None:
    """Do nothing, since `Bsend` needs no buffer."""


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
    left_out(name)
