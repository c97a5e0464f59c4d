"""gloo, which torch brings along: ranks over TCP where there is no MPI.

No global state of `torch.distributed` is set: process groups of gloo's are made and used directly.

[Note: gloo] What was found out about torch 2.13's gloo, and what follows from it:

- Of a send or receive only `Work.wait()` learns that it is over: `is_completed()` stays False, there is no future,
  and `abort()` ends no wait. A wait that times out closes every connection of its group, so that all other waits
  raise; this is how a group is given up here.
- A receive from any source sees neither dead peers nor closed connections.
- A message longer than its receive ends the *process* (`std::terminate` in gloo's thread). So do collectives whose
  ranks disagree on a size.
- A collective's future calls back from gloo's own thread, before `is_completed()` turns True.
- A thread that returns from gloo while the interpreter ends, ends the process too (SIGABRT): `atexit` closes what is
  open.

So ranks tell each other everything in *frames*: a header, then the data if it is short. One thread per peer waits for
frames, whose receives are always posted. Longer data is announced by a frame, received when its size is known and a
receive was matched, and then acknowledged. Matching is done here, so receives from any source work, and a message of
another size than its receive is an error. A collective starts with an exchange of frames, which shows whether the
ranks agree; a short one is over then, as the frames carried the data; for a long one gloo's own goes ahead.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import os
import socket
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from ctypes import memmove
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from aiodist.backends.base import Capabilities, Done, Native
from aiodist.errors import AiodistError, BackendError, BackendUnavailable, MismatchError
from aiodist.handles import Handle, Origin, Progress, from_future, from_source
from aiodist.handles.progress import transport_lock
from aiodist.types import ANY, ReduceOp

try:
    from torch._C import _distributed_c10d as c10d
    from torch._C._distributed_c10d import PrefixStore, Store, Work
except ImportError as error:
    raise BackendUnavailable(f"this torch was built without gloo: install one from pytorch.org ({error})") from error

if TYPE_CHECKING:
    from aiodist.control import Channel

__all__ = ["GlooNative", "GlooTransport", "open_world", "work_handle"]

T = TypeVar("T")

_FOREVER = timedelta(days=3000)  # deadlines are the handles' business
_SETUP_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_MISMATCH_SECONDS = 2.0
_PIECE_BYTES = 1 << 30
_POSTED = 4  # receives of frames that wait at each peer
_CREDIT = 64  # frames after which a peer that hears nothing from us is told that they came

_FRAMES, _NEVER, _PAYLOADS, _LAST_PAYLOAD = 0, 1, 2, 1 << 30  # gloo's tags

_HEADER = struct.Struct("<B3xiQqqq24s")  # kind, tag, communicator, number, bytes of data, frames received, signature
_HEADER_BYTES = _HEADER.size  # 64: what follows is aligned for every dtype
_MESSAGE, _OFFER, _TAKEN, _ROUND, _CREDITS = range(5)

_SIGNATURE = struct.Struct("<4s4s4siq")  # operation, operator, dtype, root or digest, elements

_GLOO_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_GLOO_FLOATS = frozenset({torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_WIRE = _GLOO_INTEGERS | _GLOO_FLOATS | _COMPLEX | {torch.int16}
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_GLOO_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.PROD: c10d.ReduceOp.PRODUCT,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
    ReduceOp.BAND: c10d.ReduceOp.BAND,
    ReduceOp.BOR: c10d.ReduceOp.BOR,
    ReduceOp.BXOR: c10d.ReduceOp.BXOR,
}
_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class _ProcessGroup(Protocol):
    """What is used of `ProcessGroupGloo`."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...

    def allreduce(self, tensors: list[Tensor], options: c10d.AllreduceOptions, /) -> Work: ...

    def reduce(self, tensors: list[Tensor], options: c10d.ReduceOptions, /) -> Work: ...


# --- frames ------------------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """A frame that came; `data` is a view of memory that is used again."""

    kind: int
    tag: int
    comm: int
    number: int
    nbytes: int
    acknowledged: int
    signature: bytes
    data: Tensor

    def kept(self) -> _Frame:
        """Return it with data of its own."""
        return self._replace(data=self.data.clone())


class _Member(Protocol):
    """A communicator, as frames see it; called with the transport lock held, with ranks of the world."""

    def came(self, src: int, frame: _Frame) -> None: ...

    def lost(self, world_rank: int, error: BackendError) -> None: ...


