"""A plan starts all calls with one signature. A plan is made at the first call and kept.

A plan starts an operation in one of four ways: in a lane of the compiled core, if all ranks share memory, by one native
call of a library, by one call that queues on a device, or by a program. Calls with other arguments, such as a list,
have no plan, and neither has a call with `out=` outside a lane. One rank may use a lane while another one uses a
program, for a tensor of a subclass or in another thread. The shapes of an allgather may also differ. The lane finds
both cases, and all ranks continue with the program.

The core caches the plans of allreduce by dtype and shape, so that such a call finds its plan in C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from aiodist import _core
from aiodist.backends.arithmetic import CONVERTED, SUPPORTED, check_op
from aiodist.backends.base import Begin, Done, Wanted, dtype_code, once, ours, tag_of
from aiodist.backends.shm.lanes import KINDS, LaneKind, op_code
from aiodist.collectives.across import reduce_parts
from aiodist.collectives.cuda.queued import Queue, Queued
from aiodist.collectives.endpoint import Endpoint
from aiodist.collectives.implementations import Primitives, Repertoire
from aiodist.collectives.metadata import overlaps
from aiodist.collectives.operations import Work, each, work_of
from aiodist.communicator.arguments import CallTerms, block_of, blocks_of
from aiodist.communicator.claims import Claim
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.fingerprint import Fingerprint, fingerprint_of, word_of
from aiodist.communicator.lane_issuer import LaneIssuer
from aiodist.communicator.names import Named
from aiodist.communicator.operation import CommunicatorOperation, NativeCall, When
from aiodist.handles import LARGE_BYTES, Handle
from aiodist.handles.kernel import Program, Transfer, transfer
from aiodist.streams import Events
from aiodist.streams.events import device_error
from aiodist.types import OP_ALIASES, REDUCTIONS, ReduceOp, check_timeout

T = TypeVar("T")

_MOST_PLANS = 10_000
_PLAIN = (Tensor, Parameter)
_OPS = frozenset({*ReduceOp, *OP_ALIASES})
_IN_PLACE = frozenset({"allreduce", "broadcast", "reduce", "scan"})


class Signature(NamedTuple):
    """The arguments that determine the plan of a call."""

    kind: str
    dtype: torch.dtype
    shape: torch.Size
    op: str | None
    root: int | None
    impl: str
    device: int = -1
    """Number of the CUDA device, or -1 for the host."""


class _LaneFields(NamedTuple):
    """The fields of a plan in the compiled core. See `core_op` in core.h, and `Plan`."""

    kind: LaneKind
    dtype: int
    op: int = 0
    root: int = 0
    like: int = 0
    numel: int = 0
    nbytes: int = 0
    target_nbytes: int = 0
    writes: bool = False
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class OutsidePlan(NamedTuple):
    """How calls with one signature start outside the lanes, on the host or on a device."""

    what: Fingerprint
    nbytes: int
    make: Callable[[Tensor, Tensor, CommunicatorOperation], Program[Any] | NativeCall]
    """Function of (tensor, detached view, operation) that returns the work, as `Dispatcher.issue` expects.

    The view keeps the present memory, since the program of the user may give the tensor other memory before the start.
    """
    writes: bool = True
    """True if this rank's tensor is written."""
    when: When = When.HOST
    work_bytes: int = 0
    """Bytes that this rank copies or reduces."""
    messages: bool = True
    """True if a program sends the messages, False if a library does."""


Plan = _core.Plan | OutsidePlan


