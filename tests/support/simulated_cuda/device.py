"""The simulated devices, their streams and their events."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, Final, cast

import torch

from tests.support.simulated_cuda.lanes import Lane, Marker, World
from tests.support.simulated_cuda.memory import Memory

_STREAMS_PER_DEVICE: Final = 32  # as torch's pool: later streams share them
_handles: Final = itertools.count(1)
_open: Final[list[SimulatedCuda]] = []  # at most one


def active() -> SimulatedCuda:
    """Return the simulation that is open; RuntimeError where none is."""
    if not _open:
        raise RuntimeError("no simulated CUDA device is open")
    return _open[0]


def is_open() -> bool:
    """Whether a simulation is."""
    return bool(_open)


@contextlib.contextmanager
def opened(devices: int, seed: int, delay: float) -> Iterator[SimulatedCuda]:
    """Open a simulation for the time of the context; RuntimeError where one is open."""
    if _open:
        raise RuntimeError(f"{_open[0]!r} is open already")
    world = SimulatedCuda(devices, seed, delay)
    _open.append(world)
    try:
        yield world
    finally:
        try:
            world.close()
        finally:
            _open.clear()


class _ThreadState(threading.local):
    """The current device and streams, each thread's own."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, Stream] = {}
        self.backward: dict[int, Lane] = {}  # not empty while it runs


