"""`Comm`: a communicator with mpi4py's calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from aiodist.communicator import Communicator
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.compat.data import IN_PLACE, OPS, Buffer, Op, blocks_of, buffer_of
from aiodist.compat.errors import CLASSES, MPIError, left_out, telling
from aiodist.compat.requests import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED, Request, Status, block_on, on_loop
from aiodist.handles import Handle, gather
from aiodist.types import ReduceOp

SUM = OPS["SUM"]

_LEFT_OUT = {
    "probe iprobe mprobe improbe": "recv() of an object, which need not know the size",
    "Probe Iprobe Mprobe Improbe": "recv() of an object, or `coll.recv()`, which need not know the size",
    "*_init": "Isend(), Iallreduce() and the like each time, which takes a microsecond",
    "Alltoallw Ialltoallw": "alltoall() of objects",
    "Create Create_group Get_group group": "Split(), or `coll.group(ranks)`",
    "Create_cart Create_graph Create_dist_graph Create_dist_graph_adjacent Cart_map Graph_map": "Split()",
    "Set_errhandler Get_errhandler": "try and except: each error is an exception",
    "Create_intercomm Spawn Spawn_multiple Accept Connect Disconnect": "`aiodist run -n`, which starts all ranks",
}


def _blocking(call: Callable[..., Request]) -> Callable[..., None]:
    """Return what makes `call` and waits for it."""

    @wraps(call)
    def blocking(self: Comm, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs).wait()

    name = call.__name__[1:]
    blocking.__name__ = name if call.__name__[0] == "i" else name.capitalize()
    blocking.__doc__ = f"Make `{call.__name__}` and wait for it."
    return blocking


@telling
class Comm:
    """The calls of mpi4py's communicators over `coll`, which is aiodist's: lower case for objects, upper for buffers.

    Names, arguments and results are mpi4py's, and so are the kinds of buffers. Calls whose names begin with `I` or `i`
    return a `Request`, which can be awaited where `coll` belongs to an asyncio program; there the others would block
    its loop, and raise. Sums of 16-bit floats are in float32; a reduction that torch has no arithmetic for (unsigned
    integers, logical operators, `Op.Create`) gathers all that the ranks have. What aiodist raises is raised as an
    `MPI.Exception`, from the error itself.
    """

    def __init__(self, coll: Communicator, alone: Communicator | None = None) -> None:
        """`alone` is the communicator of this rank only, for COMM_SELF."""
        self.coll = coll
        self.alone = alone
        self._loop: asyncio.AbstractEventLoop = coll.parts.dispatcher.progress.loop

    def __getattr__(self, name: str) -> NoReturn:
        left_out(f"Comm.{name}", _LEFT_OUT)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comm) and other.coll is self.coll

    def __hash__(self) -> int:
        return hash(self.coll)

    # --- who and where -------------------------------------------------------------------------------------

    def Get_rank(self) -> int:
        """Return this process's number."""
        return self.coll.rank

    def Get_size(self) -> int:
        """Return how many there are."""
        return self.coll.size

    def Get_name(self) -> str:
        """Return what error messages call it."""
        return self.coll.name

    rank, size, name = property(Get_rank), property(Get_size), property(Get_name)

    def Dup(self) -> Comm:
        """Return a communicator of the same ranks, whose messages never meet these."""
        made = self.coll.dup(thread=True) if isinstance(self.coll, ThreadedCommunicator) else self.coll.dup()
        return Comm(made.wait(), self.alone)

    Clone = Dup

    def Split(self, color: int = 0, key: int = 0) -> Comm | None:
        """Return the communicator of the ranks that gave this color, by key; None (COMM_NULL) for UNDEFINED."""
        made = self.coll.split(None if color == UNDEFINED else color, key).wait()
        return None if color == UNDEFINED else Comm(made, self.alone)

    def Split_type(self, split_type: object, key: int = 0) -> Comm | None:
        """Return the communicator of the ranks of this host, which is what COMM_TYPE_SHARED means."""
        return self.Split(self.coll.node, key)

    def Free(self) -> None:
        """Close it, on all its ranks."""
        block_on(self._loop, self.coll.aclose)

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this process with `errorcode`, and with it the job."""
        self.coll.abort(f"MPI_Abort was called with {errorcode}")
        raise SystemExit(errorcode)

    # --- objects -------------------------------------------------------------------------------------------

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send a picklable object; it is pickled at the call."""
        return self._request(None if dest == PROC_NULL else self.coll.send_object(obj, dest, tag))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send a picklable object; the request is over once a receive has matched it."""
        return self._request(None if dest == PROC_NULL else self.coll.send_object(obj, dest, tag, synchronous=True))

    def recv(
        self, buf: object = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Return the next object; `buf` is not needed."""
        return self.irecv(buf, source, tag).wait(status)

    def irecv(self, buf: object = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive the next object; `buf` is not needed."""
        return self._request(None if source == PROC_NULL else self.coll.recv_object(source, tag))

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: object = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send an object and return the one that comes."""
        coming = self.irecv(recvbuf, source, recvtag)
        self.send(sendobj, dest, sendtag)
        return coming.wait(status)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return root's object."""
        return self.coll.broadcast_object(obj, root).wait()

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects on root, None elsewhere."""
        return self.coll.gather_object(sendobj, root).wait()

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return the object of root's that has this rank's number."""
        return self.coll.scatter_object(sendobj, root).wait()

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all ranks' objects."""
        return self.coll.allgather_object(sendobj).wait()

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return what all ranks have for this one."""
        return self.coll.alltoall_object(sendobj).wait()

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any:
        """Return the objects of all ranks, joined by `op` (a function of two) in their order, on root."""
        objs = self.gather(sendobj, root)
        return None if objs is None else functools.reduce(op, objs)

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM) -> Any:
        """Return the objects of all ranks, joined by `op` in their order."""
        return functools.reduce(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM) -> Any:
        """Return those of rank 0 to this one, joined."""
        return functools.reduce(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM) -> Any:
        """Return those of the ranks before this one, joined; None on rank 0."""
        before = self.allgather(sendobj)[: self.rank]
        return functools.reduce(op, before) if before else None

    # --- buffers: messages ---------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer, which must not change until the request is over."""
        return self._request(None if dest == PROC_NULL else self.coll.send(buffer_of(buf).octets, dest, tag))

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive into a buffer; a shorter message fills its front."""
        into = None if source == PROC_NULL else buffer_of(buf, written=True).octets
        return self._request(None if into is None else self.coll.recv(into, source, tag))

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer; the request is over once a receive has matched it."""
        sent = None if dest == PROC_NULL else buffer_of(buf).octets
        return self._request(None if sent is None else self.coll.send(sent, dest, tag, synchronous=True))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive into a buffer; a shorter message fills its front, and `status` says how long it was."""
        self.Irecv(buf, source, tag).wait(status)

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        """Send one buffer while another is received."""
        coming, going = self.Irecv(recvbuf, source, recvtag).handle, self.Isend(sendbuf, dest, sendtag).handle
        if coming is None or going is None:
            return self._request(going if coming is None else coming)
        return self._request(on_loop(self._loop, lambda: gather(coming, going)))

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send one buffer while another is received."""
        coming = self.Irecv(recvbuf, source, recvtag)
        self.Send(sendbuf, dest, sendtag)
        coming.wait(status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send what is in a buffer and receive into it."""
        self.Sendrecv(buffer_of(buf).octets.clone(), dest, sendtag, buf, source, recvtag, status)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Send what is in a buffer and receive into it."""
        return self.Isendrecv(buffer_of(buf).octets.clone(), dest, sendtag, buf, source, recvtag)

    # --- buffers: collectives ------------------------------------------------------------------------------

    def Ibarrier(self) -> Request:
        """Be over once all ranks have called it."""
        return self._request(self.coll.barrier())

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Fill every rank's buffer with root's."""
        return self._request(self.coll.broadcast(buffer_of(buf, written=self.rank != root).octets, root))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Fill root's buffer with all ranks', in their order."""
        into = buffer_of(recvbuf, self.size, written=True) if self.rank == root else None
        mine = into.blocks(self.size)[root].clone() if into and _in_place(sendbuf) else buffer_of(sendbuf).octets
        return self._request(self.coll.gather(mine, root, out=None if into is None else into.octets))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Fill each rank's buffer with its block of root's."""
        parts = buffer_of(sendbuf, self.size).blocks(self.size) if self.rank == root else None
        out = None if parts and _in_place(recvbuf) else buffer_of(recvbuf, written=True).octets
        return self._request(self.coll.scatter(parts, root, out=out))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Fill every rank's buffer with all ranks', in their order."""
        into = buffer_of(recvbuf, self.size, written=True)
        mine = into.blocks(self.size)[self.rank] if _in_place(sendbuf) else buffer_of(sendbuf).octets
        return self._request(self.coll.allgather(mine, out=into.octets))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Fill the buffer with the blocks that all ranks have for this one."""
        into = buffer_of(recvbuf, self.size, written=True).octets
        mine = into.clone() if _in_place(sendbuf) else buffer_of(sendbuf, self.size).octets
        return self._request(self.coll.alltoall_single(mine, out=into))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """As `Igather`, of blocks of different lengths: [data, counts, displacements, datatype] on root."""
        into = blocks_of(recvbuf, self.size, written=True) if self.rank == root else None
        mine = into[root].octets.clone() if into and _in_place(sendbuf) else buffer_of(sendbuf).octets
        return self._request(self.coll.gather(mine, root), None if into is None else partial(_fill, into))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """As `Iscatter`, of blocks of different lengths."""
        parts = [block.octets for block in blocks_of(sendbuf, self.size)] if self.rank == root else None
        out = None if parts and _in_place(recvbuf) else buffer_of(recvbuf, written=True).octets
        return self._request(self.coll.scatter(parts, root, out=out))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As `Iallgather`, of blocks of different lengths."""
        into = blocks_of(recvbuf, self.size, written=True)
        mine = into[self.rank].octets.clone() if _in_place(sendbuf) else buffer_of(sendbuf).octets
        return self._request(self.coll.allgather(mine), partial(_fill, into))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As `Ialltoall`, of blocks of different lengths."""
        into = blocks_of(recvbuf, self.size, written=True)
        given = into if _in_place(sendbuf) else blocks_of(sendbuf, self.size)
        parts = [block.octets.clone() if given is into else block.octets for block in given]
        return self._request(self.coll.alltoall(parts), partial(_fill, into))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Reduce all ranks' buffers into root's."""
        mine, into = _operands(sendbuf, recvbuf) if self.rank == root else (buffer_of(sendbuf), None)
        if (t := _summable(mine, op)) is not None:
            out = None if into is None else into.octets.view(t.dtype)
            return self._request(self.coll.reduce(t, op.native or ReduceOp.SUM, root, out=out))
        gathered = self.coll.gather(mine.octets, root)
        return self._request(
            gathered, None if into is None else (lambda parts: _write(into.octets, _joined(parts, mine, op)))
        )

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Reduce all ranks' buffers into every one."""
        return self._reduced("allreduce", sendbuf, recvbuf, op, slice(None))

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Reduce those of rank 0 to this one."""
        return self._reduced("scan", sendbuf, recvbuf, op, slice(self.rank + 1))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Reduce those of the ranks before this one; what rank 0's buffer holds then means nothing."""
        return self._reduced("exscan", sendbuf, recvbuf, op, slice(self.rank))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """Reduce all ranks' buffers, and give rank r its block, of `recvcounts[r]` elements.

        Without counts the ranks tell one another theirs first, which blocks.
        """
        mine, into = _operands(sendbuf, recvbuf)
        if recvcounts is None:
            recvcounts = self.allgather(into.length)
        counts = [int(count) for count in recvcounts]
        size, first = into.dtype.itemsize, sum(counts[: self.rank])
        out = into.octets[: counts[self.rank] * size]
        if (t := _summable(mine, op)) is not None:
            t = t.clone() if _in_place(sendbuf) else t
            return self._request(self.coll.reduce_scatter(t, op.native or ReduceOp.SUM, counts, out=out.view(t.dtype)))
        block = slice(first * size, (first + counts[self.rank]) * size)
        return self._request(
            self.coll.allgather(mine.octets), lambda parts: _write(out, _joined([p[block] for p in parts], mine, op))
        )

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """As `Ireduce_scatter`, of blocks of one length."""
        whole = buffer_of(recvbuf if _in_place(sendbuf) else sendbuf, self.size)
        length = whole.length // self.size
        return self.Ireduce_scatter(sendbuf, recvbuf, [length] * self.size, op)

    def _reduced(self, name: str, sendbuf: Any, recvbuf: Any, op: Op, ranks: slice) -> Request:
        """Issue the reduction called `name`, into which the `ranks` go."""
        mine, into = _operands(sendbuf, recvbuf)
        if (t := _summable(mine, op)) is not None:
            out = None if _in_place(sendbuf) else into.octets.view(t.dtype)
            return self._request(getattr(self.coll, name)(t, op.native, out=out))

        def finish(parts: list[Tensor]) -> None:
            if chosen := parts[ranks]:
                _write(into.octets, _joined(chosen, mine, op))

        return self._request(self.coll.allgather(mine.octets), finish)

    send, ssend, Send, Ssend = _blocking(isend), _blocking(issend), _blocking(Isend), _blocking(Issend)
    bsend, ibsend, Bsend, Ibsend, Rsend, Irsend = send, isend, Send, Isend, Send, Isend
    barrier = _blocking(Ibarrier)
    Barrier, Bcast, Gather, Scatter = _blocking(Ibarrier), _blocking(Ibcast), _blocking(Igather), _blocking(Iscatter)
    Allgather, Alltoall = _blocking(Iallgather), _blocking(Ialltoall)
    Gatherv, Scatterv = _blocking(Igatherv), _blocking(Iscatterv)
    Allgatherv, Alltoallv = _blocking(Iallgatherv), _blocking(Ialltoallv)
    Reduce, Allreduce = _blocking(Ireduce), _blocking(Iallreduce)
    Reduce_scatter, Reduce_scatter_block = _blocking(Ireduce_scatter), _blocking(Ireduce_scatter_block)
    Scan, Exscan = _blocking(Iscan), _blocking(Iexscan)

    def _request(self, handle: Handle[Any] | None, finish: Callable[[Any], Any] | None = None) -> Request:
        return Request(self._loop, handle, finish)


def _in_place(spec: object) -> bool:
    """Return True where a call finds its input in the other buffer: mpi4py takes None for IN_PLACE too."""
    return spec is None or spec is IN_PLACE


def _operands(sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Buffer]:
    """Return what a reduction reads and what it writes; raise TypeError where their elements differ."""
    into = buffer_of(recvbuf, written=True)
    mine = into if _in_place(sendbuf) else buffer_of(sendbuf)
    if mine.kind != into.kind:
        raise TypeError(f"sendbuf of {mine.kind}, recvbuf of {into.kind}: expected elements of one type")
    return mine, into


def _summable(buffer: Buffer, op: Op) -> Tensor | None:
    """Return the numbers of a reduction that a communicator has itself, else None."""
    t = buffer.numbers()
    if op.native is None or t is None:
        return None
    orders = op.native in (ReduceOp.MAX, ReduceOp.MIN)
    bits = op.native in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    fits = not (t.is_complex() and orders) and not (bits and (t.is_floating_point() or t.is_complex()))
    return t if fits and (t.dtype is not torch.bool or orders or bits) else None


def _joined(parts: Sequence[Tensor], like: Buffer, op: Op) -> np.ndarray[Any, Any]:
    """Return all `parts`, bytes of arrays as `like`, joined by `op` in their order."""
    arrays = [part.numpy().view(like.dtype) for part in parts]
    return np.ascontiguousarray(functools.reduce(op.arrays, arrays)).astype(like.dtype, copy=False)


def _write(into: Tensor, array: np.ndarray[Any, Any]) -> None:
    into[: array.nbytes].numpy()[:] = array.view(np.uint8)


def _fill(blocks: Sequence[Buffer], parts: Sequence[Tensor]) -> None:
    """Copy what came from each rank into its block; raise `MPIError` where that is too short."""
    for rank, (block, part) in enumerate(zip(blocks, parts, strict=True)):
        if part.numel() > block.octets.numel():
            sent = part.numel() // block.dtype.itemsize
            said = f"rank {rank} sent {sent} elements: expected at most {block.length}"
            raise MPIError(CLASSES["ERR_TRUNCATE"], said)
        block.octets[: part.numel()].copy_(part)
