"""`Communicator`: the collectives and messages of a group of ranks, each call an awaitable handle.

A call checks its arguments and issues the operation; awaiting the handle completes it. Every rank must issue the
same collectives in the same order. This module owns no algorithm: see `collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from aiodist import objects
from aiodist.arguments import check_apart, check_list, check_out, check_rank, check_sizes, check_tag, check_tensor, is_number
from aiodist.collectives import operations
from aiodist.collectives.arithmetic import check_op, wire_op
from aiodist.collectives.mailbox import Arrived, Mailbox, Wanted
from aiodist.collectives.metadata import overlaps
from aiodist.collectives.primitives import Primitives, implementations
from aiodist.collectives.program import Endpoint, Program, lockstep
from aiodist.collectives.wrappers import copied_to_all, interleaved, local_first, mapped, nothing, returning
from aiodist.errors import BackendUnavailable, CommunicatorAborted
from aiodist.handles import Handle, gather
from aiodist.issuer import Claim, Issuer, Plan, claims_of, reading, writing
from aiodist.ledger import Fingerprint
from aiodist.topology import Topology
from aiodist.types import ANY, ReduceOp

if TYPE_CHECKING:
    from aiodist.backends.base import Done
    from aiodist.family import Family

__all__ = ["Communicator"]

Data = TypeVar("Data", Tensor, int, float, list[Tensor])
T = TypeVar("T")

_COLLECTIVE_TAGS = 1 << 21  # above those of the mailbox
_MOST_PLANS = 10_000
_QUICK_OPS = frozenset(op.value for op in ReduceOp) - {"mean"}


class Communicator:
    """A group of ranks that communicate; get the first from `aiodist.init`.

    It belongs to the event loop it was opened on and is called from that loop's thread alone. Every operation
    takes `timeout=` (seconds from issue, then `OperationTimeout` is raised where it is awaited; None is none) and
    `impl=` (the name of an implementation, or "auto"). Mistakes of the caller raise TypeError, ValueError or
    RuntimeError at the call, before a byte moves, and leave the communicator usable; failures of the world raise on
    await. Tensors are dense, contiguous and on the CPU. In the costs below p is the number of ranks.
    """

    def __init__(self, issuer: Issuer, topology: Topology | None, family: Family) -> None:
        self._issuer = issuer
        self._transport = issuer.transport
        self._topology = topology
        self._family = family
        self._plans: dict[tuple[torch.dtype, int, str], Plan] = {}
        self._can_be_quick = self._transport.native is not None and self._transport.size > 1 and not issuer.checked

    # --- who and where -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number, from 0; -1 outside the group."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._transport.size

    @property
    def name(self) -> str:
        """What error messages call it: "world", or a path below it."""
        return self._issuer.name

    @property
    def seq(self) -> int:
        """How many collectives were issued."""
        return self._issuer.ledger.seq

    @property
    def topology(self) -> Topology:
        """Which ranks share a host; `print` shows it."""
        if self._topology is None:
            self._issuer.check_usable()
        assert self._topology is not None
        return self._topology

    @property
    def local_rank(self) -> int:
        """This rank's place among those of its host."""
        return self.topology.local_rank

    @property
    def local_size(self) -> int:
        """How many of the ranks share this host."""
        return self.topology.local_size

    @property
    def node(self) -> int:
        """The number of this host, from 0."""
        return self.topology.node

    @property
    def nodes(self) -> int:
        """How many hosts there are."""
        return len(self.topology.hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct hosts, in the order of their first ranks."""
        return self.topology.hosts

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        return torch.device("cpu")

    @property
    def backend(self) -> str:
        """The library that carries it: "mpi", "gloo" or "local"."""
        return self._transport.name

    def statistics(self) -> dict[str, int]:
        """Return how many collectives were issued and how many operations are pending."""
        return self._issuer.statistics()

    def __repr__(self) -> str:
        return f"<Communicator {self.name!r} rank {self.rank} of {self.size} over {self.backend}>"

    # --- reductions ----------------------------------------------------------------------------------------------

    def allreduce(
        self,
        t: Data,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        across: bool = False,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Data]:
        """Return the elementwise sum (or other `op`) over all ranks, in place; sum unless said otherwise.

        Every rank gives a tensor of the same dtype and number of elements; with `out` the input is left alone and
        `out` is the result. A list of tensors is one operation that reduces each apart; with `across=True` it
        reduces over the list too, and every tensor of it becomes the total. A Python number gives a number.

        `mean` of integers raises TypeError; 16-bit floats are summed in float32 and rounded once. Cost: the native
        library's, or 2(p-1) messages of the tensor's size through rank 0 (`impl="direct"`).
        """
        if self._can_be_quick and out is None and impl == "auto" and type(t) in (Tensor, Parameter):
            key = (t.dtype, t.numel(), op)  # type: ignore[union-attr]
            plan = self._plans.get(key) or self._plan(key)
            if plan is not None and t.layout is torch.strided and t.is_cpu and t.is_contiguous():  # type: ignore[union-attr]
                return self._issuer.quick(plan, t, timeout)  # type: ignore[return-value, arg-type]
        if across:
            return self._allreduce_across(t, op, timeout, impl)
        return self._reduction("allreduce", operations.allreduce, t, op, out, timeout, impl)

    def scan(
        self,
        t: Data,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Data]:
        """Return the reduction over ranks 0 to this one, in place; sum unless said otherwise.

        As `allreduce` otherwise. Cost without a native form: a chain of p-1 messages.
        """
        return self._reduction("scan", operations.scan, t, op, out, timeout, impl)

    def exscan(
        self,
        t: Data,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Data]:
        """Return the reduction over the ranks before this one, in place; rank 0's tensor stays as it is.

        As `scan` otherwise.
        """
        return self._reduction("exscan", operations.exscan, t, op, out, timeout, impl)

    def reduce(
        self,
        t: Tensor | float | list[Tensor],
        op: str = "sum",
        root: int = 0,
        *,
        out: Tensor | None = None,
        across: bool = False,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Any]:
        """Return the reduction on `root`, in place there, and None elsewhere, where `t` is left alone.

        Sum unless said otherwise. With `across=True` a list is reduced too, into root's first tensor.
        """
        root = check_rank(root, self.size)
        mine = self.rank == root
        lifted, convert = _lifted(t, op)
        ts = _tensors(lifted)
        kinds = [check_op(op, x.dtype) for x in ts]
        what = _fingerprint("reduce", ts, op, root)
        if across:
            return self._reduce_across(what, _alike(ts), kinds, root, timeout, impl)
        if out is not None and mine:
            _single(lifted, "out")
            check_out(out, ts[0], numel=ts[0].numel())
        targets = [(x if out is None else out) if mine else None for x in ts]
        programs = [
            operations.reduce(self._primitives(impl), x, target, kind, root)
            for x, target, kind in zip(ts, targets, kinds, strict=True)
        ]
        program = _joined(programs, lifted)
        if isinstance(t, list):
            program = returning(program, t if mine else None)
        claims = (writing(*ts) if out is None else claims_of(ts, out)) if mine else reading(*ts)
        return self._issue(what, mapped(program, convert), claims, ts, timeout, outs=(out,))

    def _reduce_across(
        self,
        what: Fingerprint,
        ts: list[Tensor],
        kinds: list[ReduceOp],
        root: int,
        timeout: float | None,
        impl: str,
    ) -> Handle[Any]:
        if not ts:
            return self._issue(what, nothing(), [], ts, timeout)
        p = self._primitives(impl)

        def over_ranks(total: Tensor) -> Program[int]:
            yield from p.reduce(total, wire_op(kinds[0]), root)
            return self.size if self.rank == root else 0

        program: Program[Any] = local_first(ts, kinds[0], over_ranks)
        if self.rank != root:
            program = returning(program, None)
        return self._issue(what, program, writing(*ts), ts, timeout)

    def reduce_scatter(
        self,
        t: Tensor | list[Tensor],
        op: str = "sum",
        sizes: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Any]:
        """Return this rank's block of the reduction, in new memory or in `out`; `t` is left alone.

        `t` is cut along dim 0 into p blocks, the remainder going to the first ranks, or flat as `sizes` says (a
        number of elements per rank, the same list on every rank). Sum unless said otherwise.
        """
        ts = _tensors(t)
        kinds = [check_op(op, x.dtype) for x in ts]
        blocks = [_blocks(x, sizes, self.size) for x in ts]
        if out is not None:
            _single(t, "out")
            check_out(out, ts[0], numel=blocks[0][self.rank].numel())
        programs = [
            operations.reduce_scatter(self._primitives(impl), x, out, kind, cut)
            for x, kind, cut in zip(ts, kinds, blocks, strict=True)
        ]
        program = _joined(programs, t)
        return self._issue(_fingerprint("reduce_scatter", ts, op), program, claims_of(ts, out), ts, timeout, outs=(out,))

    # --- moving data -----------------------------------------------------------------------------------------------

    def broadcast(
        self, t: Data, root: int = 0, *, across: bool = False, timeout: float | None = None, impl: str = "auto"
    ) -> Handle[Data]:
        """Return root's elements, in place: `t` keeps its shape, only the number of elements counts.

        A list is one operation; with `across=True` root's first tensor goes into every tensor of every list. A
        Python number gives root's number.
        """
        root = check_rank(root, self.size)
        lifted, convert = _lifted(t, None)
        ts = _tensors(lifted)
        parts = _alike(ts)[:1] if across else ts
        program = _joined([operations.broadcast(self._primitives(impl), x, root) for x in parts], lifted)
        if across:
            program = copied_to_all(program, ts)
        elif isinstance(t, list):
            program = returning(program, t)
        claims = reading(*ts) if self.rank == root and not across else writing(*ts)
        return self._issue(_fingerprint("broadcast", ts, None, root), mapped(program, convert), claims, ts, timeout)

    def allgather(
        self,
        t: Tensor | list[Tensor],
        *,
        out: Tensor | None = None,
        across: bool = False,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Any]:
        """Return every rank's tensor: a list by rank, or with `out` all of them concatenated along dim 0.

        Sizes may differ between ranks, dtypes may not. `out` grows when it is too small and owns its memory, and
        `t` may be this rank's own block of it. A list of tensors gives a list of such results; with `across=True`
        one flat list in the order rank * len + i.
        """
        ts = _tensors(t)
        if out is not None:
            _single(t, "out")
            check_out(out, ts[0], numel=None, own_block=True)
        programs = [operations.allgather(self._primitives(impl), x, out) for x in ts]
        program = _joined(programs, t)
        if across:
            program = interleaved(program)
        return self._issue(Fingerprint("allgather", _dtypes(ts)), program, claims_of(ts, out), ts, timeout, outs=(out,))

    def gather(
        self,
        t: Tensor | list[Tensor],
        root: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Any]:
        """Return on `root` what `allgather` returns, and None elsewhere. Cost: one message per rank, to root."""
        root = check_rank(root, self.size)
        ts = _tensors(t)
        out = out if self.rank == root else None
        if out is not None:
            _single(t, "out")
            check_out(out, ts[0], numel=None)
        programs = [operations.gather(self._primitives(impl), x, out, root) for x in ts]
        program = _joined(programs, t)
        what = Fingerprint("gather", _dtypes(ts), root=root)
        return self._issue(what, program, claims_of(ts, out), ts, timeout, outs=(out,))

    def scatter(
        self,
        ts: Sequence[Tensor] | Sequence[Sequence[Tensor]] | None,
        root: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[Any]:
        """Return tensor number `rank` of root's list, in `out` or in new memory; `ts` is ignored elsewhere.

        Sizes may differ. On root `ts` may be a list of such lists; the result is then a list, on every rank.
        """
        root = check_rank(root, self.size)
        if out is not None:
            check_tensor(out, "out")
        what = Fingerprint("scatter", root=root)
        if self.rank != root:
            program = operations.scatter(self._primitives(impl), None, False, out, root)
            return self._issue(what, program, [] if out is None else writing(out), [], timeout, outs=(out,))
        if ts is None:
            raise TypeError("ts is None: root gives a list of tensors, one for each rank")
        lists, nested = self._lists(ts, out)
        if out is not None:
            check_out(out, lists[0][root], numel=lists[0][root].numel())
            check_apart(out, lists[0], lists[0][root])
        sent = [t for one in lists for t in one]
        program = operations.scatter(self._primitives(impl), lists, nested, out, root)
        return self._issue(what, program, claims_of(sent, out), sent, timeout, outs=(out,))

    def alltoall(
        self,
        ts: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        *,
        out: Sequence[Tensor] | None = None,
        timeout: float | None = None,
        impl: str = "auto",
    ) -> Handle[list[Any]]:
        """Return what every rank holds for this one, by rank: `ts[r]` goes to rank r. Sizes may differ.

        `out` is a list of tensors, one for each source. A list of lists gives a list of results. Cost: p-1
        messages out and in.
        """
        lists, nested = self._lists(ts, out)
        outs = None if out is None else check_list(out, self.size, "out")
        for t, into in zip(lists[0], outs or (), strict=False):
            check_out(into, t, numel=0)
            check_apart(into, lists[0], t)
        programs = [operations.alltoall(self._primitives(impl), one, outs) for one in lists]
        program = lockstep(programs) if nested else programs[0]
        sent = [t for one in lists for t in one]
        claims = claims_of(sent, *(outs or ()))
        return self._issue(Fingerprint("alltoall"), program, claims, sent, timeout, outs=outs or ())

    def _lists(self, ts: Sequence[Any], out: object) -> tuple[list[list[Tensor]], bool]:
        """Return what scatter and alltoall were given as a list of lists, and whether it was one already."""
        nested = bool(ts) and not isinstance(ts[0], Tensor)
        if nested and out is not None:
            raise ValueError("out= goes with one list of tensors: expected ts to be one list, not a list of lists")
        return ([check_list(x, self.size) for x in ts] if nested else [check_list(ts, self.size)]), nested

    def barrier(self, *, timeout: float | None = None) -> Handle[None]:
        """Return None once every rank has called it. Covers the handles before it that nobody awaited.

        Ranks that issued different operations before it get `MismatchError`. Cost: an allreduce of 16 bytes.
        """
        return self._issuer.barrier(self._primitives("auto"), timeout)

    # --- point to point ----------------------------------------------------------------------------------------------

    def send(
        self, t: Tensor | list[Tensor], dst: int, tag: int = 0, *, timeout: float | None = None
    ) -> Handle[None]:
        """Return None once `t` may be reused, which may be before it is received. `dst` may be this rank.

        Cost: one message up to about 800 bytes, two above.
        """
        dst, tag = check_rank(dst, self.size, "dst"), check_tag(tag)
        ts = _tensors(t)
        return self._send("send", ts, dst, tag, Mailbox.TENSOR, timeout)

    def recv(
        self, t: Tensor | list[Tensor] | None = None, src: int = ANY, tag: int = ANY, *, timeout: float | None = None
    ) -> Handle[Any]:
        """Return `t`, filled in place by the first message from `src` with `tag`; ANY takes all.

        Without `t`, a new tensor of the sender's shape and dtype. A shorter message fills the front (the handle's
        `nbytes` says how much came); a longer one, or one of another dtype, raises on await and is consumed.
        Receives match in the order of issue. `cancel()` withdraws one that nothing matched, and loses no message.
        The handle's `source` and `tag` say where the message came from.
        """
        src, tag = check_rank(src, self.size, "src", any_rank=True), check_tag(tag, any_tag=True)
        if isinstance(t, list):
            return gather(*[self.recv(x, src, tag, timeout=timeout) for x in check_list(t, None, "t")])
        into = None if t is None else check_tensor(t)
        handle, finish = self._issuer.message(
            "recv", 0 if into is None else into.nbytes, [] if into is None else writing(into), timeout
        )
        self._issuer.receive(handle, Wanted(Mailbox.TENSOR, src, tag, into, finish))
        return handle

    def sendrecv(
        self,
        t: Tensor,
        dst: int,
        src: int,
        out: Tensor | None = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> Handle[Tensor]:
        """Return what `src` sent, in `out` or in new memory, while `t` goes to `dst`: both at once."""
        dst, src, tag = check_rank(dst, self.size, "dst"), check_rank(src, self.size, "src"), check_tag(tag)
        t = check_tensor(t)
        into = None if out is None else check_out(out, t, numel=0)
        if into is not None and overlaps(into, t):
            raise ValueError("out overlaps the input: expected other memory, since both are in flight at once")
        claims = [*reading(t), *(writing(into) if into is not None else [])]
        handle, finish = self._issuer.message("sendrecv", t.nbytes, claims, timeout)
        mailbox = self._issuer.mailbox

        def program() -> Program[Arrived]:
            box: list[Arrived] = []
            yield [partial(mailbox.send, t, dst, tag, Mailbox.TENSOR), partial(_receive, mailbox, into, src, tag, box)]
            return box[0]

        self._issuer.run(program(), finish, t.nbytes)
        return handle

    def _send(
        self, op: str, ts: list[Tensor], dst: int, tag: int, kind: int, timeout: float | None
    ) -> Handle[None]:
        nbytes = sum(t.nbytes for t in ts)
        handle, finish = self._issuer.message(op, nbytes, reading(*ts), timeout)
        mailbox = self._issuer.mailbox

        def program() -> Program[None]:
            yield [partial(mailbox.send, t, dst, tag, kind) for t in ts]

        self._issuer.run(program(), finish, nbytes)
        return handle

    # --- Python objects ------------------------------------------------------------------------------------------------

    def broadcast_object(self, obj: T, root: int = 0, *, timeout: float | None = None) -> Handle[T]:
        """Return root's object on every rank. Pickled at the call: later changes are not seen.

        Unpickling runs code of the sender's choice: all object calls trust their peers.
        """
        root = check_rank(root, self.size)
        packed = objects.pack(obj) if self.rank == root else None
        program = operations.broadcast_bytes(self._primitives("auto"), packed, root)
        what = Fingerprint("broadcast_object", root=root)
        if packed is not None:
            return self._issue(what, returning(program, obj), [], [packed], timeout)
        return self._issue(what, program, [], [], timeout, objects.unpack)

    def allgather_object(self, obj: object, *, timeout: float | None = None) -> Handle[list[Any]]:
        """Return every rank's object, by rank."""
        packed = objects.pack(obj)
        program = operations.allgather(self._primitives("auto"), packed, None)
        return self._issue(Fingerprint("allgather_object"), program, [], [packed], timeout, objects.unpack_each)

    def gather_object(self, obj: object, root: int = 0, *, timeout: float | None = None) -> Handle[list[Any] | None]:
        """Return every rank's object on `root`, by rank, and None elsewhere."""
        root = check_rank(root, self.size)
        packed = objects.pack(obj)
        program = operations.gather(self._primitives("auto"), packed, None, root)
        convert = objects.unpack_each if self.rank == root else None
        return self._issue(Fingerprint("gather_object", root=root), program, [], [packed], timeout, convert)

    def scatter_object(self, objs: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None) -> Handle[Any]:
        """Return object number `rank` of root's list; `objs` is ignored elsewhere."""
        root = check_rank(root, self.size)
        packed = [self._pack_each(objs)] if self.rank == root else None
        program = operations.scatter(self._primitives("auto"), packed, False, None, root)
        what = Fingerprint("scatter_object", root=root)
        return self._issue(what, program, [], packed[0] if packed else [], timeout, objects.unpack)

    def alltoall_object(self, objs: Sequence[Any], *, timeout: float | None = None) -> Handle[list[Any]]:
        """Return what every rank holds for this one, by rank: `objs[r]` goes to rank r."""
        packed = self._pack_each(objs)
        program = operations.alltoall(self._primitives("auto"), packed, None)
        return self._issue(Fingerprint("alltoall_object"), program, [], packed, timeout, objects.unpack_each)

    def send_object(self, obj: object, dst: int, tag: int = 0, *, timeout: float | None = None) -> Handle[None]:
        """Return None once the object, pickled at the call, is on its way. Only `recv_object` receives it."""
        dst, tag = check_rank(dst, self.size, "dst"), check_tag(tag)
        return self._send("send_object", [objects.pack(obj)], dst, tag, Mailbox.OBJECT, timeout)

    def recv_object(self, src: int = ANY, tag: int = ANY, *, timeout: float | None = None) -> Handle[Any]:
        """Return the next object from `src` with `tag`; matching as in `recv`."""
        src, tag = check_rank(src, self.size, "src", any_rank=True), check_tag(tag, any_tag=True)
        handle, finish = self._issuer.message("recv_object", 0, [], timeout, convert=_unpacked)
        self._issuer.receive(handle, Wanted(Mailbox.OBJECT, src, tag, None, finish))
        return handle

    def _pack_each(self, objs: Sequence[Any] | None) -> list[Tensor]:
        if objs is None or len(objs) != self.size:
            seen = "None" if objs is None else f"{len(objs)} objects"
            raise ValueError(f"objs is {seen}: expected {self.size}, one for each rank")
        return [objects.pack(obj) for obj in objs]

    # --- other communicators -----------------------------------------------------------------------------------------

    def dup(self) -> Handle[Communicator]:
        """Return a communicator of the same ranks whose traffic never meets this one's.

        Whatever issues from a task of its own needs one: two tasks that issue on the same communicator would
        interleave differently on each rank. Collective; begins once all that is in flight here is over.
        """
        return self._family.derive(self, "dup", range(self.size))

    def group(self, ranks: Sequence[int]) -> Handle[Communicator]:
        """Return a communicator of `ranks`, in that order; elsewhere one of which every call raises.

        Collective over this communicator, with the same list on every rank. Made once: asking again for the same
        ranks returns the same communicator until it is closed.
        """
        wanted = [check_rank(rank, self.size, "ranks") for rank in ranks]
        if len(set(wanted)) != len(wanted) or not wanted:
            raise ValueError(f"ranks={wanted}: expected at least one rank, each once")
        return self._family.derive(self, "group", wanted)

    def split(self, color: int | None = 0, key: int | None = None) -> Handle[Communicator]:
        """Return a communicator of the ranks that gave the same `color`, ordered by `key`, then by rank.

        `color=None` gives one of which every call raises. `key` is the rank unless given. Collective; made once for
        the same ranks, as `group`.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} is {type(value).__name__}: expected an int or None")
        return self._family.split(self, color, self.rank if key is None else key)

    # --- the end ---------------------------------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Give this communicator up on all ranks: what is pending and every later call raise CommunicatorAborted."""
        error = CommunicatorAborted(f"communicator {self.name!r} was aborted: {reason}", comm=self.name, rank=self.rank)
        self._issuer.abort(error)
        self._issuer.ledger.tell_abort(str(error))

    async def aclose(self) -> None:
        """Close it on all ranks: wait for what is in flight, at most 30 s, then release it. Collective.

        Receives that nothing matched are withdrawn and reported as `ResourceWarning`. Raises `OperationTimeout`
        naming what is still pending after that, and gives it up.
        """
        await self._family.close(self)

    # --- building operations ---------------------------------------------------------------------------------------------

    def _plan(self, key: tuple[torch.dtype, int, str]) -> Plan | None:
        """Remember how to reduce tensors like this one with a single native call, where that is possible."""
        kind, numel, op = key
        native = self._transport.native
        if native is None or op not in _QUICK_OPS or not numel or len(self._plans) > _MOST_PLANS:
            return None
        known = ReduceOp(op)
        if kind in (torch.bool, torch.float16, torch.bfloat16) or not native.supports("allreduce", kind, known, numel):
            return None
        check_op(op, kind)
        what = Fingerprint("allreduce", _name(kind), numel, known.value)
        plan = self._plans[key] = Plan(what, native.plan_allreduce(kind, numel, known), numel * kind.itemsize)
        return plan

    def _reduction(
        self,
        name: str,
        make: Callable[..., Program[Tensor]],
        t: Data,
        op: str,
        out: Tensor | None,
        timeout: float | None,
        impl: str,
    ) -> Handle[Data]:
        lifted, convert = _lifted(t, op)
        ts = _tensors(lifted)
        kinds = [check_op(op, x.dtype) for x in ts]
        if out is not None:
            _single(lifted, "out")
            check_out(out, ts[0], numel=ts[0].numel())
        programs = [
            make(self._primitives(impl), x, x if out is None else out, kind) for x, kind in zip(ts, kinds, strict=True)
        ]
        program = _joined(programs, lifted)
        if isinstance(t, list) or (isinstance(t, Tensor) and out is None):
            program = returning(program, t)
        claims = writing(*ts) if out is None else claims_of(ts, out)
        return self._issue(_fingerprint(name, ts, op), mapped(program, convert), claims, ts, timeout, outs=(out,))

    def _allreduce_across(self, t: object, op: str, timeout: float | None, impl: str) -> Handle[Any]:
        ts = _alike(check_list(t, None, "t"))
        what = _fingerprint("allreduce", ts, op)
        if not ts:
            return self._issue(what, returning(nothing(), ts), [], ts, timeout)
        kind = check_op(op, ts[0].dtype)
        p = self._primitives(impl)

        def over_ranks(total: Tensor) -> Program[int]:
            yield from p.allreduce(total, wire_op(kind))
            return self.size

        program = copied_to_all(local_first(ts, kind, over_ranks), ts)
        return self._issue(what, program, writing(*ts), ts, timeout)

    def _issue(
        self,
        what: Fingerprint,
        program: Program[Any],
        claims: Sequence[Claim],
        ts: Sequence[Tensor],
        timeout: float | None,
        convert: Callable[[Any], Any] | None = None,
        *,
        outs: Sequence[Tensor | None] = (),
    ) -> Handle[Any]:
        nbytes = sum(t.nbytes for t in ts)
        # An out that grows takes new memory. The old is claimed, so nobody else may be given it before the end.
        old = [out.untyped_storage() for out in outs if out is not None]
        handle: Handle[Any] = self._issuer.collective(
            what, program, claims, nbytes=nbytes, timeout=timeout, convert=convert
        )
        if old and not handle.done():
            handle.keep = old
        return handle

    def _primitives(self, impl: str) -> Primitives:
        native = self._transport.native
        known = implementations(None if native is None else self._transport.name)
        if impl not in ("auto", *known):
            raise BackendUnavailable(f"impl={impl!r}: this communicator has auto, {', '.join(known)}")
        # From the number that all ranks give the operation, whatever errors each of them raised before it.
        tag = _COLLECTIVE_TAGS + self.seq % _COLLECTIVE_TAGS
        return Primitives(Endpoint(self._transport, tag), impl)



