"""Processes that spin on every core, for figures of a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.communicator import Communicator

__all__ = ["BUSY", "cores_to_keep_busy", "spinning"]

BUSY = ":busy"
"""Suffix of operations that were measured on busy cores."""

# the process ends when its parent has ended
_SPIN = """
import os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
os.write(1, b".")
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


async def cores_to_keep_busy(coll: Communicator) -> tuple[int, ...]:
    """Return the cores of all ranks of this host on its first rank, and an empty tuple on the others."""
    by_rank = await coll.allgather_object((coll.node, sorted(os.sched_getaffinity(0))))
    if coll.local_rank:
        return ()
    return tuple(sorted({core for node, cores in by_rank if node == coll.node for core in cores}))


@contextmanager
def spinning(cores: Iterable[int]) -> Iterator[list[int]]:
    """Run a spinning process on each of these cores during the block; yield the process ids."""
    spinners: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            command = [sys.executable, "-I", "-S", "-c", _SPIN, str(core), str(os.getpid())]
            spinners.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))
        for spinner in spinners:
            assert spinner.stdout is not None
            spinner.stdout.read(1)  # it is on its core
        yield [spinner.pid for spinner in spinners]
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()
