"""One pass: the reduction of the gradients of one backward, on this rank.

The thread of backward fills buckets, and the loop reduces them in an order that is the same on every rank. What else
the ranks exchange is the *pass status*, a small sum on a communicator of its own: which parameters had a gradient,
which ranks failed or have no data left, how many buckets each had sent when its backward ended. `PassMachine` decides
what to do, and `Pass` does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.communicator import parts_of
from aiodist.errors import OperationTimeout
from aiodist.handles import Handle, Operation, internals, kernel
from aiodist.handles.tracing import tracing
from aiodist.nn.buckets import Bucket, CommHook, RowBucket
from aiodist.nn.consensus import Consensus
from aiodist.nn.pass_machine import (
    Abort,
    Action,
    Arrive,
    ExchangeAccounts,
    Fail,
    PassMachine,
    Phase,
    Send,
    Settle,
    Stage,
    SumHeader,
    SumStatus,
    Terms,
)
from aiodist.nn.pass_status import PassStatus, StatusKind
from aiodist.streams import Fence
from aiodist.world.tracebacks import folded

Conclude = Callable[["Pass"], Coroutine[Any, Any, None]]


class Pass:
    """The reduction of all buckets; every rank makes the same passes in the same order.

    `settled[i]` is done when bucket i may be used: a bucket on a CUDA device as soon as its reduction is queued there,
    see `order`. Only a pass with a `window` has these handles: otherwise no optimizer waits for a single bucket.
    `usable` is done when all buckets may be used. `finished` is done when all are reduced, or with the error of the
    pass: this rank's, a `RemoteError` if another rank failed, or the communicator's. `over` is done when nothing is in
    flight, however the pass ended, or after an error in this class, which refuses the net.

    The thread of backward calls `full` and `end_backward`. Everything else happens on the loop: `_receive` gives the
    machine each event, and carries out what the machine then asks for.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        terms: Terms,
        hook: CommHook,
        consensus: Consensus,
        conclude: Conclude,
        *,
        window: int | None = None,
        before: Pass | None = None,
        alone: bool = False,
    ) -> None:
        """Make a pass that awaits `conclude` at its end, and sends nothing before the end of the pass `before`.

        `alone` is True if there is no other rank, and no code looks at single buckets: gradients then stay in place,
        and the pass ends in `end_alone`, without the loop.
        """
        waits = before is not None and not before.over.done()
        self.buckets = tuple(buckets)
        self.machine = PassMachine(self.buckets, terms, rank=consensus.data.rank, window=window, waits=waits)
        self.alone = alone
        self.refused = terms.refused is not None
        """True if the ranks knew before backward that the pass cannot count."""
        self.filled: set[int] = set()
        """Buckets that are full."""
        self.times = Times()
        self.on_arrival: Callable[[Bucket], None] | None = None
        """Called on the loop when a bucket is reduced."""
        self._hook = hook
        self._consensus = consensus
        self._conclude = conclude
        self.finished: Handle[None] = self._handle("reduction of the gradients")
        self.usable = self._handle("gradients") if consensus.loop.devices else self.finished
        self.over: Handle[None] = self._handle("end of the reduction")
        self.settled = [] if window is None else [self._handle("reduction of a bucket") for _ in self.buckets]
        self._settled: set[int] = set()
        """Buckets that may be used."""
        # A state may be loaded before the status is sent.
        steps = consensus.steps
        self._marks = (steps.mark, steps.settings_hash) if terms.active else (None, 0)
        """Mark of the steps made, and hash of this step's settings."""
        self._events: deque[tuple[Callable[..., list[Action]], tuple[Any, ...]]] = deque()
        """Methods of the machine to call, with their arguments."""
        self._reacts = False
        """True while events are handled, and after the end of the pass, so that no further event counts."""
        self.queues = DeviceQueues() if consensus.loop.devices else None
        """Reductions that are queued on devices, or None if all parameters are on the CPU."""
        self._late = False
        """True after a report of a late collective: one report for the pass is enough."""
        if before is not None and waits:
            consensus.loop.progress.post(consensus.loop.wait, before.over, self._report_late, self._begin)
        elif terms.header is not None:
            consensus.loop.progress.post(self._receive, self.machine.begin)

    def _handle(self, name: str) -> Handle[None]:
        operation: Operation[None] = Operation(self._consensus.loop.progress, name, polled=False)
        operation.mark_retrieved()  # the step's own handle reports the errors
        return operation.handle

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """First error of the pass, as far as is known."""
        return self.machine.error

    @property
    def participants(self) -> int:
        """Number of ranks that had data, as soon as the status is known."""
        return 0 if self.machine.status is None else self.machine.status.active

    def withholds(self, parameter: int) -> bool:
        """Return True while the gradient of the parameter with this id may not be used."""
        index = self._places.get(parameter)
        if index is None or index in self._settled or self.usable.done():
            return False
        return self.on_arrival is None or self.machine.stages[index] is not Stage.REDUCED

    @cached_property
    def _places(self) -> Mapping[int, int]:
        """Number of the bucket, by the id of the parameter."""
        return {id(slot.parameter): i for i, bucket in enumerate(self.buckets) for slot in bucket.slots}

    # --- the threads of backward -------------------------------------------------------------------------------------

    def full(self, index: int) -> None:
        """Fill bucket `index`, all of whose gradients have come, and send it (thread of the last gradient)."""
        self._fill(index)
        self._consensus.loop.progress.post(self._receive, self.machine.filled, index)

    def _fill(self, index: int, *, blank: bool = False) -> None:
        bucket, devices = self.buckets[index], self._consensus.loop.devices
        with bucket.lock:
            if index in self.filled:
                return
            if blank:
                bucket.blank()
            else:
                if bucket.on_device:  # autograd may have made its gradients on other streams
                    devices.gather(bucket.device, bucket.gradients())
                bucket.fill()
            if self.queues is not None and bucket.on_device:
                self.queues.full[index] = devices.filled(bucket.device)
            self.filled.add(index)

    def end_backward(self, error: BaseException | None = None) -> None:
        """Send the remaining buckets; after an `error` of backward zeros, so that the other ranks do not wait."""
        raised: BaseException | None = None
        unsendable: BaseException | None = None
        blank = error is not None or self.refused or not self.machine.terms.active
        left = deque(index for index in range(len(self.buckets)) if index not in self.filled)
        while left and unsendable is None:
            try:
                self._fill(left[0], blank=blank)
                left.popleft()
            except BaseException as failed:  # noqa: BLE001  - raised below
                if blank:  # no memory even for zeros, or the device is lost
                    unsendable = failed
                else:
                    raised, blank = failed, True
                error = error or failed
        self.times.backward_ended = perf_counter()
        failure = None if error is None else folded(error, programs=True)
        loop = self._consensus.loop
        for stream in () if self.queues is None else loop.devices.currents():
            loop.progress.post(loop.devices.time, stream, self.times.end_backward)
        loop.progress.post(self._receive, self.machine.backward_ended, error, failure, unsendable)
        if raised is not None:
            raise raised

    def end_alone(self) -> None:
        """End a pass without other ranks, whose gradients stay in place."""
        try:
            for bucket in self.buckets:
                bucket.keep()
        except BaseException as error:
            self.end_backward(error)
            raise
        now = perf_counter()
        for bucket in self.buckets:
            self._hook.nbytes += bucket.nbytes
            self.times.spans.append((now, now))
        consensus, machine = self._consensus, self.machine
        machine.phase = Phase.OVER
        made, stops = (consensus.steps.made,), int(consensus.asks_stop())
        machine.status = PassStatus(machine.terms.members, (), 1, len(self.buckets), made, (StatusKind.END,), stops)
        consensus.answer = machine.status
        self._succeed()

    # --- the thread that uses the gradients --------------------------------------------------------------------------

    def order(self, index: int) -> None:
        """Let the current stream of its device wait for the reduction of bucket `index`, which is settled.

        If the host has a part in the reduction, this blocks until all of it is queued. `error` has a later failure.
        """
        bucket, queues = self.buckets[index], self.queues
        if queues is None:
            return
        if bucket.on_device and not self.alone:
            queues.order(index, torch.cuda.current_stream(bucket.device))
            bucket.data.record_stream(torch.cuda.current_stream(bucket.device))  # the user may drop it at any time
            bucket.scale()
        queues.ordered.add(index)

    @property
    def used(self) -> bool:
        """True if the streams of all devices wait for all buckets, and not the host."""
        return self.queues is not None and len(self.queues.ordered) == len(self.buckets)

    # --- on the loop -------------------------------------------------------------------------------------------------

    def _begin(self, _: BaseException | None) -> None:
        """Begin, since nothing of the pass before is in flight."""
        self._receive(self.machine.begin)

    def _receive(self, event: Callable[..., list[Action]], *args: Any) -> None:
        """Give the machine an event. An event that comes meanwhile is handled next. End the pass after the last one."""
        self._events.append((event, args))
        if self._reacts:
            return
        self._reacts = True
        while self._events and self.machine.phase is not Phase.OVER:
            event, args = self._events.popleft()
            self._react(event, *args)
        self._reacts = self.machine.phase is Phase.OVER
        if self._reacts and not self.over.done():
            kernel.run(self._end(), self._note_end)

    def _react(self, event: Callable[..., list[Action]], *args: Any) -> None:
        """Carry out the actions of an event."""
        try:
            for action in event(*args):
                match action:
                    case Send(index):
                        kernel.run(self._reduce(index), self._note_end)
                    case Settle(index):
                        self._settle(index)
                    case Arrive(index):
                        if self.on_arrival is not None:
                            self.on_arrival(self.buckets[index])
                    case Fail(error):
                        self._fail(error)
                    case Abort(why, wholly):
                        self._consensus.abort(why, wholly=wholly)
                    case question:
                        kernel.run(self._ask(question), self._note_end)
        except BaseException as error:  # noqa: BLE001  - a fault of ours: no rank may wait for this pass
            self._note_end(None, kernel.ours(error) if isinstance(error, Exception) else error)

    async def _ask(self, question: SumHeader | SumStatus | ExchangeAccounts) -> None:
        """Continue with the answer of the ranks to a question."""
        consensus, machine, late = self._consensus, self.machine, self._report_late
        event: Callable[..., list[Action]]
        answer: Any
        try:
            match question:
                case SumStatus(issued, failed):
                    event, answer = machine.summed, await consensus.sum(self._status(issued, failed), late)
                    consensus.answer = answer
                case SumHeader():
                    event, answer = machine.header_summed, await consensus.sum(machine.terms.header, late)
                case ExchangeAccounts(failure):
                    accounts = consensus.accounts(failure, machine.terms.active, late)
                    event, answer = machine.explained, await accounts
        except Exception as error:  # noqa: BLE001  - the machine ends the pass
            event, answer = machine.unanswered, error
        self._receive(event, answer)

    async def _reduce(self, index: int) -> None:
        """Reduce a bucket, once the limit of the bytes in flight allows."""
        bucket, machine, loop = self.buckets[index], self.machine, self._consensus.loop
        # Queued work of devices is not limited: a step must not wait for it.
        permit = await loop.permit(bucket.nbytes, limited=not bucket.on_device or bool(loop.lane.waiting))
        try:
            handle = self._issue(index)
        except Exception as error:  # noqa: BLE001  - the machine ends the pass
            if permit is not None:
                permit.release()
            self._react(machine.unsent, index, error)  # now: the next bucket must not be sent in the place of this one
            self._receive(list)  # no action: the pass may have ended
            return
        self.times.began.setdefault(index, perf_counter())
        if bucket.on_device:
            self._receive(machine.queued, index)
        await kernel.transfers([(loop.wait, handle, self._report_late)])
        if permit is not None:
            permit.release()
        failure = internals.error_of(handle)
        if failure is None:
            try:
                began = self.times.began[index]
                self.times.spans.append((began, perf_counter()))
                if (trace := tracing.to) is not None:
                    rank = parts_of(self._consensus.data).registry.channel.rank
                    trace.span(f"bucket {index}", began, track="reductions", of_rank=rank, bytes=bucket.nbytes)
                bucket.release()
            except Exception as error:  # noqa: BLE001  - the machine ends the pass
                failure = error
        if failure is None:
            self._receive(machine.reduced, index)
            return
        if self.queues is not None:
            self.queues.abort(index)
        self._receive(machine.failed, index, failure)

    def _issue(self, index: int) -> Handle[Any]:
        bucket, consensus = self.buckets[index], self._consensus
        if isinstance(bucket, RowBucket):
            self._hook.nbytes += bucket.nbytes
            return bucket.gather(consensus.data, consensus.op)
        if self.queues is None or not bucket.on_device:
            return self._hook.reduce(bucket)
        devices = consensus.loop.devices
        with devices.behind(bucket.device, self.queues.full.pop(index)) as stream:
            handle = self._hook.reduce(bucket)
        self.queues.add(index, handle)
        devices.time(stream, partial(self.times.began.__setitem__, index))
        return handle

    def _status(self, issued: int, failed: bool) -> Tensor:
        """Return this rank's pass status, after it has sent `issued` buckets."""
        used, data = list(self.machine.terms.members), self._consensus.data
        for bucket in self.buckets:
            for slot in bucket.unused:
                used[slot.index] = 0.0
        (steps, settings), stop = self._marks, self._consensus.asks_stop()
        return PassStatus.pack(
            used, data.size, data.rank, failed=failed, steps=steps, issued=issued, stop=stop, settings=settings
        )

    def _settle(self, index: int) -> None:
        """Give the parameters the gradients of a bucket."""
        bucket, status = self.buckets[index], self.machine.status
        assert status is not None
        size = len(status.kinds)
        if self._consensus.op == "mean" and 0 < status.active < size:
            bucket.factor = size / status.active
            if not bucket.on_device:  # there the stream that uses it scales it, after its reduction
                bucket.scale()
        bucket.place(status.columns.__getitem__, empty=not status.active)
        if not isinstance(bucket, RowBucket):
            self._hook.settle(bucket)
        self._settled.add(index)
        if self.settled:
            Operation.of(self.settled[index]).resolve(None)
        if self.usable is not self.finished and len(self._settled) == len(self.buckets):
            Operation.of(self.usable).resolve(None)

    def _report_late(self, error: OperationTimeout) -> None:
        if not self._late:
            self._late = True
            self._consensus.loop.late(error)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """End the pass, whose collectives have ended.

        The step may continue before `_conclude`. If that raises, the net is refused, and the next step raises.
        """
        self._succeed()
        await self._conclude(self)
        Operation.of(self.over).resolve(None)

    def _succeed(self) -> None:
        for handle in (self.finished, self.usable):  # `usable` too if there is no bucket
            if not handle.done():
                Operation.of(handle).resolve(None)

    def _note_end(self, _: None, error: BaseException | None) -> None:
        """After an error that has left a program, refuse the net, so that no rank waits for this pass."""
        if error is not None:
            self.machine.phase = Phase.OVER
            self._consensus.refuse(error)
            self._fail(error)
            self.abort()
            if not self.over.done():
                Operation.of(self.over).resolve(None)

    def _fail(self, error: BaseException) -> None:
        for handle in (self.finished, self.usable, *self.settled):
            if not handle.done():
                Operation.of(handle).reject(error)

    def abort(self) -> None:
        """Let threads continue that wait for reductions on devices: the net was closed or aborted."""
        if self.queues is not None:
            for index in list(self.queues.fences):
                self.queues.abort(index)


