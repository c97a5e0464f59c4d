"""Pushes and pulls of the parameter server, torch's RPC, and plain Send and Recv, with the same tensors and ranks.

Every rank opens each library. On a worker the contenders make requests. On a server they answer one request of each
worker, or do nothing if the library serves on its own threads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aiodist.bench.timing import Contender
from aiodist.errors import BackendUnavailable
from aiodist.ps.settings import place

if TYPE_CHECKING:
    from mpi4py import MPI

    from aiodist.communicator import Communicator
    from aiodist.ps import ParameterServer

__all__ = ["SPLIT_BYTES", "Mpi", "Ours", "Roles", "Rpc", "Way", "rpc_opened"]

SPLIT_BYTES = 1 << 20
"""Bytes from which a tensor is split over all servers."""
_NOTHING = bytearray()
_APPLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"copy": Tensor.copy_, "add": Tensor.add_}


class Roles(NamedTuple):
    """The roles of the ranks."""

    rank: int
    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def works(self) -> bool:
        """True on a rank that makes requests."""
        return self.rank in self.workers

    def parts(self, t: Tensor) -> list[tuple[int, Tensor]]:
        """Return the servers of flat `t`, each with its block, as the parameter server splits it."""
        spans = place(str(t.nbytes), t.numel(), t.itemsize, self.servers, SPLIT_BYTES)
        return [(span.rank, t[span.start : span.stop]) for span in spans]


class Way(Protocol):
    """A library, with contenders for one tensor."""

    name: str

    def holding(self, t: Tensor) -> AbstractAsyncContextManager[None]:
        """Register a tensor with the servers during the block, which all ranks enter; workers push and pull `t`."""

    def push(self, rule: str) -> Contender:
        """Push; finished when the servers have applied the push."""

    def pull(self) -> Contender:
        """Pull; finished when the values have arrived."""

    def push_pull(self, rule: str) -> Contender:
        """Push, then pull."""

    def pushes(self, rule: str, count: int) -> Contender:
        """Push `count` times without waiting, from the first worker; finished when all pushes are applied."""


async def _nothing() -> None:
    """The call of a rank without a part."""


class Ours:
    """`ParameterServer`; `arena` puts the tensors of workers into memory that the ranks of a host share."""

    def __init__(self, ps: ParameterServer, coll: Communicator, roles: Roles, *, arena: bool) -> None:
        self.name = "aiodist:ps-arena" if arena else "aiodist:ps"
        self._ps = ps
        self._coll = coll
        self._roles = roles
        self._arena = arena

    @asynccontextmanager
    async def holding(self, t: Tensor) -> AsyncIterator[None]:
        """See `Way`."""
        self._t = self._coll.arena_empty(t.shape, t.dtype).zero_() if self._arena else t
        self._key = f"{self.name}:{t.nbytes}"
        if self._roles.works:
            await self._ps.init(self._key, self._t)
        try:
            yield
        finally:
            del self._t
        if self._roles.works:
            await self._ps.free(self._key)

    def push(self, rule: str) -> Contender:
        """See `Way`."""
        return self._contender(partial(self._ps.push, self._key, self._t, rule=rule))

    def pull(self) -> Contender:
        """See `Way`."""
        return self._contender(partial(self._ps.pull, self._key, self._t))

    def push_pull(self, rule: str) -> Contender:
        """See `Way`."""
        return self._contender(partial(self._ps.push_pull, self._key, self._t, self._t, rule=rule))

    def pushes(self, rule: str, count: int) -> Contender:
        """See `Way`."""
        ps, key, t = self._ps, self._key, self._t

        async def pushes() -> None:
            for _ in range(count):
                ps.push(key, t, rule=rule)
            await ps.sync()

        return self._contender(pushes, one=True)

    def _contender(self, once: Callable[[], Any], *, one: bool = False) -> Contender:
        asks = self._roles.rank == self._roles.workers[0] if one else self._roles.works
        return Contender(self.name, once if asks else _nothing, awaited=True)


# --- torch's RPC -----------------------------------------------------------------------------------------------------

_SHARDS: dict[int, Tensor] = {}
"""The shards of this server, by the bytes of the whole tensor; RPC finds functions by name."""


def _rpc_push(key: int, value: Tensor, rule: str) -> None:
    _APPLY[rule](_SHARDS[key], value)


def _rpc_pull(key: int) -> Tensor:
    return _SHARDS[key]


def _rpc_push_pull(key: int, value: Tensor, rule: str) -> Tensor:
    return _APPLY[rule](_SHARDS[key], value)


def _rpc_name(rank: int) -> str:
    return f"rank{rank}"


@asynccontextmanager
async def rpc_opened(coll: Communicator) -> AsyncIterator[None]:
    """Run `torch.distributed.rpc` between all ranks during the block, which all ranks enter."""
    import torch.distributed.rpc as rpc

    if not rpc.is_available():
        raise BackendUnavailable("--against rpc: this torch was built without it")
    host = "127.0.0.1" if coll.nodes == 1 else socket.gethostname()
    host, port = await coll.broadcast_object((host, _free_port(host)))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{host}:{port}")
    await asyncio.to_thread(
        rpc.init_rpc, _rpc_name(coll.rank), rank=coll.rank, world_size=coll.size, rpc_backend_options=options
    )
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)  # the others may never come
        raise
    await asyncio.to_thread(rpc.shutdown)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Rpc:
    """`rpc_sync`, as in PyTorch's parameter-server tutorial, with functions that find the shard by a key."""

    name = "rpc"

    def __init__(self, roles: Roles) -> None:
        import torch.distributed.rpc as rpc

        self._rpc = rpc
        self._roles = roles

    @asynccontextmanager
    async def holding(self, t: Tensor) -> AsyncIterator[None]:
        """See `Way`."""
        self._parts = [(_rpc_name(rank), part) for rank, part in self._roles.parts(t)]
        self._key = t.nbytes
        mine = [part for rank, part in self._roles.parts(t) if rank == self._roles.rank]
        with _held(self._key, mine):
            yield

    def push(self, rule: str) -> Contender:
        """See `Way`."""
        return self._contender(lambda: self._call(_rpc_push, rule))

    def pull(self) -> Contender:
        """See `Way`; the values are in new tensors."""
        return self._contender(lambda: self._call(_rpc_pull))

    def push_pull(self, rule: str) -> Contender:
        """See `Way`; the values are in new tensors."""
        return self._contender(lambda: self._call(_rpc_push_pull, rule))

    def _call(self, function: Callable[..., Any], rule: str | None = None) -> list[Any]:
        calls = [(to, (self._key,) if rule is None else (self._key, part, rule)) for to, part in self._parts]
        if len(calls) == 1:
            return [self._rpc.rpc_sync(calls[0][0], function, calls[0][1])]
        answers = [self._rpc.rpc_async(to, function, arguments) for to, arguments in calls]
        return [answer.wait() for answer in answers]

    def pushes(self, rule: str, count: int) -> Contender:
        """See `Way`."""

        def pushes() -> None:
            answers = [
                self._rpc.rpc_async(to, _rpc_push, (self._key, part, rule))
                for _ in range(count)
                for to, part in self._parts
            ]
            for answer in answers:
                answer.wait()

        return self._contender(pushes, one=True)

    def _contender(self, once: Callable[[], Any], *, one: bool = False) -> Contender:
        asks = self._roles.rank == self._roles.workers[0] if one else self._roles.works
        return Contender(self.name, once) if asks else Contender(self.name, _nothing, awaited=True)


