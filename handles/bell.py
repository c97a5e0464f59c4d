"""What the progress thread sleeps at: a bell that its own process rings, or that others can ring too."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from typing import Protocol

__all__ = ["Bell", "FutexBell", "LockBell", "SharedWord"]

_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 1 << 30
_FOR_US, _FOR_ALL = 1, 2  # who sleeps: may its own process alone wake it, or the others too?


class Bell(Protocol):
    """Rung by anybody, heard by one thread; a ring that nobody waits for is heard by the next wait."""

    def ring(self) -> None:
        """Wake the thread that waits; from any thread."""

    def wait(self, seconds: float | None, *, for_all: bool = True) -> None:
        """Return when it was rung, or after `seconds`; unless it is `for_all`, other processes need not ring."""


class LockBell:
    """A bell for the threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """See `Bell`."""
        if self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError:
                return  # somebody else rang first

    def wait(self, seconds: float | None, *, for_all: bool = True) -> None:
        """See `Bell`."""
        self._lock.acquire(timeout=-1 if seconds is None else seconds)


class SharedWord:
    """32 bits in memory that several processes map."""

    def __init__(self, memory: memoryview) -> None:
        """Use the first four bytes of `memory`, which must be writable."""
        self._word = ctypes.c_uint32.from_buffer(memory)
        self.address = ctypes.addressof(self._word)

    def get(self) -> int:
        """Return its value."""
        return self._word.value

    def set(self, value: int) -> None:
        """Store `value`."""
        self._word.value = value & 0xFFFFFFFF


class FutexBell:
    """A bell in shared memory, which other processes ring as well (Linux, futex(2)).

    `count` changes with each ring, `asleep` says whether anybody need be woken: ringing at one who is awake costs
    no system call. Nothing here is added to atomically, so each ring stores a number of its own: one more than was
    there would, from a ringer that was stopped in between, be what the sleeper has heard already.
    """

    def __init__(self, count: SharedWord, asleep: SharedWord) -> None:
        self._count = count
        self._asleep = asleep
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(futex_number())
        self._at = ctypes.c_void_p(count.address)
        self._heard = count.get()
        self._fresh = random.Random()
        self._fence = threading.Lock()

    def ring(self) -> None:
        """See `Bell`."""
        self._ring_where(_FOR_US)

    def ring_if_asleep(self) -> None:
        """Ring for another process: only where its owner waits for that, and does not look by itself."""
        # What was stored before is visible before anything is read: taking a lock is a full fence.
        self._fence.acquire()
        self._fence.release()
        if self._asleep.get() >= _FOR_ALL:
            self._ring_where(_FOR_ALL)

    def _ring_where(self, asleep: int) -> None:
        self._count.set(self._fresh.getrandbits(32))
        self._fence.acquire()
        self._fence.release()
        if self._asleep.get() >= asleep:
            self._syscall(self._number, self._at, _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seconds: float | None, *, for_all: bool = True) -> None:
        """See `Bell`."""
        self._asleep.set(_FOR_ALL if for_all else _FOR_US)
        self._fence.acquire()
        self._fence.release()
        heard = self._count.get()
        if heard == self._heard:
            limit = None if seconds is None else ctypes.byref(_timespec(seconds))
            self._syscall(self._number, self._at, _WAIT, ctypes.c_uint32(heard), limit, None, 0)
        self._asleep.set(0)
        self._heard = self._count.get()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def futex_number() -> int:
    """Return the number of the system call; raise OSError where it is not known."""
    machine = os.uname().machine
    if os.uname().sysname != "Linux" or machine not in _FUTEX:
        raise OSError(f"futexes are not known on {os.uname().sysname} {machine}")
    return _FUTEX[machine]
