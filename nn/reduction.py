"""One pass: the gradients of one backward on their way through the buckets.

Threads that compute say which buckets are full, the loop issues their reductions in an order that is the same on every
rank, and awaits them. What is more to know travels as the *pass status*, a small sum on a communicator of its own:
which parameters had a gradient, which ranks failed or have no data left, how far each had come when its backward ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from aiodist.errors import (
    AiodistError,
    CommunicatorError,
    MismatchError,
    OperationTimeout,
    PeerError,
)
from aiodist.handles import Handle, Permit
from aiodist.nn.accounts import PassAccount, explained, some_in_join
from aiodist.nn.buckets import Bucket
from aiodist.nn.pass_status import PassStatus, StatusKind
from aiodist.nn.paths import Arrival, Paths
from aiodist.nn.queued import Queued
from aiodist.nn.steps import Steps
from aiodist.world.tracebacks import folded

__all__ = ["Observer", "Reduction"]


class Observer(Protocol):
    """The object that is told of the end of a pass; on the loop."""

    steps: Steps
    """Those that the optimizer has made."""

    def account(self, failure: str | None, *, active: bool) -> PassAccount:
        """Return what this rank tells the others where a pass cannot count."""

    def late(self, error: OperationTimeout) -> None:
        """An operation of it has passed its deadline, and goes on."""

    def ended(self, reduction: Reduction, over: Callable[[], None]) -> None:
        """Nothing of it is in flight any more; call `over` when the next may begin."""


class Reduction:
    """One pass over all buckets; every rank makes the same passes in the same order.

    `settled[i]` is done when bucket i may be used: one on a CUDA device behind its reduction, which may only be under
    way (`order`); `usable` when all may. `finished` when all are reduced, or with the error of the pass: this rank's,
    a `RemoteError` where another rank failed, or the communicator's. `over` when nothing is in flight any more,
    however it ended. A pass may begin before the one `behind` which it comes is over; what it sends waits for that.
    """

    def __init__(
        self,
        paths: Paths,
        buckets: Sequence[Bucket],
        observer: Observer,
        members: Sequence[float],
        *,
        active: bool = True,
        behind: Reduction | None = None,
        header: Tensor | None = None,
        refused: PassStatus | None = None,
    ) -> None:
        """`members` has 1.0 for each parameter of the module that is in a bucket, else 0.0."""
        self.paths = paths
        self.buckets = tuple(buckets)
        self.active = active
        self.on_arrival: Callable[[Bucket], None] | None = None
        """Called on the loop when a bucket is reduced."""
        self.prompt = True
        """Not only when the pass status is known, which may change it."""
        self.began = perf_counter()
        self.closed: float | None = None
        """When backward ended, seconds of `perf_counter`."""
        self.spans: list[tuple[float, float]] = []
        """From when to when each bucket was on its way."""
        self.finished: Handle[None] = self._handle("reduction of the gradients")
        self.usable = self._handle("gradients") if paths.devices else self.finished
        self.over: Handle[None] = self._handle("end of the reduction")
        self.settled: list[Handle[None]] = [self._handle("reduction of a bucket") for _ in self.buckets]
        self._unsettled = len(self.buckets)
        """How many of those are not done."""
        self._observer = observer
        self._members = members
        self._error: BaseException | None = None
        self._unsendable: Exception | None = None
        """Why this rank cannot send what the others wait for."""
        self._full = [False] * len(self.buckets)
        self._order = list(range(len(self.buckets)))
        self._next = 0
        """How many buckets, of `_order`, were asked leave for."""
        self._open = True
        """Backward goes on."""
        self._ended = False
        self._frozen = False
        """The ranks are about to agree on an order: nothing new is begun."""
        self._moving: dict[int, Permit | None] = {}
        self._was_late = False
        self._startable: deque[int] = deque()
        """Those that have leave, and are not issued yet."""
        self._reduced: set[int] = set()
        self._queued = Queued(paths.devices, self.buckets)
        """Those on CUDA devices."""
        self._ordered: set[int] = set()
        self.refused = refused
        """What the ranks told before backward, where that shows that this pass cannot count: zeros are sent."""
        self._header = header
        """What is told before all else."""
        self._behind = behind
        self._waits = self._closing = False
        """For the pass before: to issue something; to send its status too."""
        self._began: dict[int, float] = {}
        self._backward: list[torch.cuda.Stream] = []
        """The streams on which backward ended."""
        self._status: PassStatus | None = None
        self._status_pending = 0
        self._text: str | None = None

        if header is not None:
            self.paths.progress.post(self._issue)

    def _handle(self, name: str) -> Handle[None]:
        handle: Handle[None] = Handle(self.paths.progress, name)
        handle.polled = False
        handle.outcome_error()  # those that nobody waits for are no loss: the step's own handle tells
        return handle

    def is_full(self, index: int) -> bool:
        """Bucket `index` was filled."""
        return self._full[index]

    # --- from the threads that run backward -------------------------------------------------------------------

    def full(self, index: int) -> None:
        """All gradients of bucket `index` are there; in the thread in which the last of them came."""
        self._fill(index)
        self.paths.progress.post(self._issue)

    def _fill(self, index: int, *, blank: bool = False) -> None:
        bucket = self.buckets[index]
        with bucket.lock:
            if self._full[index]:
                return
            if blank:
                bucket.blank()
            else:
                self._queued.gather(index)
                bucket.fill()
            self._queued.filled(index)
            self._full[index] = True

    def close(self, error: BaseException | None = None) -> None:
        """Backward is over: send what has not gone yet; with `error` only to keep the others from waiting."""
        try:
            for index in range(len(self.buckets)):
                if not self._full[index] and error is None and self.active and self.refused is None:
                    self._fill(index)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._close_with(error)

    def _close_with(self, error: BaseException | None) -> None:
        try:
            for index in range(len(self.buckets)):
                if not self._full[index]:
                    self._fill(index, blank=True)
        except Exception as raised:  # noqa: BLE001  - no memory even for zeros, or the device is lost
            self._unsendable = raised
            error = error or raised
        self.closed = perf_counter()
        self._backward = self.paths.devices.currents()
        if error is not None:
            self._error = error
            self._text = folded(error, programs=True)
        self.paths.progress.post(self._close)

    # --- from the thread that uses the gradients ---------------------------------------------------------------

    def order(self, index: int) -> None:
        """Let the current stream of its device go on behind the reduction of bucket `index`, which is settled.

        Not on the loop's thread: it blocks until all of the reduction is queued, where the host has a part in it. What
        goes wrong is told by `error`, now or later.
        """
        if self._queued.order(index):
            self.buckets[index].scale()
        self._ordered.add(index)

    @property
    def used(self) -> bool:
        """Every bucket was ordered."""
        return len(self._ordered) == len(self.buckets)

    # --- on the loop: issuing ---------------------------------------------------------------------------------

    def _is_next(self) -> bool:
        """The pass before is over; else what is to be sent is asked for again when it is."""
        if self._behind is None:
            return True
        if self._behind.over.done():
            self._behind = None
            return True
        if not self._waits:
            self._waits = True
            self._behind.over.add_done_callback(self._go_on)
        return False

    def _go_on(self, _: Handle[None]) -> None:
        if self._closing:
            self._close()
        else:
            self._issue()

    def _close(self) -> None:
        if not self._is_next():
            self._closing = True
            return
        self._tell_header()
        self._open = False
        if self._unsendable is not None:
            self._leave_out(self._unsendable)
        for stream in self._backward:
            self.paths.devices.time(stream, self._backward_ended)
        if self.paths.urgent:
            self._frozen = self._next < len(self.buckets)
        self._send_status()
        self._issue()

    def _backward_ended(self, when: float) -> None:
        self.closed = max(when, self.closed or when)

    def _issue(self) -> None:
        if not self._is_next():
            return
        self._tell_header()
        while not self._frozen and self._next < len(self._order) and self._full[self._order[self._next]]:
            if self.paths.urgent and not self._fits(self.buckets[self._order[self._next]]):
                return
            index = self._order[self._next]
            self._next += 1
            self._moving[index] = None
            bucket = self.buckets[index]
            if bucket.on_device and not self.paths.lane.waiting:
                self._granted(index)  # what devices have queued limits nothing here: a step must not wait for them
                continue
            permit = self.paths.lane.request(bucket.nbytes, partial(self._granted, index))
            if index in self._moving:
                self._moving[index] = permit
            else:
                permit.release()

    def _fits(self, bucket: Bucket) -> bool:
        moving = sum(self.buckets[index].nbytes for index in self._moving)
        return len(self._moving) < 2 or moving + bucket.nbytes <= self.paths.window

    def _granted(self, index: int) -> None:
        """Start it, in order; but not as a call of the task that has just given back leave."""
        self._startable.append(index)
        if asyncio.current_task() is None:
            self._start_all()
        else:
            self.paths.progress.post(self._start_all)

    def _start_all(self) -> None:
        while self._startable:
            self._start(self._startable.popleft())

    def _start(self, index: int) -> None:
        try:
            handle = self._reduce(index)
        except Exception as error:  # noqa: BLE001  - the thread that waits for the pass is told
            permit = self._moving.pop(index)
            if permit is not None:
                permit.release()
            if isinstance(error, (CommunicatorError, PeerError)):
                self._fail(error)
            else:
                self._leave_out(error)
            self._conclude()
        else:
            self._began.setdefault(index, perf_counter())
            handle.add_waiter(self._arrival(partial(self._came, index)))
            self._settle(index)

    def _leave_out(self, error: Exception) -> None:
        """Send no more, which the others would wait for: nobody can go on."""
        self._next = len(self._order)
        self._frozen = False
        self.paths.data.abort(f"rank {self.paths.data.rank} cannot send its gradients: {error}")
        self._fail(self._error or error)

    def _reduce(self, index: int) -> Handle[Any]:
        allreduce = partial(self.paths.data.allreduce, self.buckets[index].data, self.paths.op)
        if self.buckets[index].on_device:
            return self._queued.issue(index, allreduce, partial(self._began.__setitem__, index))
        return allreduce()

    def _tell_header(self) -> None:
        """In a `join` block: tell those whose data have ended which parameters are trained; they answer nothing."""
        header, self._header = self._header, None
        if header is not None:
            self._send(header, self._compare_header)

    def _compare_header(self, status: PassStatus) -> None:
        if not status.all_are(StatusKind.JOIN):
            self._part(status)

    def _send_status(self) -> None:
        data = self.paths.data
        if self.refused is not None and StatusKind.JOIN not in self.refused.kinds:
            self._take_status(self.refused)  # the others have taken what this rank asked for its status in this pass
            return
        used = list(self._members)
        for bucket in self.buckets:
            for slot in bucket.unused:
                used[slot.index] = 0.0
        failed = self._text is not None or self.refused is not None
        steps = self._observer.steps.made if self.active else None
        told = PassStatus.pack(used, data.size, data.rank, failed=failed, steps=steps, issued=self._next)
        self._send(told, self._take_status)

    def _send(self, told: Tensor, then: Callable[[PassStatus], None]) -> None:
        def come(error: BaseException | None) -> None:
            self._status_pending -= 1
            if error is not None:
                self._fail(error)
            else:
                then(PassStatus.unpack(told, self.paths.data.size))
            self._conclude()

        try:
            handle = self.paths.status.allreduce(told)
        except Exception as error:  # noqa: BLE001
            self._fail(error)
            self._conclude()
        else:
            self._status_pending += 1
            handle.add_waiter(self._arrival(come))

    def _arrival(self, then: Callable[[BaseException | None], None]) -> Arrival:
        return Arrival(self.paths, self._late, then)

    def _late(self, error: OperationTimeout) -> None:
        """Tell it once, as any deadline: the next await waits on."""
        if not self._was_late:
            self._was_late = True
            self._observer.late(error)

    # --- on the loop: what comes back ---------------------------------------------------------------------------

    def _came(self, index: int, error: BaseException | None) -> None:
        permit = self._moving.pop(index)
        if permit is not None:
            permit.release()
        if error is not None:
            self._queued.let_go(index)
            self._fail(error)
        else:
            self.spans.append((self._began[index], perf_counter()))
            self._reduced.add(index)
            if self.prompt:
                self._arrived(index)
            self._settle(index)
        self._issue()
        self._conclude()

    def _take_status(self, status: PassStatus) -> None:
        self._status = status
        if StatusKind.JOIN in status.kinds:
            self._part(status)
        elif not status.sound:
            self._ask_why(status)
        if self._frozen:
            self._turn(status.issued)
        for index in sorted(self._reduced.union(self._queued.issued)):
            self._settle(index)

    def _part(self, status: PassStatus) -> None:
        """Some ranks are in a `join` block, and some are not: they have no pass in common."""
        text = some_in_join(status)
        self._fail(MismatchError(text, rank=self.paths.data.rank))
        for comm in (self.paths.data, self.paths.status):
            comm.abort(text)

    def _turn(self, issued: int) -> None:
        """All ranks have issued at most so many: go on from there in the order in which forward wants them."""
        self._order[issued:] = reversed(self._order[issued:])
        self._frozen = False
        self._issue()

    def _settle(self, index: int) -> None:
        """Apply what the pass status says of a bucket that is reduced, or is being reduced on its device."""
        if self._status is None or self._error is not None or not self._status.sound:
            return
        bucket = self.buckets[index]
        reduced = index in self._reduced
        if not self.settled[index].done() and (reduced or bucket.on_device):
            self._apply(bucket, self._status)
            self.settled[index].resolve(None)
            self._unsettled -= 1
            if not self._unsettled and self.usable is not self.finished:
                self.usable.resolve(None)
        if reduced and not self.prompt:
            self._arrived(index)

    def _apply(self, bucket: Bucket, status: PassStatus) -> None:
        if self.paths.op == "mean" and 0 < status.active < self.paths.data.size:
            bucket.factor = self.paths.data.size / status.active
            if not bucket.on_device:  # there it is scaled behind its reduction, on the stream that uses it
                bucket.scale()
        bucket.place(status.columns.__getitem__)

    def give_up(self) -> None:
        """Nobody drives it any more: let the compute thread go on."""
        for index in self._queued.issued:
            self._queued.let_go(index)

    def _arrived(self, index: int) -> None:
        if self.on_arrival is not None:
            self.on_arrival(self.buckets[index])

    @property
    def error(self) -> BaseException | None:
        """What it failed with, as far as is known."""
        return self._error

    @property
    def participants(self) -> int:
        """How many ranks brought data; known when it is finished."""
        return 0 if self._status is None else self._status.active

    @property
    def sound(self) -> bool:
        """All ranks have made the pass, as far as is known."""
        return self._status is not None and self._status.sound

    @property
    def ending(self) -> bool:
        """Some ranks close the net, and some do not."""
        return self._status is not None and StatusKind.CLOSE in self._status.kinds

    # --- on the loop: the end -------------------------------------------------------------------------------

    def _ask_why(self, status: PassStatus) -> None:
        """Some rank failed, or is elsewhere, which all know now: have each say how it is."""
        self._status_pending += 1
        try:
            told = self.paths.status.allgather_object(self._observer.account(self._text, active=self.active))
        except Exception as error:  # noqa: BLE001
            self._status_pending -= 1
            self._fail(error)
        else:
            told.add_waiter(self._arrival(partial(self._told, status, told)))

    def _told(self, status: PassStatus, told: Handle[Any], error: BaseException | None) -> None:
        self._status_pending -= 1
        if error is not None:
            self._fail(error)
        else:
            self._fail(explained(status, told.result(), self.paths.data.rank), lost=False)
        self._conclude()

    def _fail(self, error: BaseException, *, lost: bool = True) -> None:
        """Those who wait for the pass are told now; what is in flight goes on. With `lost` nothing more can be sent."""
        if self._error is None:
            self._error = error
        if lost and isinstance(error, AiodistError):  # the communicator is gone
            self._next = len(self._order)
            self._frozen = False
        for handle in (self.finished, self.usable, *self.settled):
            if not handle.done():
                handle.reject(self._error)

    def _conclude(self) -> None:
        if self._open or self._moving or self._status_pending or self._next < len(self._order) or self._ended:
            return
        if not self.finished.done():
            if self._error is not None:
                self._fail(self._error)
            else:
                self.finished.resolve(None)
        if not self.usable.done():  # there is no bucket
            self.usable.resolve(None)
        self._ended = True
        self._observer.ended(self, partial(self.over.resolve, None))