@contextmanager
def _held(key: int, mine: list[Tensor]) -> Iterator[None]:
    """Register the block of this rank, if it has one."""
    for part in mine:
        _SHARDS[key] = torch.zeros_like(part)
    try:
        yield
    finally:
        _SHARDS.pop(key, None)


# --- plain Send and Recv ---------------------------------------------------------------------------------------------


class Mpi:
    """mpi4py's blocking calls on the memory of the tensors; a server receives into its shard, or adds to it.

    An empty message acknowledges a push, or requests a pull.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, roles: Roles) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._roles = roles

    @asynccontextmanager
    async def holding(self, t: Tensor) -> AsyncIterator[None]:
        """See `Way`."""
        parts = self._roles.parts(t)
        self._parts = [(rank, self._memory(part)) for rank, part in parts]
        self._shard = next((torch.zeros_like(part) for rank, part in parts if rank == self._roles.rank), None)
        self._buffer = None if self._shard is None else torch.zeros_like(self._shard)
        self._t = t
        try:
            yield
        finally:
            del self._parts, self._shard, self._buffer, self._t

    def _memory(self, t: Tensor) -> Any:  # noqa: ANN401
        return [self._mpi.memory.fromaddress(t.data_ptr(), t.nbytes), self._mpi.BYTE]

    def push(self, rule: str) -> Contender:
        """See `Way`."""
        return self._contender(self._ask_push, lambda shard, buffer: self._serve(shard, buffer, rule, answers=False))

    def pull(self) -> Contender:
        """See `Way`."""
        return self._contender(self._ask_pull, lambda shard, _: self._serve(shard, None, None, answers=True))

    def push_pull(self, rule: str) -> Contender:
        """See `Way`."""
        return self._contender(
            self._ask_push_pull, lambda shard, buffer: self._serve(shard, buffer, rule, answers=True)
        )

    def pushes(self, rule: str, count: int) -> Contender:
        """See `Way`."""

        def ask() -> None:
            for _ in range(count):
                for rank, part in self._parts:
                    self._comm.Send(part, rank)
            for rank, _ in self._parts:
                self._comm.Recv(_NOTHING, rank)

        def serve(shard: Tensor, buffer: Tensor) -> None:
            first = self._roles.workers[0]
            for _ in range(count):
                self._take(shard, buffer, rule, first)
            self._comm.Send(_NOTHING, first)

        return self._contender(ask, serve, one=True)

    def _ask_push(self) -> None:
        for rank, part in self._parts:
            self._comm.Send(part, rank)
        for rank, _ in self._parts:
            self._comm.Recv(_NOTHING, rank)

    def _ask_pull(self) -> None:
        for rank, _ in self._parts:
            self._comm.Send(_NOTHING, rank)
        for rank, part in self._parts:
            self._comm.Recv(part, rank)

    def _ask_push_pull(self) -> None:
        for rank, part in self._parts:
            self._comm.Send(part, rank)
        for rank, part in self._parts:
            self._comm.Recv(part, rank)

    def _serve(self, shard: Tensor, buffer: Tensor | None, rule: str | None, *, answers: bool) -> None:
        """Answer one request of each worker, in order of arrival."""
        for _ in self._roles.workers:
            source = self._take(shard, buffer, rule)
            self._comm.Send(self._memory(shard) if answers else _NOTHING, source)

    def _take(self, shard: Tensor, buffer: Tensor | None, rule: str | None, source: int | None = None) -> int:
        """Receive one request and apply it; return its rank."""
        status = self._mpi.Status()
        into = shard if rule == "copy" else buffer
        memory = _NOTHING if into is None else self._memory(into)
        self._comm.Recv(memory, self._mpi.ANY_SOURCE if source is None else source, status=status)
        if rule is not None and into is not None and into is not shard:
            _APPLY[rule](shard, into)
        return status.source

    def _contender(
        self, ask: Callable[[], None], serve: Callable[[Tensor, Tensor], None], *, one: bool = False
    ) -> Contender:
        if self._shard is not None and self._buffer is not None:
            return Contender(self.name, partial(serve, self._shard, self._buffer))
        asks = self._roles.rank == self._roles.workers[0] if one else self._roles.works
        return Contender(self.name, ask) if asks else Contender(self.name, _nothing, awaited=True)
