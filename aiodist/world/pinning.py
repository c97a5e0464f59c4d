"""Cores for each rank.

Ranks that may use the same cores have `cores / ranks` each; a rank to which its launcher gave cores of its own keeps
them. Threads of torch are then as many as the rank's cores, unless the user said how many. A rank that would be left
with one core is not held to it unless AIODIST_PIN=1 says so: its loop, compute, progress and loader threads could not
get out of one another's way, nor out of that of other programs.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aiodist.env import Environment

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from aiodist.control import Channel
    from aiodist.topology import Topology

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


async def pinned(channel: Channel, topology: Topology, environment: Environment) -> AbstractContextManager[None]:
    """Return a block in which this process has its share of the cores; every rank must call it.

    Nothing is changed with AIODIST_PIN=0, and for the only rank of a host.
    """
    if environment.pin is False or topology.local_size == 1:
        return _held(None, None)
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    said = ",".join(map(str, allowed)).encode()
    here = topology.ranks_on(topology.host_of[topology.rank])
    asked = [channel.get(f"cores/{rank}") for rank in here]
    _, *cores = await asyncio.gather(channel.set(f"cores/{channel.rank}", said), *asked)
    alike = [rank for rank, there in zip(here, cores, strict=True) if there == said]
    mine = share(allowed, alike.index(channel.rank), len(alike))
    hold = environment.pin or (len(mine) > 1 and len(mine) < len(allowed))
    # Whether the user said how many threads torch has: by itself it starts one for each core that it sees.
    chosen = torch.get_num_threads() < len(allowed) or any(environment.variables.get(name) for name in _THREADS)
    return _held(mine if hold else None, None if chosen else len(mine))


def share(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """Return the cores of one of `count` ranks: cores / count of its own, or one that it shares where they are few.

    >>> [share([0, 1, 2, 3, 4], i, 2) for i in range(2)], [share([0, 1], i, 3) for i in range(3)]
    ([(0, 1), (2, 3)], [(0,), (1,), (0,)])
    """
    each = max(1, len(cores) // count)
    first = index * each % len(cores)
    return tuple(cores[first : first + each])


def warn_of_one_core(workers: int) -> None:
    """Warn, once in a process, that this many loader workers share one core with all else that it does."""
    if not workers or len(os.sched_getaffinity(0)) > 1:
        return
    if (os.cpu_count() or 1) > 1 and not warned:
        warned.append(True)
        text = (
            f"this process has one core for its loop, its computation and {workers} loader worker(s): "
            "give it more (mpirun --bind-to none, AIODIST_PIN=0, or fewer ranks)"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=3)


warned: list[bool] = []


@contextmanager
def _held(cores: Sequence[int] | None, threads: int | None) -> Iterator[None]:
    """Hold this process to cores, and torch to a number of threads, where they are given."""
    before = os.sched_getaffinity(0) if cores is not None else set()
    threads_before, process = torch.get_num_threads(), os.getpid()
    if cores is not None:
        _move(cores)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if os.getpid() == process:  # a forked child that leaves the block keeps what it inherited
            if cores is not None:
                _move(before)
            if threads is not None and torch.get_num_threads() == threads:
                torch.set_num_threads(threads_before)


def _move(cores: Sequence[int] | set[int]) -> None:
    """Move all threads that there are; those that come inherit it."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended, or the cores were taken away meanwhile
            os.sched_setaffinity(int(task.name), cores)