class _Peer:
    """What goes to and comes from one other rank of the world; with the transport lock held, save where it says so."""

    def __init__(self, wire: _Wire, rank: int) -> None:
        self._wire = wire
        self.rank = rank
        self.error: BackendError | None = None
        """Why it can no longer be reached."""
        self._sent: deque[Work] = deque()
        """Frames that must stay alive until the peer says that they came."""
        self._offers: dict[int, tuple[list[Work], Done]] = {}
        self._next_payload = _PAYLOADS
        self._received = self._told = self._acknowledged = 0
        self._payloads: SimpleQueue[tuple[list[Work], Done] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._hear, name=f"aiodist-gloo-{rank}", daemon=True)]
        self._threads[0].start()

    # Sending.

    def send(
        self,
        kind: int,
        *,
        tag: int = 0,
        comm: int = 0,
        number: int = 0,
        nbytes: int = 0,
        signature: bytes = b"",
        data: Tensor | None = None,
    ) -> BackendError | None:
        """Send a frame with a copy of `data`; return why that cannot be done."""
        if self.error is not None:
            return self.error
        inline = 0 if data is None else data.nbytes
        frame = torch.empty(_HEADER_BYTES + inline, dtype=torch.uint8, device="cpu")
        address = frame.data_ptr()
        self._told = self._received
        memmove(address, _HEADER.pack(kind, tag, comm, number, nbytes, self._told, signature), _HEADER_BYTES)
        if data is not None:
            memmove(address + _HEADER_BYTES, data.data_ptr(), inline)
        try:
            self._sent.append(self._wire.group.send([frame], self.rank, _FRAMES))
        except RuntimeError as error:
            return _backend_error(error)
        return None

    def offer(self, t: Tensor, tag: int, comm: int, done: Done) -> None:
        """Announce `t` and send it; done when the peer says that it came."""
        pieces = _pieces(_bytes(t))
        if self._next_payload + len(pieces) > _LAST_PAYLOAD:
            self._next_payload = _PAYLOADS
        number = self._next_payload
        self._next_payload += len(pieces)
        error = self.send(_OFFER, tag=tag, comm=comm, number=number, nbytes=t.nbytes)
        works: list[Work] = []
        try:
            if error is None:
                send = self._wire.group.send
                works = [send([piece], self.rank, number + i) for i, piece in enumerate(pieces)]
        except RuntimeError as raised:
            error = _backend_error(raised)
        if error is None:
            self._offers[number] = works, done
        else:
            done(_again(error))

    def fetch(self, number: int, into: Tensor, done: Done) -> None:
        """Receive what was offered as `number` into the bytes `into`."""
        try:
            receive = self._wire.group.recv
            pieces = _pieces(into)
            works = [receive([piece], self.rank, number + i) for i, piece in enumerate(pieces)]
        except RuntimeError as error:
            done(_backend_error(error))
            return

        def over(error: BaseException | None) -> None:
            if error is None:
                self.send(_TAKEN, number=number)
            done(error)

        if len(self._threads) == 1:
            self._threads.append(
                threading.Thread(target=self._collect, name=f"aiodist-gloo-{self.rank}-data", daemon=True)
            )
            self._threads[1].start()
        self._payloads.put((works, over))

    # Receiving: on threads of its own, which take the lock to tell what came.

    def _hear(self) -> None:
        """Wait for frames until the connection is gone."""
        try:
            works = deque(self._post(_empty(_HEADER_BYTES + self._wire.capacity)) for _ in range(_POSTED))
            while True:
                work, buffer, view = works.popleft()
                work.wait(_FOREVER)
                self._wire.tell(partial(self._came, buffer, view))
                works.append(self._post(buffer, view))
        except RuntimeError as error:
            self._wire.tell(partial(self._gone, _backend_error(error)))

    def _post(self, buffer: Tensor, view: memoryview | None = None) -> tuple[Work, Tensor, memoryview]:
        work = self._wire.group.recv([buffer], self.rank, _FRAMES)
        return work, buffer, memoryview(cast(Any, buffer.numpy())) if view is None else view

    def _came(self, buffer: Tensor, view: memoryview) -> None:
        kind, tag, comm, number, nbytes, acknowledged, signature = _HEADER.unpack_from(view)
        data = buffer[_HEADER_BYTES : _HEADER_BYTES + (nbytes if kind in (_MESSAGE, _ROUND) else 0)]
        frame = _Frame(kind, tag, comm, number, nbytes, acknowledged, signature, data)
        self._received += 1
        for _ in range(frame.acknowledged - self._acknowledged):
            self._sent.popleft()
        self._acknowledged = frame.acknowledged
        if self._received - self._told >= _CREDIT:
            self.send(_CREDITS)
        if kind == _TAKEN:
            _, done = self._offers.pop(number)
            done(None)
        elif kind != _CREDITS:
            self._wire.came(self.rank, frame)

    def _collect(self) -> None:
        """Wait for data, in the order of its receives: the peer has sent all of it already."""
        while (item := self._payloads.get()) is not None:
            works, over = item
            failure: BackendError | None = None
            try:
                for work in works:
                    work.wait(_FOREVER)
            except RuntimeError as error:
                failure = _backend_error(error)
            self._wire.tell(partial(over, failure))
            del works, over, item

    def _gone(self, error: BackendError) -> None:
        if self.error is None:
            self.error = error
            self.give_up(error)
            self._wire.lost(self.rank, error)

    def give_up(self, error: BackendError) -> None:
        """What was not taken never will be."""
        offers, self._offers = self._offers, {}
        for _, done in offers.values():
            done(_again(error))

    def join(self, until: float) -> bool:
        """Wait for its threads, without the lock, once the connection is closed; return whether they ended."""
        self._payloads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        self._sent.clear()
        return not any(thread.is_alive() for thread in self._threads)


