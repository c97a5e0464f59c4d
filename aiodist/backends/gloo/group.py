"""gloo's own collectives, for what is too long for frames."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.gloo.library import CLOSE_SECONDS, FOREVER, ProcessGroup, Work, backend_error, c10d, cut
from aiodist.backends.gloo.memory import pieces
from aiodist.backends.inplace import flat
from aiodist.errors import BackendError
from aiodist.handles import join
from aiodist.handles.progress import transport_lock
from aiodist.types import ReduceOp

__all__ = ["Call", "GlooGroup", "allreduce_calls", "reduce_calls"]

Call = Callable[[ProcessGroup], Work]

_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.PROD: c10d.ReduceOp.PRODUCT,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
    ReduceOp.BAND: c10d.ReduceOp.BAND,
    ReduceOp.BOR: c10d.ReduceOp.BOR,
    ReduceOp.BXOR: c10d.ReduceOp.BXOR,
}


class GlooGroup:
    """One process group of gloo's, for the long collectives of one communicator."""

    def __init__(self, group: ProcessGroup, others: Sequence[int], tell: Callable[[Callable[[], None]], None]) -> None:
        """`tell` calls what completes operations from a thread of gloo's: see `Wire`."""
        self._group: ProcessGroup | None = group
        self._others = others
        self._tell = tell
        self._running = 0
        self._cutter: threading.Thread | None = None

    def run(self, calls: Sequence[Call], done: Done) -> None:
        """Start collectives, `done` when all are over; with the transport lock held."""
        over = join(len(calls), done)
        for call in calls:
            self._start(call, over)

    def _start(self, call: Call, over: Done) -> None:
        if self._group is None:
            over(BackendError("gloo: the transport is closed"))
            return
        try:
            future = call(self._group).get_future()
        except Exception as error:  # noqa: BLE001  - torch chooses the class
            over(backend_error(error))
            return
        starting: int | None = threading.get_ident()

        def finish(error: BaseException | None) -> None:
            self._running -= 1
            over(error)

        def ended(future: torch.futures.Future[Any]) -> None:
            error = _future_error(future)
            if starting == threading.get_ident():  # it was over before it could be watched: we hold the lock
                finish(error)
            else:
                self._tell(partial(finish, error))

        self._running += 1
        future.add_done_callback(ended)
        starting = None

    def cut(self) -> None:
        """Have what runs fail, soon; with the lock held."""
        if self._running and self._group is not None and self._cutter is None:
            self._cutter = threading.Thread(target=cut, args=(self._group, self._others), daemon=True)
            self._cutter.start()

    def close(self) -> None:
        """Close the connections; without the lock, blocks for `CLOSE_SECONDS` at most."""
        group = self._group
        if group is None:
            return
        if self._cutter is not None:
            self._cutter.join()
        elif self._running:
            cut(group, self._others)
        until = monotonic() + CLOSE_SECONDS
        with transport_lock:
            self._group = None
        pause = threading.Event()
        while self._running and monotonic() < until:
            pause.wait(2e-3)
        if self._running:  # destroying it would wait for what runs, for ever: a thread keeps it instead
            threading.Thread(target=_keep, args=(group,), daemon=True).start()


def _keep(_group: ProcessGroup) -> None:
    threading.Event().wait()


def _future_error(future: torch.futures.Future[Any]) -> BackendError | None:
    try:
        future.value()
    except Exception as error:  # noqa: BLE001  - torch chooses the class
        return backend_error(error)
    return None


def allreduce_calls(t: Tensor, op: ReduceOp) -> list[Call]:
    """Return what reduces `t` in place on every rank."""
    return _calls(t, partial(_allreduce, op))


def reduce_calls(t: Tensor, op: ReduceOp, root: int) -> list[Call]:
    """Return what reduces into root's `t`, with the others' as scratch."""
    return _calls(t, partial(_reduce, op, root))


def _calls(t: Tensor, call: Callable[[Tensor, ProcessGroup], Work]) -> list[Call]:
    numbers = flat(t)
    if numbers.is_complex():
        numbers = flat(torch.view_as_real(numbers))
    return [partial(call, piece) for piece in pieces(numbers)]


def _allreduce(op: ReduceOp, t: Tensor, group: ProcessGroup) -> Work:
    options = c10d.AllreduceOptions()
    options.reduceOp = _OPS[op]
    options.timeout = FOREVER
    return group.allreduce([t], options)


def _reduce(op: ReduceOp, root: int, t: Tensor, group: ProcessGroup) -> Work:
    options = c10d.ReduceOptions()
    options.reduceOp = _OPS[op]
    options.rootRank = root
    options.timeout = FOREVER
    return group.reduce([t], options)
