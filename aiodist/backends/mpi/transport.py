"""MPI communicators: the world and splits. Initialisation and finalisation of MPI."""

from __future__ import annotations

import atexit
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from aiodist.backends.base import Capabilities, Done, Native, Transport, again, in_thread
from aiodist.backends.mpi.library import MPI, PIECE_BYTES, as_backend_error, cuda_aware
from aiodist.backends.mpi.native import MpiNative, Pipeline
from aiodist.backends.mpi.requests import Requests, address, spec, start
from aiodist.errors import BackendError
from aiodist.handles import Progress, join
from aiodist.handles.polling import transport_lock
from aiodist.streams.memory import bytes_of
from aiodist.types import ANY

T = TypeVar("T")

_SHORT_BYTES = 64 << 10
_RENDEZVOUS_BYTES = 1 << 20  # larger than the eager limit of any MPI
_MPICH_MEMORY = " /dev/shm/mpich_shm_"


class MpiTransport:
    """One MPI communicator, a duplicate that only aiodist uses. If all ranks are on one host, messages go by `near`."""

    name = "mpi"

    def __init__(
        self,
        comms: tuple[MPI.Intracomm, MPI.Intracomm],
        progress: Progress,
        requests: Requests,
        near: Transport | None = None,
    ) -> None:
        """`comms` are two communicators of the same ranks. The second one carries the chunks of large reductions."""
        comm, pieces = comms
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self._progress = progress
        self.requests = requests
        self._owns_requests = False
        self.near = near
        """Transport in shared memory that carries the messages if all ranks are on one host, since it needs no polls
        while it waits. MPI then has only its collectives. Otherwise None."""
        self.beside: Transport | None = None
        """Transport that makes the splits if ranks may die, since MPI would block for a lost rank. Otherwise None."""
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._pipeline = Pipeline(pieces, requests)
        self.native: Native | None = MpiNative(comm, requests, self._pipeline)

    def capabilities(self) -> Capabilities:
        if self.near is not None:
            return replace(self.near.capabilities(), overruns=True)  # by collectives
        # Open MPI 5 frees memory twice if a receive is too short for a message beyond the eager limit.
        devices = frozenset({"cpu", "cuda"} if cuda_aware() else {"cpu"})
        return Capabilities(short_receives=True, devices=devices, overruns=True, kept_from=_RENDEZVOUS_BYTES)

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send by `near`, or by Isend of bytes, in chunks of at most 1 GiB."""
        if self.near is not None:
            self.near.isend(t, dst, tag, done)
        elif t.nbytes <= _SHORT_BYTES:
            self._send_short(t, dst, tag, done)
        else:
            self._transfer(t, done, self._comm.Isend, dst, tag)

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive by `near`, or by Irecv of bytes, in chunks of at most 1 GiB."""
        if self.near is not None:
            self.near.irecv(t, src, tag, done)
            return
        source = MPI.ANY_SOURCE if src == ANY else src
        self._transfer(t, done, self._comm.Irecv, source, tag)

    def _send_short(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send a short message. Most libraries copy the bytes, so the finished request needs no polls."""
        nbytes = t.nbytes
        self.requests.used = True
        if self.requests.left is not None:
            done(again(self.requests.left))
            return
        try:
            request = self._comm.Isend([address(t.data_ptr(), nbytes), nbytes, MPI.BYTE], dst, tag)
            finished = request.Test()
        except MPI.Exception as error:
            done(as_backend_error(error))
            return
        if finished:
            done(None)
        else:
            self.requests.track(request, done, nbytes)

    def _transfer(self, t: Tensor, done: Done, call: Callable[..., MPI.Request], peer: int, tag: int) -> None:
        flat = bytes_of(t)
        pieces = flat.split(PIECE_BYTES) if flat.nbytes > PIECE_BYTES else (flat,)
        joined = join(len(pieces), done) if len(pieces) > 1 else done
        for piece in pieces:
            start(self.requests, piece.nbytes, joined, call, spec(piece), peer, tag)

    async def split(self, ranks: Sequence[int], name: str) -> Transport:
        """Create a communicator among `ranks`.

        MPI has no non-blocking call for a new communicator. Two tasks may create communicators in different orders on
        different ranks. So each call blocks in a separate thread, outside the transport lock.
        """
        if self.beside is not None:
            return await self.beside.split(ranks, name)
        # The tag is the same on these ranks, independent of other communicators of each rank.
        tag = zlib.crc32(name.encode()) & 0x7FFF
        group = self._comm.Get_group().Incl(list(ranks))
        near = None if self.near is None else await self.near.split(ranks, name)
        return MpiTransport(await in_thread(self._create, group, tag), self._progress, self.requests, near)

    def _create(self, group: MPI.Group, tag: int) -> tuple[MPI.Intracomm, MPI.Intracomm]:
        created = self._comm.Create_group(group, tag)
        group.Free()
        return created, created.Dup()

    async def aclose(self, *, drained: bool) -> None:
        """Free the communicator if `drained`. Otherwise MPI is never finalised."""
        if self.near is not None:
            await self.near.aclose(drained=drained)
        if self.beside is not None:
            self.leave()
            await self.beside.aclose(drained=drained)
        elif drained:
            await in_thread(self._pipeline.comm.Free)
            await in_thread(self._comm.Free)
            self.requests.stir(0)
            if self._owns_requests and not len(self.requests):  # a split may still have requests in flight
                self._progress.remove_poller(self.requests)
        else:
            World.doom()

    def leave(self) -> None:
        """Make no more MPI calls in this process: pending requests fail (loop's thread)."""
        self._progress.with_lock(self._leave)

    def _leave(self) -> None:
        if self.requests.left is None:
            self.requests.leave(BackendError("MPI is no longer used: a rank was lost, or the world has changed"))


class World:
    """MPI is initialised once per process, by aiodist or by the user, and finalised by the same side."""

    pid: int | None = None
    doomed = False  # True if MPI is never finalised, since MPI_Finalize could wait without end

    @classmethod
    def initialize(cls) -> None:
        """Initialise MPI with THREAD_MULTIPLE, or check that the user did so."""
        if MPI.Is_finalized():
            raise BackendError("MPI was finalized in this process and cannot be initialised again")
        if MPI.Is_initialized():
            level = MPI.Query_thread()
        else:
            level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
            cls.pid = os.getpid()
            atexit.register(cls.finalize)
        if level < MPI.THREAD_MULTIPLE:
            names = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
            raise BackendError(f"MPI offers {names[level]}; aiodist needs THREAD_MULTIPLE")

    @classmethod
    def outlive(cls) -> None:
        """Never finalise MPI, since ranks may die. Raise `BackendError` if the program initialised MPI."""
        if cls.pid is None:
            how = "expected mpi4py.rc.initialize = False before `from mpi4py import MPI`"
            raise BackendError(f"MPI was initialised by the program, and waits for lost ranks at its end: {how}")
        cls.doomed = True

    @classmethod
    def doom(cls) -> None:
        """Never finalise MPI. Remove the file of MPICH's shared memory, which all ranks map, as MPI_Finalize would."""
        cls.doomed = True
        if cls.pid != os.getpid():
            return
        with suppress(OSError), open("/proc/self/maps") as maps:
            for path in {line.split()[-1] for line in maps if _MPICH_MEMORY in line}:
                with suppress(FileNotFoundError):
                    os.unlink(path)

    @classmethod
    def finalize(cls) -> None:
        """Finalise MPI at exit after an initialisation by aiodist in this process without aborted transfers."""
        if cls.pid != os.getpid() or MPI.Is_finalized() or cls.doomed:
            return
        # The progress thread must not call MPI during the finalisation, nor afterwards: the lock is never released.
        # MPI waits here for the other ranks, which may still work after the world was closed.
        if transport_lock.acquire(timeout=5):
            with suppress(MPI.Exception):
                MPI.Finalize()


async def open_world(*, mortal: bool = False) -> MpiTransport:
    """Initialise MPI if necessary, and return a transport over all ranks. Every rank must make this call.

    MPI starts in a thread, so the loop continues. If ranks are `mortal`, MPI is never finalised, since that would wait
    for dead ranks. Raises `BackendError` if MPI has no THREAD_MULTIPLE, or if ranks are mortal and the program itself
    would finalise MPI.
    """
    progress = Progress.current()
    requests = Requests(progress)
    try:
        world = MpiTransport(await in_thread(_start_mpi, mortal), progress, requests)
    except BaseException:
        World.doom()  # the thread may still wait for the other ranks
        raise
    world._owns_requests = True
    progress.add_poller(requests)
    return world


def _start_mpi(mortal: bool) -> tuple[MPI.Intracomm, MPI.Intracomm]:
    World.initialize()
    if mortal:
        World.outlive()
    return MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
