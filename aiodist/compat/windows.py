"""`Win`: memory that the ranks of a host share."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from aiodist.compat.comm import Comm
from aiodist.compat.errors import CLASSES, MPIError, Told, telling
from aiodist.compat.missing import left_out
from aiodist.compat.requests import PROC_NULL


class _Kind(type):
    """The type of `Win`: names the replacement of each call that the class does not have, such as `Win.Create`."""

    def __getattr__(cls, name: str) -> NoReturn:
        left_out(f"Win.{name}")


@telling
class Win(metaclass=_Kind):
    """A window of `Allocate_shared`: each rank's part of one table, which all ranks of the host read and write."""

    def __init__(self, comm: Comm, table: Tensor, parts: list[tuple[int, int, int]]) -> None:
        """`parts` are offset, bytes and unit of each rank's part of the `table`."""
        self._comm: Comm | None = comm
        self._table = table
        self._parts = parts

    @classmethod
    def Allocate_shared(cls, size: int, disp_unit: int = 1, info: object = None, comm: Comm | None = None) -> Win:
        """Return a window with `size` bytes of this rank, all 0. Collective over `comm`, whose ranks share a host.

        The parts are in rank order, and sizes may differ. Raises `MPI.Exception`: ERR_ARG for a size below 0 or a unit
        below 1, and ERR_COMM for ranks on several hosts.
        """
        if not isinstance(comm, Comm):
            raise TypeError(f"comm is {type(comm).__name__}: expected a communicator of ranks of one host")
        sizes = comm.allgather((size, disp_unit))
        if min(n for n, _ in sizes) < 0 or min(unit for _, unit in sizes) < 1:
            said = f"sizes and units of the ranks are {sizes}: expected sizes of 0 or more, units of 1 or more"
            raise MPIError(CLASSES["ERR_ARG"], said)
        if comm.coll.nodes > 1:
            said = f"ranks on {comm.coll.nodes} hosts share no memory: expected Split_type(MPI.COMM_TYPE_SHARED)"
            raise MPIError(CLASSES["ERR_COMM"], said)
        starts = [0, *accumulate(n for n, _ in sizes)]
        with Told():
            table = comm.coll.shared_table(starts[-1], torch.uint8).wait()
        return cls(comm, table, [(at, n, unit) for at, (n, unit) in zip(starts, sizes, strict=False)])

    def __bool__(self) -> bool:
        return self._comm is not None

    def __getattr__(self, name: str) -> NoReturn:
        left_out(f"Win.{name}")

    def Shared_query(self, rank: int) -> tuple[memoryview, int]:
        """Return a rank's part as a buffer of bytes, and its unit. PROC_NULL returns the first part that has bytes."""
        self._check()
        if rank == PROC_NULL:
            rank = next((r for r, (_, n, _) in enumerate(self._parts) if n), 0)
        if not 0 <= rank < len(self._parts):
            raise MPIError(CLASSES["ERR_RANK"], f"rank={rank}: expected 0 to {len(self._parts) - 1}, or PROC_NULL")
        start, nbytes, unit = self._parts[rank]
        return self._table.numpy().data[start : start + nbytes], unit

    def tomemory(self) -> memoryview:
        """Return this rank's part."""
        return self.Shared_query(self._check().rank)[0]

    def Fence(self, assertion: int = 0) -> None:
        """Return once all ranks have made this call. All ranks then see all earlier writes."""
        self._check().Barrier()

    def Sync(self) -> None:
        """Do nothing, since all ranks use the same memory. A barrier orders their writes."""
        self._check()

    def Lock_all(self, assertion: int = 0) -> None:
        """Do nothing, as `Sync`."""
        self._check()

    Unlock_all = Flush_all = Flush_local_all = Sync

    def Free(self) -> None:
        """Release the window, on all ranks. The memory is freed when no rank has a buffer of it."""
        self._check().Barrier()
        self._comm = None
        self._table = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _check(self) -> Comm:
        if self._comm is None:
            raise MPIError(CLASSES["ERR_WIN"], "the window was freed: expected one that is open")
        return self._comm


class NullWin(Win):
    """`WIN_NULL`, which is false. Each call raises an `MPI.Exception` of ERR_WIN."""

    def __init__(self) -> None:
        self._comm: Any = None


WIN_NULL = NullWin()
