"""This machine: the identity of its kernel and namespaces, and the sockets of its jobs.

Host names identify no machine: two hosts may have the same name.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path  # loading it would delay each guard

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Return the random number of the kernel's start, or "" if the kernel has none."""
    with suppress(OSError), open(_BOOT_ID) as file:
        return file.read().strip()
    return ""


def network() -> str:
    """Return a text that is equal for processes with the same loopback interface and abstract sockets."""
    return _namespace("net")


def process_table() -> str:
    """Return a text that is equal for processes with the same table of process ids."""
    return _namespace("pid")


def _namespace(kind: str) -> str:
    inode = 0
    with suppress(OSError):
        inode = os.stat(f"/proc/self/ns/{kind}").st_ino
    return f"{boot_id()} {inode}"


def job_socket(job: int | str) -> Path:
    """Return the socket of a job on this host for `aiodist inspect`, in the user's runtime folder."""
    return runtime_folder() / f"{job}.sock"


def runtime_folder() -> Path:
    """Return the folder of this user on this host for sockets and addresses of jobs, which may be missing."""
    from platformdirs import user_runtime_path

    with warnings.catch_warnings():  # about a folder that is not private, which is not used
        warnings.simplefilter("ignore")
        return user_runtime_path("aiodist")