class SimulatedCuda(World):
    """The devices that `simulated_cuda()` gives to a test.

    `delay` is the longest time in seconds that a job waits before it runs; it may be set at any time. `launches`
    counts the queued jobs by the operator's name ("add", "addmm", "copy_", …); copies between memories also count as
    "copy_h2d", "copy_d2h" and "copy_d2d". `synchronisations` counts the waits of the host: "device", "stream" and
    "event" for a call of `synchronize`, "implicit" for an operation that has to wait (`item()`, `cpu()`, `nonzero()`,
    …). `fallbacks` counts operators whose result has a shape that depends on the data: the host waits for them, unlike
    on a GPU. `hazards` lists uses of memory after it was freed, and memory that was lent to another stream and freed
    after the loss of its device, in which case torch's destructor aborts the process. `pinning_fails` makes every
    attempt to pin memory raise.
    """

    def __init__(self, devices: int, seed: int, delay: float) -> None:
        super().__init__(seed, delay)
        self.count: Final = devices
        self.launches: Final[collections.Counter[str]] = collections.Counter()
        self.fallbacks: Final[collections.Counter[str]] = collections.Counter()
        self.events: Final[dict[bytes, Event]] = {}  # those with a handle
        self.autograd_lanes: Final[set[Lane]] = set()  # on which something ran that backward may read
        self.memory: Final = Memory(self)
        self._lanes: Final = [[Lane(self, i, n) for n in range(_STREAMS_PER_DEVICE + 1)] for i in range(devices)]
        self._made = [0] * devices
        self._capturing: Final[set[Lane]] = set()
        self._threads: Final = _ThreadState()

    def __repr__(self) -> str:
        return f"simulated_cuda(devices={self.count}, seed={self.seed}, delay={self.delay})"

    # --- for tests

    @contextlib.contextmanager
    def paused(self, *streams: Stream | torch.cuda.Stream) -> Iterator[None]:
        """Hold these streams, all of them where none is named: nothing on them ends until the context does."""
        lanes = [_lane(stream) for stream in streams]
        self.hold(lanes, 1)
        try:
            yield
        finally:
            self.hold(lanes, -1)

    @contextlib.contextmanager
    def capturing(self, stream: Stream | torch.cuda.Stream | None = None) -> Iterator[None]:
        """Let `torch.cuda.is_current_stream_capturing()` say yes where this stream (default: current) is current."""
        lane = _lane(stream or self.current_stream())
        self._capturing.add(lane)
        try:
            yield
        finally:
            self._capturing.discard(lane)

    # --- for the patches

    def capturing_now(self) -> bool:
        """Whether the calling thread's current stream is captured."""
        return self.current_stream().lane in self._capturing

    def index(self, device: object = None, *, optional: bool = True) -> int:
        """Return the index of a device given in any way that torch takes; None is the thread's current one."""
        if device is None and optional:
            return self._threads.index
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != "cuda":
                raise ValueError(f"Expected a cuda device, but got: {device}")
            device = self._threads.index if device.index is None else device.index
        if not isinstance(device, int):
            raise ValueError(f"Expected a cuda device with a specified index, but got: {device!r}")
        if not 0 <= device < self.count:
            raise torch.AcceleratorError(f"CUDA error: invalid device ordinal {device}: there are {self.count}")
        return device

    def set_index(self, device: object) -> None:
        """Make a device the calling thread's current one; nothing happens where it is negative."""
        if not (isinstance(device, int) and device < 0):
            self._threads.index = self.index(device)

    def new_lane(self, index: int) -> Lane:
        """Return the lane of a new stream: one of the pool's, in turn."""
        with self.condition:
            self._made[index] += 1
            return self._lanes[index][(self._made[index] - 1) % _STREAMS_PER_DEVICE + 1]

    def default_lane(self, index: int) -> Lane:
        """Return the lane of a device's default stream."""
        return self._lanes[index][0]

    def lanes(self, index: int) -> list[Lane]:
        """Return all lanes of a device."""
        return self._lanes[index]

    def current_stream(self, device: object = None) -> Stream:
        """Return the calling thread's current stream of a device."""
        index = self.index(device)
        if (stream := self._threads.streams.get(index)) is None:
            stream = self._threads.streams[index] = Stream.on(self.default_lane(index))
        return stream

    def set_stream(self, stream: Stream) -> None:
        """Make a stream the calling thread's current one, and its device as well."""
        self._threads.streams[stream.lane.index] = stream
        self._threads.index = stream.lane.index

    def backward_lane(self, index: int) -> Lane | None:
        """Return the lane on which the calling thread's backward runs, None outside of one."""
        return self._threads.backward.get(index)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Let the calling thread's current streams be those of a backward, after all that it may read.

        On a GPU each step of it runs on the stream of its forward, and the engine lets them wait for each other.
        """
        lanes = {index: self.current_stream(index).lane for index in range(self.count)}
        for lane in tuple(self.autograd_lanes):
            if lane is not lanes[lane.index]:
                lanes[lane.index].wait_for(lane.mark())
        before, self._threads.backward = self._threads.backward, lanes
        try:
            yield
        finally:
            self._threads.backward = before

    def synchronise(self, device: object = None) -> None:
        """Let the host wait for all streams of a device."""
        index = self.index(device)
        self.check(index)
        self._count("device")
        for marker in [lane.mark() for lane in self._lanes[index] if not lane.idle]:
            if not marker.wait(self.patience):
                raise RuntimeError(f"cuda:{index} did not end within {self.patience} s: is a stream held?")
        self.check(index)

    def allocated(self, device: object = None) -> int:
        """Return the bytes of a device that tensors hold."""
        return self.memory.allocated(self.index(device))

    def close(self) -> None:
        """Do what is queued, without delay, and end the threads."""
        with self.condition:
            self.delay = 0.0
            self.held = 0
            for lane in (lane for lanes in self._lanes for lane in lanes):
                lane.held = 0
            self.condition.notify_all()
        stuck = [lane for lanes in self._lanes for lane in lanes if not lane.end(self.patience)]
        self.closed = True
        if stuck:
            raise RuntimeError(f"{', '.join(map(str, stuck))} did not end within {self.patience} s")


def _lane(stream: Stream | torch.cuda.Stream) -> Lane:
    """Return the lane of a stream, which the type checker takes for a real one."""
    return cast(Stream, stream).lane


# --- what stands in for torch.cuda.Stream, torch.cuda.Event and the contexts around them


class Stream:
    """A queue of work on one device: two streams wait for each other only where an event says so."""

    lane: Lane
    device_type = 1  # CUDA's number among the kinds of device

    def __init__(
        self,
        device: object = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int = 0,
        device_type: int = 1,
    ) -> None:
        """Take the next stream of the device's pool, or with `stream_id` the one that has it."""
        world = active()
        if stream_id is None:
            self.lane = world.new_lane(world.index(device))
        else:
            self.lane = world.lanes(world.index(device_index))[stream_id]
        self.priority = priority

    @classmethod
    def on(cls, lane: Lane) -> Stream:
        """Return the stream of a lane."""
        self = cls.__new__(cls)
        self.lane, self.priority = lane, 0
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.lane is self.lane

    def __hash__(self) -> int:
        return hash(self.lane)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x} (simulated)>"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.lane.index)

    @property
    def device_index(self) -> int:
        return self.lane.index

    @property
    def cuda_stream(self) -> int:
        """A number which no other stream of the device has; 0 is the default stream."""
        return self.lane.number

    stream_id = cuda_stream

    def wait_event(self, event: Event) -> None:
        if event.marker is not None:
            self.lane.wait_for(event.marker)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        self.lane.world.check(self.lane.index)
        return self.lane.idle

    def synchronize(self) -> None:
        self.lane.world.wait(self.lane.mark(), self.lane.index, "stream")

    def hold(self) -> None:
        """Let nothing on this stream end until `release` (a test's tool: a GPU has none)."""
        self.lane.world.hold([self.lane], 1)

    def release(self) -> None:
        """End one `hold`."""
        self.lane.world.hold([self.lane], -1)

    def __enter__(self) -> Stream:
        self._context = stream_context(self)
        self._context.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._context.__exit__(*raised)


