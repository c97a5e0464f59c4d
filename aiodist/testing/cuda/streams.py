"""What stands in for `torch.cuda.Stream`, `torch.cuda.Event` and the contexts around them, and does what they do."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch

from aiodist.testing.cuda.device import active
from aiodist.testing.cuda.lanes import Lane, Marker

__all__ = ["Event", "Stream", "device_context", "stream_context"]

_handles: Final = itertools.count(1)


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

    def __exit__(self, *raised: Any) -> None:  # noqa: ANN401
        self._context.__exit__(*raised)


class _Recorded:
    """What an event and those opened from its handle share."""

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
        """Return an event that is over when the one with this handle is."""
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
        """What was recorded last, None before that."""
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
