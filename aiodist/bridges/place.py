"""The place where two jobs meet, by a name or an address, and the lock that gives a name to one listener."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiodist.control.places import tcp_address
from aiodist.control.thread import forget, guard
from aiodist.errors import ConfigError
from aiodist.machine import runtime_folder

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class MeetingPlace:
    """The place where two jobs meet: a name in a folder, or an address with a token."""

    name: str
    folder: Path | None
    host: str = ""
    port: int = 0
    token: str = ""

    @classmethod
    def of(cls, name: str, folder: str | os.PathLike[str] | None, token: str | None) -> MeetingPlace:
        """Return the place of these arguments. Raises `ConfigError` for a wrong one."""
        where, colon, port = name.rpartition(":")
        if colon:
            if not port.isdecimal() or not 0 < int(port) < 65536 or not where:
                raise ConfigError(f"{name!r}: expected a name, or host:port with a port from 1 to 65535")
            if folder is not None:
                raise ConfigError(f"{name!r} with folder=: expected a folder for a name only, not for host:port")
            if not token:
                raise ConfigError(f"{name!r} without token=: expected the same secret text in both jobs for host:port")
            return cls(name, None, where.strip("[]"), int(port), token)
        if not _NAME.fullmatch(name):
            raise ConfigError(f"name {name!r}: expected letters, digits, dots, dashes and underscores, or host:port")
        if token is not None:
            raise ConfigError(f"{name!r} with token=: expected a token for host:port only; a name has one in its file")
        return cls(name, runtime_folder() / "bridges" if folder is None else Path(folder))

    @property
    def file(self) -> Path:
        """File with the address of a named listener."""
        assert self.folder is not None
        return self.folder / f"{self.name}.json"

    def __str__(self) -> str:
        return str(self.file) if self.folder is not None else tcp_address(self.host, self.port)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the name, which the kernel frees if this process dies. Raises `ConfigError` if another door has it."""
        path = self.file.with_suffix(".lock")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use the folder of {self}: {error.strerror}") from error
        guard(fd)  # a forked child would keep the name
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 200, 0).decode(errors="replace")
                raise ConfigError(
                    f"{holder or 'another process'} listens as {self.name!r} in {self.folder} already: expected one "
                    "listener for a name; close that one, or use another name or folder"
                ) from None
            os.truncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
        finally:
            forget(fd)
            os.close(fd)