def _tensors(t: object) -> list[Tensor]:
    """Return one tensor or a list of tensors as a list, each checked."""
    if isinstance(t, Tensor):
        return [check_tensor(t)]
    if not isinstance(t, (list, tuple)):
        raise TypeError(f"t is {type(t).__name__}: expected a tensor or a list of tensors")
    return check_list(t, None, "t")


def _lifted(t: Any, op: str | None) -> tuple[Any, Callable[[Any], Any]]:  # noqa: ANN401
    """Return a Python number as a tensor with the way back; anything else as it is."""
    if not is_number(t):
        return t, lambda result: result
    whole = isinstance(t, int) and op != "mean"
    lifted = torch.tensor([t], dtype=torch.int64 if whole else torch.float64)
    return lifted, lambda result: None if result is None else result.item()


def _joined(programs: Sequence[Program[Any]], given: object) -> Program[Any]:
    return programs[0] if isinstance(given, Tensor) else lockstep(programs)


def _single(t: object, name: str) -> None:
    if not isinstance(t, Tensor):
        raise ValueError(f"{name}= goes with one tensor: expected t to be one too, not a list")


def _alike(ts: list[Tensor]) -> list[Tensor]:
    if any(t.dtype is not ts[0].dtype or t.numel() != ts[0].numel() for t in ts):
        raise ValueError(f"across=True over {_described(ts)}: expected the same dtype and number of elements")
    return ts