class DeviceQueues:
    """The reductions of one pass on CUDA devices, for which streams wait, by the number of the bucket."""

    def __init__(self) -> None:
        self.full: dict[int, torch.cuda.Event] = {}
        """End of the work that fills the bucket."""
        self.fences: dict[int, tuple[Handle[Any], Fence | None]] = {}
        """Handle of the reduction, and its place in the device's queue."""
        self.ordered: set[int] = set()
        """Buckets for which the streams that use them wait."""
        self.broken = False
        """True if a reduction failed for which a stream should wait; `finished` reports it soon."""

    def add(self, index: int, handle: Handle[Any]) -> None:
        """Add the reduction of a bucket."""
        fence = internals.fence_of(handle)
        self.fences[index] = handle, fence if isinstance(fence, Fence) else None

    def order(self, index: int, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the reduction of a bucket."""
        handle, fence = self.fences[index]
        if fence is not None:  # a finished handle has none
            fence.order(stream, handle)
            self.broken = self.broken or (handle.done() and internals.error_of(handle) is not None)

    def abort(self, index: int) -> None:
        """Let a thread continue that waits until a reduction is queued: it failed."""
        _, fence = self.fences.get(index, (None, None))
        if fence is not None:
            self.broken = True
            fence.reached(None)


@dataclass(slots=True)
class Times:
    """Times of one pass, in seconds of `perf_counter`."""

    backward_ended: float | None = None
    """End of backward."""
    began: dict[int, float] = field(default_factory=dict)
    """Begin of each bucket's reduction: its issue, or the time when its device began."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each finished reduction."""

    def end_backward(self, when: float) -> None:
        """Note the end of backward on a device."""
        self.backward_ended = max(when, self.backward_ended or when)

    def seconds(self) -> tuple[float, float]:
        """Return the time in which reductions were in flight, and the part of this time after the end of backward.

        >>> Times(2, spans=[(0, 2), (1, 3), (5, 6)]).seconds()
        (4.0, 2.0)
        """
        total, exposed, end = 0.0, 0.0, -inf
        ended = inf if self.backward_ended is None else self.backward_ended
        for begin, until in sorted(self.spans):
            if until > end:
                total += until - max(begin, end)
                exposed += max(0.0, until - max(begin, end, ended))
                end = until
        return total, exposed
