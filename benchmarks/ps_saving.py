"""A checkpoint of a server during pushes: `aiodist run -n 2 -m benchmarks.ps_saving [GB]`; medians of rounds.

Pushes go to the tensor that is saved last, 64 KiB each, or in turn to all tensors, 4 MiB each. For comparison, the same
pushes run while a thread only writes the same number of bytes. No file is removed during a round, which would take
0.15 s a GB on a file system with `discard`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from collections.abc import Awaitable, Callable
from itertools import cycle
from pathlib import Path
from shutil import rmtree
from statistics import mean, median
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import torch

import aiodist
from aiodist.ps import ParameterServer

NBYTES = 4 << 20
_PUSHED = 64 << 10
_PIECE_BYTES = 16 << 20
ROUNDS = 5
SECONDS = 0.5


async def main() -> None:
    """Push on rank 0, and serve on rank 1."""
    torch.set_num_threads(1)
    names = [f"saved {i}" for i in range(round(float(sys.argv[1] if len(sys.argv) > 1 else 1) * 1e9 / NBYTES))]
    async with aiodist.init() as coll, ParameterServer(coll, servers=1, rule="add") as ps:
        for name in names if ps.is_worker else ():
            await ps.init(name, torch.randn(NBYTES // 4))
        if ps.is_worker:
            await ps.init("pushed", torch.zeros(_PUSHED // 4))
            path = Path(mkdtemp(prefix="aiodist-"))
            small, large, turn = torch.zeros(_PUSHED // 4), torch.zeros(NBYTES // 4), cycle(names)
            try:
                await _measure("one of 64 KiB", lambda: ps.push("pushed", small), ps, path, len(names) * NBYTES)
                await _measure("all of 4 MiB", lambda: ps.push(next(turn), large), ps, path, len(names) * NBYTES)
            finally:
                rmtree(path)
            await ps.barrier()


async def _measure(what: str, push: Callable[[], Awaitable[Any]], ps: ParameterServer, path: Path, nbytes: int) -> None:
    """Print the slowdown of pushes by a save, and its time."""
    slowed: dict[str, list[float]] = {"save": [], "writer": []}
    took: dict[str, list[float]] = {"save": [], "writer": [], "alone": []}
    for turn in range(1 + ROUNDS):
        for way in slowed:
            before = await _pushes(push, _soon())
            began = perf_counter()
            over: Any = ps.save(path / "saved") if way == "save" else _in_thread(path / "plain", nbytes)
            during = await _pushes(push, over.done)
            await over
            seconds = perf_counter() - began
            _clear(path)
            after = await _pushes(push, _soon())
            if turn:  # the first touches memory
                slowed[way].append(during / mean((before, after)))
                took[way].append(seconds)
        took["alone"].append(_write(path / "plain", nbytes))
        _clear(path)
    alone = median(took["alone"])
    for way, ratios in slowed.items():
        told, seconds = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios)), median(took[way])
        sys.stdout.write(
            f"pushes to {what} beside the {way}: {median(ratios):.2f} times as long ({told}); "
            f"{nbytes / 1e9:.2f} GB in {seconds:.2f} s, "
            f"at {alone / seconds:.2f} of the disk's {nbytes / 1e9 / alone:.2f} GB/s\n"
        )
    sys.stdout.flush()


async def _pushes(push: Callable[[], Awaitable[Any]], over: Callable[[], bool]) -> float:
    """Push until a task has finished; return the mean seconds of a push."""
    began, count = perf_counter(), 0
    while not count or not over():
        await push()
        count += 1
    return (perf_counter() - began) / count


def _soon() -> Callable[[], bool]:
    until = perf_counter() + SECONDS
    return lambda: perf_counter() > until


def _in_thread(path: Path, nbytes: int) -> asyncio.Task[float]:
    return asyncio.get_running_loop().create_task(asyncio.to_thread(_write, path, nbytes))


def _write(path: Path, nbytes: int) -> float:
    """Return the seconds to write a file of `nbytes` to the disk, past the cache."""
    buffer = mmap.mmap(-1, _PIECE_BYTES)
    buffer.write(os.urandom(_PIECE_BYTES))
    began = perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    for at in range(0, nbytes, _PIECE_BYTES):
        os.write(fd, memoryview(buffer)[: min(_PIECE_BYTES, nbytes - at)])
    os.fsync(fd)
    os.close(fd)
    return perf_counter() - began


def _clear(path: Path) -> None:
    rmtree(path)
    path.mkdir()


if __name__ == "__main__":
    aiodist.run(main)
