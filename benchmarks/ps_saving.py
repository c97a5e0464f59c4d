"""A checkpoint of a parameter server while pushes go on: how much it slows these, and how fast it is written."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from time import perf_counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session
    from aiodist.ps import ParameterServer

__all__ = ["measure"]

_TENSORS = 64
_NBYTES = 4 << 20
_PUSHED = 64 << 10
"""Bytes of the tensors that are pushed to."""
_ROUNDS = 5


async def measure(session: Session, ps: ParameterServer, nbytes: int = _NBYTES) -> list[Record]:
    """Return of 64 tensors of `nbytes`: the mean push beside a save to that before and after it, and the seconds of a
    save to those in which the same bytes are written to the same disk; medians of rounds, both.
    """
    names = [f"saved {i}" for i in range(_TENSORS)]
    value = torch.zeros(_PUSHED // 4)
    if ps.is_worker:
        await ps.init(names, [torch.randn(nbytes // 4) for _ in names])
        await ps.init("pushed", value)
    slowed, slower = list[float](), list[float]()
    await session.coll.barrier()
    if ps.rank == ps.workers[0]:
        path = Path(mkdtemp(prefix="aiodist-"))
        for turn in range(1 + (session.plan.repeat or _ROUNDS)):
            before = await _pushes(ps, value, seconds=0.5)
            began = perf_counter()
            saving = ps.save(path, keep=1)
            count = 0
            while not saving.done():
                await ps.push("pushed", value)
                count += 1
            await saving
            took = perf_counter() - began
            after = await _pushes(ps, value, seconds=0.5)
            alone = _written(path / "plain", _TENSORS * nbytes)
            if turn:  # the first touches memory
                slowed.append(took / count / statistics.mean((before, after)))
                slower.append(took / alone)
        rmtree(path)
    await session.coll.barrier()
    if ps.is_worker:
        await ps.free([*names, "pushed"])
    return [
        record
        for name, found in (("beside", slowed), ("disk", slower))
        for record in await session.valued(
            f"ps_save:{name}", "aiodist:ps", statistics.median(found) if found else None, _TENSORS * nbytes
        )
    ]


async def _pushes(ps: ParameterServer, value: torch.Tensor, seconds: float) -> float:
    """Return the mean seconds of a push."""
    began, count = perf_counter(), 0
    while perf_counter() - began < seconds:
        await ps.push("pushed", value)
        count += 1
    return (perf_counter() - began) / count


def _written(path: Path, nbytes: int) -> float:
    """Return the seconds in which a file of so many bytes is on the disk."""
    data = torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().data
    began = perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)
    os.close(fd)
    took = perf_counter() - began
    path.unlink()
    return took
