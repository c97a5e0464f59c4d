"""One pass: the reduction of the gradients of one backward, on this rank.

The thread of backward fills buckets, and the loop reduces them in an order that is the same on every rank. What else
the ranks exchange is the *pass status*, a small sum on a communicator of its own: which parameters had a gradient,
which ranks failed or have no data left, how many buckets each had sent when its backward ended. `PassMachine` decides
what to do, and `Pass` does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.communicator import parts_of
from aiodist.errors import OperationTimeout
from aiodist.handles import Done, Handle, Operation, internals, kernel
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
    see `order`. `usable` is done when all buckets may be used. `finished` is done when all are reduced, or with the
    error of the pass: this rank's, a `RemoteError` if another rank failed, or the communicator's. `over` is done when
    nothing is in flight, however the pass ended.

    The thread of backward calls `full` and `end_backward`. Everything else happens in one program on the loop, `_run`.
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
        self.times = Times()
        self.on_arrival: Callable[[Bucket], None] | None = None
        """Called on the loop when a bucket is reduced."""
        self._hook = hook
        self._consensus = consensus
        self._conclude = conclude
        self.finished: Handle[None] = self._handle("reduction of the gradients")
        self.usable = self._handle("gradients") if consensus.loop.devices else self.finished
        self.over: Handle[None] = self._handle("end of the reduction")
        self.settled = [self._handle("reduction of a bucket") for _ in self.buckets]
        # A state may be loaded before the status is sent.
        steps = consensus.steps
        self._marks = (steps.mark, steps.settings_hash) if terms.active else (None, 0)
        """Mark of the steps made, and hash of this step's settings."""
        self._filled: set[int] = set()
        self._events: deque[tuple[Callable[..., list[Action]], tuple[Any, ...]]] = deque()
        """Methods of the machine to call, with their arguments."""
        self._wake: Done | None = None
        """Callback that continues the program, while it waits for an event."""
        self._started = False
        self.queues = DeviceQueues() if consensus.loop.devices else None
        """Reductions that are queued on devices, or None if all parameters are on the CPU."""
        self._late = False
        """True after a report of a late collective: one report for the pass is enough."""
        if before is not None and waits:
            consensus.loop.progress.post(self._start, before)
        elif terms.header is not None:
            consensus.loop.progress.post(self._start)

    def _handle(self, name: str) -> Handle[None]:
        operation: Operation[None] = Operation(self._consensus.loop.progress, name, polled=False)
        operation.mark_retrieved()  # the step's own handle reports the errors
        return operation.handle

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def refused(self) -> bool:
        """True if the ranks knew before backward that the pass cannot count."""
        return self.machine.terms.refused is not None

    @property
    def status(self) -> PassStatus | None:
        """Sum of all ranks' pass status, as soon as it is known."""
        return self.machine.status

    @property
    def error(self) -> BaseException | None:
        """First error of the pass, as far as is known."""
        return self.machine.error

    @property
    def participants(self) -> int:
        """Number of ranks that had data, as soon as the status is known."""
        return 0 if self.machine.status is None else self.machine.status.active

    def is_full(self, index: int) -> bool:
        """Return True if bucket `index` is full."""
        return index in self._filled

    @property
    def withholding(self) -> bool:
        """True while some gradient may not be used."""
        return not self.usable.done()

    def withholds(self, parameter: int) -> bool:
        """Return True while the gradient of the parameter with this id may not be used."""
        index = self._places.get(parameter)
        if index is None or self.settled[index].done() or self.usable.done():
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
            if index in self._filled:
                return
            if blank:
                bucket.blank()
            else:
                if bucket.on_device:  # autograd may have made its gradients on other streams
                    devices.gather(bucket.device, bucket.gradients())
                bucket.fill()
            if self.queues is not None and bucket.on_device:
                self.queues.full[index] = devices.filled(bucket.device)
            self._filled.add(index)

    def end_backward(self, error: BaseException | None = None) -> None:
        """Send the remaining buckets; after an `error` of backward zeros, so that the other ranks do not wait."""
        unsendable: Exception | None = None
        try:
            if error is None and self.machine.terms.active and not self.refused:
                for index in range(len(self.buckets)):
                    self._fill(index)
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                for index in range(len(self.buckets)):
                    self._fill(index, blank=True)
            except Exception as raised:  # noqa: BLE001  - no memory even for zeros, or the device is lost
                unsendable = raised
                error = error or raised
            self.times.backward_ended = perf_counter()
            streams = self._consensus.loop.devices.currents()
            failure = None if error is None else folded(error, programs=True)
            self._consensus.loop.progress.post(self._end_backward, streams, error, failure, unsendable)

    def _end_backward(self, streams: Iterable[torch.cuda.Stream], *outcome: Any) -> None:
        for stream in streams:
            self._consensus.loop.devices.time(stream, self.times.end_backward)
        self._receive(self.machine.backward_ended, *outcome)

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

    # --- the program on the loop -------------------------------------------------------------------------------------

    def _receive(self, event: Callable[..., list[Action]], *args: Any) -> None:
        """Continue the program with an event of the machine."""
        self._events.append((event, args))
        if not self._started:
            self._start()
        elif self._wake is not None:
            wake, self._wake = self._wake, None
            self._consensus.loop.resume(wake)

    def _start(self, before: Pass | None = None) -> None:
        if not self._started:
            self._started = True
            kernel.run(self._run(before), self._note_end)

    async def _run(self, before: Pass | None) -> None:
        """Reduce the buckets as they become full, agree on the status, and end the pass."""
        machine, loop = self.machine, self._consensus.loop
        if before is not None:
            await kernel.transfer(loop.wait, before.over, self._report_late)
        del before  # its gradients
        if machine.phase in (Phase.WAITING, Phase.HELD):
            self._events.appendleft((machine.begin, ()))
        while machine.phase is not Phase.OVER:
            if not self._events:
                await kernel.transfers([(self._wait_event,)])
            event, args = self._events.popleft()
            self._react(event, *args)
        self._succeed()
        await self._conclude(self)
        if not self.over.done():
            Operation.of(self.over).resolve(None)

    def _note_end(self, _: None, error: BaseException | None) -> None:
        """After an error that has left a program, refuse the net, so that no rank waits for this pass."""
        if error is not None:
            self._consensus.refuse(error)
            self._fail(error)
            self.abort()
            if not self.over.done():
                Operation.of(self.over).resolve(None)

    def _wait_event(self, done: Done) -> None:
        """Call `done` when there is an event."""
        self._wake = done

    def _react(self, event: Callable[..., list[Action]], *args: Any) -> None:
        """Carry out the actions of an event, which may come while those of another event are carried out."""
        for action in event(*args):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        consensus, machine = self._consensus, self.machine
        match action:
            case Send(index):
                kernel.run(self._reduce(index), self._note_end)
            case Settle(index):
                self._settle(index)
            case SumHeader():
                kernel.run(self._ask(machine.header_summed, consensus.sum, machine.terms.header), self._note_end)
            case SumStatus(issued, failed):
                kernel.run(self._ask(machine.summed, consensus.conclude, self._status(issued, failed)), self._note_end)
            case ExchangeAccounts(failure):
                active = machine.terms.active
                kernel.run(self._ask(machine.explained, consensus.accounts, failure, active), self._note_end)
            case Arrive(index):
                if self.on_arrival is not None:
                    self.on_arrival(self.buckets[index])
            case Fail(error):
                self._fail(error)
            case Abort(why, wholly):
                consensus.abort(why, wholly=wholly)

    async def _ask(self, event: Callable[..., list[Action]], question: Callable[..., Any], *args: Any) -> None:
        """Continue with `event` and the ranks' answer to a question."""
        try:
            answer = await question(*args, self._report_late)
        except Exception as error:  # noqa: BLE001  - the machine ends the pass
            self._receive(self.machine.unanswered, error)
        else:
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
            self._receive(list)  # no action: the program looks if the pass has ended
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
                self._finish_bucket(index)
            except Exception as error:  # noqa: BLE001  - the machine ends the pass
                failure = error
        if failure is None:
            self._receive(machine.reduced, index)
            return
        if self.queues is not None:
            self.queues.abort(index)
        self._receive(machine.failed, index, failure)

    def _finish_bucket(self, index: int) -> None:
        """Note the times of a reduced bucket, and release its memory."""
        bucket, began = self.buckets[index], self.times.end(index)
        if (trace := tracing.to) is not None:
            rank = parts_of(self._consensus.data).registry.channel.rank
            trace.span(f"bucket {index}", began, track="reductions", of_rank=rank, bytes=bucket.nbytes)
        bucket.release()

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
        bucket, status, size = self.buckets[index], self.machine.status, self._consensus.data.size
        assert status is not None
        if self._consensus.op == "mean" and 0 < status.active < size:
            bucket.factor = size / status.active
            if not bucket.on_device:  # there the stream that uses it scales it, after its reduction
                bucket.scale()
        bucket.place(status.columns.__getitem__, empty=not status.active)
        if not isinstance(bucket, RowBucket):
            self._hook.settle(bucket)
        Operation.of(self.settled[index]).resolve(None)
        if self.usable is not self.finished and all(handle.done() for handle in self.settled):
            Operation.of(self.usable).resolve(None)

    def _report_late(self, error: OperationTimeout) -> None:
        if not self._late:
            self._late = True
            self._consensus.loop.late(error)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _succeed(self) -> None:
        for handle in (self.finished, self.usable):  # `usable` too if there is no bucket
            if not handle.done():
                Operation.of(handle).resolve(None)

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


class Times:
    """Times of one pass, in seconds of `perf_counter`."""

    def __init__(self) -> None:
        self.backward_ended: float | None = None
        """End of backward."""
        self.began: dict[int, float] = {}
        """Begin of each bucket's reduction: its issue, or the time when its device began."""
        self.spans: list[tuple[float, float]] = []
        """Begin and end of each finished reduction."""

    def end(self, index: int) -> float:
        """Note the end of a bucket's reduction, and return its begin."""
        began = self.began[index]
        self.spans.append((began, perf_counter()))
        return began

    def end_backward(self, when: float) -> None:
        """Note the end of backward on a device."""
        self.backward_ended = max(when, self.backward_ended or when)

    def seconds(self, after: float = float("-inf")) -> float:
        """Return the time `after` a moment in which reductions were in flight.

        >>> times = Times()
        >>> times.spans = [(0, 2), (1, 3), (5, 6)]
        >>> times.seconds(), times.seconds(after=2)
        (4.0, 2.0)
        """
        total, end = 0.0, after
        for begin, until in sorted(self.spans):
            if until > end:
                total += until - max(begin, end)
                end = until
        return total
