"""NCCL communicators: created once, opened at the first use, called in order, aborted after a failure."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeVarTuple

import torch
from torch import Tensor

from aiodist.backends.arithmetic import divide
from aiodist.backends.base import Done, again, started
from aiodist.backends.nccl.launch_order import LaunchOrder, LaunchSlot
from aiodist.backends.nccl.library import ID_BYTES, IN_PROGRESS, SUCCESS, Library
from aiodist.errors import BackendError
from aiodist.handles import Operation, Progress
from aiodist.streams import OnStream, Staging
from aiodist.streams.current import device_index

CLOSE_SECONDS = 5.0
"""Longest wait for the other ranks at the close."""

SPIN_SECONDS = 5e-5  # NCCL's thread launches on connected ranks within tens of microseconds
SPIN_ALONE_SECONDS = 2e-4  # a group of one rank waits for no other rank

_PRIORITY = -2  # torch has a pool of streams per priority: 0 is the default, -1 is for copies

Launch = Callable[[Any, int], None]
"""Function of (communicator, handle of the stream) that makes native calls. May raise."""
Exchange = Callable[[bytes | None, Callable[[bytes | None, BaseException | None], None]], None]
"""Function of (rank 0's message, then) that calls `then(message, error)` on every rank (transport lock held)."""
Ts = TypeVarTuple("Ts")
_Work = concurrent.futures.Future[Any]
_Key = tuple[str, tuple[int, ...], int, torch.device]


class NcclCall(NamedTuple):
    """Native calls for a group to launch."""

    launch: Launch
    what: str
    done: Done
    means: Sequence[Tensor] = ()
    """Tensors to divide by the number of ranks after the calls, for a mean."""
    stream: torch.cuda.Stream | None = None
    """The caller's stream, or None. The calls run between the earlier and the later work of this stream."""
    awaited: torch.cuda.Event | None = None
    """Event that the calls wait for if `stream` is None, or None."""


@dataclass(eq=False, slots=True)
class _Thread:
    work: _Work
    then: Callable[[_Work], None]
    until: float = float("inf")
    """Deadline to continue without this call, in seconds of `monotonic`."""


class NcclGroup:
    """The NCCL communicator of some ranks, each with one device.

    All methods are called with the transport lock held. No method blocks. A failure of NCCL or of another rank raises
    nothing. Blocking calls of NCCL run in threads. `poll` continues after their end. `ranks` are world ranks, `rank` is
    an index in `ranks`, and `device` has an index.

    [Note: the stream of a group] The kernels of a group wait for one another and for the other ranks. So these kernels
    have a separate stream without other work. Events order the kernels after the caller's earlier work, and the
    caller's later work after the kernels. The streams of other operations do not wait for these kernels.
    """

    def __init__(
        self,
        library: Library,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        staging: Staging,
    ) -> None:
        if device.index is None:
            raise ValueError(f"{device}: NCCL needs a device with an index")
        self.library = library
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(ranks)
        self.device = device
        self.launch_order = LaunchOrder()
        self._index: int = device.index
        self.opened = False
        """True after the call of `open`."""
        self.stream: torch.cuda.Stream | None = None
        """Stream of the kernels, or None before the first call."""
        self._stream_number = 0
        self._staging = staging
        self.comm: Any = None
        self._error: BaseException | None = None
        self._aborted = threading.Event()
        self._waiting: deque[NcclCall] = deque()
        self._launching: NcclCall | None = None
        self._pumping = False
        self._threads: list[_Thread] = []
        self.last: _Work | None = None
        """The thread that opens, closes or aborts the communicator."""

    # --- opening ----------------------------------------------------------------------------------------

    def open(self, exchange: Exchange) -> None:
        """Connect the ranks. Every rank calls this once. Native calls wait for the connection.

        `exchange` sends NCCL's id from rank 0 to the others. `exchange` is called once, or not at all if the group has
        one rank.
        """
        if self.opened or self._error is not None:
            return
        self.opened = True
        if self.rank == 0:
            self._in_thread(partial(self._give_id, exchange), self.library.unique_id)
        else:
            exchange(None, self._got_id)

    def _give_id(self, exchange: Exchange, work: _Work) -> None:
        error = self._error or work.exception()
        # The others always wait for a message. A message of another length is the text of an error.
        message = work.result() if error is None else str(error).encode().ljust(ID_BYTES + 1)
        if self.size == 1:
            self._got_id(message, None)
        else:
            exchange(message, self._got_id)

    def _got_id(self, message: bytes | None, error: BaseException | None) -> None:
        if self._error is not None:
            return
        if message is None or error is not None:
            self._fail(error or BackendError("NCCL: no id came from rank 0"))
        elif len(message) != ID_BYTES:
            self._fail(BackendError(f"rank 0 could not create an id: {message.decode().rstrip()}"))
        else:
            connect = self.library.connect
            self.last = self._in_thread(self._connected, connect, self.size, self.rank, message, self._aborted)

    def _connected(self, work: _Work) -> None:
        error = work.exception()
        if self._error is not None:
            if error is None:  # aborted just after the connection
                self.last = self._started(work.result().abort)
        elif error is not None:
            self._fail(error)
        else:
            self.comm = work.result()
            self._pump()

    # --- calls ------------------------------------------------------------------------------------------

    def call(
        self,
        launch: Launch,
        what: str,
        done: Done,
        *,
        means: Sequence[Tensor] = (),
        slot: LaunchSlot | None = None,
    ) -> None:
        """Enqueue the native calls of `launch` as if on the device's current stream.

        The calls go to the group's stream, after earlier calls or at the place of `slot` in the launch order.
        `done(None)` is called when the calls and the divisions of `means` are enqueued and the caller's stream waits
        for both. `done(error)` is called if that fails. `what` names the calls in errors.
        """
        call = NcclCall(launch, what, done, means, torch.cuda.current_stream(self.device))
        if slot is None:
            self.submit(call)
        else:
            slot.run(self.submit, call)

    def submit(self, call: NcclCall) -> None:
        """Launch `call` after the calls submitted earlier. A call without a stream orders no streams."""
        if self._error is not None:
            call.done(again(self._error))
            return
        self._waiting.append(call)
        self._pump()

    def _pump(self) -> None:
        """Launch the calls that are ready. A `done` may add calls."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._waiting and self.comm is not None and self._launching is None:
                self._begin(self._waiting.popleft())
        finally:
            self._pumping = False

    def _begin(self, call: NcclCall) -> None:
        self._launching = call
        try:
            if self.stream is None:
                self.stream = torch.cuda.Stream(device=self.device, priority=_PRIORITY)
                self._stream_number = self.stream.cuda_stream
            if call.awaited is not None:
                self.stream.wait_event(call.awaited)
            if call.stream is not None:
                self._staging.order(self.stream, call.stream)
            if device_index() == self._index:
                call.launch(self.comm, self._stream_number)
            else:  # NCCL uses the current device
                with torch.cuda.device(self._index):
                    call.launch(self.comm, self._stream_number)
            if (state := self.library.state(self.comm)) == IN_PROGRESS:
                state = self._spin()
        except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the call
            # The other ranks may have made this call: later calls would not match.
            self._fail(self.library.error(raised, call.what, self.comm))
        else:
            self._end_launch(state)

    def _spin(self) -> int:
        """Wait a moment for the launch of the calls. Return the communicator's state."""
        until = monotonic() + (SPIN_ALONE_SECONDS if self.size == 1 else SPIN_SECONDS)
        while (state := self.library.state(self.comm)) == IN_PROGRESS and monotonic() < until:
            pass
        return state

    def _end_launch(self, state: int) -> bool:
        """Finish the current call if the communicator's `state` shows its end.

        Return False while the call is in progress.
        """
        if state == IN_PROGRESS:
            return False
        call = self._launching
        assert call is not None
        if state != SUCCESS:
            self._fail(self.library.failure(self.comm, state, call.what))
            return True
        self._launching = None
        error: BackendError | None = None
        if call.stream is not None or call.means:
            try:
                self._end_on_stream(call)
            except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the call
                error = self.library.error(raised, call.what, self.comm)
        call.done(error)
        return True

    def _end_on_stream(self, call: NcclCall) -> None:
        """Queue the divisions of `means`, and let the caller's stream wait for this work and the calls."""
        assert self.stream is not None
        try:
            if call.means and self.size > 1:
                with OnStream(self.stream):
                    for t in call.means:
                        divide(t, self.size)
        finally:
            if call.stream is not None:
                self._staging.order(call.stream, self.stream)

    # --- what is pending --------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of threads and launches in flight."""
        return len(self._threads) + (self._launching is not None)

    def poll(self) -> bool:
        moved = False
        now = monotonic()
        for thread in tuple(self._threads):
            if thread.work.done() or now >= thread.until:
                self._threads.remove(thread)
                thread.then(thread.work)
                moved = True
        if self._launching is not None and not self._pumping and self._end_launch(self.library.state(self.comm)):
            moved = True
            self._pump()
        return moved

    def _in_thread(self, then: Callable[[_Work], None], fn: Callable[[*Ts], Any], *args: *Ts) -> _Work:
        work = self._started(fn, *args)
        self._threads.append(_Thread(work, then))
        return work

    def _started(self, fn: Callable[[*Ts], Any], *args: *Ts) -> _Work:
        """Run `fn` in a thread with the group's device: on another device CUDA would create a context there."""
        return started(self._on_device, fn, args)

    def _on_device(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        torch.cuda.set_device(self.device)
        return fn(*args)

    # --- failures ---------------------------------------------------------------------------------------

    def poll_error(self) -> BaseException | None:
        """Return an asynchronous error such as a lost connection, which ends the group, or None.

        Call this method regularly while an operation is in flight. A call costs a microsecond.
        """
        if self._error is None and self.comm is not None:
            state = self.library.state(self.comm)
            if state not in (SUCCESS, IN_PROGRESS):
                self._fail(self.library.failure(self.comm, state, "an earlier call failed"))
        return None if self._error is None else again(self._error)

    def abort(self, error: BaseException) -> None:
        """Abort the communicator: waiting and later calls fail with `error`, running kernels end soon.

        The buffers of enqueued calls are in use until the stream has passed these calls, since NCCL ends the kernels in
        its own thread, without a wait for other ranks.
        """
        if self._error is None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        comm = self._detach(error)
        if comm is not None:
            self.last = self._started(comm.abort)
        self._flush()

    def _detach(self, error: BaseException) -> Any:  # noqa: ANN401
        """Stop using the communicator, and return the communicator or None."""
        self._error = error
        self._aborted.set()
        comm, self.comm = self.comm, None
        return comm

    def _flush(self) -> None:
        error = self._error
        assert error is not None
        calls = list(self._waiting)
        self._waiting.clear()
        if (launching := self._launching) is not None:
            self._launching = None
            calls.insert(0, launching)
            if self.stream is not None and launching.stream is not None:
                with suppress(RuntimeError):  # the device is lost
                    # Launched kernels may use the tensors until the abort ends the kernels.
                    self._staging.order(launching.stream, self.stream)
        for call in calls:
            call.done(again(error))
        self.launch_order.run_all()

    # --- its end ----------------------------------------------------------------------------------------

    def release(self, done: Done, *, drained: bool) -> None:
        """Release the communicator, then call `done(None)`, always within some seconds. Make this call once.

        `drained` is True if every rank makes this call and no call is in flight. Otherwise the communicator is aborted.
        Waiting calls fail.
        """
        closed = BackendError("NCCL: the communicator was destroyed")
        if self._error is None:
            comm = self._detach(closed)
            if comm is not None:
                closing = (self.library.close, comm, CLOSE_SECONDS) if drained else (comm.abort,)
                self.last = self._started(*closing)
            self._flush()
        if self.last is None:
            done(None)
        else:
            self._threads.append(_Thread(self.last, lambda work: done(None), monotonic() + 2 * CLOSE_SECONDS))


class NcclGroups:
    """All groups of one world, a poller of `progress`.

    `poll` runs with the transport lock held, in any thread. The other methods run in the loop's thread. Iteration
    yields the groups that were not released.
    """

    rings = False

    def __init__(self, library: Library, progress: Progress) -> None:
        self._library = library
        self._progress = progress
        self._groups: dict[_Key, NcclGroup] = {}
        self._polled: tuple[NcclGroup, ...] = ()
        """The groups to poll, also groups that are being released. A tuple, for iteration on other threads."""
        progress.add_poller(self)

    def of(self, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> NcclGroup:
        """Return the group of these ranks and this device, the same object each time. All ranks give the same name."""
        key = (name, tuple(ranks), rank, device)
        group = self._groups.get(key)
        if group is None:
            staging = Staging.of(self._progress)
            group = self._groups[key] = NcclGroup(self._library, name, ranks, rank, device, staging)
            self._polled = (*self._polled, group)
        return group

    def __iter__(self) -> Iterator[NcclGroup]:
        return iter(tuple(self._groups.values()))

    def __len__(self) -> int:
        return sum([group.pending for group in self._polled])

    def poll(self, until: float = 0.0) -> bool:
        moved = False
        for group in self._polled:
            moved = group.poll() or moved
        return moved

    async def release(self, group: NcclGroup, *, drained: bool) -> None:
        """Release `group` (see `NcclGroup.release`) and wait for the end. A later `of` creates a new group."""
        self._groups = {key: known for key, known in self._groups.items() if known is not group}
        ended: Operation[None] = Operation(self._progress, "release")
        self._progress.start(partial(group.release, lambda _: ended.resolve(None), drained=drained))
        await ended.handle
        self._polled = tuple([known for known in self._polled if known is not group])

    async def aclose(self, *, drained: bool) -> None:
        """Release all groups within some seconds.

        `drained` is True if every rank makes this call and no call is in flight.
        """
        try:
            await asyncio.gather(*(self.release(group, drained=drained) for group in self))
        finally:
            self._progress.remove_poller(self)
