"""NCCL communicators: each made once, opened at its first use, called in order, given up when it fails."""

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
from typing import Any, NamedTuple

import torch

from aiodist.backends.base import Done, again, started
from aiodist.backends.nccl.launch_order import LaunchOrder, LaunchSlot
from aiodist.backends.nccl.library import ID_BYTES, IN_PROGRESS, SUCCESS, Library
from aiodist.errors import BackendError
from aiodist.handles import Operation, Progress
from aiodist.streams import OnStream, Staging
from aiodist.streams.current import device_index

CLOSE_SECONDS = 5.0
"""How long closing waits for the other ranks."""

SPIN_SECONDS = 5e-5  # NCCL's thread launches what is connected within tens of microseconds
SPIN_ALONE_SECONDS = 2e-4  # a rank alone waits for nobody else

_PRIORITY = -2  # torch has a pool for each: 0 is everybody's, -1 that of copies

Launch = Callable[[Any, int], None]
"""(communicator, handle of the stream): what makes native calls; may raise."""
Exchange = Callable[[bytes | None, Callable[[bytes | None, BaseException | None], None]], None]
"""(rank 0's message or None, then): has every rank's `then(message, error)` called, with the transport lock held."""
_Work = concurrent.futures.Future[Any]
_Key = tuple[str, tuple[int, ...], int, torch.device]


class NcclCall(NamedTuple):
    """What a group is given to launch."""

    launch: Launch
    what: str
    done: Done
    after: Callable[[], None] | None = None
    """What is queued on the stream behind it."""
    stream: torch.cuda.Stream | None = None
    """Takes part in the order: what it has queued comes first, what it queues next comes after."""
    behind: torch.cuda.Event | None = None
    """Without a stream: comes first."""


@dataclass(eq=False, slots=True)
class _Thread:
    work: _Work
    then: Callable[[_Work], None]
    until: float = float("inf")
    """When to go on without it, in seconds of `monotonic`."""


