"""Folders for what an MPI leaves on this host: they go with the job, or when the next finds that it was killed."""

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
    """Make a folder in `parent` for this block, and remove those that launchers of this user left there.

    A launcher locks its folder as long as it lives: the kernel gives the lock back when it is killed. The name tells
    folders of this kernel from those of other hosts that see `parent` too, whose locks may not be seen here.
    """
    prefix = f"aiodist-{boot_id()[:8]}-"
    for left in Path(parent).glob(f"{prefix}*"):
        with suppress(OSError), _locked(left):  # else it is in use, another user's, or gone meanwhile
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
    """Hold the lock of a folder of this user; raise OSError where somebody else does, or it is not there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        flock(fd, LOCK_EX | LOCK_NB)
        yield
    finally:
        os.close(fd)
