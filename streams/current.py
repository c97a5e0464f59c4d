"""The calling thread's current stream, for a block."""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["OnStream"]


class OnStream:
    """A block in which `stream` is the calling thread's current one, and its device the current one; costs 5 us.

    `torch.cuda.stream` alone would, in a thread that has been on no device yet, end with `cudaSetDevice(0)`. That
    opens a context there: hundreds of megabytes on the first device for each process that computes on another one.
    """

    __slots__ = ("_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = torch.cuda.device(stream.device_index)
        self._stream = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._device.__enter__()
        self._stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, error, traceback)
        self._device.__exit__(kind, error, traceback)