class NcclGroup:
    """Some ranks, each with one device, and the NCCL communicator among them.

    All methods are called with the transport lock held, none waits and none raises for failures of the world. What
    blocks in NCCL runs in threads, and `poll` goes on when they are over. `ranks` are those of the world, `rank` is
    my place among them, `device` has an index.

    [Note: the stream of a group] Its kernels wait for one another, and each for the other ranks: they have a stream of
    their own, on which there is nothing else. It is ordered behind the stream of the operation that calls, and that
    one behind the kernel; the streams of other operations have no part in it. So what the host does on the device
    between the steps of one operation does not wait for the kernels of another.
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
        """`open` was called, or there is no need to."""
        self.stream: torch.cuda.Stream | None = None
        """That of its kernels, from the first call on."""
        self._stream_number = 0
        self._staging = staging
        self.comm: Any = None
        self._error: BaseException | None = None
        self._give_up = threading.Event()
        self._waiting: deque[NcclCall] = deque()
        self._launching: NcclCall | None = None
        self._pumping = False
        self._threads: list[_Thread] = []
        self.last: _Work | None = None
        """The thread that holds the communicator while it is opened or ended."""

    # --- opening ----------------------------------------------------------------------------------------

    def open(self, exchange: Exchange) -> None:
        """Connect the ranks, which all call this, once; calls that are made meanwhile wait.

        `exchange` carries NCCL's id from rank 0 to the others; it is used once, and not at all by a rank alone.
        """
        if self.opened or self._error is not None:
            return
        self.opened = True
        if self.rank == 0:
            self._in_thread(self.library.unique_id, partial(self._give_id, exchange))
        else:
            exchange(None, self._got_id)

    def _give_id(self, exchange: Exchange, work: _Work) -> None:
        error = self._error or work.exception()
        # The others wait for a message in any case; one of another length is a text.
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
            self._fail(BackendError(f"rank 0 could not begin: {message.decode().rstrip()}"))
        else:
            connect = partial(self.library.connect, self.size, self.rank, message, self._give_up)
            self.last = self._in_thread(connect, self._connected)

    def _connected(self, work: _Work) -> None:
        error = work.exception()
        if self._error is not None:
            if error is None:  # it was given up just when it was ready
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
        after: Callable[[], None] | None = None,
        slot: LaunchSlot | None = None,
    ) -> None:
        """Have `launch` enqueue its calls as if on the stream that is the device's current one now.

        They are made on the group's stream, behind those of earlier calls, with `slot` at its place in the launch
        order. `done(None)` is called when they and what `after` queues are enqueued and the caller's stream is ordered
        behind them, `done(error)` when they cannot be; `what` names them in errors.
        """
        call = NcclCall(launch, what, done, after, torch.cuda.current_stream(self.device))
        if slot is None:
            self.submit(call)
        else:
            slot.run(partial(self.submit, call))

    def submit(self, call: NcclCall) -> None:
        """Make `call` behind those that were submitted; one without a stream leaves the order of streams alone."""
        if self._error is not None:
            call.done(again(self._error))
            return
        self._waiting.append(call)
        self._pump()

    def _pump(self) -> None:
        """Make the calls that can be made; a `done` may add more."""
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
            if call.behind is not None:
                self.stream.wait_event(call.behind)
            if call.stream is not None:
                self._staging.order(self.stream, call.stream)
            if device_index() == self._index:
                call.launch(self.comm, self._stream_number)
            else:  # NCCL is told the stream, and takes the device that is current
                with torch.cuda.device(self._index):
                    call.launch(self.comm, self._stream_number)
            if (state := self.library.state(self.comm)) == IN_PROGRESS:
                state = self._spin()
        except Exception as raised:  # noqa: BLE001  - it belongs to the task that awaits the call
            # The other ranks may have made this call: from here on the calls do not match.
            self._fail(self.library.error(raised, call.what, self.comm))
        else:
            self._look(state)

    def _spin(self) -> int:
        """Wait a moment until what was called is launched; return the communicator's state."""
        until = monotonic() + (SPIN_ALONE_SECONDS if self.size == 1 else SPIN_SECONDS)
        while (state := self.library.state(self.comm)) == IN_PROGRESS and monotonic() < until:
            pass
        return state

    def _look(self, state: int) -> bool:
        """Go on with the call that is being launched, if the communicator's `state` says that it is."""
        if state == IN_PROGRESS:
            return False
        call = self._launching
        assert call is not None
        if state != SUCCESS:
            self._fail(self.library.failure(self.comm, state, call.what))
            return True
        self._launching = None
        error: BackendError | None = None
        if call.stream is not None or call.after is not None:
            try:
                self._end_on_stream(call)
            except Exception as raised:  # noqa: BLE001  - it belongs to the task that awaits the call
                error = self.library.error(raised, call.what, self.comm)
        call.done(error)
        return True

    def _end_on_stream(self, call: NcclCall) -> None:
        """Queue what comes behind the call, and order the caller's stream behind all of it."""
        assert self.stream is not None
        try:
            if call.after is not None:
                with OnStream(self.stream):
                    call.after()
        finally:
            if call.stream is not None:
                self._staging.order(call.stream, self.stream)

    # --- what is pending --------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """What there is to poll for."""
        return len(self._threads) + (self._launching is not None)

    def poll(self) -> bool:
        moved = False
        now = monotonic()
        for thread in tuple(self._threads):
            if thread.work.done() or now >= thread.until:
                self._threads.remove(thread)
                thread.then(thread.work)
                moved = True
        if self._launching is not None and not self._pumping and self._look(self.library.state(self.comm)):
            moved = True
            self._pump()
        return moved

    def _in_thread(self, fn: Callable[[], Any], then: Callable[[_Work], None]) -> _Work:
        work = self._started(fn)
        self._threads.append(_Thread(work, then))
        return work

    def _started(self, fn: Callable[[], Any]) -> _Work:
        """Run `fn` in a thread whose current device is the group's: another one would get a context, and memory."""

        def run() -> Any:  # noqa: ANN401
            torch.cuda.set_device(self.device)
            return fn()

        return started(run)

    # --- failures ---------------------------------------------------------------------------------------

    def poll_error(self) -> BaseException | None:
        """Return what went wrong since a call was enqueued, such as a lost connection; it ends the group.

        To be asked now and then while an operation is pending: it costs a microsecond.
        """
        if self._error is None and self.comm is not None:
            state = self.library.state(self.comm)
            if state not in (SUCCESS, IN_PROGRESS):
                self._fail(self.library.failure(self.comm, state, "an earlier call failed"))
        return None if self._error is None else again(self._error)

    def abort(self, error: BaseException) -> None:
        """Give it up: calls that wait and all later ones are done with `error`; kernels that run end soon.

        Buffers of calls that were enqueued are in use until the stream is over them: NCCL ends its kernels in a
        thread of its own, and waits for no other rank.
        """
        if self._error is None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        comm = self._detach(error)
        if comm is not None:
            self.last = self._started(comm.abort)
        self._flush()

    def _detach(self, error: BaseException) -> Any:  # noqa: ANN401
        """Use the communicator no more, and return it if there is one."""
        self._error = error
        self._give_up.set()
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
                    # What it may have launched uses the tensors until it is over, which the abort sees to.
                    self._staging.order(launching.stream, self.stream)
        for call in calls:
            call.done(again(error))
        self.launch_order.run_all()

    # --- its end ----------------------------------------------------------------------------------------

    def release(self, done: Done, *, drained: bool) -> None:
        """Release it and call `done(None)` when that is over, within some seconds in any case; not more than once.

        With `drained` every rank calls it and nothing is in flight, else it is just given up. What still waits is
        done with an error.
        """
        closed = BackendError("NCCL: the communicator was destroyed")
        if self._error is None:
            comm = self._detach(closed)
            if comm is not None:
                self.last = self._started(partial(self.library.close, comm, CLOSE_SECONDS) if drained else comm.abort)
            self._flush()
        if self.last is None:
            done(None)
        else:
            self._threads.append(_Thread(self.last, lambda work: done(None), monotonic() + 2 * CLOSE_SECONDS))


class NcclGroups:
    """All groups of one world: what `progress` polls.

    `poll` runs with the transport lock held, in any thread; all else belongs to the loop's. To iterate goes over the
    groups that were not released.
    """

    rings = False

    def __init__(self, library: Library, progress: Progress) -> None:
        self._library = library
        self._progress = progress
        self._groups: dict[_Key, NcclGroup] = {}
        self._polled: tuple[NcclGroup, ...] = ()
        """Replaced and never changed, since other threads go through it; released ones, too, until they are over."""
        progress.add_poller(self)

    def of(self, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> NcclGroup:
        """Return the group of these ranks, named alike on all of them, and my device: always the same object."""
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
        """Release `group`, see there, and wait until that is over; `of` makes a new one from now on."""
        self._groups = {key: known for key, known in self._groups.items() if known is not group}
        ended: Operation[None] = Operation(self._progress, "release")
        self._progress.start(partial(group.release, lambda _: ended.resolve(None), drained=drained))
        await ended.handle
        self._polled = tuple([known for known in self._polled if known is not group])

    async def aclose(self, *, drained: bool) -> None:
        """Release all; with `drained` every rank calls it and nothing is in flight. It takes some seconds at most."""
        try:
            await asyncio.gather(*(self.release(group, drained=drained) for group in self))
        finally:
            self._progress.remove_poller(self)