def _blocks(t: Tensor, sizes: Sequence[int] | None, ranks: int) -> list[torch.Size]:
    """Return the shapes of the blocks that reduce_scatter cuts `t` into."""
    if sizes is not None:
        return [torch.Size([size]) for size in check_sizes(sizes, t.numel(), ranks)]
    if t.dim() == 0:
        raise ValueError("t has no dimension to cut: expected at least one, or sizes=")
    rows, more = divmod(t.shape[0], ranks)
    return [torch.Size([rows + (rank < more), *t.shape[1:]]) for rank in range(ranks)]


def _described(ts: Sequence[Tensor]) -> str:
    return ", ".join(f"{_name(t.dtype)}[{t.numel()}]" for t in ts)


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _dtypes(ts: Sequence[Tensor]) -> str:
    return ", ".join(_name(t.dtype) for t in ts)


def _fingerprint(kind: str, ts: Sequence[Tensor], op: str | None, root: int | None = None) -> Fingerprint:
    known = None if op is None else ReduceOp(op).value
    if len(ts) == 1:
        return Fingerprint(kind, _name(ts[0].dtype), ts[0].numel(), known, root)
    return Fingerprint(kind, _described(ts), sum(t.numel() for t in ts), known, root)


def _receive(mailbox: Mailbox, into: Tensor | None, src: int, tag: int, box: list[Arrived], done: Done) -> None:
    def finish(arrived: Arrived | None, error: BaseException | None) -> None:
        if arrived is not None:
            box.append(arrived)
        done(error)

    mailbox.receive(Wanted(Mailbox.TENSOR, src, tag, into, finish))


def _unpacked(arrived: Arrived) -> Arrived:
    return replace(arrived, data=objects.unpack(arrived.data))
