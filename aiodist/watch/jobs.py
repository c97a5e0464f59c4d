"""Jobs of this host, each inspected by a socket in the user's runtime folder. Imports no torch."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from aiodist.errors import ConfigError
from aiodist.machine import job_socket

_SECONDS = 5.0


def claim(job: int) -> Path:
    """Return a path for the job's socket, in a private folder of this user, after removal of a stale socket."""
    path = job_socket(job)
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    _is_alive(path)
    return path


def running() -> list[int]:
    """Return the jobs whose sockets answer. Stale sockets are removed."""
    found = [path for path in job_socket(0).parent.glob("*.sock") if path.stem.isdecimal() and _is_alive(path)]
    return sorted(int(path.stem) for path in found)


def look(job: int | None) -> dict[str, Any]:
    """Return the states of the ranks of `job`, or of the only job here for None.

    Raises ConfigError without such a job.
    """
    if job is None:
        here = running()
        if len(here) != 1:
            seen = f"jobs {', '.join(map(str, here))} are" if here else "no job is"
            raise ConfigError(f"{seen} running here: expected the process id of a launcher, or of rank 0 without one")
        (job,) = here
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(str(job_socket(job)))
            answer: dict[str, Any] = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    except (OSError, ValueError) as error:
        _is_alive(job_socket(job))
        others = ", ".join(map(str, running())) or "none"
        raise ConfigError(f"job {job} does not answer here: {error}; jobs that answer: {others}") from error
    return answer


def _is_alive(path: Path) -> bool:
    """Return True if a process serves the socket. The socket of a killed process is removed."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return False
    except OSError:
        return path.exists()
    return True
