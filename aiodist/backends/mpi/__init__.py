"""MPI through mpi4py: native non-blocking collectives, Open MPI and MPICH.

The import of this package imports `mpi4py.MPI` but does not initialise MPI. `open_world` does, with THREAD_MULTIPLE.
"""

from aiodist.backends.mpi.library import library_version
from aiodist.backends.mpi.requests import request_handle
from aiodist.backends.mpi.transport import MpiTransport, open_world

__all__ = ["MpiTransport", "library_version", "open_world", "request_handle"]