class Plans:
    """The plans of one communicator, by signature. `issue` returns None for a call without a plan."""

    def __init__(
        self, dispatcher: Dispatcher, device: torch.device, queue_of: Callable[[Signature, Repertoire], Queue | None]
    ) -> None:
        """`queue_of` returns a function that queues an allreduce on a device in one call, or None."""
        self._dispatcher = dispatcher
        self._device = device
        self._queue_of = queue_of
        self._lanes = LaneIssuer(dispatcher)
        self._rank, self._size = dispatcher.transport.rank, dispatcher.transport.size
        self._repertoire = dispatcher.repertoire
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        """Plans by `Signature`, or None for a signature without one."""
        self.off = False
        """True if no call has a plan."""
        barrier = Fingerprint("barrier")
        self._barrier = _core.Plan(
            barrier, barrier.kind, None, barrier.word, *_LaneFields(LaneKind.BARRIER, dtype_code(torch.uint8))
        )

    def follow(self, repertoire: Repertoire) -> None:
        """Choose by `repertoire` from the next call on."""
        self._repertoire = repertoire
        self._plans.clear()
        if self._lanes.core is not None:
            self._lanes.core.forget()

    def without_plans(self) -> Plans:
        """Return a copy of the plans in which no call has a plan."""
        other = copy(self)
        other.off = True
        return other

    def issue(
        self,
        kind: str,
        t: object,
        out: Tensor | None,
        terms: CallTerms,
        *,
        op: str | None = None,
        root: int | None = None,
    ) -> Handle[Any] | None:
        """Issue a collective by a plan, with the result in `out`, `t` or new memory. Return None without a plan."""
        if self.off or not isinstance(t, Tensor) or terms.name is not None or not (t.is_cuda or type(t) in _PLAIN):
            return None
        if terms.timeout is not None:
            check_timeout(terms.timeout)
        call = kind, t.dtype, t.shape, op, root, terms.impl, t.get_device()
        try:
            plan = self._plans[call]  # a `Signature` equals its tuple, which takes a third of the time
        except KeyError:
            plan = self._plan(Signature(*call), t)
        except TypeError:  # an operator or an implementation without a hash, which the general checks report
            return None
        if plan is None or t.layout is not torch.strided or not _dense(t, memory := t.untyped_storage()):
            return None
        if isinstance(plan, _core.Plan):
            return self._issue_in_lane(plan, kind, root, t, out, terms.timeout)
        if out is not None or not (start := t.data_ptr()):
            return None
        claim = Claim(start, plan.nbytes, plan.writes, memory, t)
        return self._dispatcher.issue(
            CommunicatorOperation(None, (claim,), when=plan.when),
            plan.what,
            partial(plan.make, t, t.data),
            nbytes=plan.nbytes,
            timeout=terms.timeout,
            work_bytes=plan.work_bytes,
            messages=plan.messages,
        )

    def issue_across(
        self, kind: str, parts: Sequence[Tensor], out: Tensor | None, terms: CallTerms, op: str, root: int | None
    ) -> Handle[Any] | None:
        """Issue a reduction over the parts of all ranks into `out` in a lane. Return None if no lane can run it.

        The parts of all ranks are one tree in the fixed order if each rank has the same power of two.
        """
        if self.off or self._lanes.core is None or terms.name is not None or type(parts) is not list or not parts:
            return None
        mine, t = root in (None, self._rank), parts[0]
        target = out if out is not None and mine else t
        if (kind == "allreduce" and out is None) or any(type(part) is not Tensor for part in (*parts, target)):
            return None
        if any(part.shape != t.shape or not self._takes(kind, part, target) for part in parts):
            return None
        signature = Signature(kind, t.dtype, t.shape, op, root, terms.impl, t.get_device())
        call = *signature, len(parts)
        try:
            plan = self._plans[call]
        except KeyError:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[call] = self._plan_across(signature, t, len(parts))
        except TypeError:  # as in `issue`
            return None
        if plan is None or not all(_dense(part, part.untyped_storage()) for part in parts):
            return None
        if terms.timeout is not None:
            check_timeout(terms.timeout)
        issuer, result = self._lanes.core, target if mine else None
        handle: Handle[Any] | None = issuer.issue(plan, t, target, result, out if mine else None, tuple(parts[1:]))  # type: ignore[assignment, arg-type]
        if handle is not None:
            self._dispatcher.set_deadline(handle, terms.timeout)
        return handle

    def barrier(self, timeout: float | None) -> Handle[None] | None:
        """Issue a barrier in a lane, or return None."""
        issuer = self._lanes.core
        if issuer is None:
            return None
        check_timeout(timeout)
        handle: Handle[None] | None = issuer.issue(self._barrier, None, None, None, None)  # type: ignore[assignment]
        if handle is not None:
            self._dispatcher.set_deadline(handle, timeout)
        return handle

    # --- the work of an operation -----------------------------------------------------------------------------

    def _issue_in_lane(
        self, plan: _core.Plan, kind: str, root: int | None, t: Tensor, out: Tensor | None, timeout: float | None
    ) -> Handle[Any] | None:
        """Issue the call in the compiled core. Return None if the core does not take the call now."""
        issuer = self._lanes.core
        if issuer is None:
            return None
        if kind == "broadcast":
            target, result = t, t
        elif root is not None and root != self._rank:
            target, result = t, None
        elif out is not None:
            if not self._takes(kind, t, out):
                return None
            target = result = out
        else:
            target, result = self._room(kind, t)
        handle: Handle[Any] | None = issuer.issue(plan, t, target, result, out)  # type: ignore[assignment]
        if handle is not None:
            self._dispatcher.set_deadline(handle, timeout)
        return handle

    async def program(
        self,
        work: Callable[[Primitives], Program[T]],
        repertoire: Repertoire,
        impl: str,
        operation: CommunicatorOperation,
    ) -> T:
        """Run `work` with the primitives of an operation, whose number is known when the program begins."""
        dispatcher, number, named = self._dispatcher, operation.number, isinstance(operation.meets, Named)
        device_messages = dispatcher.mailbox.device_messages
        ep = Endpoint(dispatcher.transport, tag_of(number), device_messages, operation.traffic, number)
        return await work(Primitives(ep, repertoire, impl, later=named, device=self._device))

    async def _collective(
        self,
        work: Work,
        in_place: bool,
        repertoire: Repertoire,
        impl: str,
        t: Tensor,
        view: Tensor,
        operation: CommunicatorOperation,
    ) -> Any:  # noqa: ANN401
        """Run a collective of one tensor. True for `in_place` makes `t` the result."""
        (result,) = await self.program(lambda p: work(p, [view], None), repertoire, impl, operation)
        return t if in_place else result

    def _native(
        self, start: Begin, implementation: str, nbytes: int, t: Tensor, view: Tensor, operation: CommunicatorOperation
    ) -> NativeCall:
        """Return one call of a library."""
        call: Transfer = (start, view, operation.number)
        if operation.traffic is not None:
            operation.traffic.way = implementation
        if self._dispatcher.large_bytes <= nbytes < LARGE_BYTES:
            call = (self._call_in_background, call)
        return NativeCall(call, t)

    def _call_in_background(self, call: Transfer, done: Done) -> None:
        """Make `call`, and let only the progress thread poll until the end of the call."""
        start, *args = call
        ended = once(self._dispatcher.progress.counted(done))
        try:
            start(*args, ended)
        except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the operation
            ended(ours(raised))

    def _queue(
        self,
        queue: Queue,
        stream: Callable[[], torch.cuda.Stream],
        t: Tensor,
        _: Tensor,
        operation: CommunicatorOperation,
    ) -> Program[Tensor]:
        """Queue one call on a device, while the ranks compare. Return the program that waits for the call.

        `stream` returns the caller's current stream of the device, or raises RuntimeError while the stream captures a
        graph.
        """
        if self._dispatcher.lifetime.issuing is not None:
            self._dispatcher.check_on_loop("an operation on CUDA tensors")
        current = stream()
        queued: Queued | BaseException
        try:
            queued = queue(t, current)
        except RuntimeError as raised:
            queued = device_error(raised)
        else:
            operation.set_fence(queued)
        operation.admit()  # the launch cannot be recalled
        return _queued(t, queued, operation)

    # --- where results go -----------------------------------------------------------------------------------

    def _shape(self, kind: str, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the result for a `t` of `shape` on all ranks."""
        if kind == "reduce_scatter":
            return block_of(shape, self._rank, self._size)
        if kind == "allgather":
            return (shape[0] * self._size, *shape[1:]) if shape else (self._size,)
        return shape

    def _room(self, kind: str, t: Tensor) -> tuple[Tensor, Any]:
        """Return the output tensor and the result of a call without `out`."""
        if kind in _IN_PLACE:
            return t, t
        room = t.new_empty(self._shape(kind, t.shape))
        if kind != "allgather":
            return room, room
        return room, [block.view(t.shape) for block in room.view(-1).split(t.numel())]

    def _takes(self, kind: str, t: Tensor, out: Tensor) -> bool:
        """Return True if `out` can hold the result without change. The general checks report errors of `out`."""
        if type(out) not in _PLAIN or out.dtype is not t.dtype or not out.is_cpu or out.layout is not torch.strided:
            return False
        if out.shape != self._shape(kind, t.shape) or not _dense(out, out.untyped_storage()):
            return False
        own = self._rank * t.nbytes if kind == "allgather" else 0
        return not overlaps(out, t) or (out.data_ptr() + own == t.data_ptr() and kind in (*_IN_PLACE, "allgather"))

    # --- plans ----------------------------------------------------------------------------------------------

    def _plan(self, call: Signature, t: Tensor) -> Plan | None:
        """Make and keep the plan of the calls with this signature. Return None without a plan."""
        self._repertoire.check(call.impl, call.kind)
        numel, ranks = call.shape.numel(), self._size
        if not numel or call.dtype not in SUPPORTED or (call.kind in REDUCTIONS and call.op not in _OPS):
            return None
        kind = KINDS[call.kind.removesuffix("_single")]
        known = None if call.op is None else check_op(call.op, call.dtype)
        cut = kind in (LaneKind.REDUCE_SCATTER, LaneKind.ALLTOALL)
        if (cut and not call.shape) or (kind is LaneKind.ALLTOALL and call.shape[0] % ranks):
            return None
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        if call.device >= 0 or self._lanes.core is None or not self._chosen(call, known):
            plan = self._plan_outside(call, known, t)
            if plan is not None:  # NCCL may open later
                self._plans[call] = plan
            return plan
        sent: Sequence[int] = ()
        if kind is LaneKind.REDUCE_SCATTER:
            sent = [block.numel() for block in blocks_of(t, None, ranks)]
        elif kind is LaneKind.ALLGATHER:
            sent = [numel] * ranks
        elif kind is LaneKind.ALLTOALL:
            sent = [numel // ranks] * ranks
        what = fingerprint_of(call.kind, [t], call.op, call.root, call.impl)
        form = _LaneFields(
            kind,
            dtype_code(call.dtype),
            0 if known is None else op_code(known),
            call.root or 0,
            like=word_of((list(call.shape),)) if kind is LaneKind.ALLGATHER else 0,
            numel=numel * ranks if kind is LaneKind.ALLGATHER else numel,
            nbytes=numel * call.dtype.itemsize,
            target_nbytes=torch.Size(self._shape(call.kind, call.shape)).numel() * call.dtype.itemsize,
            writes=call.root is None or (call.root == self._rank) != (kind is LaneKind.BROADCAST),
            sent=tuple(sent),
            received=tuple(sent) if kind is LaneKind.ALLTOALL else (),
        )
        otherwise = partial(self._go_on, call, self._repertoire)
        in_lane = self._plans[call] = _core.Plan(what, call.kind, otherwise, what.word, *form)
        # The compiled core cannot detect conjugated views of complex tensors.
        if call.kind == "allreduce" and self._lanes.core is not None and not call.dtype.is_complex:
            self._lanes.core.add(t, call.op, call.impl, in_lane)
        return in_lane

    def _plan_across(self, call: Signature, t: Tensor, count: int) -> _core.Plan | None:
        """Return the plan of a reduction over `count` parts of each rank, or None without one."""
        self._repertoire.check(call.impl, call.kind)
        if call.dtype in CONVERTED or call.impl not in ("auto", "shm") or call.op not in _OPS or not t.numel():
            return None
        op = check_op(call.op or "", call.dtype)
        wanted = Wanted(call.kind, call.dtype, op, t.numel())
        if count & (count - 1) or self._repertoire.pick(wanted, call.impl, ordered=True).name != "shm":
            return None
        what = fingerprint_of(call.kind, [t], call.op, call.root, call.impl, across=True)
        form = _LaneFields(
            KINDS[call.kind],
            dtype_code(call.dtype),
            op_code(op),
            call.root or 0,
            numel=t.numel(),
            nbytes=t.nbytes,
            target_nbytes=t.nbytes,
            writes=call.root in (None, self._rank),
        )
        otherwise = partial(self._go_on_across, call, self._repertoire)
        return _core.Plan(what, call.kind, otherwise, what.word, *form)

    def _plan_outside(self, call: Signature, op: ReduceOp | None, t: Tensor) -> OutsidePlan | None:
        """Return the plan of a call outside the lanes, or None if the device has none."""
        kind, dtype, numel, repertoire = call.kind, call.dtype, call.shape.numel(), self._repertoire
        nbytes = numel * dtype.itemsize
        what = fingerprint_of(kind, [t], call.op, call.root, call.impl)
        if call.device >= 0:
            queue = self._queue_of(call, repertoire) if kind == "allreduce" else None
            if queue is None:
                return None
            stream = partial(Events.of(self._dispatcher.progress).issuing_stream, call.device)
            return OutsidePlan(what, nbytes, partial(self._queue, queue, stream), when=When.NOW)
        if kind == "allreduce" and self._size > 1:
            assert op is not None
            chosen = repertoire.pick(Wanted("allreduce", dtype, op, numel), call.impl)
            if (start := chosen.plan_allreduce(dtype, numel, op)) is not None:
                make = partial(self._native, start, chosen.name, nbytes)
                return OutsidePlan(what, nbytes, make, when=When.ALL, work_bytes=nbytes, messages=False)
        mine = call.root in (None, self._rank)
        in_place = kind == "broadcast" or (kind in _IN_PLACE and mine)
        program = partial(self._collective, self._work(call, t), in_place, repertoire, call.impl)
        return OutsidePlan(what, nbytes, program, in_place and (kind != "broadcast" or not mine), work_bytes=nbytes)

    def _work(self, call: Signature, t: Tensor) -> Work:
        """Return the collective of a call that a program runs."""
        blocks = [blocks_of(t, None, self._size)] if call.kind == "reduce_scatter" else []
        return work_of(call.kind, None if call.op is None else ReduceOp(call.op), call.root, blocks=blocks)

    def _chosen(self, call: Signature, op: ReduceOp | None) -> bool:
        """Return True if the table or the call chooses shared memory."""
        kind, repertoire = call.kind, self._repertoire
        if kind == "allgather" and call.impl == "auto":  # ranks do not know the sizes of one another
            return repertoire.every(kind) == {"shm"}
        if kind == "alltoall_single":  # the table has no row of this kind
            return call.impl in ("auto", "shm")
        return repertoire.pick(Wanted(kind, call.dtype, op, call.shape.numel()), call.impl).name == "shm"

    # --- calls that a program continues -----------------------------------------------------------------------

    def _go_on(
        self,
        call: Signature,
        repertoire: Repertoire,
        handle: Handle[Any],
        t: Tensor,
        out: Tensor | None,
        owned: Sequence[tuple[int, int, bool, UntypedStorage, Tensor | None]],
        changed: Tensor | None,
    ) -> None:
        """Continue by a program after the ranks have agreed on a call that no lane can run.

        `owned` has the fields of the claims. `changed` is the tensor that the user's program has changed, or None.
        """
        claims = [Claim(*one) for one in owned]
        t = _as_claimed(t, call, claims)
        work = partial(each, work=self._work(call, t), ts=[t], out=out)
        self._lanes.go_on(handle, partial(self.program, work, repertoire, call.impl), claims, changed)

    def _go_on_across(
        self,
        call: Signature,
        repertoire: Repertoire,
        handle: Handle[Any],
        parts: Tensor | Sequence[Tensor],
        out: Tensor | None,
        owned: Sequence[tuple[int, int, bool, UntypedStorage, Tensor | None]],
        changed: Tensor | None,
    ) -> None:
        """As `_go_on`, for a reduction over parts, if ranks have different numbers of parts."""
        claims = [Claim(*one) for one in owned]
        parts = [parts] if isinstance(parts, Tensor) else parts
        ts = [_as_claimed(part, call, [claim for claim in claims if claim.tensor is part]) for part in parts]
        mine = call.root in (None, self._rank)
        into = [] if not mine else ts[:1] if out is None else [out.detach()]
        result = None if not mine else parts[0] if out is None else out
        work = partial(_across, ts=ts, into=into, op=ReduceOp(call.op or ""), root=call.root, result=result)
        self._lanes.go_on(handle, partial(self.program, work, repertoire, call.impl), claims, changed)


async def _across(
    p: Primitives, ts: Sequence[Tensor], into: Sequence[Tensor], op: ReduceOp, root: int | None, result: Tensor | None
) -> Tensor | None:
    """Reduce over the parts of all ranks. Return `result`."""
    await reduce_parts(p, ts, into, op, root)
    return result


async def _queued(t: Tensor, queued: Queued | BaseException, operation: CommunicatorOperation) -> Tensor:
    """Wait for a call that was queued on a device, or raise its error."""
    if isinstance(queued, BaseException):
        raise queued
    if operation.traffic is not None:
        operation.traffic.way, operation.traffic.native = "nccl", 1
    await transfer(queued.start)
    if operation.traffic is not None:
        operation.traffic.native = 0
    return t


def _as_claimed(t: Tensor, call: Signature, owned: Sequence[Claim]) -> Tensor:
    """Return `t` with the memory of the call, since the user may have given `t` other memory."""
    claim = next((claim for claim in owned if not claim.writes), next(iter(owned), None))
    inside = any(one.start <= t.data_ptr() < one.start + one.nbytes for one in owned)
    if claim is None or claim.memory is None or (inside and t.dtype is call.dtype and t.shape == call.shape):
        return t
    offset = (claim.start - claim.memory.data_ptr()) // call.dtype.itemsize
    return (
        torch.empty(0, dtype=call.dtype, device="cpu")
        .set_(claim.memory, offset, (call.shape.numel(),), (1,))
        .view(call.shape)
    )


def _dense(t: Tensor, memory: UntypedStorage) -> bool:
    """Return True if the storage `memory` of `t` holds all elements in order, without conjugation or negation.

    A program may have shrunk the storage.
    """
    if t.is_neg() or (t.dtype.is_complex and t.is_conj()) or not t.is_contiguous():
        return False
    return t.storage_offset() * t.itemsize + t.nbytes <= memory.nbytes()
