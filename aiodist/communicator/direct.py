"""Collectives that a lane runs from the call on, if all ranks share memory.

What a call needs is worked out at the first one of its kind and kept, as a plan of the compiled core. A rank may issue
the same operation in the general way: its tensor is of a class of its own, another thread is at work. And ranks may
bring tensors of different shapes to an allgather. The lane finds that out, and all go on in the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from aiodist import _core
from aiodist.backends.base import Wanted, dtype_code, key_of, tag_of
from aiodist.backends.shm.lanes import KINDS, Kind, op_code
from aiodist.backends.words import word_of
from aiodist.collectives import operations
from aiodist.collectives.arithmetic import SUPPORTED, check_op
from aiodist.collectives.endpoint import Endpoint
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.metadata import overlaps
from aiodist.collectives.primitives import Primitives
from aiodist.communicator.arguments import Terms, block_of, blocks_of
from aiodist.communicator.claims import Claim
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.fingerprint import Fingerprint, fingerprint_of
from aiodist.handles import Handle
from aiodist.handles.kernel import Program
from aiodist.types import OP_ALIASES, REDUCTIONS, ReduceOp, check_timeout

_MOST_PLANS = 10_000
_PLAIN = (Tensor, Parameter)
_OPS = frozenset({*ReduceOp, *OP_ALIASES})
_IN_PLACE = frozenset({"allreduce", "broadcast", "reduce", "scan"})


class _Call(NamedTuple):
    """What calls have in common that go by one plan."""

    kind: str
    dtype: torch.dtype
    shape: torch.Size
    op: str | None
    root: int | None
    impl: str


class _Form(NamedTuple):
    """What the compiled core has to know of them; see `core_op` in core.h, and `Plan`."""

    kind: Kind
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


def _reduced(
    make: Callable[..., Program[Any]], p: Primitives, t: Tensor, out: Tensor | None, call: _Call
) -> Program[Any]:
    assert call.op is not None
    into = t if out is None else out
    if call.root is None:
        return make(p, t, into, ReduceOp(call.op))
    return make(p, t, into if p.ep.rank == call.root else None, ReduceOp(call.op), call.root)


def _scattered(p: Primitives, t: Tensor, out: Tensor | None, call: _Call) -> Program[Any]:
    assert call.op is not None
    return operations.reduce_scatter(p, t, out, ReduceOp(call.op), blocks_of(t, None, p.ep.size))


_PROGRAMS: Mapping[str, Callable[[Primitives, Tensor, Tensor | None, _Call], Program[Any]]] = MappingProxyType(
    {
        "allreduce": partial(_reduced, operations.allreduce),
        "reduce": partial(_reduced, operations.reduce),
        "scan": partial(_reduced, operations.scan),
        "broadcast": lambda p, t, _, call: operations.broadcast(p, t, call.root or 0),
        "reduce_scatter": _scattered,
        "allgather": lambda p, t, out, _: operations.allgather(p, t, out),
        "alltoall_single": lambda p, t, out, _: operations.alltoall_single(p, t, out, None),
    }
)
"""The general way of each: what goes on where a lane cannot do it."""


class Direct:
    """Issues them for one communicator. A call that cannot go this way returns None, and is to go the general one."""

    def __init__(self, dispatcher: Dispatcher, device: torch.device) -> None:
        self._dispatcher = dispatcher
        self._device = device
        self._rank, self._size = dispatcher.transport.rank, dispatcher.transport.size
        self._repertoire = dispatcher.repertoire
        self._plans: dict[_Call, _core.Plan | None] = {}
        """None where such calls do not go this way."""
        barrier = Fingerprint("barrier")
        self._barrier = _core.Plan(
            barrier, barrier.kind, None, barrier.word, *_Form(Kind.BARRIER, dtype_code(torch.uint8))
        )

    def follow(self, repertoire: Repertoire) -> None:
        """Choose as `repertoire` says, from the next call on."""
        self._repertoire = repertoire
        self._plans.clear()
        if self._dispatcher.issuer is not None:
            self._dispatcher.issuer.forget()

    def issue(
        self,
        kind: str,
        t: object,
        out: Tensor | None,
        terms: Terms,
        *,
        op: str | None = None,
        root: int | None = None,
    ) -> Handle[Any] | None:
        """Issue a collective of `t`, with the result in `out`, in `t` or in new memory."""
        issuer, timeout = self._dispatcher.issuer, terms.timeout
        if issuer is None or type(t) not in _PLAIN or terms.name is not None:
            return None
        assert isinstance(t, Tensor)
        check_timeout(timeout)
        call = _Call(kind, t.dtype, t.shape, op, root, terms.impl)
        try:
            plan = self._plans[call]
        except KeyError:
            plan = self._plan(call, t)
        except TypeError:  # what has no hash is no operator and names no implementation
            return None
        if plan is None or not _dense(t):
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

    def barrier(self, timeout: float | None) -> Handle[None] | None:
        """Issue a barrier."""
        issuer = self._dispatcher.issuer
        if issuer is None:
            return None
        check_timeout(timeout)
        handle: Handle[None] | None = issuer.issue(self._barrier, None, None, None, None)  # type: ignore[assignment]
        if handle is not None:
            self._dispatcher.set_deadline(handle, timeout)
        return handle

    # --- where results go -----------------------------------------------------------------------------------

    def _shape(self, kind: str, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the result of a `t` of `shape`, where all ranks bring the same."""
        if kind == "reduce_scatter":
            return block_of(shape, self._rank, self._size)
        if kind == "allgather":
            return (shape[0] * self._size, *shape[1:]) if shape else (self._size,)
        return shape

    def _room(self, kind: str, t: Tensor) -> tuple[Tensor, Any]:
        """Return where the result goes of a call without `out`, and what it returns."""
        if kind in _IN_PLACE:
            return t, t
        room = t.new_empty(self._shape(kind, t.shape))
        if kind != "allgather":
            return room, room
        return room, [block.view(t.shape) for block in room.view(-1).split(t.numel())]

    def _takes(self, kind: str, t: Tensor, out: Tensor) -> bool:
        """Return whether the result goes into `out` as it is; what else there is to say of it the general way says."""
        if type(out) not in _PLAIN or out.dtype is not t.dtype or not _dense(out):
            return False
        if out.shape != self._shape(kind, t.shape):
            return False
        own = self._rank * t.nbytes if kind == "allgather" else 0
        return not overlaps(out, t) or (out.data_ptr() + own == t.data_ptr() and kind in (*_IN_PLACE, "allgather"))

    # --- plans ----------------------------------------------------------------------------------------------

    def _plan(self, call: _Call, t: Tensor) -> _core.Plan | None:
        """Work out how such calls go, and keep it; None where they do not go this way."""
        self._repertoire.check(call.impl)
        numel, ranks = call.shape.numel(), self._size
        if not numel or call.dtype not in SUPPORTED or (call.kind in REDUCTIONS and call.op not in _OPS):
            return None
        kind = KINDS[call.kind.removesuffix("_single")]
        known = None if call.op is None else check_op(call.op, call.dtype)
        cut = kind in (Kind.REDUCE_SCATTER, Kind.ALLTOALL)
        if (cut and not call.shape) or (kind is Kind.ALLTOALL and call.shape[0] % ranks):
            return None
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        if not self._chosen(call, known):
            self._plans[call] = None
            return None
        sent: Sequence[int] = ()
        if kind is Kind.REDUCE_SCATTER:
            sent = [block.numel() for block in blocks_of(t, None, ranks)]
        elif kind is Kind.ALLGATHER:
            sent = [numel] * ranks
        elif kind is Kind.ALLTOALL:
            sent = [numel // ranks] * ranks
        what = fingerprint_of(call.kind, [t], call.op, call.root, call.impl)
        form = _Form(
            kind,
            dtype_code(call.dtype),
            0 if known is None else op_code(known),
            call.root or 0,
            like=word_of((list(call.shape),)) if kind is Kind.ALLGATHER else 0,
            numel=numel * ranks if kind is Kind.ALLGATHER else numel,
            nbytes=numel * call.dtype.itemsize,
            target_nbytes=torch.Size(self._shape(call.kind, call.shape)).numel() * call.dtype.itemsize,
            writes=call.root is None or (call.root == self._rank) != (kind is Kind.BROADCAST),
            sent=tuple(sent),
            received=tuple(sent) if kind is Kind.ALLTOALL else (),
        )
        otherwise = partial(self._go_on, call, self._repertoire)
        plan = self._plans[call] = _core.Plan(what, call.kind, otherwise, what.word, *form)
        # Whether memory of complex numbers is to be conjugated the compiled way does not see.
        if call.kind == "allreduce" and self._dispatcher.issuer is not None and not call.dtype.is_complex:
            self._dispatcher.issuer.add(t, call.op, call.impl, plan)
        return plan

    def _chosen(self, call: _Call, op: ReduceOp | None) -> bool:
        """Return whether the table, or the call, has shared memory do it."""
        kind, repertoire = call.kind, self._repertoire
        if kind == "allgather" and call.impl == "auto":  # ranks do not know the sizes of one another
            return repertoire.every(kind) == {"shm"}
        if kind == "alltoall_single":  # the table has no row of it
            return call.impl in ("auto", "shm")
        return repertoire.pick(Wanted(kind, call.dtype, op, call.shape.numel()), call.impl).name == "shm"

    # --- the general way --------------------------------------------------------------------------------------

    def _go_on(
        self,
        call: _Call,
        repertoire: Repertoire,
        handle: Handle[Any],
        t: Tensor,
        out: Tensor | None,
        owned: Sequence[tuple[int, int, bool, UntypedStorage, Tensor | None]],
    ) -> None:
        """The ranks agree, but the lane did not do it; `owned` are the fields of its claims."""
        dispatcher, seq, claims = self._dispatcher, handle.seq, [Claim(*one) for one in owned]

        def make() -> Program[Any]:
            ep = Endpoint(dispatcher.transport, tag_of(seq), traffic=dispatcher.traffic(seq), key=key_of(seq))
            p = Primitives(ep, repertoire, call.impl, device=self._device)
            return _PROGRAMS[call.kind](p, _as_claimed(t, call, claims), out, call)

        dispatcher.go_on(handle, make, claims)


class Never(Direct):
    """The general path for all calls."""

    def __init__(self) -> None: ...

    def issue(self, *args: object, **kwargs: object) -> None:
        """Return None."""


def _as_claimed(t: Tensor, call: _Call, owned: Sequence[Claim]) -> Tensor:
    """Return `t` as it was at the call: the program may have given it other memory since."""
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


def _dense(t: Tensor) -> bool:
    """Return whether its memory is as it reads, on the CPU."""
    odd = t.is_neg() or (t.dtype.is_complex and t.is_conj())
    return t.is_cpu and t.layout is torch.strided and t.is_contiguous() and not odd