class _Recorded:
    """The state that an event shares with the events opened from its handle."""

    __slots__ = ("lane", "marker")

    def __init__(self) -> None:
        self.marker: Marker | None = None
        self.lane: Lane | None = None


class Event:
    """A place in a stream, over when all that the stream had queued before it is done."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess and enable_timing:
            raise RuntimeError("CUDA error: invalid argument: an interprocess event has no timing")
        active()
        self.enable_timing, self.blocking, self.interprocess = enable_timing, blocking, interprocess
        self._recorded = _Recorded()
        self._handle: bytes | None = None

    def __repr__(self) -> str:
        state = "never recorded" if self.marker is None else "over" if self.marker.reached else "pending"
        return f"<torch.cuda.Event {state} (simulated)>"

    @classmethod
    def from_ipc_handle(cls, device: object, handle: bytes) -> Event:
        """Return an event that finishes together with the event of this handle."""
        active().index(device)
        original = active().events.get(handle)
        if original is None:
            raise RuntimeError("CUDA error: invalid resource handle")
        event = cls(interprocess=True)
        event._recorded = original._recorded
        return event

    def ipc_handle(self) -> bytes:
        """Return 64 bytes that name the event within this process."""
        if not self.interprocess:
            raise RuntimeError("CUDA error: invalid resource handle: the event is not interprocess")
        if self._handle is None:
            self._handle = next(_handles).to_bytes(64, "little")
            active().events[self._handle] = self
        return self._handle

    @property
    def marker(self) -> Marker | None:
        """The latest record; None before the first."""
        return self._recorded.marker

    @property
    def device(self) -> torch.device | None:
        return None if self._recorded.lane is None else torch.device("cuda", self._recorded.lane.index)

    def record(self, stream: Stream | None = None) -> None:
        lane = (active().current_stream() if stream is None else stream).lane
        recorded = self._recorded
        if recorded.lane is not None and recorded.lane.index != lane.index:
            raise RuntimeError(f"Event device {recorded.lane.index} does not match recording stream's {lane.index}")
        recorded.lane = lane
        recorded.marker = lane.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (active().current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        recorded = self._recorded
        if recorded.lane is None or recorded.marker is None:
            return True
        recorded.lane.world.check(recorded.lane.index)
        return recorded.marker.reached

    def synchronize(self) -> None:
        recorded = self._recorded
        if recorded.lane is not None and recorded.marker is not None:
            recorded.lane.world.wait(recorded.marker, recorded.lane.index, "event")

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.marker is None or end.marker is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.marker.at is None or end.marker.at is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.marker.at - self.marker.at) * 1e3


@contextlib.contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """Make a stream current, and its device, until the context ends; None does nothing."""
    if stream is None:
        yield
        return
    world = active()
    on_current, on_its = world.current_stream(), world.current_stream(stream.device)
    world.set_stream(stream)
    try:
        yield
    finally:
        world.set_stream(on_its)
        world.set_stream(on_current)


@contextlib.contextmanager
def device_context(device: object) -> Iterator[None]:
    """Make a device current until the context ends; None and negative numbers do nothing."""
    world = active()
    before = world.index()
    world.set_index(-1 if device is None else device)
    try:
        yield
    finally:
        world.set_index(before)
