"""This machine: the identity of its kernel and namespaces, and the sockets of its jobs.

Names of hosts tell nothing: two hosts may have the same.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what the kernel drew when it started; empty where it does not say."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def network() -> str:
    """Return what is equal for processes with the same loopback interface and the same abstract sockets."""
    return _namespace("net")


def process_table() -> str:
    """Return what is equal for processes to which an id means the same process."""
    return _namespace("pid")


def _namespace(kind: str) -> str:
    namespace = Path("/proc/self/ns") / kind
    return f"{boot_id()} {namespace.stat().st_ino if namespace.exists() else 0}"


def job_socket(job: int | str) -> Path:
    """Return the socket at which a job on this host can be looked into, in the user's runtime folder."""
    from platformdirs import user_runtime_path

    with warnings.catch_warnings():  # of a folder that is not private, and so is not taken
        warnings.simplefilter("ignore")
        return user_runtime_path("aiodist") / f"{job}.sock"
