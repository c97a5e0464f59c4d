"""What torch must never free: where its destructors end the process.

Two of them raise on a device that is lost, and what a destructor raises is a SIGABRT: that of pinned memory which a
copy has used without waiting for it, and that of a device's memory with which `record_stream` was called. Each
records an event when the memory is freed, and that fails.
"""

from __future__ import annotations

import ctypes


def leak(x: object) -> None:
    """Keep `x` until the process ends, and then too: what a module holds is freed at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
