"""One pass: the gradients of one backward on their way through the buckets.

Threads that compute say which buckets are full, the loop issues their reductions in an order that is the same on every
rank, and awaits them. What is more to know travels as the *pass status*, a small sum on a communicator of its own:
which parameters had a gradient, which ranks failed or have no data left, how far each had come when its backward ended.
`pass_machine` decides what is done when; here it is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from aiodist.communicator import Communicator, parts_of
from aiodist.errors import OperationTimeout
from aiodist.handles import Handle, Lane, Operation, Permit, Progress, internals, join
from aiodist.handles.combinators import EndWaiter
from aiodist.handles.tracing import tracing
from aiodist.nn.buckets import Bucket, CommHook, RowBucket
from aiodist.nn.devices import Devices
from aiodist.nn.pass_machine import PassMachine, Phase, Stage, Terms
from aiodist.nn.pass_status import PassAccount, PassStatus, StatusKind
from aiodist.nn.steps import Steps
from aiodist.streams import Fence
from aiodist.world.tracebacks import folded

T = TypeVar("T")

WINDOW_BYTES = 8 << 20
"""What may be in flight where the order may still change, on a slow network; two buckets may, however large."""


class PassHost(Protocol):
    """What makes the passes of a net, and is told of them on the loop."""

    data: Communicator
    status: Communicator
    progress: Progress
    lane: Lane
    devices: Devices
    op: Literal["mean", "sum"]
    hook: CommHook
    """How a bucket is reduced."""
    urgent: bool
    """What is left when backward ends goes in the order of the next forward."""
    window: int
    """Then, how many bytes may be in flight. A rank's own affair."""
    steps: Steps
    """Those that the optimizer has made."""
    asks_stop: Callable[[], bool]
    """Tells whether this rank asks all ranks to stop behind the pass."""

    def account(self, failure: str | None, *, active: bool) -> PassAccount:
        """Return what this rank tells the others where a pass cannot count."""

    def late(self, error: OperationTimeout) -> None:
        """An operation of it has passed its deadline, and goes on."""

    def ended(self, reduction: Reduction, over: Callable[[], None]) -> None:
        """Nothing of it is in flight any more; call `over` when the next may begin."""


def arrival(
    host: PassHost, late: Callable[[OperationTimeout], None], then: Callable[[BaseException | None], None]
) -> EndWaiter:
    """Return what waits for a handle on behalf of a pass."""

    def over(handle: Handle[Any]) -> None:
        error = internals.error_of(handle)
        if asyncio.current_task() is None and not host.devices:
            then(error)
        else:
            # Some task's await has polled it to its end. What is issued now is not that task's, which differs by rank.
            # The thread that polls devices holds the transport lock.
            host.progress.post(partial(then, error))

    return EndWaiter(over, lambda _, error: late(error))


def ask(
    host: PassHost,
    call: Callable[[], Handle[T]],
    late: Callable[[OperationTimeout], None],
    then: Callable[[T], None],
    failed: Callable[[BaseException], None],
) -> None:
    """Have `then` called with the result of what `call` issues, or `failed` with why there is none."""
    try:
        handle = call()
    except Exception as error:  # noqa: BLE001  - the thread that waits is told
        failed(error)
        if parts_of(host.data).dispatcher.lifetime.refusal is None:  # the others wait for what this rank has not sent
            host.data.abort(f"rank {host.data.rank} cannot go on: {error}")
    else:
        come = lambda error: then(handle.result()) if error is None else failed(error)  # noqa: E731
        internals.add_waiter(handle, arrival(host, late, come))


