"""Plain calls of other libraries, in the same processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
    from torch._C._distributed_c10d import Store

    from aiodist.communicator import Communicator

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
    root: int = 0

    @property
    def filled(self) -> Tensor:
        """The separate result."""
        assert self.out is not None
        return self.out

    def blocks(self, t: Tensor) -> list[Tensor]:
        """Return the blocks of `t`, one for each rank."""
        return list(t.chunk(self.size))

    @property
    def is_root(self) -> bool:
        """True on the root."""
        return self.rank == self.root

    @property
    def neighbours(self) -> tuple[int, int]:
        """The destination and the source of this rank in a ring."""
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size


class Mpi4py:
    """mpi4py on a duplicate of COMM_WORLD."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._started = not MPI.Is_initialized()
        if self._started:  # aiodist uses another backend
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self.comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        library = MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0]
        self.described = f"mpi4py {metadata.version('mpi4py')} over {' '.join(library.split())}"

    def contenders(self, op: str, buffers: Buffers) -> list[Contender]:
        """Return the blocking and the non-blocking form."""
        if op != "barrier" and buffers.t.dtype not in _MPI_DTYPES:
            return []
        blocking, started = _mpi_calls(self.comm, op, self._mpi.IN_PLACE, buffers)
        return [Contender(f"mpi4py:{op}", blocking), Contender(f"mpi4py:i{op}", started)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def close(self) -> None:
        """Release the library."""
        self.comm.Free()
        if self._started:
            self._mpi.Finalize()


_Calls = tuple[Callable[[], Any], Callable[[], Any]]


def _mpi_calls(comm: MPI.Intracomm, op: str, here: Any, b: Buffers) -> _Calls:  # noqa: ANN401
    """Return a blocking call, and the non-blocking call with a wait; `here` is MPI's IN_PLACE."""
    if op == "barrier":
        return comm.Barrier, lambda: comm.Ibarrier().Wait()
    if op == "sendrecv":
        return _mpi_sendrecv(comm, b)
    t, out = b.t.numpy(), None if b.out is None else b.out.numpy()
    name, arguments = {
        "allreduce": ("Allreduce", (here, t)),
        "broadcast": ("Bcast", (t,)),
        "reduce": ("Reduce", (here, t) if b.is_root else (t, None)),
        "allgather": ("Allgather", (t, out)),
        "gather": ("Gather", (t, out if b.is_root else None)),
        "scatter": ("Scatter", (t if b.is_root else None, out)),
        "reduce_scatter": ("Reduce_scatter_block", (t, out)),
        "alltoall": ("Alltoall", (t, out)),
        "alltoall_single": ("Alltoall", (t, out)),
        "scan": ("Scan", (here, t)),
        "exscan": ("Exscan", (here, t)),
    }[op]
    rooted = {"root": b.root} if op in ("broadcast", "reduce", "gather", "scatter") else {}
    blocking, started = getattr(comm, name), getattr(comm, f"I{name.lower()}")
    return lambda: blocking(*arguments, **rooted), lambda: started(*arguments, **rooted).Wait()


def _mpi_sendrecv(comm: MPI.Intracomm, b: Buffers) -> _Calls:
    t, out, (dst, src) = b.t.numpy(), b.filled.numpy(), b.neighbours

    def started() -> None:
        receiving = comm.Irecv(out, src)
        comm.Isend(t, dst).Wait()
        receiving.Wait()

    return lambda: comm.Sendrecv(t, dst, recvbuf=out, source=src), started


class Gloo:
    """torch.distributed with its gloo backend, as the default process group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        import torch.distributed as dist

        self.dist = dist
        self.described = f"gloo of torch {torch.__version__}"
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def contenders(self, op: str, buffers: Buffers) -> list[Contender]:
        """Return the blocking form."""
        if op != "barrier" and buffers.t.dtype not in _GLOO_DTYPES:
            return []
        call = _gloo_call(self.dist, op, buffers)
        return [] if call is None else [Contender("gloo", call)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.dist.barrier()

    def close(self) -> None:
        """Release the library."""
        self.dist.destroy_process_group()


def _gloo_call(dist: Any, op: str, b: Buffers) -> Callable[[], Any] | None:  # noqa: ANN401
    t, out, root = b.t, b.out, b.root
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: dist.all_reduce(t),
        "broadcast": lambda: dist.broadcast(t, root),
        "reduce": lambda: dist.reduce(t, root),
        "allgather": lambda: dist.all_gather_into_tensor(out, t),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, t),
        "alltoall": lambda: dist.all_to_all_single(out, t),
        "alltoall_single": lambda: dist.all_to_all_single(out, t),
        "barrier": dist.barrier,
    }
    if op == "gather":
        received = b.blocks(b.filled) if b.is_root else None
        calls["gather"] = lambda: dist.gather(t, received, root)
    elif op == "scatter":
        sent = b.blocks(t) if b.is_root else None
        calls["scatter"] = lambda: dist.scatter(out, sent, root)
    elif op == "sendrecv" and b.size > 1:  # gloo cannot send to the same rank
        dst, src = b.neighbours

        def sendrecv() -> None:
            sending, receiving = dist.isend(t, dst), dist.irecv(out, src)
            sending.wait()
            receiving.wait()

        calls["sendrecv"] = sendrecv
    return calls.get(op)


Peer = Mpi4py | Gloo


@asynccontextmanager
async def opened(names: Sequence[str], coll: Communicator) -> AsyncIterator[list[Peer]]:
    """Open peers over the ranks of `coll`, and release them at the end; all ranks must enter."""
    openers: dict[str, Callable[[Communicator], Awaitable[Peer]]]
    openers = {"mpi4py": _open_mpi4py, "mpi": _open_mpi4py, "gloo": _open_gloo, "ddp": _open_gloo}
    async with AsyncExitStack() as stack:
        peers = []
        for name in names:
            if name in openers:  # others need no library, or their benchmark opens it
                peers.append(await openers[name](coll))
                stack.callback(peers[-1].close)
        yield peers


async def _open_mpi4py(coll: Communicator) -> Mpi4py:
    try:
        peer = await asyncio.to_thread(Mpi4py)
    except ImportError as error:
        raise BackendUnavailable(f"--against mpi4py: {error}") from error
    if peer.comm.size != coll.size or peer.comm.rank != coll.rank:
        raise ConfigError(
            f"--against mpi4py: rank {coll.rank} of {coll.size} is rank {peer.comm.rank} of {peer.comm.size} in MPI; "
            "start the ranks with an mpirun"
        )
    return peer


async def _open_gloo(coll: Communicator) -> Gloo:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    if not dist.is_available() or not dist.is_gloo_available():
        raise BackendUnavailable("--against gloo: this torch was built without it")
    host = "127.0.0.1" if coll.nodes == 1 else socket.gethostname()
    store = None
    if coll.rank == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    told = await coll.broadcast_object(None if store is None else (host, store.port))
    assert told is not None
    if store is None:
        store = await asyncio.to_thread(TCPStore, *told, is_master=False, wait_for_workers=False)
    return await asyncio.to_thread(Gloo, store, coll.rank, coll.size)