class _Wire:
    """Frames between the ranks of the world, for all communicators; with the transport lock held."""

    def __init__(self, group: _ProcessGroup, rank: int, size: int, progress: Progress) -> None:
        self.group = group
        self.progress = progress
        self.capacity = max(4096, (1 << 20) // size)
        """The longest data that travels in a frame, in bytes."""
        self._open: dict[int, _Member] = {}
        self._closed: set[int] = set()
        self._early: dict[int, list[tuple[int, _Frame]]] = {}
        """Frames for communicators that this rank has not made yet."""
        self._closing = False
        self.groups: set[_Group] = set()
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self.peers = {other: _Peer(self, other) for other in range(size) if other != rank}

    def join(self, comm: int, member: _Member) -> None:
        """Deliver the frames of `comm` to `member`."""
        self._open[comm] = member
        for src, frame in self._early.pop(comm, ()):
            member.came(src, frame)
        for peer in self.peers.values():
            if peer.error is not None:
                member.lost(peer.rank, peer.error)

    def leave(self, comm: int) -> None:
        """Throw the frames of `comm` away."""
        self._open.pop(comm, None)
        self._early.pop(comm, None)
        self._closed.add(comm)

    def tell(self, fn: Callable[[], None]) -> None:
        """Call `fn`, which may complete operations, from a thread of ours: it takes the lock."""
        with transport_lock:
            try:
                fn()
            except Exception as error:  # noqa: BLE001  - it must not end the thread
                self.progress.report("what a frame completed failed", error)
            self.progress.called()

    def came(self, src: int, frame: _Frame) -> None:
        """Deliver `frame`."""
        member = self._open.get(frame.comm)
        if member is not None:
            member.came(src, frame)
        elif frame.comm not in self._closed:
            self._early.setdefault(frame.comm, []).append((src, frame.kept()))

    def lost(self, rank: int, error: BackendError) -> None:
        """Tell every communicator that `rank` cannot be reached."""
        if not self._closing:
            for member in list(self._open.values()):
                member.lost(rank, error)

    def give_up(self, error: BackendError) -> None:
        """Nothing is sent or received any more."""
        self._closing = True
        for peer in self.peers.values():
            peer.error = peer.error or error
            peer.give_up(error)

    def _at_exit(self) -> None:
        """Nobody closed it. A thread that comes back from gloo while the interpreter ends would end the process."""
        if os.getpid() == self._pid:
            self.close()

    def close(self) -> None:
        """End the threads and close the connections; without the lock, blocks for `_CLOSE_SECONDS` at most."""
        atexit.unregister(self._at_exit)
        for group in list(self.groups):
            group.close()
        _cut(self.group, self.peers)
        until = monotonic() + _CLOSE_SECONDS
        if all([peer.join(until) for peer in self.peers.values()]):  # noqa: C419  - each is to be joined
            del self.group


class _Disputes:
    """Operations that fail because ranks disagree; nothing is lost by that, what follows goes on.

    The ledger of the layer above sees the same, knows the lines of code and gives the operation up. Only when it
    has not, after a while, they fail here. With the transport lock held.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: dict[int, tuple[Done, AiodistError]] = {}
        self._numbers = itertools.count()

    def add(self, done: Done, error: AiodistError) -> None:
        """Call `done(error)` a little later."""
        number = next(self._numbers)
        self._open[number] = done, error
        progress = self._progress

        def settle() -> None:
            if self._open.pop(number, None) is not None:
                done(error)

        def later() -> None:
            progress.loop.call_later(_MISMATCH_SECONDS, progress.start, settle)

        progress.post(later)

    def settle(self) -> None:
        """Call them now."""
        disputed, self._open = self._open, {}
        for done, error in disputed.values():
            done(error)


# --- collectives -------------------------------------------------------------------------------------------


class _Group:
    """One process group of gloo's, for the long collectives of one communicator."""

    def __init__(self, group: _ProcessGroup, others: Sequence[int]) -> None:
        self._group: _ProcessGroup | None = group
        self._others = others
        self._running = 0
        self._cutter: threading.Thread | None = None

    def run(self, calls: Sequence[Callable[[_ProcessGroup], Work]], done: Done) -> None:
        """Start collectives, `done` when all are over; with the transport lock held."""
        left = len(calls)
        first: BaseException | None = None

        def over(error: BaseException | None) -> None:
            nonlocal left, first
            left -= 1
            first = first or error
            if left == 0:
                done(first)

        for call in calls:
            self._start(call, over)

    def _start(self, call: Callable[[_ProcessGroup], Work], over: Done) -> None:
        if self._group is None:
            over(BackendError("gloo: the transport is closed"))
            return
        try:
            future = call(self._group).get_future()
        except (RuntimeError, TypeError) as error:
            over(_backend_error(error))
            return
        starting: int | None = threading.get_ident()

        def ended(future: torch.futures.Future[Any]) -> None:
            error = _future_error(future)
            if starting == threading.get_ident():  # it was over before it could be watched: we hold the lock
                self._running -= 1
                over(error)
            else:
                with transport_lock:
                    self._running -= 1
                    over(error)

        self._running += 1
        future.add_done_callback(ended)
        starting = None

    def cut(self) -> None:
        """Have what runs fail, soon; with the lock held."""
        if self._running and self._group is not None and self._cutter is None:
            self._cutter = threading.Thread(target=_cut, args=(self._group, self._others), daemon=True)
            self._cutter.start()

    def close(self) -> None:
        """Close the connections; without the lock, blocks for `_CLOSE_SECONDS` at most."""
        group = self._group
        if group is None:
            return
        if self._cutter is not None:
            self._cutter.join()
        elif self._running:
            _cut(group, self._others)
        until = monotonic() + _CLOSE_SECONDS
        with transport_lock:
            self._group = None
        pause = threading.Event()
        while self._running and monotonic() < until:
            pause.wait(2e-3)
        if self._running:  # destroying it would wait for what runs, for ever: a thread keeps it instead
            threading.Thread(target=_keep, args=(group,), daemon=True).start()


def _keep(_group: _ProcessGroup) -> None:
    threading.Event().wait()


@dataclass(eq=False)
class _Round:
    """One collective: what each rank brought to it so far."""

    signature: bytes
    finish: Callable[[list[Tensor]], None] | None
    calls: Sequence[Callable[[_ProcessGroup], Work]]
    """What gloo is to do where frames do not suffice."""
    done: Done
    signatures: dict[int, bytes] = field(default_factory=dict)
    parts: dict[int, Tensor] = field(default_factory=dict)


class GlooNative:
    """Collectives: short ones in one exchange of frames, long ones by gloo once the ranks have shown that they agree.

    p ranks, n bytes: a short one costs p-1 frames of n bytes in and out and one latency; its parts are combined in
    rank order.
    """

    def __init__(
        self, wire: _Wire, comm: int, rank: int, world_ranks: Sequence[int], group: _Group, disputes: _Disputes
    ) -> None:
        self.group = group
        self._disputes = disputes
        self._comm = comm
        self._rank = rank
        self._size = len(world_ranks)
        self._limit = wire.capacity
        self._others = [wire.peers[other] for other in world_ranks if other in wire.peers]
        self._seq = 0
        self._rounds: dict[int, _Round] = {}
        self._early: dict[int, list[tuple[int, _Frame]]] = {}

    # What it offers.

    def supports(self, operation: str, kind: torch.dtype, op: ReduceOp | None, numel: int) -> bool:
        """Return True for reductions, long ones where gloo has the dtype and the operator."""
        if operation not in _CODES or op not in _COMBINE or kind not in _WIRE:
            return False
        if (op in _BITWISE and kind not in _INTEGERS) or (op in _ORDERED and kind in _COMPLEX):
            return False
        if numel * kind.itemsize <= self._limit:
            return operation != "reduce"  # the others send to the root and need not wait
        if operation not in ("allreduce", "reduce"):
            return False
        return kind in _GLOO_INTEGERS or kind in _GLOO_FLOATS or (op is ReduceOp.SUM and kind in _COMPLEX)

    def plan_allreduce(self, kind: torch.dtype, numel: int, op: ReduceOp) -> Callable[[Tensor, Done], None]:
        """Return `allreduce` for such tensors, with all that can be known ahead worked out."""
        return partial(self._allreduce, signature=_sign("allreduce", kind, numel, op), op=op)

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place on every rank."""
        self._allreduce(t, done, _sign("allreduce", t.dtype, t.numel(), op), op)

    def _allreduce(self, t: Tensor, done: Done, signature: bytes, op: ReduceOp) -> None:
        if t.nbytes > self._limit:
            self._begin(_Round(signature, None, _calls(t, partial(_gloo_allreduce, op)), done), None)
            return

        def finish(parts: list[Tensor]) -> None:
            _combine(parts, t, op)

        self._begin(_Round(signature, finish, (), done), t)

    def reduce(self, t: Tensor, op: ReduceOp, root: int, done: Done) -> None:
        """Reduce into root's `t`; gloo uses the others' as scratch, so they give it copies."""
        given = t if self._rank == root else t.detach().clone()
        signature = _sign("reduce", t.dtype, t.numel(), op, root)
        self._begin(_Round(signature, None, _calls(given, partial(_gloo_reduce, op, root)), done), None)

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp, done: Done) -> None:
        """Reduce short `t` and give rank r the `counts[r]` elements of block r in `out`."""
        start = sum(counts[: self._rank])

        def finish(parts: list[Tensor]) -> None:
            first = start * t.element_size()
            _combine([part[first : first + out.nbytes] for part in parts], out, op)

        digest = zlib.crc32(repr(tuple(counts)).encode()) >> 1
        self._begin(_Round(_sign("reduce_scatter", t.dtype, t.numel(), op, digest), finish, (), done), t)

    def scan(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce short `t` in place over the ranks up to this one."""

        def finish(parts: list[Tensor]) -> None:
            if self._rank:
                _combine(parts[: self._rank + 1], t, op)

        self._begin(_Round(_sign("scan", t.dtype, t.numel(), op), finish, (), done), t)

    def broadcast(self, t: Tensor, root: int, done: Done) -> None:
        """Not offered: direct sends spare the ranks the wait for one another."""
        done(BackendError("gloo: broadcast is not native here"))

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int], done: Done) -> None:
        """Not offered: direct sends cost as many messages, and no exchange before."""
        done(BackendError("gloo: allgather is not native here"))

    # The exchange.

    def _begin(self, round: _Round, data: Tensor | None) -> None:
        number = self._seq
        self._seq += 1
        nbytes = 0 if data is None else data.nbytes
        error = next((peer.error for peer in self._others if peer.error is not None), None)
        for peer in self._others:
            error = error or peer.send(
                _ROUND, comm=self._comm, number=number, nbytes=nbytes, signature=round.signature, data=data
            )
        early = self._early.pop(number, ())
        if error is not None:
            round.done(_again(error))
            return
        self._add(round, self._rank, round.signature, _nothing if data is None else _bytes(data))
        self._rounds[number] = round
        for src, frame in early:
            self._add(round, src, frame.signature, frame.data)
        self._conclude(number, round)

    def came(self, src: int, frame: _Frame) -> None:
        """A rank of this communicator came to round `frame.number`."""
        round = self._rounds.get(frame.number)
        if round is not None:
            last = len(round.parts) == self._size - 1
            self._add(round, src, frame.signature, frame.data if last else frame.data.clone())
            self._conclude(frame.number, round)
        elif frame.number >= self._seq:
            self._early.setdefault(frame.number, []).append((src, frame.kept()))

    def _add(self, round: _Round, src: int, signature: bytes, data: Tensor) -> None:
        round.signatures[src] = signature
        round.parts[src] = data

    def _conclude(self, number: int, round: _Round) -> None:
        """Go on with `round` when all have come.

        All ranks come to this point in the same order, as gloo demands of its collectives: each peer's frames arrive
        in the order of its calls, so an earlier round is complete before a later one.
        """
        if len(round.parts) < self._size:
            return
        del self._rounds[number]
        if any(signature != round.signature for signature in round.signatures.values()):
            brought = "; ".join(f"rank {rank}: {_read(text)}" for rank, text in sorted(round.signatures.items()))
            self._disputes.add(round.done, MismatchError(f"the ranks disagree: {brought}"))
            return
        if round.finish is None:
            self.group.run(round.calls, round.done)
            return
        error: BackendError | None = None
        try:
            round.finish([round.parts[rank] for rank in range(self._size)])
        except RuntimeError as raised:
            error = _backend_error(raised)
        round.done(error)

    def give_up(self, error: BackendError) -> None:
        """What is under way never ends."""
        rounds, self._rounds = self._rounds, {}
        for round in rounds.values():
            round.done(_again(error))
        self.group.cut()


