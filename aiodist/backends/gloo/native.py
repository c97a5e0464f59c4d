"""gloo's own collectives for one communicator. Handles for works of the user."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Begin, Done, Primitive, Wanted, again, started
from aiodist.backends.gloo.library import (
    CLOSE_SECONDS,
    FOREVER,
    ProcessGroup,
    Work,
    abort_group,
    backend_error,
    c10d,
    pieces,
)
from aiodist.backends.gloo.wire import GlooPeer
from aiodist.errors import BackendError
from aiodist.handles import Handle, Origin, from_future, from_source, join
from aiodist.handles.polling import transport_lock
from aiodist.streams.memory import flat
from aiodist.threads import OwnThread
from aiodist.types import ReduceOp

_OPS: dict[ReduceOp | None, Any] = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.PROD: c10d.ReduceOp.PRODUCT,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
    ReduceOp.BAND: c10d.ReduceOp.BAND,
    ReduceOp.BOR: c10d.ReduceOp.BOR,
    ReduceOp.BXOR: c10d.ReduceOp.BXOR,
}
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
_TAKES = {
    **dict.fromkeys((torch.uint8, torch.int8, torch.int32, torch.int64), tuple(_OPS)),
    **dict.fromkeys((torch.float32, torch.float64), _ARITHMETIC),
    **dict.fromkeys((torch.complex64, torch.complex128), (ReduceOp.SUM,)),
}


@dataclass(eq=False)
class GlooNative:
    """`allreduce` and `reduce`, in a separate process group.

    Other collectives use direct sends, since gloo's would need as many messages and make the ranks wait. All ranks must
    begin the same operations in the same order, else gloo ends the process. So the ranks compare operations before they
    begin.
    """

    finishes = False
    in_order = True
    recallable = False

    _group: ProcessGroup | None
    _rank: int
    _peers: Collection[GlooPeer]
    _run: Callable[..., None]  # `Wire.call`, which runs completions from a thread of gloo
    _running: int = 0
    _aborter: threading.Thread | None = None

    def supports(self, wanted: Wanted) -> bool:
        return wanted.operation in ("allreduce", "reduce") and wanted.op in _TAKES.get(wanted.kind, ())

    def plan_allreduce(self, kind: torch.dtype, numel: int, op: ReduceOp) -> Begin:
        return lambda t, key, done: self.start(Primitive("allreduce", t, op=op), key, done)

    def start(self, operation: Primitive, _: int, done: Done) -> None:
        """Begin an operation (transport lock held)."""
        o = operation
        error = next((peer.error for peer in self._peers if peer.error is not None), None)
        if error is not None or not o.t.numel():
            done(error and again(error))
            return
        # gloo uses the tensors of ranks other than the root as scratch, so these ranks pass copies.
        t = o.t if o.kind == "allreduce" or self._rank == o.root else o.t.detach().clone()
        numbers = flat(torch.view_as_real(t)) if t.is_complex() else flat(t)
        parts = pieces(numbers)
        joined = join(len(parts), done)
        for part in parts:
            self._start(o, part, joined)

    def _start(self, o: Primitive, part: Tensor, done: Done) -> None:
        if self._group is None:
            done(BackendError("gloo: the transport is closed"))
            return
        try:
            future = _begin(self._group, o, part).get_future()
        except Exception as error:  # noqa: BLE001  - torch chooses the class
            done(backend_error(error))
            return
        starting: int | None = threading.get_ident()

        def ended(future: torch.futures.Future[Any]) -> None:
            error = None
            try:
                future.value()
            except Exception as raised:  # noqa: BLE001  - torch chooses the class
                error = backend_error(raised)
            if starting == threading.get_ident():  # the work ended during `add_done_callback`, with the lock held
                self._finish(done, error)
            else:
                self._run(self._finish, done, error)

        self._running += 1
        future.add_done_callback(ended)
        starting = None

    def _finish(self, done: Done, error: BaseException | None) -> None:
        self._running -= 1
        done(error)

    def abort(self) -> None:
        """Make operations in flight fail soon (lock held)."""
        if self._running and self._group is not None and self._aborter is None:
            self._aborter = OwnThread("aiodist-gloo-abort", self._abort_group, self._group)
            self._aborter.start()

    def _abort_group(self, group: ProcessGroup) -> None:
        abort_group(group, [rank for rank in range(len(self._peers) + 1) if rank != self._rank])

    def close(self) -> None:
        """Close the connections (lock not held). The call blocks for `CLOSE_SECONDS` at most."""
        group = self._group
        if group is None:
            return
        if self._aborter is not None:
            self._aborter.join()
        elif self._running:
            self._abort_group(group)
        until = monotonic() + CLOSE_SECONDS
        with transport_lock:
            self._group = None
        pause = threading.Event()
        while self._running and monotonic() < until:
            pause.wait(2e-3)
        if self._running:  # the destructor would wait without end, so a thread holds a reference
            OwnThread("aiodist-gloo-held", lambda _: threading.Event().wait(), group).start()


def _begin(group: ProcessGroup, o: Primitive, t: Tensor) -> Work:
    options = c10d.AllreduceOptions() if o.kind == "allreduce" else c10d.ReduceOptions()
    options.reduceOp = _OPS[o.op]
    options.timeout = FOREVER
    if isinstance(options, c10d.AllreduceOptions):
        return group.allreduce([t], options)
    options.rootRank = o.root
    return group.reduce([t], options)


class _WorkSource:
    """A torch Work with a usable `is_completed`: of gloo's collectives and of NCCL, whose futures end too early."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def poll(self) -> bool:
        return self._work.is_completed()

    def result(self) -> None:
        self._work.wait()


def _wait(work: Work) -> None:
    work.wait()


def work_handle(work: Work) -> Handle[None]:
    """Return a handle that completes with the user's own `work`.

    gloo's sends and receives offer only a blocking wait, so each uses a thread until the end.
    """
    try:
        work.get_future()
    except RuntimeError:
        return from_future(started(_wait, work), "work")
    return from_source(_WorkSource(work), "work", origin=Origin.here())
