"""The collectives of one communicator."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Begin, Done, Operation, Wanted, tell
from aiodist.backends.gloo.frames import ROUND, Frame
from aiodist.backends.gloo.group import Call, GlooGroup, allreduce_calls, reduce_calls
from aiodist.backends.gloo.library import again, backend_error
from aiodist.backends.gloo.memory import empty
from aiodist.backends.gloo.reductions import combine, gloo_reduces, reducible
from aiodist.backends.gloo.signatures import CODES, read, sign
from aiodist.backends.gloo.wire import Wire
from aiodist.backends.inplace import bytes_of
from aiodist.errors import BackendError, MismatchError
from aiodist.handles import LARGE_BYTES
from aiodist.types import ReduceOp

__all__ = ["GlooNative"]

_NOTHING = empty(0)


@dataclass(eq=False)
class _Round:
    """One collective: what each rank brought to it so far."""

    signature: bytes
    finish: Callable[[list[Tensor]], None] | None
    calls: Sequence[Call]
    """What gloo is to do where frames do not suffice."""
    done: Done
    signatures: dict[int, bytes] = field(default_factory=dict)
    parts: dict[int, Tensor] = field(default_factory=dict)


class GlooNative:
    """Collectives: short ones in one exchange of frames, long ones by gloo once the ranks have shown that they agree.

    p ranks, n bytes: a short one costs p-1 frames of n bytes in and out and one latency; its parts are combined in
    rank order.
    """

    finishes = False
    inline_bytes = LARGE_BYTES
    in_order = True

    def __init__(self, wire: Wire, comm: int, rank: int, world_ranks: Sequence[int], group: GlooGroup) -> None:
        self.group = group
        self._comm = comm
        self._rank = rank
        self._size = len(world_ranks)
        self._limit = wire.capacity
        self._others = [wire.peers[other] for other in world_ranks if other in wire.peers]
        self._seq = 0
        self._rounds: dict[int, _Round] = {}
        self._early: dict[int, list[tuple[int, Frame]]] = {}

    # What it offers.

    def supports(self, wanted: Wanted) -> bool:
        """Return True for reductions, long ones where gloo has the dtype and the operator.

        What moves tensors goes by direct sends: as many messages, and the ranks need not wait for one another.
        """
        operation, kind, op = wanted.operation, wanted.kind, wanted.op
        if operation not in CODES or not reducible(kind, op):
            return False
        if wanted.nbytes <= self._limit:
            return operation != "reduce"  # the others send to the root and need not wait
        return operation in ("allreduce", "reduce") and gloo_reduces(kind, op)

    def plan_allreduce(self, kind: torch.dtype, numel: int, op: ReduceOp) -> Begin:
        """Return what begins an allreduce, with all that can be known ahead worked out."""
        signature = sign("allreduce", kind, numel, op)
        return lambda t, _, done: self._begin(self._round(Operation("allreduce", t, op=op), signature, done), t)

    def start(self, operation: Operation, _: int, done: Done) -> None:
        """Begin an operation; see `supports` for which."""
        t = operation.t
        # Of what is reduced to all alike it is the same as where it was planned.
        where = _digest(operation.counts) if operation.counts else operation.root
        round = self._round(operation, sign(operation.kind, t.dtype, t.numel(), operation.op, where), done)
        self._begin(round, t if round.finish is not None else None)

    def _round(self, o: Operation, signature: bytes, done: Done) -> _Round:
        if o.kind == "reduce":  # gloo uses the others' as scratch, so they give it copies
            given = o.t if self._rank == o.root else o.t.detach().clone()
            return _Round(signature, None, reduce_calls(given, o.op, o.root), done)
        if o.t.nbytes > self._limit:
            return _Round(signature, None, allreduce_calls(o.t, o.op), done)
        return _Round(signature, partial(self._finish, o), (), done)

    def _finish(self, o: Operation, parts: list[Tensor]) -> None:
        """Combine what the ranks brought."""
        if o.kind == "reduce_scatter":
            first = sum(o.counts[: self._rank]) * o.t.element_size()
            parts = [part[first : first + o.out.nbytes] for part in parts]
        elif o.kind == "scan":
            parts = parts[: self._rank + 1]
        combine(parts, o.out, o.op)

    # The exchange.

    def _begin(self, round: _Round, data: Tensor | None) -> None:
        number = self._seq
        self._seq += 1
        nbytes = 0 if data is None else data.nbytes
        error = next((peer.error for peer in self._others if peer.error is not None), None)
        for peer in self._others:
            error = error or peer.send(
                ROUND, comm=self._comm, number=number, nbytes=nbytes, signature=round.signature, data=data
            )
        early = self._early.pop(number, ())
        if error is not None:
            round.done(again(error))
            return
        self._add(round, self._rank, round.signature, _NOTHING if data is None else bytes_of(data))
        self._rounds[number] = round
        for src, frame in early:
            self._add(round, src, frame.signature, frame.data)
        self._conclude(number, round)

    def came(self, src: int, frame: Frame) -> None:
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
            brought = "; ".join(f"rank {rank}: {read(text)}" for rank, text in sorted(round.signatures.items()))
            round.done(MismatchError(f"the ranks disagree: {brought}"))
            return
        if round.finish is None:
            self.group.run(round.calls, round.done)
            return
        error: BackendError | None = None
        try:
            round.finish([round.parts[rank] for rank in range(self._size)])
        except Exception as raised:  # noqa: BLE001  - it belongs to the task that awaits the operation
            error = backend_error(raised)
        round.done(error)

    def abort(self, error: BackendError) -> None:
        """What is under way never ends."""
        rounds, self._rounds = self._rounds, {}
        self.group.cut()
        tell((round.done, again(error)) for round in rounds.values())


def _digest(counts: Sequence[int]) -> int:
    return zlib.crc32(repr(tuple(counts)).encode()) >> 1
