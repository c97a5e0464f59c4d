"""The event loop of process groups, and the rendezvous of their ranks."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import count
from time import monotonic
from typing import Any, TypeVar

import torch.distributed as dist

from aiodist.c10d.work import future_threads
from aiodist.communicator import Communicator, parts_of
from aiodist.control import connect, name_ranks
from aiodist.control.places import TcpPlace, is_loopback, outward_host, parse
from aiodist.env import Environment
from aiodist.errors import AiodistError, CommunicatorAborted, OperationTimeout
from aiodist.threads import result_of
from aiodist.world.background import WorldThread
from aiodist.world.opening import Introduction, Limits
from aiodist.world.runtime import opened
from aiodist.world.tracebacks import fold_tracebacks

T = TypeVar("T")
Met = tuple[dist.Store, int, int]
_STORE_TIMEOUT = timedelta(minutes=1)
_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_LONGEST = timedelta(minutes=5)


class Home:
    """The communicators of one default group, and of the groups made from it."""

    def __init__(self, world: Communicator, block: ExitStack | None = None) -> None:
        """`block` has the open world and its loop, or is None if the program has them."""
        self.world = world
        self.loop = parts_of(world).dispatcher.progress.loop
        self._block = block
        self._ending = threading.Lock()

    @classmethod
    def open(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Home:
        """Open a world on a loop in a thread. Its ranks meet in `store`."""
        meeting = Introduction(rank, size, _exchange(store, rank, size, timeout))
        stack = ExitStack()
        try:
            world = stack.enter_context(WorldThread(opened(Limits(rendezvous=timeout), meeting=meeting, thread=True)))
        except OperationTimeout as error:  # words of torch's stores, which programs search for
            raise dist.DistStoreError(f"wait timeout after {1e3 * timeout:g}ms: {error}") from error
        fold_tracebacks()  # torch's hook, which comes later, calls ours
        home = cls(world, stack)
        future_threads.groups.add(id(home))
        return home

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and return its result (any thread but the loop's)."""
        if parts_of(self.world).dispatcher.progress.owns_thread():
            raise RuntimeError("torch.distributed would block the event loop here: call it in a thread (to_thread)")
        return result_of(asyncio.run_coroutine_threadsafe(make(), self.loop))

    def group(self, name: str, ranks: Sequence[int], parent: Communicator | None = None) -> Communicator:
        """Return a communicator of `ranks` of `parent`, or of the world for None. Only these ranks call."""
        parent = parent or self.world
        safe = "".join(c if c.isalnum() else "-" for c in name)

        async def make() -> Communicator:
            parts_of(parent).dispatcher.check_usable()  # an abort may have come before the loop ran this
            made: Communicator = await parts_of(parent).registry.among(parent, f"c10d-{safe}", ranks)
            return made

        return self.call(make)

    def release(self, communicator: Communicator) -> None:
        """Let the loop close a communicator of `group` together with its other ranks. Do not wait."""
        if communicator is not self.world:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(lambda: self.loop.create_task(_close(communicator)))

    def close(self) -> None:
        """Close the world with all its communicators, and its loop. Collective."""
        block = self._take_block()
        if block is not None:
            try:
                block.close()
            finally:
                self._end_threads()

    def abort(self, reason: str) -> None:
        """Abort the world on this rank. The others learn that the rank has left. A thread closes the world."""
        block = self._take_block()
        if block is None:
            with suppress(RuntimeError):  # the loop is closed
                self.world.abort(reason)
            return
        error = CommunicatorAborted(f"communicator {self.world.name!r} was aborted: {reason}", comm=self.world.name)
        with suppress(RuntimeError):  # the interpreter ends, and the world was left
            threading.Thread(target=_end, args=(block, error), name="aiodist-abort").start()
        self._end_threads()

    def _end_threads(self) -> None:
        future_threads.groups.discard(id(self))
        future_threads.end_idle()

    def _take_block(self) -> ExitStack | None:
        """Return the open world's block to the first caller, which ends it, and None to later ones."""
        with self._ending:
            block, self._block = self._block, None
        return block

    def __del__(self) -> None:
        # Otherwise the world is closed, belongs to the program, or is left at the exit, when no thread can start.
        if getattr(self, "_block", None) is not None and not sys.is_finalizing():
            self.abort("the process group was dropped")


def _end(block: ExitStack, error: CommunicatorAborted) -> None:
    with suppress(CommunicatorAborted):
        block.__exit__(type(error), error, None)


async def _close(communicator: Communicator) -> None:
    with suppress(AiodistError, RuntimeError):  # RuntimeError: the world and its channel were closed meanwhile
        await communicator.aclose()


