"""The state of the simulated devices, and what a test may do with it."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, cast

import torch

from aiodist.testing.cuda.lanes import Lane, Marker
from aiodist.testing.cuda.memory import Memory

if TYPE_CHECKING:
    from aiodist.testing.cuda.streams import Event, Stream

__all__ = ["SimulatedCuda", "active", "is_open", "opened"]

_STREAMS_PER_DEVICE: Final = 32  # as torch's pool: later streams share them
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


class SimulatedCuda:
    """What `simulated_cuda()` gives: the devices, seen by a test.

    `delay` is the longest time in seconds that a job waits before it runs; it may be set at any time.
    `launches` counts what was queued, by the operator's name ("add", "addmm", "copy_", …); copies between memories
    also count as "copy_h2d", "copy_d2h" and "copy_d2d". `synchronisations` counts the times that the host waited:
    "device", "stream" and "event" for a call of `synchronize` that says so, "implicit" for an operation that has to
    wait (`item()`, `cpu()`, `nonzero()`, …). `fallbacks` counts operators whose result's shape is not known without
    running them: the host waits for them, unlike on a GPU. `hazards` lists what used memory after it was freed, and
    what was freed when its device was lost, where torch's destructor aborts the process. `pinning_fails` makes every
    attempt to pin memory raise.
    """

    def __init__(self, devices: int, seed: int, delay: float) -> None:
        self.count: Final = devices
        self.seed: Final = seed
        self.delay = delay
        self.patience = 30.0  # seconds that the host waits for a stream before it gives up
        self.launches: Final[collections.Counter[str]] = collections.Counter()
        self.synchronisations: Final[collections.Counter[str]] = collections.Counter()
        self.fallbacks: Final[collections.Counter[str]] = collections.Counter()
        self.hazards: Final[list[str]] = []
        self.pinning_fails = False
        self.condition: Final = threading.Condition(threading.RLock())
        self.held = 0  # under the condition
        self.errors: Final[dict[int, BaseException]] = {}  # by device: it stays, as CUDA's
        self.events: Final[dict[bytes, Event]] = {}  # those with a handle
        self.autograd_lanes: Final[set[Lane]] = set()  # on which something ran that backward may read
        self.closed = False
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

    def hold(self, lanes: list[Lane], by: int) -> None:
        """Hold these lanes so many times more, or less; all of them where none is given."""
        with self.condition:
            if not lanes:
                self.held += by
            for lane in lanes:
                lane.held += by
            self.condition.notify_all()

    @contextlib.contextmanager
    def capturing(self, stream: Stream | torch.cuda.Stream | None = None) -> Iterator[None]:
        """Let `torch.cuda.is_current_stream_capturing()` say yes where this stream (default: current) is current."""
        lane = _lane(stream or self.current_stream())
        self._capturing.add(lane)
        try:
            yield
        finally:
            self._capturing.discard(lane)

    def fail(self, index: int, error: BaseException | str) -> None:
        """Let device `index` fail: what is queued is skipped, and every call that asks it raises, from now on."""
        self.errors.setdefault(index, RuntimeError(error) if isinstance(error, str) else error)

    # --- for what is patched

    def capturing_now(self) -> bool:
        """Whether the calling thread's current stream is captured."""
        return self.current_stream().lane in self._capturing

    def check(self, index: int) -> None:
        """Raise what the device failed with."""
        if (error := self.errors.get(index)) is not None:
            raise torch.AcceleratorError(f"CUDA error: {error}") from error

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
            from aiodist.testing.cuda.streams import Stream

            stream = self._threads.streams[index] = Stream.on(self.default_lane(index))
        return stream

    def set_stream(self, stream: Stream) -> None:
        """Make a stream the calling thread's current one, and its device as well."""
        self._threads.streams[stream.lane.index] = stream
        self._threads.index = stream.lane.index

    def wait(self, marker: Marker, index: int, kind: str) -> None:
        """Let the host wait for a marker; RuntimeError after `patience` seconds, and what the device failed with."""
        self._count(kind)
        if not marker.wait(self.patience):
            raise RuntimeError(f"cuda:{index} did not get that far within {self.patience} s: is a stream held?")
        self.check(index)

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

    def _count(self, kind: str) -> None:
        with self.condition:
            self.synchronisations[kind] += 1

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
    """Return the lane of what a type checker takes for a real stream."""
    return cast("Stream", stream).lane
