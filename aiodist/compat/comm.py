"""`Comm`: a communicator with mpi4py's calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

from torch import Tensor

from aiodist.collectives.metadata import overlaps
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.arguments import check_rank, check_tag
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.compat.data import OPS, Buffer, Op, blocks_of, buffer_of, check_op
from aiodist.compat.errors import CLASSES, MPIError, telling
from aiodist.compat.missing import left_out
from aiodist.compat.operands import (
    check_alike,
    check_blocks,
    check_counts,
    fill_blocks,
    in_place,
    joined,
    operands,
    summable,
    write_array,
)
from aiodist.compat.requests import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED, Request, Status, block_on, on_loop, waits
from aiodist.handles import Handle, gather
from aiodist.streams.writes import check_written
from aiodist.types import ReduceOp

SUM = OPS["SUM"]
COMM_TYPE_SHARED = 1


@telling
class Comm:
    """The calls of mpi4py's communicators, over the communicator `coll`: lower case for objects, upper for buffers.

    Names, arguments, results and kinds of buffers are mpi4py's. Calls whose names begin with `I` or `i` return a
    `Request`. In an asyncio program, requests can be awaited, and the other calls raise, since they would block the
    loop. Sums of 16-bit floats are in float32. A reduction without arithmetic in torch (unsigned integers, logical
    operators, `Op.Create`) gathers the buffers of all ranks. An error of aiodist is raised as an `MPI.Exception`.
    """

    def __init__(self, coll: Communicator, alone: Communicator | None = None) -> None:
        """`alone` is the communicator of this rank only, for COMM_SELF."""
        self.coll = coll
        self.alone = alone
        self._loop: asyncio.AbstractEventLoop = parts_of(coll).dispatcher.progress.loop
        self._freed = False

    def __getattr__(self, name: str) -> NoReturn:
        left_out(f"Comm.{name}")

    def __bool__(self) -> bool:
        return not self._freed

    def __eq__(self, other: object) -> bool:
        """Return True for the same communicator. Freed communicators equal COMM_NULL."""
        return isinstance(other, Comm) and (other.coll is self.coll if self and other else bool(self) == bool(other))

    def __hash__(self) -> int:
        return hash(self.coll)

    # --- ranks and groups ----------------------------------------------------------------------------------

    def Get_rank(self) -> int:
        """Return the rank of this process."""
        return self.coll.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.coll.size

    def Get_name(self) -> str:
        """Return the name in error messages."""
        return self.coll.name

    rank, size, name = property(Get_rank), property(Get_size), property(Get_name)

    def Dup(self) -> Comm:
        """Return a communicator of the same ranks with separate messages."""
        made = self.coll.dup(thread=True) if isinstance(self.coll, ThreadedCommunicator) else self.coll.dup()
        return Comm(made.wait(), self.alone)

    Clone = Dup

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """Return a communicator of the ranks with this color, 0 or more, by key, or COMM_NULL for UNDEFINED."""
        if color < 0 and color != UNDEFINED:
            raise MPIError(CLASSES["ERR_ARG"], f"color={color}: expected 0 or more, or UNDEFINED")
        made = self.coll.split(None if color == UNDEFINED else color, key).wait()
        return COMM_NULL if color == UNDEFINED else Comm(made, self.alone)

    def Split_type(self, split_type: int, key: int = 0, info: object = None) -> Comm:
        """Return a communicator of this host's ranks for COMM_TYPE_SHARED, or COMM_NULL for UNDEFINED."""
        if split_type not in (COMM_TYPE_SHARED, UNDEFINED):
            raise MPIError(CLASSES["ERR_ARG"], f"split_type={split_type}: expected COMM_TYPE_SHARED, or UNDEFINED")
        return self.Split(UNDEFINED if split_type == UNDEFINED else self.coll.node, key)

    def Free(self) -> None:
        """Close the communicator, on all ranks."""
        block_on(self._loop, self.coll.aclose)
        self._freed = True

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this process with `errorcode`, and the job."""
        self.coll.abort(f"MPI_Abort was called with {errorcode}")
        raise SystemExit(errorcode)

    # --- objects -------------------------------------------------------------------------------------------

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object, which is pickled at the call."""
        return self._request(None if dest == PROC_NULL else self.coll.send_object(obj, dest, tag))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object. The request is done once a receive has matched the message."""
        return self._request(None if dest == PROC_NULL else self.coll.send_object(obj, dest, tag, synchronous=True))

    def recv(
        self, buf: object = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Return the next object. `buf` is ignored."""
        return self.irecv(buf, source, tag).wait(status)

    def irecv(self, buf: object = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive the next object. `buf` is ignored."""
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
        """Send an object and return the received one."""
        self._check_destination(dest, sendtag)
        coming = self.irecv(recvbuf, source, recvtag)
        self.send(sendobj, dest, sendtag)
        return coming.wait(status)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return root's object."""
        return self.coll.broadcast_object(obj, root).wait()

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects on root, None on other ranks."""
        return self.coll.gather_object(sendobj, root).wait()

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's object of root's sequence."""
        return self.coll.scatter_object(sendobj, root).wait()

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all ranks' objects."""
        return self.coll.allgather_object(sendobj).wait()

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return the object of each rank for this rank."""
        return self.coll.alltoall_object(sendobj).wait()

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any:
        """Return all ranks' objects combined by `op`, a function of two, in rank order, on root."""
        check_op(op)
        objs = self.gather(sendobj, root)
        return None if objs is None else functools.reduce(op, objs)

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM) -> Any:
        """Return all ranks' objects combined by `op` in rank order."""
        check_op(op)
        return functools.reduce(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM) -> Any:
        """Return the objects of rank 0 to this rank, combined."""
        check_op(op)
        return functools.reduce(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM) -> Any:
        """Return the objects of the lower ranks, combined, or None on rank 0."""
        check_op(op)
        before = self.allgather(sendobj)[: self.rank]
        return functools.reduce(op, before) if before else None

    # --- buffers: messages ---------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer, which must not change until the request is done."""
        return self._send(None if dest == PROC_NULL else buffer_of(buf).sent(), dest, tag)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive into a buffer. A shorter message fills its beginning."""
        into = None if source == PROC_NULL else buffer_of(buf, written=True).sent()
        return self._request(None if into is None else self.coll.recv(into, source, tag))

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer. The request is done once a receive has matched the message."""
        return self._send(None if dest == PROC_NULL else buffer_of(buf).sent(), dest, tag, synchronous=True)

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive into a buffer. A shorter message fills its beginning, and `status` has the length."""
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
        sent = None if dest == PROC_NULL else buffer_of(sendbuf).sent()
        return self._both(*self._exchange(sent, dest, sendtag, recvbuf, source, recvtag))

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
        sent = None if dest == PROC_NULL else buffer_of(sendbuf).sent()
        coming, going = self._exchange(sent, dest, sendtag, recvbuf, source, recvtag)
        going.wait()
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
        sent = buffer_of(buf).sent().clone()
        coming, going = self._exchange(sent, dest, sendtag, buf, source, recvtag)
        going.wait()
        coming.wait(status)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Send what is in a buffer and receive into it."""
        sent = buffer_of(buf).sent().clone()
        return self._both(*self._exchange(sent, dest, sendtag, buf, source, recvtag))

    def _send(self, sent: Tensor | None, dest: int, tag: int, *, synchronous: bool = False) -> Request:
        """Send a tensor, unless `dest` is PROC_NULL."""
        if sent is None or dest == PROC_NULL:
            return self._request(None)
        return self._request(self.coll.send(sent, dest, tag, synchronous=synchronous))

    def _exchange(
        self, sent: Tensor | None, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int
    ) -> tuple[Request, Request]:
        """Issue a receive and a send, or neither, since all checks come first."""
        self._check_destination(dest, sendtag)
        if sent is not None and source != PROC_NULL and overlaps(sent, buffer_of(recvbuf, written=True).octets):
            raise ValueError("sendbuf overlaps recvbuf: expected other memory, or Sendrecv_replace of one buffer")
        coming = self.Irecv(recvbuf, source, recvtag)
        return coming, self._send(sent, dest, sendtag)

    def _check_destination(self, dest: int, tag: int) -> None:
        if dest != PROC_NULL:
            check_rank(dest, self.size, "dst")
            check_tag(tag)

    def _both(self, coming: Request, going: Request) -> Request:
        """Return one request for a receive and a send."""
        receive, send = coming.handle, going.handle
        if receive is None or send is None:
            return self._request(send if receive is None else receive)
        return self._request(on_loop(self._loop, lambda: gather(receive, send)))

    # --- buffers: collectives ------------------------------------------------------------------------------

    def Ibarrier(self) -> Request:
        """Return a request that is done once all ranks have made this call."""
        return self._request(self.coll.barrier())

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Copy root's buffer to every rank."""
        check_written(buf[0] if isinstance(buf, (list, tuple)) else buf, "Bcast", "its buffer")
        data = buffer_of(buf, written=self.rank != root)
        if (t := data.typed()) is not None:
            return self._request(self.coll.broadcast(t, root))
        return self._request(self._comparing("bcast", data, data.length, root=root).broadcast(data.octets, root))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Gather all ranks' buffers, of one length, into root's buffer, in rank order."""
        into = buffer_of(recvbuf, self.size, written=True) if self.rank == root else None
        if into is not None and in_place(sendbuf):
            mine = into.block(self.rank, self.size).copied()
        else:
            mine = buffer_of(sendbuf)
            if into is not None:
                check_blocks(mine.length, into, self.size)
        coll = self._comparing("gather", mine, mine.length, root=root)
        return self._request(coll.gather(mine.octets, root, out=None if into is None else into.octets))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Copy to each rank its block of root's buffer, of one length."""
        whole = buffer_of(sendbuf, self.size) if self.rank == root else None
        if whole is not None and in_place(recvbuf):
            into, out = whole.block(self.rank, self.size), None
        else:
            into = buffer_of(recvbuf, written=True)
            out = into.octets
            if whole is not None:
                check_blocks(into.length, whole, self.size)
        coll = self._comparing("scatter", into, into.length, root=root)
        return self._request(coll.scatter(None if whole is None else whole.blocks(self.size), root, out=out))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Gather all ranks' buffers, of one length, into each rank's buffer, in rank order."""
        into = buffer_of(recvbuf, self.size, written=True)
        if in_place(sendbuf):
            mine = into.block(self.rank, self.size)
        else:
            mine = buffer_of(sendbuf)
            check_blocks(mine.length, into, self.size)
        if mine.length and (t := mine.typed()) is not None and (out := into.typed()) is not None:
            # As rows, since the ranks compare the length of a row.
            return self._request(self.coll.allgather(t.view(1, -1), out=out.view(self.size, -1)))
        coll = self._comparing("allgather", mine, mine.length)
        return self._request(coll.allgather(mine.octets, out=into.octets))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Fill the buffer with each rank's block for this rank, of one length."""
        into = buffer_of(recvbuf, self.size, written=True)
        mine = into.copied() if in_place(sendbuf) else buffer_of(sendbuf, self.size)
        check_alike(mine, into)
        if (t := mine.typed()) is not None and (out := into.typed()) is not None:
            return self._request(self.coll.alltoall_single(t, out=out))
        coll = self._comparing("alltoall", mine, mine.length)
        return self._request(coll.alltoall_single(mine.octets, out=into.octets))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """As `Igather`, with blocks of different lengths: [data, counts, displacements, datatype] on root."""
        into = blocks_of(recvbuf, self.size, written=True) if self.rank == root else None
        mine = into[root].copied() if into and in_place(sendbuf) else buffer_of(sendbuf)
        coll = self._comparing("gatherv", mine, root=root)
        return self._request(coll.gather(mine.octets, root), None if into is None else partial(fill_blocks, into))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """As `Iscatter`, with blocks of different lengths."""
        parts = blocks_of(sendbuf, self.size) if self.rank == root else None
        into = parts[root] if parts and in_place(recvbuf) else buffer_of(recvbuf, written=True)
        out = None if parts and in_place(recvbuf) else into.octets
        coll = self._comparing("scatterv", into, root=root)
        return self._request(coll.scatter(None if parts is None else [part.octets for part in parts], root, out=out))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As `Iallgather`, with blocks of different lengths."""
        into = blocks_of(recvbuf, self.size, written=True)
        mine = into[self.rank].copied() if in_place(sendbuf) else buffer_of(sendbuf)
        return self._request(self._comparing("allgatherv", mine).allgather(mine.octets), partial(fill_blocks, into))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As `Ialltoall`, with blocks of different lengths."""
        into = blocks_of(recvbuf, self.size, written=True)
        given = [block.copied() for block in into] if in_place(sendbuf) else blocks_of(sendbuf, self.size)
        coll = self._comparing("alltoallv", given[0])
        return self._request(coll.alltoall([block.octets for block in given]), partial(fill_blocks, into))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Reduce all ranks' buffers into root's buffer."""
        mine, into = operands(sendbuf, recvbuf) if self.rank == root else (buffer_of(sendbuf), None)
        check_op(op, mine.number_kind)
        if into is not None:
            check_alike(mine, into)
        if (t := summable(mine, op)) is not None:
            out = None if into is None else into.octets.view(t.dtype)
            return self._request(self.coll.reduce(t, op.native or ReduceOp.SUM, root, out=out))
        gathered = self._comparing("reduce", mine, mine.length, op=op, root=root).gather(mine.octets, root)
        finish = None if into is None else (lambda parts: write_array(into.octets, joined(parts, mine, op)))
        return self._request(gathered, finish)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Reduce all ranks' buffers into each rank's buffer."""
        return self._reduced("allreduce", sendbuf, recvbuf, op, slice(None))

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Reduce the buffers of rank 0 to this rank."""
        return self._reduced("scan", sendbuf, recvbuf, op, slice(self.rank + 1))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Reduce the buffers of the lower ranks. Rank 0's result is undefined."""
        return self._reduced("exscan", sendbuf, recvbuf, op, slice(self.rank))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """Reduce all ranks' buffers, and return rank r's block of `recvcounts[r]` elements.

        Without counts, the call blocks and exchanges them first.
        """
        mine, into = operands(sendbuf, recvbuf)
        check_op(op, mine.number_kind)
        if recvcounts is None:
            recvcounts = self.allgather(into.length)
        counts = [int(count) for count in recvcounts]
        check_counts(counts, self.size, mine, into.length - counts[self.rank] if len(counts) == self.size else 0)
        size, first = into.dtype.itemsize, sum(counts[: self.rank])
        out = into.octets[: counts[self.rank] * size]
        if (t := summable(mine, op)) is not None:
            t = t.clone() if in_place(sendbuf) else t
            return self._request(self.coll.reduce_scatter(t, op.native or ReduceOp.SUM, counts, out=out.view(t.dtype)))
        block = slice(first * size, (first + counts[self.rank]) * size)
        gathered = self._comparing("reduce_scatter", mine, mine.length, op=op).allgather(mine.octets)
        return self._request(gathered, lambda parts: write_array(out, joined([p[block] for p in parts], mine, op)))

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """As `Ireduce_scatter`, with blocks of one length."""
        whole = buffer_of(recvbuf if in_place(sendbuf) else sendbuf, self.size)
        length = whole.length // self.size
        return self.Ireduce_scatter(sendbuf, recvbuf, [length] * self.size, op)

    def _reduced(self, name: str, sendbuf: Any, recvbuf: Any, op: Op, ranks: slice) -> Request:
        """Issue the reduction `name` of the buffers of `ranks`."""
        mine, into = operands(sendbuf, recvbuf)
        check_op(op, mine.number_kind)
        check_alike(mine, into)
        if (t := summable(mine, op)) is not None:
            out = None if in_place(sendbuf) else into.octets.view(t.dtype)
            return self._request(getattr(self.coll, name)(t, op.native, out=out))

        def finish(parts: list[Tensor]) -> None:
            if chosen := parts[ranks]:
                write_array(into.octets, joined(chosen, mine, op))

        return self._request(self._comparing(name, mine, mine.length, op=op).allgather(mine.octets), finish)

    send, ssend, Send, Ssend = waits(isend), waits(issend), waits(Isend), waits(Issend)
    bsend, ibsend, Bsend, Ibsend, Rsend, Irsend = send, isend, Send, Isend, Send, Isend
    barrier = waits(Ibarrier)
    Barrier, Bcast, Gather, Scatter = waits(Ibarrier), waits(Ibcast), waits(Igather), waits(Iscatter)
    Allgather, Alltoall = waits(Iallgather), waits(Ialltoall)
    Gatherv, Scatterv = waits(Igatherv), waits(Iscatterv)
    Allgatherv, Alltoallv = waits(Iallgatherv), waits(Ialltoallv)
    Reduce, Allreduce = waits(Ireduce), waits(Iallreduce)
    Reduce_scatter, Reduce_scatter_block = waits(Ireduce_scatter), waits(Ireduce_scatter_block)
    Scan, Exscan = waits(Iscan), waits(Iexscan)

    def _comparing(
        self, name: str, data: Buffer, count: int | None = None, *, op: Op | None = None, root: int | None = None
    ) -> Communicator:
        """Return a communicator for one call whose ranks compare datatype, count, operator and root."""
        size = None if count is None else f"[{count}]"
        what = Fingerprint(name, data.words(), size, None if op is None else op.name, root)
        return cast(Communicator, parts_of(self.coll).comparing(what))

    def _request(self, handle: Handle[Any] | None, finish: Callable[[Any], Any] | None = None) -> Request:
        return Request(self._loop, handle, finish)


class NullComm(Comm):
    """`COMM_NULL`, which is false. Each call raises an `MPI.Exception` of ERR_COMM."""

    def __init__(self) -> None:
        self._freed = True

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        if name in ("name", "Get_name"):
            return "MPI_COMM_NULL" if name == "name" else lambda: "MPI_COMM_NULL"
        if callable(getattr(Comm, name, None)):
            return partial(self._refuse, name)
        if hasattr(Comm, name) or name in ("coll", "alone"):
            self._refuse(name)
        return super().__getattribute__(name)

    def __hash__(self) -> int:
        return object.__hash__(self)

    @staticmethod
    def _refuse(name: str, *_: object, **__: object) -> NoReturn:
        raise MPIError(CLASSES["ERR_COMM"], f"{name} of COMM_NULL, which has no ranks: expected a communicator")


COMM_NULL = NullComm()
