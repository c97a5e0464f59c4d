"""What other threads capture in CUDA graphs is no business of ours: asking the driver must not spoil it.

While some thread captures a graph in the "global" mode, which is torch's, calls that CUDA holds to be unsafe fail in
every thread, and end that capture: to ask for an event, to pin memory. A thread may say that its calls have nothing
to do with captures. Torch does so around its own (PyTorch pull requests 104555 and 148594), with the runtime's call;
here it is the driver's, since the runtime's would open a context on device 0 in a thread that is on none yet.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import TracebackType
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PUT_OFF = "operation not permitted when stream is capturing"  # cudaErrorStreamCaptureUnsupported


@cache
def _driver() -> Any:  # noqa: ANN401
    """Return the driver's library, None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


class Uncaptured:
    """A block whose calls of CUDA have nothing to do with captures of other threads; costs 2 us."""

    __slots__ = ("_exchange", "_mode")

    def __enter__(self) -> None:
        self._exchange = _driver()
        if self._exchange is not None:
            self._mode = ctypes.c_int(_RELAXED)
            if self._exchange(ctypes.byref(self._mode)):  # it holds the former mode now, unless this failed
                self._exchange = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._exchange is not None:
            self._exchange(ctypes.byref(self._mode))


def spoiled(error: BaseException) -> bool:
    """Return True where a call failed for another stream's capture alone, and may be made again.

    Not for an event that was itself recorded in a capture: that is over never.
    """
    return _PUT_OFF in str(error)