_INTEGERS = _GLOO_INTEGERS | {torch.int16}
_CODES = {"allreduce": b"ared", "reduce": b"redu", "reduce_scatter": b"rsca", "scan": b"scan"}
_nothing = torch.empty(0, dtype=torch.uint8)


def _sign(operation: str, kind: torch.dtype, numel: int, op: ReduceOp, root: int = 0) -> bytes:
    name = f"{'c' if kind.is_complex else 'f' if kind.is_floating_point else 'i' if kind.is_signed else 'u'}"
    return _SIGNATURE.pack(_CODES[operation], op.encode(), f"{name}{8 * kind.itemsize}".encode(), root, numel)


def _read(signature: bytes) -> str:
    code, op, kind, root, numel = _SIGNATURE.unpack(signature)
    operation = next(name for name, known in _CODES.items() if known == code)
    where = f", root {root}" if operation == "reduce" else ""
    return f"{operation} {op.rstrip(bytes(1)).decode()} of {numel} {kind.rstrip(bytes(1)).decode()}{where}"


def _combine(parts: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
    """Combine bytes `parts`, in order, into `out`, which may be one of them."""
    # Through NumPy, for a tensor without a history: `out` may need a gradient or be one of inference mode's.
    target = torch.from_numpy(out.detach().view(-1).numpy())
    combine = _COMBINE[op]
    typed = [part.view(out.dtype) for part in parts]
    total = typed[0]
    for i, part in enumerate(typed[1:], 2):
        total = combine(total, part, out=target) if i == len(typed) else combine(total, part)


def _calls(t: Tensor, call: Callable[[Tensor, _ProcessGroup], Work]) -> list[Callable[[_ProcessGroup], Work]]:
    flat = t.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return [partial(call, piece) for piece in _pieces(flat)]


def _gloo_allreduce(op: ReduceOp, t: Tensor, group: _ProcessGroup) -> Work:
    options = c10d.AllreduceOptions()
    options.reduceOp = _GLOO_OPS[op]
    options.timeout = _FOREVER
    return group.allreduce([t], options)


def _gloo_reduce(op: ReduceOp, root: int, t: Tensor, group: _ProcessGroup) -> Work:
    options = c10d.ReduceOptions()
    options.reduceOp = _GLOO_OPS[op]
    options.rootRank = root
    options.timeout = _FOREVER
    return group.reduce([t], options)


# --- the transport -----------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """A receive that waits for its message."""

    src: int
    tag: int
    into: Tensor
    done: Done


class _Message(NamedTuple):
    """A message that came before its receive, or that it was offered."""

    src: int
    tag: int
    nbytes: int
    data: Tensor
    offer: int
    """Its number where the data is still to be fetched, else 0."""


class GlooTransport:
    """One communicator over gloo. That of the world owns the connections, the others borrow them."""

    name = "gloo"

    def __init__(
        self,
        meeting: _Meeting,
        wire: _Wire | None,
        path: str,
        world_ranks: Sequence[int],
        group: _ProcessGroup | None,
    ) -> None:
        """`world_ranks` are its ranks' ranks in the world, in order; `path` is its name, the same on all of them.

        A rank that is alone has neither `wire` nor `group`.
        """
        self._meeting = meeting
        self._wire = wire
        self._path = path
        self._world_ranks = tuple(world_ranks)
        self._local = {world: rank for rank, world in enumerate(world_ranks)}
        self.rank = self._local[meeting.rank]
        self.size = len(world_ranks)
        self._comm = zlib.crc32(path.encode()) | zlib.adler32(path.encode()) << 32
        self._wanted: list[_Wanted] = []
        self._unexpected: list[_Message] = []
        self._closed = False
        self._disputes = _Disputes(Progress.current())
        self._native: GlooNative | None = None
        if wire is not None and group is not None:
            long = _Group(group, [rank for rank in range(self.size) if rank != self.rank])
            self._native = GlooNative(wire, self._comm, self.rank, world_ranks, long, self._disputes)
            with transport_lock:
                wire.groups.add(long)
                wire.join(self._comm, self)
        self.native: Native | None = self._native

    def capabilities(self) -> Capabilities:
        """Return what it can do."""
        return Capabilities(short_receives=False)

    # Messages.

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send `t`; done at once when it is short, else when it was received."""
        if dst == self.rank or self._wire is None:
            self._arrived(_Message(self.rank, tag, t.nbytes, _bytes(t).clone(), 0))
            done(None)
            return
        peer = self._wire.peers[self._world_ranks[dst]]
        if t.nbytes <= self._wire.capacity:
            error = peer.send(_MESSAGE, tag=tag, comm=self._comm, nbytes=t.nbytes, data=t)
            done(error and _again(error))
        else:
            peer.offer(t, tag, self._comm, done)

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t` a message of its size."""
        wanted = _Wanted(src, tag, t, done)
        for i, message in enumerate(self._unexpected):
            if _matches(wanted, message):
                del self._unexpected[i]
                self._deliver(message, wanted)
                return
        error = self.error_of(src)
        if error is not None:
            done(_again(error))
        else:
            self._wanted.append(wanted)

    def _arrived(self, message: _Message) -> None:
        for i, wanted in enumerate(self._wanted):
            if _matches(wanted, message):
                del self._wanted[i]
                self._deliver(message, wanted)
                return
        self._unexpected.append(message if message.offer else message._replace(data=message.data.clone()))

    def _deliver(self, message: _Message, wanted: _Wanted) -> None:
        nbytes, done = message.nbytes, wanted.done
        fits = nbytes == wanted.into.nbytes
        if not fits:
            refusal = BackendError(f"a message of {nbytes} bytes met a receive of {wanted.into.nbytes}")
            done = partial(self._refuse, refusal, done)
        if not message.offer:
            if fits:
                memmove(wanted.into.data_ptr(), message.data.data_ptr(), nbytes)
            done(None)
            return
        # What does not fit is received all the same, so that its sender is rid of it.
        assert self._wire is not None
        peer = self._wire.peers[self._world_ranks[message.src]]
        peer.fetch(message.offer, _bytes(wanted.into) if fits else _empty(nbytes), done)

    def _refuse(self, refusal: BackendError, done: Done, error: BaseException | None) -> None:
        if error is None:
            self._disputes.add(done, refusal)
        else:
            done(error)

    # What the wire tells.

    def came(self, src: int, frame: _Frame) -> None:
        """A frame from rank `src` of the world."""
        local = self._local[src]
        if frame.kind == _ROUND:
            if self._native is not None:
                self._native.came(local, frame)
        else:
            number = frame.number if frame.kind == _OFFER else 0
            self._arrived(_Message(local, frame.tag, frame.nbytes, frame.data, number))

    def lost(self, world_rank: int, error: BackendError) -> None:
        """Rank `world_rank` of the world cannot be reached: what needs it fails."""
        rank = self._local.get(world_rank)
        if rank is None:
            return
        waiting, self._wanted = self._wanted, []
        for wanted in waiting:
            if wanted.src in (rank, ANY):
                wanted.done(_again(error))
            else:
                self._wanted.append(wanted)
        if self._native is not None:
            self._native.give_up(error)

    def error_of(self, src: int) -> BackendError | None:
        """Return why `src`, for `ANY` one of the others, cannot be reached."""
        if self._wire is None:
            return None
        ranks = self._world_ranks if src == ANY else (self._world_ranks[src],)
        errors = (self._wire.peers[rank].error for rank in ranks if rank in self._wire.peers)
        return next((error for error in errors if error is not None), None)

    # Its life.

    async def split(self, ranks: Sequence[int], name: str) -> GlooTransport:
        """Return a transport among `ranks`, with a process group of its own; the connections take some milliseconds."""
        path = f"{self._path}/{name}"
        world_ranks = [self._world_ranks[rank] for rank in ranks]
        if len(ranks) == 1:
            return GlooTransport(self._meeting, None, path, world_ranks, None)
        group = await self._meeting.group(path, list(ranks).index(self.rank), len(ranks))
        return GlooTransport(self._meeting, self._wire, path, world_ranks, group)

    async def aclose(self, *, drained: bool) -> None:
        """Close it; what is pending fails. The world's closes the connections, which all its splits use."""
        if self._closed:
            return
        self._closed = True
        owner = self._path == _WORLD
        try:
            if drained and owner and self.size > 1:
                await self._meeting.part()
        finally:  # also when this call is cancelled
            with transport_lock:
                self._give_up(BackendError("gloo: the transport was closed"), owner)
            closing = _started(partial(self._close, owner))
        await asyncio.wrap_future(closing)

    def _give_up(self, error: BackendError, owner: bool) -> None:
        wanted, self._wanted = self._wanted, []
        for receive in wanted:
            receive.done(_again(error))
        self._disputes.settle()
        if self._native is not None:
            self._native.give_up(error)
        if self._wire is not None:
            self._wire.leave(self._comm)
            if owner:
                self._wire.give_up(error)

    def _close(self, owner: bool) -> None:
        if self._wire is not None and self._native is not None:
            self._native.group.close()
            self._wire.groups.discard(self._native.group)
            if owner:
                self._wire.close()
                self._meeting.devices.clear()


def _matches(wanted: _Wanted, message: _Message) -> bool:
    return wanted.tag == message.tag and wanted.src in (ANY, message.src)


# --- setting up --------------------------------------------------------------------------------------------

_WORLD = "world"


class _ChannelStore(Store):
    """What gloo asks while its ranks connect, answered by the control channel; gloo calls it in a thread."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._channel = channel
        self._loop = loop
        self._asking: concurrent.futures.Future[Any] | None = None
        self._given_up = False
        self.error: BaseException | None = None

    def set(self, key: str, value: Any) -> None:  # noqa: ANN401  - bytes, where the stub says str
        """Store `value`."""
        self._ask(self._channel.set(f"gloo/{key}", bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for `key`."""
        value: bytes = self._ask(self._channel.get(f"gloo/{key}", timeout=_SETUP_SECONDS))
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all of `keys`."""
        for key in keys:
            self.get(key)

    def give_up(self) -> None:
        """Have what waits raise, from the loop's thread."""
        self._given_up = True
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self, question: Any) -> Any:  # noqa: ANN401
        try:
            self._asking = asyncio.run_coroutine_threadsafe(question, self._loop)
            if self._given_up:
                self._asking.cancel()
            return self._asking.result()
        except BaseException as error:
            self.error = error
            raise


