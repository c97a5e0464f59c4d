"""The peer `shm-c`: DeepSpeed's allreduce in shared memory, rebuilt in C and compiled when it is measured."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aiodist.bench.timing import Contender
from aiodist.errors import BackendUnavailable

if TYPE_CHECKING:
    from aiodist.bench.peers import Buffers
    from aiodist.communicator import Communicator

__all__ = ["ShmC", "compiled", "opened"]

_FLAGS = ("-std=c11", "-O3", "-march=native", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
COMPILERS = ("cc", "gcc", "clang")


class _Group(ctypes.Structure):
    """`struct group`."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("rank", ctypes.c_uint),
        ("ranks", ctypes.c_uint),
        ("round", ctypes.c_uint64),
    )


class ShmC:
    """One rank's part, with the slots of all ranks mapped."""

    def __init__(self, library: str, shared: str, rank: int, ranks: int) -> None:
        """`shared` is the path of a file for the slots of all ranks, of any length."""
        loaded = ctypes.CDLL(library)
        loaded.shm_c_slot_bytes.restype = ctypes.c_size_t
        nbytes = ranks * loaded.shm_c_slot_bytes()
        with Path(shared).open("r+b") as file:
            file.truncate(nbytes)
            self._memory = mmap.mmap(file.fileno(), nbytes)
        slots = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._group = _Group(slots, rank, ranks, 0)
        self._call = loaded.shm_c_allreduce
        self._call.argtypes = (ctypes.POINTER(_Group), ctypes.c_void_p, ctypes.c_size_t)
        self._call.restype = None

    def allreduce(self, t: torch.Tensor) -> None:
        """Sum `t`, float32 and contiguous, over all ranks, in place."""
        self._call(self._group, t.data_ptr(), t.numel())

    def contenders(self, op: str, buffers: Buffers) -> list[Contender]:
        """Return its allreduce of float32, the only thing that it does."""
        if op != "allreduce" or buffers.t.dtype is not torch.float32:
            return []
        return [Contender("shm-c", partial(self.allreduce, buffers.t))]

    def barrier(self) -> None:
        """Block until every rank is here."""
        self.allreduce(torch.zeros(1))

    def close(self) -> None:
        """Unmap the slots."""
        self._memory.close()

    @property
    def described(self) -> str:
        """What it is, and how it was compiled."""
        return f"shm-c: DeepSpeed's csrc/cpu/comm/shm.cpp, rebuilt ({' '.join(_FLAGS[:3])}, one thread a rank)"


@contextmanager
def compiled() -> Iterator[str]:
    """Have the library, compiled with this machine's compiler, while the block runs; the value is its path."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BackendUnavailable(f"shm-c is left out: no C compiler, expected one of {', '.join(COMPILERS)}")
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "shm_c.so"))
        command = [compiler, *_FLAGS, str(Path(__file__).with_suffix(".c")), "-o", library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackendUnavailable(f"shm-c is left out: {compiler} failed: {done.stderr.strip()}")
        yield library


@asynccontextmanager
async def opened(coll: Communicator) -> AsyncIterator[ShmC]:
    """Have it among the ranks of `coll`, all of which enter; raise `BackendUnavailable`, on all, where it cannot be."""
    if coll.nodes > 1:
        raise BackendUnavailable("shm-c is left out: it is for one host")
    with ExitStack() as stack:
        shared: tuple[str, str] | str = ""
        if coll.rank == 0:
            try:
                shared = stack.enter_context(compiled()), stack.enter_context(_memory())
            except BackendUnavailable as error:
                shared = str(error)
        shared = await coll.broadcast_object(shared)
        if isinstance(shared, str):
            raise BackendUnavailable(shared)
        peer = ShmC(*shared, coll.rank, coll.size)
        stack.callback(peer.close)
        await coll.barrier()  # all have mapped it: what rank 0 made may go
        yield peer


@contextmanager
def _memory() -> Iterator[str]:
    """Have memory that other processes can open by this path while the block runs."""
    descriptor = os.memfd_create("shm-c")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