def _exchange(
    store: dist.Store, rank: int, size: int, seconds: float
) -> Callable[[bytes], Coroutine[Any, Any, list[bytes]]]:
    """Return a function that exchanges bytes between all ranks by torch's store, until `seconds` from now.

    The function then raises OperationTimeout with the missing ranks, also if the store has a longer timeout. The store
    may have the keys of earlier groups: that of torchrun lasts as long as the job.
    """
    rounds, until = count(), monotonic() + seconds
    meeting = store.add(f"aiodist/meetings/{rank}", 1)

    async def exchange(said: bytes) -> list[bytes]:
        """Exchange bytes. The loop may block, since no other task runs yet."""
        prefix = f"aiodist/{meeting}/{next(rounds)}"
        store.set(f"{prefix}/{rank}", said.decode())
        keys = [f"{prefix}/{other}" for other in range(size)]
        try:
            store.wait(keys, timedelta(seconds=max(0.01, until - monotonic())))
        except dist.DistStoreError as error:
            late = {other: "never came" for other, key in enumerate(keys) if not store.check([key])}
            if not late:
                raise
            waited = f"{name_ranks(late)} did not come to the process group within {seconds:g} s"
            how = f"start all {size} ranks, or pass a longer timeout"
            raise OperationTimeout(f"{waited}: {how}", late=late) from error
        return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]

    return exchange


async def wrap(coll: Communicator) -> dist.ProcessGroup:
    """Return torch's default process group over the ranks of `coll`, which stays usable. Collective.

    The group has its own `dup(thread=True)`. `torch.distributed.is_initialized()` is then true. Torch's users of
    process groups (FSDP2, DTensor, samplers, metrics) work in threads: in `asyncio.to_thread` or on a `HostStream`. On
    the loop's thread, a call that waits raises RuntimeError. `dist.destroy_process_group()` or the end of the
    communicator ends the group. Raises ValueError if torch has a default group already.
    """
    own = await coll.dup(thread=True)
    store = None
    if coll.rank == 0:
        store = dist.TCPStore(
            socket.gethostname() if coll.nodes > 1 else "127.0.0.1", 0, coll.size, True, _STORE_TIMEOUT, False
        )
    host, port = await coll.broadcast_object(None if store is None else (store.host, store.port))
    if store is None:
        store = await asyncio.to_thread(dist.TCPStore, host, port, coll.size, False, _STORE_TIMEOUT)
    dist.init_process_group("aiodist", store=store, rank=coll.rank, world_size=coll.size, pg_options=own)
    group = dist.group.WORLD
    assert group is not None
    return group


# --- registration with torch ------------------------------------------------------------------------------------------


def register(name: str, create: Callable[..., Any]) -> None:
    """Register the backend, and `env://` without torch's variables, once in a process."""
    if name in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    of_torch = handlers["env"]

    def meet(url: str, timeout: timedelta = _LONGEST, **options: object) -> Iterator[Met]:
        """Yield the store, rank and size by torch's variables, `aiodist run` or a plain mpirun, in this order."""
        environment = Environment.read()
        started = environment.mpi or environment.rendezvous is not None
        if "rank=" in url or environment.variables.keys() >= _VARIABLES or not started:
            yield from of_torch(url, timeout=timeout, **options)
        else:
            yield _met(environment, timeout)

    handlers["env"] = meet


def _met(environment: Environment, timeout: timedelta) -> Met:
    """Open a store on rank 0, and send its address to the other ranks."""
    rank, size = environment.rank, environment.size

    def open_store(host: str) -> dist.TCPStore:
        return dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)

    if environment.rendezvous is None:
        store = open_store(socket.gethostname()) if rank == 0 else None
        said = _over_mpi(None if store is None else f"{store.host} {store.port}")
    else:
        store, said = asyncio.run(_over_channel(environment, open_store, timeout.total_seconds()))
    host, port = said.split()
    return store or dist.TCPStore(host, int(port), size, is_master=False, timeout=timeout), rank, size


def _over_mpi(told: str | None) -> str:
    from aiodist.backends.mpi.transport import World

    World.initialize()
    from mpi4py import MPI

    said: str = MPI.COMM_WORLD.bcast(told)
    return said


async def _over_channel(
    environment: Environment, open_store: Callable[[str], dist.TCPStore], seconds: float
) -> tuple[dist.TCPStore | None, str]:
    """Return the store, on rank 0 only, and its address.

    Other hosts reach rank 0 by the address with which rank 0 reaches the hub.
    """
    assert environment.rendezvous is not None
    channel = await connect(
        environment.rendezvous,
        rank=environment.rank,
        size=environment.size,
        token=environment.token,
        timeout=seconds,
        environ=environment.variables,
    )
    store = None
    if environment.rank == 0:
        hub = parse(environment.rendezvous, environment.variables)
        one_host = isinstance(hub, TcpPlace) and is_loopback(hub.host)
        store = open_store(channel.source if one_host or not is_loopback(channel.source) else outward_host())
        await channel.set("c10d/store", f"{store.host} {store.port}".encode())
    said: bytes = await channel.get("c10d/store")
    await channel.aclose()
    return store, said.decode()
