"""Whole lines with the rank in front, on the launcher's own standard output and error."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from aiodist.launch.wire import Kind

__all__ = ["Console", "Lines", "Logs"]

_LONGEST = 1 << 20
_REDRAW = 1.0
_PIECE = 4096  # a pipe that reports room takes this much without blocking (PIPE_BUF)
_FDS = {Kind.OUT: 1, Kind.ERR: 2}


class Lines:
    """Cuts what one rank writes to one stream into lines and puts `prefix` before each.

    A line longer than 1 MiB is cut. A carriage return starts a line anew, as on a terminal: of a progress bar that
    redraws itself the state is printed as a line at most once a second, and its last state when the line ends.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""
        self._drawn = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the lines that `data` completes."""
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        lines = whole.split(b"\n") if newline and b"\r" in whole else [whole] if newline else []
        if newline and b"\r" in whole:
            lines = [_last_state(line) for line in lines]
        if b"\r" in rest:
            rest, drawn = _redrawn(rest)
            if drawn and now >= self._drawn + _REDRAW:
                self._drawn = now
                lines.append(drawn)
        if len(rest) > _LONGEST:
            lines.append(rest)
            rest = b""
        self._rest = rest
        return b"".join(self._prefix + line.replace(b"\n", b"\n" + self._prefix) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Return what was written after the last line end, as a line."""
        rest, self._rest = _last_state(self._rest), b""
        return self._prefix + rest + b"\n" if rest else b""


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _redrawn(rest: bytes) -> tuple[bytes, bytes]:
    """Return the state being drawn and the one complete before it; a final return may belong to a line end."""
    tail = b"\r" if rest.endswith(b"\r") else b""
    before, _, state = rest[: len(rest) - len(tail)].rpartition(b"\r")
    return state + tail, _last_state(before)


class Console:
    """Writes to the standard streams without ever blocking the loop, one writer at a time.

    The descriptors stay as they are: they are shared with the shell, which would be surprised by O_NONBLOCK.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._broken: set[int] = set()

    @property
    def broken(self) -> bool:
        """Nobody reads standard output any more."""
        return 1 in self._broken

    async def write(self, kind: Kind, data: bytes) -> None:
        """Write all of `data`, which are whole lines; wait for the reader as long as it takes."""
        fd = _FDS[kind]
        async with self._lock:
            view = memoryview(data)
            while view and fd not in self._broken:
                try:
                    if _may_block(fd):
                        await _writable(fd)
                        view = view[os.write(fd, view[:_PIECE]) :]
                    else:
                        view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await _writable(fd)
                except OSError:  # a pipe nobody reads, a terminal that is gone, a full disk
                    self._broken.add(fd)


def _may_block(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(fd)


class Logs:
    """What each rank wrote, byte for byte: `DIR/rank-0.out` and `DIR/rank-0.err`."""

    def __init__(self, folder: Path | None, ranks: int) -> None:
        self._files: dict[tuple[int, Kind], int] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            for kind, ending in ((Kind.OUT, "out"), (Kind.ERR, "err")):
                path = folder / f"rank-{rank}.{ending}"
                self._files[rank, kind] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, rank: int, kind: Kind, data: bytes) -> None:
        """Add to the rank's file, if there is one."""
        view = memoryview(data)
        while view and (rank, kind) in self._files:
            view = view[os.write(self._files[rank, kind], view) :]

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