class Reduction(PassMachine[Bucket]):
    """One pass over all buckets; every rank makes the same passes in the same order.

    `settled[i]` is done when bucket i may be used: one on a CUDA device behind its reduction, which may only be under
    way (`order`); `usable` when all may. `finished` when all are reduced, or with the error of the pass: this rank's,
    a `RemoteError` where another rank failed, or the communicator's. `over` when nothing is in flight any more,
    however it ended. A pass may begin before the one `behind` which it comes is over; what it sends waits for that.
    """

    def __init__(
        self,
        host: PassHost,
        buckets: Sequence[Bucket],
        terms: Terms,
        *,
        header: Tensor | None = None,
        behind: Reduction | None = None,
        single: bool = False,
    ) -> None:
        """`header` is the status that this rank tells before all else, where `terms` say that there is one.

        `single`: there is no other rank, and nobody looks at a bucket. Gradients stay where they are, and a pass that
        does not fail is over when `end_backward` returns, without the loop.
        """
        waits = behind is not None and not behind.over.done()
        window = host.window if host.urgent else None
        super().__init__(buckets, terms, rank=host.data.rank, window=window, waits=waits)
        self._host = host
        self._hook = host.hook
        self.spans = Spans()
        self.on_arrival: Callable[[Bucket], None] | None = None
        """Called on the loop when a bucket is reduced."""
        self.single = single
        self.finished: Handle[None] = self._handle("reduction of the gradients")
        self.usable = self._handle("gradients") if host.devices else self.finished
        self.over: Handle[None] = self._handle("end of the reduction")
        self.settled: list[Handle[None]] = [self._handle("reduction of a bucket") for _ in self.buckets]
        usable = self.usable  # and not this object, which would know itself
        self._note_settled = join(len(self.buckets), lambda _: Operation.of(usable).resolve(None))
        self._header = header
        self._settings = host.steps.settings_hash if terms.active else 0
        self._steps = host.steps.mark if terms.active else None  # a state may be loaded before the status is sent
        self._filled: set[int] = set()
        self._permits: dict[int, Permit | None] = {}
        """Of the buckets that wait for leave, or are under way."""
        self._startable: deque[int] = deque()
        """Those that have leave, and are not issued yet."""
        self._full: dict[int, torch.cuda.Event] = {}
        """By bucket on a CUDA device: when it is full there."""
        self._fences: dict[int, tuple[Handle[Any], Fence | None]] = {}
        """By bucket on a CUDA device: its reduction, which is issued, and where that ends there."""
        self._ordered: set[int] = set()
        self.broken = False
        """A reduction that streams were to be ordered behind has failed: `finished` is about to say so."""
        self._late: OperationTimeout | None = None
        """What was told of deadlines: once, as of any; the next await waits on."""
        if behind is not None and waits:
            host.progress.post(partial(behind.over.add_done_callback, lambda _: self.begin()))
        elif terms.header:
            host.progress.post(self.begin)

    def _handle(self, name: str) -> Handle[None]:
        operation: Operation[None] = Operation(self._host.progress, name, polled=False)
        operation.mark_retrieved()  # the step's own handle reports the errors
        return operation.handle

    def is_full(self, index: int) -> bool:
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
        return self.on_arrival is None or self.stages[index] is not Stage.REDUCED

    @cached_property
    def _places(self) -> Mapping[int, int]:
        """The number of the bucket of each parameter, by the id of that."""
        return {id(slot.parameter): i for i, bucket in enumerate(self.buckets) for slot in bucket.slots}

    @property
    def participants(self) -> int:
        """How many ranks brought data; known when it is finished."""
        return 0 if self.status is None else self.status.active

    # --- from the threads that run backward -------------------------------------------------------------------

    def full(self, index: int) -> None:
        """All gradients of bucket `index` are there; in the thread in which the last of them came."""
        self._fill(index)
        self._host.progress.post(partial(self.filled, index))

    def _fill(self, index: int, *, blank: bool = False) -> None:
        bucket = self.buckets[index]
        with bucket.lock:
            if index in self._filled:
                return
            if blank:
                bucket.blank()
            else:
                if bucket.on_device:  # autograd may have made its gradients on other streams
                    self._host.devices.gather(bucket.device, bucket.gradients())
                bucket.fill()
            if bucket.on_device:
                self._full[index] = self._host.devices.filled(bucket.device)
            self._filled.add(index)

    def end_backward(self, error: BaseException | None = None) -> None:
        """Backward is over: send what has not gone yet; with `error` only to keep the others from waiting."""
        try:
            if error is None and self.terms.active and self.terms.refused is None:
                for index, bucket in enumerate(self.buckets):
                    bucket.keep() if self.single else self._fill(index)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is None and self.single:
                self._end_single()
            else:
                self._end_backward_with(error)

    def _end_single(self) -> None:
        host, buckets = self._host, self.buckets
        for index, bucket in enumerate(buckets):
            self._hook.nbytes += bucket.nbytes
            self.spans.issued(index)
            self.spans.end(index)
        self.phase = Phase.OVER
        made, stops = (host.steps.made,), int(host.asks_stop())
        self.status = PassStatus(self.terms.members, (), 1, len(buckets), made, (StatusKind.END,), stops)
        self._end()

    def _end_backward_with(self, error: BaseException | None) -> None:
        unsendable: Exception | None = None
        try:
            for index in range(len(self.buckets)):
                self._fill(index, blank=True)
        except Exception as raised:  # noqa: BLE001  - no memory even for zeros, or the device is lost
            unsendable = raised
            error = error or raised
        self.spans.backward_ended = perf_counter()
        streams = self._host.devices.currents()
        failure = None if error is None else folded(error, programs=True)

        def tell() -> None:
            for stream in streams:
                self._host.devices.time(stream, self.spans.end_backward)
            self.backward_ended(error, failure, unsendable)

        self._host.progress.post(tell)

    # --- from the thread that uses the gradients ---------------------------------------------------------------

    def order(self, index: int) -> None:
        """Let the current stream of its device go on behind the reduction of bucket `index`, which is settled.

        Not on the loop's thread: it blocks until all of the reduction is queued, where the host has a part in it. What
        goes wrong is told by `error`, now or later.
        """
        bucket = self.buckets[index]
        if bucket.on_device and not self.single:
            handle, fence = self._fences[index]
            stream = torch.cuda.current_stream(bucket.device)
            if fence is not None:  # the handle has none any more when it is over
                fence.order(stream, handle)
                self.broken = self.broken or (handle.done() and internals.error_of(handle) is not None)
            bucket.data.record_stream(stream)  # code that forgets a gradient need not know where it came from
            bucket.scale()
        self._ordered.add(index)

    @property
    def used(self) -> bool:
        """Every bucket was ordered."""
        return len(self._ordered) == len(self.buckets)

    # --- on the loop: buckets ------------------------------------------------------------------------------------

    def _send(self, index: int) -> None:
        self._permits[index] = None
        bucket = self.buckets[index]
        if bucket.on_device and not self._host.lane.waiting:
            self._granted(index)  # what devices have queued limits nothing here: a step must not wait for them
            return
        permit = self._host.lane.request(bucket.nbytes, partial(self._granted, index))
        if index in self._permits:
            self._permits[index] = permit
        else:
            permit.release()

    def _granted(self, index: int) -> None:
        """Start it, in order; but not as a call of the task that has just given back leave."""
        self._startable.append(index)
        if asyncio.current_task() is None:
            self._start_all()
        else:
            self._host.progress.post(self._start_all)

    def _start_all(self) -> None:
        while self._startable:
            self._start(self._startable.popleft())

    def _start(self, index: int) -> None:
        try:
            handle = self._reduce(index)
        except Exception as error:  # noqa: BLE001  - the thread that waits for the pass is told
            self._release(index)
            self.unsent(index, error)
        else:
            self.spans.issued(index)
            if self.buckets[index].on_device:
                self.queued(index)
            internals.add_waiter(handle, arrival(self._host, self._tell_late, partial(self._came, index)))

    def _reduce(self, index: int) -> Handle[Any]:
        bucket = self.buckets[index]
        if isinstance(bucket, RowBucket):
            self._hook.nbytes += bucket.nbytes
            return bucket.gather(self._host.data, self._host.op)
        reduce = partial(self._hook.reduce, bucket)
        if not bucket.on_device:
            return reduce()
        with self._host.devices.behind(bucket.device, self._full.pop(index)) as stream:
            handle = reduce()
        self._fences[index] = handle, fence if isinstance(fence := internals.fence_of(handle), Fence) else None
        self._host.devices.time(stream, partial(self.spans.begin, index))
        return handle

    def _release(self, index: int) -> None:
        permit = self._permits.pop(index)
        if permit is not None:
            permit.release()

    def _came(self, index: int, error: BaseException | None) -> None:
        self._release(index)
        if error is not None:
            self._abort_fence(index)
            self.failed(index, error)
        else:
            began = self.spans.end(index)
            if (trace := tracing.to) is not None:
                rank, nbytes = parts_of(self._host.data).registry.channel.rank, self.buckets[index].nbytes
                trace.span(f"bucket {index}", began, track="reductions", of_rank=rank, bytes=nbytes)
            self.buckets[index].release()
            self.reduced(index)

    def _settle(self, index: int) -> None:
        bucket, status = self.buckets[index], self.status
        assert status is not None
        if self._host.op == "mean" and 0 < status.active < self._host.data.size:
            bucket.factor = self._host.data.size / status.active
            if not bucket.on_device:  # there it is scaled behind its reduction, on the stream that uses it
                bucket.scale()
        bucket.place(status.columns.__getitem__, empty=not status.active)
        if not isinstance(bucket, RowBucket):
            self._hook.settle(bucket)
        Operation.of(self.settled[index]).resolve(None)
        if self.usable is not self.finished:
            self._note_settled(None)

    def _arrive(self, index: int) -> None:
        if self.on_arrival is not None:
            self.on_arrival(self.buckets[index])

    # --- on the loop: what the ranks tell each other ----------------------------------------------------------------

    def _send_header(self) -> None:
        assert self._header is not None
        self._add_up(self._header, self.header_told)

    def _send_status(self, issued: int, *, failed: bool) -> None:
        used = list(self.terms.members)
        for bucket in self.buckets:
            for slot in bucket.unused:
                used[slot.index] = 0.0
        data = self._host.data
        stop = self._host.asks_stop()
        told = PassStatus.pack(
            used,
            data.size,
            data.rank,
            failed=failed,
            steps=self._steps,
            issued=issued,
            stop=stop,
            settings=self._settings,
        )
        self._add_up(told, self.told)

    def _add_up(self, told: Tensor, then: Callable[[PassStatus], None]) -> None:
        host = self._host
        answer = lambda _: then(PassStatus.unpack(told, host.data.size))  # noqa: E731
        ask(host, partial(host.status.allreduce, told), self._tell_late, answer, self.untold)

    def _send_account(self, failure: str | None) -> None:
        host, active = self._host, self.terms.active
        told = lambda: host.status.allgather_object(host.account(failure, active=active))  # noqa: E731
        ask(host, told, self._tell_late, self.explained, self.untold)

    def _tell_late(self, error: OperationTimeout) -> None:
        if self._late is None:
            self._late = error
            self._host.late(error)

    # --- on the loop: the end ---------------------------------------------------------------------------------------

    def _abort(self, why: str, *, wholly: bool) -> None:
        self._host.data.abort(why)
        if wholly:
            self._host.status.abort(why)

    def _tell_failed(self, error: BaseException) -> None:
        for handle in (self.finished, self.usable, *self.settled):
            if not handle.done():
                Operation.of(handle).reject(error)

    def _end(self) -> None:
        for handle in (self.finished, self.usable):  # nothing has settled where there is no bucket
            if not handle.done():
                Operation.of(handle).resolve(None)
        self._host.ended(self, partial(Operation.of(self.over).resolve, None))

    def abort(self) -> None:
        """Nobody drives it any more: let the compute thread go on."""
        for index in list(self._fences):
            self._abort_fence(index)

    def _abort_fence(self, index: int) -> None:
        """Its reduction has failed, and will not be queued: a thread that would wait for that goes on."""
        _, fence = self._fences.get(index, (None, None))
        if fence is not None:
            self.broken = True
            fence.reached(None)


