"""The calling thread's current CUDA stream: set for a block, and tested for graph capture."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import _C

_HERE: Final = nullcontext()


def device_index() -> int:
    """Return the number of the calling thread's current CUDA device; torch's own asks first whether one was opened."""
    return int(_C._cuda_getDevice())


def stream_key(device: int) -> tuple[int, int, int]:
    """Return what torch knows the calling thread's current stream of a device by: 0 first for the default one."""
    return _C._cuda_getCurrentStream(device)


def _set_stream(number: int, device: int, kind: int) -> None:
    _C._cuda_setStream(number, device, kind)


class OnStream:
    """A block in which `stream` is the calling thread's current one, and its device the current one.

    `torch.cuda.stream` alone would, in a thread that has been on no device yet, end with `cudaSetDevice(0)`. That
    opens a context there: hundreds of megabytes on the first device for each process that computes on another one.
    It also costs twice as much where the device is the current one already (15 and 8 us beside an H100), as do torch's
    own functions for the current stream, which make an object of each.
    """

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._device = on_device(stream.device_index)
        self._device.__enter__()
        self._before = stream_key(stream.device_index)
        _set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *raised: object) -> None:
        _set_stream(*self._before)
        self._device.__exit__(None, None, None)


def on_device(device: int) -> AbstractContextManager[object]:
    """Return a block in which that CUDA device is the calling thread's current one."""
    return _HERE if device == device_index() else torch.cuda.device(device)


def check_not_capturing(*devices: int) -> None:
    """Raise RuntimeError while the current stream of one of `devices` captures a CUDA graph.

    None named is the current device. Nothing in a graph can be waited for.
    """
    if torch.cuda.is_initialized() and any(map(captures, devices or (torch.cuda.current_device(),))):
        raise RuntimeError(
            "the current stream captures a CUDA graph: a graph holds no communication and no handle; issue it outside "
            "of the capture"
        )


def captures(device: int) -> bool:
    """Return True where the current stream of `device` captures; torch asks the current device alone."""
    if device_index() == device:  # as below, without torch's looks at whether it has opened a device
        return bool(_C._cuda_isCurrentStreamCapturing())
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
