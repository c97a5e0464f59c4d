"""Plain calls of other libraries, in the same processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiodist.bench.timing import Contender
from aiodist.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from aiodist.communicator import Communicator

ROOT = 0
_MPI_DTYPES = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_GLOO_DTYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}


@dataclass(frozen=True)
class Buffers:
    """The tensors of one operation at one size; `out` is the separate result, if there is one."""

    rank: int
    size: int
    t: Tensor
    out: Tensor | None

    def blocks(self, t: Tensor | None) -> list[Tensor] | None:
        """Return the blocks of `t`, one for each rank."""
        return None if t is None else list(t.chunk(self.size))

    @property
    def neighbours(self) -> tuple[int, int]:
        """The destination and the source of this rank in a ring."""
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size


@dataclass(frozen=True)
class OtherLibrary:
    """Another library, open on the ranks of a communicator."""

    name: str
    version: str
    contenders: Callable[[str, Buffers], list[Contender]]
    """Returns the library's forms of an operation, none if it has no such operation."""
    barrier: Callable[[], object]
    native: Any
    """mpi4py's communicator, or the module `torch.distributed`."""


@asynccontextmanager
async def opened(names: Sequence[str], coll: Communicator) -> AsyncIterator[list[OtherLibrary]]:
    """Open peers over the ranks of `coll`, and release them at the end; all ranks must enter.

    A name without a library is skipped: its benchmark needs none, or opens it.
    """
    openers = {"mpi4py": _mpi4py, "mpi": _mpi4py, "gloo": _gloo, "ddp": _gloo}
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(openers[name](coll)) for name in names if name in openers]


# --- mpi4py ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _mpi4py(coll: Communicator) -> AsyncIterator[OtherLibrary]:
    """Open mpi4py on a duplicate of COMM_WORLD."""
    try:
        native, starts, comm = await asyncio.to_thread(_mpi_world)
    except ImportError as error:
        raise BackendUnavailable(f"--against mpi4py: {error}") from error
    if (comm.size, comm.rank) != (coll.size, coll.rank):
        raise ConfigError(
            f"--against mpi4py: rank {coll.rank} of {coll.size} is rank {comm.rank} of {comm.size} in MPI; "
            "start the ranks with an mpirun"
        )

    def contenders(op: str, b: Buffers) -> list[Contender]:
        """Return the blocking and the non-blocking form."""
        if op != "barrier" and b.t.dtype not in _MPI_DTYPES:
            return []
        blocking, started = _mpi_calls(comm, op, native.IN_PLACE, b)
        return [Contender(f"mpi4py:{op}", blocking), Contender(f"mpi4py:i{op}", started)]

    library = " ".join(native.Get_library_version().strip("\0").splitlines()[0].split(",")[0].split())
    try:
        version = f"mpi4py {metadata.version('mpi4py')} over {library}"
        yield OtherLibrary("mpi4py", version, contenders, comm.Barrier, comm)
    finally:
        comm.Free()
        if starts:
            native.Finalize()


def _mpi_world() -> tuple[Any, bool, MPI.Intracomm]:
    """Return the module, True if this call initialised MPI, and a duplicate of COMM_WORLD."""
    from mpi4py import MPI

    starts = not MPI.Is_initialized()
    if starts:  # aiodist uses another backend
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI, starts, MPI.COMM_WORLD.Dup()


def _mpi_calls(
    comm: MPI.Intracomm,
    op: str,
    here: Any,  # noqa: ANN401  - MPI's IN_PLACE
    b: Buffers,
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a blocking call, and the non-blocking call with a wait."""
    if op == "barrier":
        return comm.Barrier, lambda: comm.Ibarrier().Wait()
    t, out, at_root = b.t.numpy(), None if b.out is None else b.out.numpy(), b.rank == ROOT
    if op == "sendrecv":
        dst, src = b.neighbours

        def sendrecv() -> None:
            receiving = comm.Irecv(out, src)
            comm.Isend(t, dst).Wait()
            receiving.Wait()

        return lambda: comm.Sendrecv(t, dst, recvbuf=out, source=src), sendrecv
    name, arguments = {
        "allreduce": ("Allreduce", (here, t)),
        "broadcast": ("Bcast", (t,)),
        "reduce": ("Reduce", (here, t) if at_root else (t, None)),
        "allgather": ("Allgather", (t, out)),
        "gather": ("Gather", (t, out)),
        "scatter": ("Scatter", (t if at_root else None, out)),
        "reduce_scatter": ("Reduce_scatter_block", (t, out)),
        "alltoall": ("Alltoall", (t, out)),
        "alltoall_single": ("Alltoall", (t, out)),
        "scan": ("Scan", (here, t)),
        "exscan": ("Exscan", (here, t)),
    }[op]
    rooted = {"root": ROOT} if op in ("broadcast", "reduce", "gather", "scatter") else {}
    blocking, started = getattr(comm, name), getattr(comm, f"I{name.lower()}")
    return lambda: blocking(*arguments, **rooted), lambda: started(*arguments, **rooted).Wait()


# --- torch.distributed -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def _gloo(coll: Communicator) -> AsyncIterator[OtherLibrary]:
    """Open torch.distributed with its gloo backend, as the default process group."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    if not dist.is_available() or not dist.is_gloo_available():
        raise BackendUnavailable("--against gloo: this torch was built without it")
    host = "127.0.0.1" if coll.nodes == 1 else socket.gethostname()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if coll.rank == 0 else None
    host, port = await coll.broadcast_object((host, 0 if store is None else store.port))
    if store is None:
        store = await asyncio.to_thread(TCPStore, host, port, is_master=False, wait_for_workers=False)
    await asyncio.to_thread(dist.init_process_group, "gloo", store=store, rank=coll.rank, world_size=coll.size)

    def contenders(op: str, b: Buffers) -> list[Contender]:
        """Return the blocking form."""
        if op != "barrier" and b.t.dtype not in _GLOO_DTYPES:
            return []
        call = _gloo_call(dist, op, b)
        return [] if call is None else [Contender("gloo", call)]

    try:
        yield OtherLibrary("gloo", f"gloo of torch {torch.__version__}", contenders, dist.barrier, dist)
    finally:
        dist.destroy_process_group()


def _gloo_call(dist: Any, op: str, b: Buffers) -> Callable[[], Any] | None:  # noqa: ANN401
    """Return a blocking call; gloo has no scan, and cannot send to the same rank."""
    t, out, (dst, src) = b.t, b.out, b.neighbours

    def sendrecv() -> None:
        sending, receiving = dist.isend(t, dst), dist.irecv(out, src)
        sending.wait()
        receiving.wait()

    received, sent = b.blocks(out), b.blocks(t) if b.rank == ROOT else None
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: dist.all_reduce(t),
        "broadcast": lambda: dist.broadcast(t, ROOT),
        "reduce": lambda: dist.reduce(t, ROOT),
        "allgather": lambda: dist.all_gather_into_tensor(out, t),
        "gather": lambda: dist.gather(t, received, ROOT),
        "scatter": lambda: dist.scatter(out, sent, ROOT),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, t),
        "alltoall": lambda: dist.all_to_all_single(out, t),
        "alltoall_single": lambda: dist.all_to_all_single(out, t),
        "barrier": dist.barrier,
        **({"sendrecv": sendrecv} if b.size > 1 else {}),
    }
    return calls.get(op)
