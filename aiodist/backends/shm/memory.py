"""Memory that the other ranks of a host can map: blocks of segments, each segment a memfd.

A segment is a wide range of addresses with nothing behind it. A block has its pages reserved when it is made, so
that lack of memory is an exception and not a SIGBUS in the middle of a reduction, and gives them back when the last
tensor in it dies. A segment is sealed: nobody who has its descriptor can make it shorter, so that who maps it never
looks past its end. No name in any file system belongs to it: nothing stays behind, however the process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import psutil
import torch
from torch import Tensor

from aiodist import _core

_SEGMENT_BYTES = 1 << 30  # of addresses
_SKEW_BYTES = 33 * mmap.PAGESIZE
"""Unused, at the end of each segment: those that are mapped side by side then do not lie a power of two apart.

Some processors guess from bits 12 to 27 of an address where in the first cache its line is (Lipp et al. 2020, "Take A
Way", doi:10.1145/3320269.3384746). What ranks reduce lies at the same place in the segment of each: with these bits
alike as well a reduction in place took eight times as long.
"""
_POPULATE_WRITE = 23  # madvise, from Linux 5.14 on: have the pages in the page table at once
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_SMALL_BYTES = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _memmove() -> Callable[[int, int, int], None]:
    function: Any = ctypes.CDLL(None).memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function  # type: ignore[no-any-return]


move_bytes = _memmove()  # (to, from, count): copy many bytes; the GIL is free meanwhile


class Place(NamedTuple):
    """Where in an arena some bytes lie, as its rank tells the others."""

    segment: int
    offset: int


class Arena:
    """One rank's memory. `empty` and `locate` may be called from any thread, tensors may die in any."""

    def __init__(self) -> None:
        self.segments: list[_Segment] = []
        """In order of their numbers; none ever goes, since others have mapped it."""
        self.addresses = _core.Segments()  # where they lie, and how many of them the others know
        self._lock = threading.Lock()
        self._freed: deque[tuple[_Segment, int, int]] = deque()
        self._process = os.getpid()
        self._closed = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor; raise MemoryError where its pages cannot be had."""
        numel = prod(shape)
        if numel <= 0:  # which says what is wrong with sizes below zero
            return torch.empty(shape, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        segment, start, stop = self._allocate(_in_pages(nbytes))
        memory = memoryview(segment.map)[start:stop]
        # The storage holds on to `memory`, which dies with the last tensor that looks at it.
        finalize(memory, self._free, segment, start, stop).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel).view(shape)

    def reserve(self, nbytes: int) -> None:
        """Have room for `nbytes` more whose pages are there already, and stay."""
        nbytes = _in_pages(nbytes)
        check_room(nbytes)
        with self._lock:
            segment = self._add(nbytes, kept=True)
            try:
                segment.fill(0, nbytes)
            except OSError as error:
                segment.holes.clear()
                raise _lack(nbytes, error) from error
        self._reclaim()

    def close(self) -> None:
        """Give no more pages back one by one: others may still look, and all go with the last tensor and mapping."""
        with self._lock:
            self._closed = True

    def locate(self, address: int, nbytes: int) -> Place | None:
        """Return where `nbytes` from `address` on lie, None when not in this arena."""
        place = self.addresses.locate(address, nbytes)
        return None if place is None else Place(*place)

    def memory(self, place: Place, nbytes: int) -> Tensor:
        """Return the bytes at `place`, which may belong to any tensor."""
        return self.segments[place.segment].bytes[place.offset : place.offset + nbytes]

    def _allocate(self, nbytes: int) -> tuple[_Segment, int, int]:
        if os.getpid() != self._process:
            raise RuntimeError("this arena is the parent's of a forked child: expected a call in its own process")
        with self._lock:
            for segment in sorted(self.segments, key=lambda s: not s.kept):
                start = segment.take(nbytes)
                if start is not None:
                    break
            else:
                check_room(nbytes)  # addresses that were never used would stay
                segment = self._add(max(nbytes, _SEGMENT_BYTES), kept=False)
                start = segment.take(nbytes)
                assert start is not None
        stop = start + nbytes
        if not segment.kept:
            try:
                if nbytes > _SMALL_BYTES:
                    check_room(nbytes)
                segment.fill(start, stop)
            except OSError as error:
                self._free(segment, start, stop)
                raise _lack(nbytes, error) from error
            except MemoryError:
                self._free(segment, start, stop)
                raise
        self._reclaim()
        return segment, start, stop

    def _add(self, nbytes: int, *, kept: bool) -> _Segment:
        try:
            segment = _Segment(len(self.segments), nbytes, kept=kept)
        except OSError as error:
            raise _lack(nbytes, error) from error
        self.segments.append(segment)
        self.addresses.add(segment.address, nbytes)
        return segment

    def _free(self, segment: _Segment, start: int, stop: int) -> None:
        """Give a block back; called by the garbage collector, in any thread, in the middle of anything."""
        if os.getpid() != self._process:  # in a forked child: the memory is the parent's
            return
        self._freed.append((segment, start, stop))
        self._reclaim()

    def _reclaim(self) -> None:
        # The thread that holds the lock now comes by here afterwards.
        while self._freed and self._lock.acquire(False):
            try:
                while self._freed:
                    segment, start, stop = self._freed.popleft()
                    if not (segment.kept or self._closed):
                        segment.empty(start, stop)
                    segment.free(start, stop)
            finally:
                self._lock.release()


class _Segment:
    """A memfd, mapped whole, and the holes in it."""

    def __init__(self, number: int, nbytes: int, *, kept: bool) -> None:
        self.number = number
        self.nbytes = nbytes
        self.mapped_bytes = nbytes + _SKEW_BYTES
        self.kept = kept  # its pages are there from the beginning, and stay, whether blocks are in them or not
        self.fd = segment_fd(f"aiodist-{number}", self.mapped_bytes)
        try:
            self.map = mmap.mmap(self.fd, self.mapped_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.holes = [(0, nbytes)]
        with torch.inference_mode(False):  # the first to need it may be in that mode
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        finalize(self, os.close, self.fd)

    def take(self, nbytes: int) -> int | None:
        """Return where `nbytes` are free, which they are no longer."""
        for i, (start, stop) in enumerate(self.holes):
            if stop - start >= nbytes:
                self.holes[i : i + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def fill(self, start: int, stop: int) -> None:
        """Have pages behind these bytes; raise OSError where there are none."""
        os.posix_fallocate(self.fd, start, stop - start)
        with suppress(OSError):  # an older kernel: each page costs a fault at its first use
            self.map.madvise(_POPULATE_WRITE, start, stop - start)

    def empty(self, start: int, stop: int) -> None:
        """Give the pages behind these bytes back to the system."""
        self.map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def free(self, start: int, stop: int) -> None:
        at = bisect_right(self.holes, (start, stop))
        if at < len(self.holes) and self.holes[at][0] == stop:
            stop = self.holes.pop(at)[1]
        if at and self.holes[at - 1][1] == start:
            at -= 1
            start = self.holes.pop(at)[0]
        self.holes.insert(at, (start, stop))


def segment_fd(name: str, nbytes: int) -> int:
    """Return the descriptor of a new memfd of `nbytes` that stays as long as it is; raise OSError where none can be."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise OSError(error.errno, f"memfd_create: {error.strerror}") from error
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reserved_fd(name: str, nbytes: int) -> tuple[int, int]:
    """Return the descriptor of a new memfd whose pages are there, and its bytes, in whole pages; raise MemoryError."""
    room = _in_pages(nbytes)
    check_room(room)
    try:
        fd = segment_fd(name, room)
        try:
            os.posix_fallocate(fd, 0, room)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise _lack(room, error) from error
    return fd, room


def check_segment(fd: int, nbytes: int) -> None:
    """Raise ValueError, saying what was seen, unless `fd` is of `nbytes` and can never be shorter."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError("it is no memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("it may shrink while it is mapped, for it is not sealed")
    if (size := os.fstat(fd).st_size) != nbytes:
        raise ValueError(f"{size} bytes are there")


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def check_room(nbytes: int, cgroup: Path = _CGROUP) -> None:
    """Raise MemoryError where reserving would have the kernel kill somebody; `cgroup` has this process's limits."""
    available = psutil.virtual_memory().available
    for limit, used in _LIMITS:
        try:
            available = min(available, int((cgroup / limit).read_text()) - int((cgroup / used).read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    if nbytes > available:
        raise MemoryError(f"an arena block of {nbytes} bytes was asked for: {available} bytes of memory are available")


def _lack(nbytes: int, error: OSError) -> MemoryError:
    return MemoryError(f"an arena block of {nbytes} bytes was asked for: {error.strerror}")
