"""Folders for the files of an MPI on this host, removed with the job or, after a kill, by the next job."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from aiodist.machine import boot_id


@contextmanager
def scratch_folder(parent: str) -> Iterator[str]:
    """Make a folder in `parent` for this block, and remove those of killed launchers of this user.

    A launcher holds a lock on its folder while it lives; the kernel releases the lock of a killed one. The name has the
    kernel's id, since other hosts may see `parent` too, and their locks may not be visible here.
    """
    prefix = f"aiodist-{boot_id()[:8]}-"
    for left in Path(parent).glob(f"{prefix}*"):
        with suppress(OSError), _locked(left):  # it is in use, of another user, or removed
            shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as stack:
        while True:
            folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
            try:
                stack.enter_context(_locked(folder))
            except (BlockingIOError, FileNotFoundError):  # another launcher is about to remove it
                continue
            except OSError:  # there are no locks here, for the next launcher neither
                break
            if Path(folder).exists():
                break
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a folder of this user. Raises OSError if another process holds it, or without the folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        flock(fd, LOCK_EX | LOCK_NB)
        yield
    finally:
        os.close(fd)