class _Meeting:
    """How process groups are made: over the control channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.devices: list[Any] = []
        self.rank = channel.rank

    async def group(self, name: str, rank: int, size: int) -> _ProcessGroup:
        """Return the process group `name`, which all its ranks make at the same time."""
        if not self.devices:
            one_host = await self._on_one_host()
            self.devices = [await _in_thread(partial(_device, one_host))]
        store = _ChannelStore(self._channel, asyncio.get_running_loop())
        try:
            return await _in_thread(partial(self._connect, PrefixStore(name, store), rank, size))
        except asyncio.CancelledError:
            store.give_up()
            raise
        except Exception as error:
            if isinstance(store.error, AiodistError):
                raise store.error from error
            raise _backend_error(error) from error

    def _connect(self, store: Store, rank: int, size: int) -> _ProcessGroup:
        make: Any = c10d.ProcessGroupGloo  # its stub lacks most of it
        options = make._Options()
        options._devices = self.devices
        options._threads = 2
        options._timeout = timedelta(seconds=_SETUP_SECONDS)
        return cast(_ProcessGroup, make(store, rank, size, options))

    async def _on_one_host(self) -> bool:
        """Return whether all ranks are, so that they can use the loopback interface."""
        channel = self._channel
        await channel.set(f"gloo/host/{channel.rank}", _host().encode())
        hosts = [await channel.get(f"gloo/host/{rank}", timeout=_SETUP_SECONDS) for rank in range(channel.size)]
        return len(set(hosts)) == 1

    async def part(self) -> None:
        """Wait until all ranks are about to close: a connection that is closed takes what is under way with it."""
        with suppress(AiodistError, RuntimeError):
            if await self._channel.add("gloo/parting") == self._channel.size:
                await self._channel.set("gloo/parted", b"")
            await self._channel.get("gloo/parted", timeout=_CLOSE_SECONDS)


def _device(one_host: bool) -> Any:  # noqa: ANN401
    if one_host:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return c10d.ProcessGroupGloo.create_default_device()


def _host() -> str:
    """Return what no two hosts share: containers may have the same name."""
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}"
    return socket.gethostname()


async def open_world(channel: Channel) -> GlooTransport:
    """Return a transport over all ranks of `channel`; every rank must call it, once in the channel's life.

    gloo connects in a thread, so the loop goes on; cancelling leaves nothing behind but that thread, for a while.
    Raises `BackendError` when the ranks cannot connect, `OperationTimeout` or `PeerLost` when one is not there.
    """
    meeting = _Meeting(channel)
    if channel.size == 1:
        return GlooTransport(meeting, None, _WORLD, (0,), None)
    frames = await meeting.group("frames", channel.rank, channel.size)
    group = await meeting.group(_WORLD, channel.rank, channel.size)
    wire = _Wire(frames, channel.rank, channel.size, Progress.current())
    return GlooTransport(meeting, wire, _WORLD, range(channel.size), group)


class _WorkSource:
    """A torch Work that can be asked: gloo's collectives, and NCCL's works, whose futures are done too early."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def poll(self) -> bool:
        return self._work.is_completed()

    def result(self) -> None:
        self._work.wait()


