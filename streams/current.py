"""The calling thread's current CUDA stream: for a block, and whether it captures a graph."""

from __future__ import annotations

import torch


class OnStream:
    """A block in which `stream` is the calling thread's current one, and its device the current one; costs 8 us.

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

    def __exit__(self, *raised: object) -> None:
        self._stream.__exit__(*raised)
        self._device.__exit__(*raised)


def check_not_capturing(*devices: int) -> None:
    """Raise RuntimeError while the current stream of one of `devices` captures a CUDA graph.

    None named is the current device. Nothing in a graph can be waited for.
    """
    if torch.cuda.is_initialized() and any(map(_captures, devices or (torch.cuda.current_device(),))):
        raise RuntimeError(
            "the current stream captures a CUDA graph: a graph holds no communication and no handle; issue it outside "
            "of the capture"
        )


def _captures(device: int) -> bool:
    """Return True where the current stream of `device` captures; torch asks the current device alone."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