# --- how long reductions take -----------------------------------------------------------------------------------------


class Spans:
    """Times of one pass, in seconds of `perf_counter`; `len` is how many buckets were reduced."""

    def __init__(self) -> None:
        self.backward_ended: float | None = None
        """When backward ended."""
        self._began: dict[int, float] = {}
        self._spans: list[tuple[float, float]] = []

    def issued(self, index: int) -> None:
        """Bucket `index` is on its way, unless its device tells otherwise."""
        self._began.setdefault(index, perf_counter())

    def begin(self, index: int, when: float) -> None:
        """Its device began with bucket `index`."""
        self._began[index] = when

    def end(self, index: int) -> float:
        """Bucket `index` is reduced; return when it began."""
        began = self._began[index]
        self._spans.append((began, perf_counter()))
        return began

    def end_backward(self, when: float) -> None:
        """A device came to the end of backward."""
        self.backward_ended = max(when, self.backward_ended or when)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def seconds(self) -> float:
        """In which something was on its way."""
        return _union(self._spans)

    @property
    def exposed(self) -> float:
        """Those of them after backward had ended."""
        ended = self.backward_ended
        return 0.0 if ended is None else _union([(max(a, ended), b) for a, b in self._spans if b > ended])


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what intervals cover together.

    >>> _union([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        if b > end:
            total += b - max(a, end)
            end = b
    return total