def work_handle(work: Work) -> Handle[None]:
    """Return a handle that is done when the user's own `work` is.

    gloo's sends and receives can only be waited for: each takes a thread until it is over.
    """

    def wait() -> None:
        work.wait()

    try:
        work.get_future()
    except RuntimeError:
        return from_future(_started(wait), "work")
    return from_source(_WorkSource(work), "work", origin=Origin.here())


# --- helpers -----------------------------------------------------------------------------------------------


def _bytes(t: Tensor) -> Tensor:
    return t.detach().view(-1).view(torch.uint8)


def _pieces(flat: Tensor) -> list[Tensor]:
    """Return `flat` in pieces whose counts every library can hold."""
    most = _PIECE_BYTES // flat.element_size()
    return [flat[start : start + most] for start in range(0, max(1, flat.numel()), most)]


def _empty(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _backend_error(error: Exception) -> BackendError:
    """Return our error with gloo's text, less torch's own stack, raised from torch's."""
    wrapped = BackendError(f"gloo: {str(error).partition(chr(10) + 'Exception raised from')[0]}")
    wrapped.__cause__ = error.with_traceback(None)  # its frames hold tensors and connections
    return wrapped


def _again(error: BackendError) -> BackendError:
    """Return it anew: each operation writes its own place into its error."""
    again = copy(error)
    again.__cause__ = error.__cause__
    return again


def _future_error(future: torch.futures.Future[Any]) -> BackendError | None:
    try:
        future.value()
    except Exception as error:  # noqa: BLE001  - torch chooses the class
        return _backend_error(error)
    return None


def _cut(group: _ProcessGroup, others: Sequence[int] | dict[int, _Peer]) -> None:
    """Close the connections of `group`: a wait that times out does that. It blocks for milliseconds."""
    for rank in others:
        with suppress(RuntimeError):
            group.recv([_empty(1)], rank, _NEVER).wait(timedelta(milliseconds=1))


def _started(fn: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `fn` in a daemon thread of its own: it may block for long, and nobody must wait for it at exit."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = fn()
        except BaseException as error:  # noqa: BLE001  - it belongs to whoever waits
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name="aiodist-gloo-call", daemon=True).start()
    return future


async def _in_thread(fn: Callable[[], T]) -> T:
    return await asyncio.wrap_future(_started(fn))
