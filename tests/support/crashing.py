"""A file system that a machine leaves at any moment: what was not synced is lost, and nothing happens afterwards."""

from __future__ import annotations

import os
import random
from pathlib import Path
from threading import Lock
from typing import Any


class Crash(OSError):
    """The machine is gone: every call raises it from then on."""


class CrashingOs:
    """Stands in for `os` in code that writes files; crashes at the `stop`-th call, a write in the middle of its bytes.

    `crash` does what a crash may do to a disk: a file that was not synced since it was written is cut anywhere, or has
    other bytes, and a name that was not synced with its folder may be the one before.
    """

    def __init__(self, stop: int | None, draw: random.Random) -> None:
        self.calls = 0
        self._stop = stop
        self._draw = draw
        self._lock = Lock()
        self._names: dict[int, Path] = {}
        self._dirty: dict[Path, Path] = {}
        """Files with bytes that may be lost."""
        self._renamed: list[tuple[Path, Path]] = []
        """Renamed, in folders that were not synced since."""
        self.crashed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _next(self) -> bool:
        """Count a call; return whether the machine crashes in the middle of this call."""
        if self.crashed:
            raise Crash
        self.calls += 1
        self.crashed = self.calls == self._stop
        return self.crashed

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            if self._next():
                raise Crash
            fd = os.open(path, flags, mode)
            self._names[fd] = Path(path)
            if flags & os.O_CREAT:
                self._dirty[Path(path)] = Path(path)
            return fd

    def write(self, fd: int, data: memoryview) -> int:
        with self._lock:
            if self._next():
                os.write(fd, data[: self._draw.randrange(len(data))])
                raise Crash
            return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        with self._lock:
            if self._next():
                raise Crash
            path = self._names[fd]
            if path.is_dir():
                self._renamed = [(a, b) for a, b in self._renamed if b.parent != path]
            self._dirty.pop(path, None)

    def close(self, fd: int) -> None:
        with self._lock:  # no error: the files of a process that is gone are closed too
            self._names.pop(fd, None)
            os.close(fd)

    def rename(self, a: Path, b: Path) -> None:
        with self._lock:
            if self._next():
                raise Crash
            os.rename(a, b)
            self._renamed.append((Path(a), Path(b)))
            self._dirty = {b / file.name if file.parent == a else file: file for file in self._dirty}

    def mkdir(self, path: Path) -> None:
        with self._lock:
            if self._next():
                raise Crash
            os.mkdir(path)

    def rmtree(self, path: Path) -> None:
        """Stand in for `shutil.rmtree`: each file is one call."""
        for file in sorted(path.iterdir(), key=lambda _: self._draw.random()):
            with self._lock:
                if self._next():
                    raise Crash
                file.unlink()
        path.rmdir()

    def crash(self) -> None:
        """Change the disk as a crash may."""
        for path in self._dirty:
            if path.exists():
                data = bytearray(path.read_bytes())
                if data and self._draw.random() < 0.5:
                    data[self._draw.randrange(len(data))] ^= 1
                path.write_bytes(data[: self._draw.randint(0, len(data))])
        for a, b in reversed(self._renamed):
            if b.exists() and self._draw.random() < 0.5:
                os.rename(b, a)
