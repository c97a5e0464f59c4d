"""The calling thread's current stream, for a block."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import _C

StreamNumbers = tuple[int, int, int]
"""A stream as torch's C++ knows it: its number, its device's index, and the kind of device."""

# Torch has these in builds with CUDA alone, and simulated devices replace them: they are looked up at each call.


def device_index() -> int:
    """Return the index of the current device; unlike `torch.cuda.current_device` it opens none."""
    return _C._cuda_getDevice()


def to_device(index: int) -> None:
    """Make the device the current one; unlike `torch.cuda.set_device` it opens no context on one that has none."""
    _C._cuda_maybeExchangeDevice(index)


def numbers_of_stream(device: int) -> StreamNumbers:
    """Return the current stream of a device."""
    return _C._cuda_getCurrentStream(device)


def to_stream(stream: StreamNumbers) -> None:
    """Make the stream the current one of its device, and that the current device."""
    _C._cuda_setStream(*stream)


class OnStream:
    """A block in which `stream` is the calling thread's current one, and its device the current one; costs 1 us.

    `torch.cuda.stream` alone would, in a thread that has been on no device yet, end with `cudaSetDevice(0)`. That
    opens a context there: hundreds of megabytes on the first device for each process that computes on another one.
    `torch.cuda.device` around it would do; both together cost 8 us.

    Attributes:
        before: what was the current stream of that device, as torch's C++ knows it.

    """

    __slots__ = ("_device", "_stream", "before")

    before: StreamNumbers

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> OnStream:
        stream = self._stream
        index = stream.device_index
        self._device = _C._cuda_exchangeDevice(index)
        self.before = numbers_of_stream(index)
        to_stream((stream.stream_id, index, stream.device_type))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        to_stream(self.before)
        to_device(self._device)
