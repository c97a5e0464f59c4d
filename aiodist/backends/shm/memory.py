"""Memory that the other ranks of a host can map: blocks of segments, each segment a memfd.

A segment is a large range of addresses without pages. A block reserves its pages at the allocation, so that lack of
memory is an exception and not a SIGBUS during a reduction. The pages are freed when the last tensor of the block dies.
A segment is sealed. No process with the descriptor can shrink the segment, so a mapping never extends past the end. A
segment has no name in any file system. The kernel frees the segment, however the process ends.
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
"""Unused bytes at the end of each segment: the distance of adjacent mappings is then no power of two.

Some processors predict the place of a line in the first cache from bits 12 to 27 of its address (Lipp et al. 2020,
"Take A Way", doi:10.1145/3320269.3384746). The ranks reduce data at equal offsets of the segments. With equal bits, a
reduction in place took eight times as long.
"""
_POPULATE_WRITE = 23  # madvise, since Linux 5.14: fills the page table in advance
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_SMALL_BYTES = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _memmove() -> Callable[[int, int, int], None]:
    function: Any = ctypes.CDLL(None).memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function  # type: ignore[no-any-return]


move_bytes = _memmove()  # (to, from, count): copies many bytes with the GIL released


class Place(NamedTuple):
    """An address in an arena, as sent to other ranks."""

    segment: int
    offset: int


class Arena:
    """One rank's shared memory. Any thread may call `empty` and `locate`. Tensors may die in any thread."""

    def __init__(self) -> None:
        self.segments: list[_Segment] = []
        """Segments by number, never removed, since other ranks map them."""
        self.addresses = _core.Segments()  # addresses of the segments, and number of the published ones
        self._lock = threading.Lock()
        self._freed: deque[tuple[_Segment, int, int]] = deque()
        self._process = os.getpid()
        self._closed = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, or raise MemoryError if the pages cannot be reserved."""
        numel = prod(shape)
        if numel <= 0:  # torch reports negative sizes
            return torch.empty(shape, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        segment, start, stop = self._allocate(_in_pages(nbytes))
        memory = memoryview(segment.map)[start:stop]
        # The storage holds a reference to `memory`, which dies with the last tensor of this storage.
        finalize(memory, self._free, segment, start, stop).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel).view(shape)

    def reserve(self, nbytes: int) -> None:
        """Add a segment of `nbytes` with pages that are reserved now and never freed."""
        nbytes = _in_pages(nbytes)
        check_room(nbytes)
        with self._lock:
            segment = self._add(nbytes, reserved=True)
            try:
                segment.fill(0, nbytes)
            except OSError as error:
                segment.holes.clear()
                raise _lack(nbytes, error) from error
        self._reclaim()

    def close(self) -> None:
        """Stop freeing pages of single blocks, which other ranks may still read.

        The end of the last mapping frees all.
        """
        with self._lock:
            self._closed = True

    def locate(self, address: int, nbytes: int) -> Place | None:
        """Return the place of `nbytes` at `address`, or None for an address outside this arena."""
        place = self.addresses.locate(address, nbytes)
        return None if place is None else Place(*place)

    def memory(self, place: Place, nbytes: int) -> Tensor:
        """Return the bytes at `place` of any tensor."""
        return self.segments[place.segment].bytes[place.offset : place.offset + nbytes]

    def _allocate(self, nbytes: int) -> tuple[_Segment, int, int]:
        if os.getpid() != self._process:
            raise RuntimeError("this arena belongs to the parent of a forked child: expected a call in the parent")
        with self._lock:
            for segment in sorted(self.segments, key=lambda s: not s.reserved):
                start = segment.take(nbytes)
                if start is not None:
                    break
            else:
                check_room(nbytes)  # before a segment is added: segments are never removed
                segment = self._add(max(nbytes, _SEGMENT_BYTES), reserved=False)
                start = segment.take(nbytes)
                assert start is not None
        stop = start + nbytes
        if not segment.reserved:
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

    def _add(self, nbytes: int, *, reserved: bool) -> _Segment:
        try:
            segment = _Segment(len(self.segments), nbytes, reserved=reserved)
        except OSError as error:
            raise _lack(nbytes, error) from error
        self.segments.append(segment)
        self.addresses.add(segment.address, nbytes)
        return segment

    def _free(self, segment: _Segment, start: int, stop: int) -> None:
        """Free a block. The garbage collector makes this call in any thread, between any two instructions."""
        if os.getpid() != self._process:  # a forked child: the memory belongs to the parent
            return
        self._freed.append((segment, start, stop))
        self._reclaim()

    def _reclaim(self) -> None:
        # If another thread holds the lock, that thread frees these blocks too.
        while self._freed and self._lock.acquire(False):
            try:
                while self._freed:
                    segment, start, stop = self._freed.popleft()
                    if not (segment.reserved or self._closed):
                        segment.empty(start, stop)
                    segment.free(start, stop)
            finally:
                self._lock.release()


class _Segment:
    """A memfd, mapped as a whole, with its free ranges."""

    def __init__(self, number: int, nbytes: int, *, reserved: bool) -> None:
        self.number = number
        self.nbytes = nbytes
        self.mapped_bytes = nbytes + _SKEW_BYTES
        self.reserved = reserved  # True if the pages exist as long as the segment, also without blocks
        self.fd = segment_fd(f"aiodist-{number}", self.mapped_bytes)
        try:
            self.map = mmap.mmap(self.fd, self.mapped_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.holes = [(0, nbytes)]
        with torch.inference_mode(False):  # the caller may be in that mode
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        finalize(self, os.close, self.fd)

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` and return the offset, or None if no free range is large enough."""
        for i, (start, stop) in enumerate(self.holes):
            if stop - start >= nbytes:
                self.holes[i : i + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def fill(self, start: int, stop: int) -> None:
        """Reserve the pages of these bytes. Raise OSError if there are none."""
        os.posix_fallocate(self.fd, start, stop - start)
        with suppress(OSError):  # an older kernel: the first use of each page faults
            self.map.madvise(_POPULATE_WRITE, start, stop - start)

    def empty(self, start: int, stop: int) -> None:
        """Free the pages of these bytes."""
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
    """Return the descriptor of a new memfd with the fixed size `nbytes`, or raise OSError if that fails."""
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
    """Return the descriptor and size, in whole pages, of a new memfd with reserved pages, or raise MemoryError."""
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
    """Raise ValueError unless `fd` is a memfd of `nbytes` that cannot shrink."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError("it is no memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("it is not sealed, so that it may shrink while it is mapped")
    if (size := os.fstat(fd).st_size) != nbytes:
        raise ValueError(f"its size is {size} bytes")


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def check_room(nbytes: int, cgroup: Path = _CGROUP) -> None:
    """Raise MemoryError if the kernel would kill a process to reserve `nbytes`. `cgroup` has the limits."""
    available = psutil.virtual_memory().available
    for limit, used in _LIMITS:
        try:
            available = min(available, int((cgroup / limit).read_text()) - int((cgroup / used).read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    if nbytes > available:
        raise MemoryError(f"no memory for an arena block of {nbytes} bytes: {available} bytes are available")


def _lack(nbytes: int, error: OSError) -> MemoryError:
    return MemoryError(f"no memory for an arena block of {nbytes} bytes: {error.strerror}")
