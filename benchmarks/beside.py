"""Awaits and other work at the same time: parked waits, the loop's lateness, computing threads."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import torch

from aiodist.bench.timing import WARMUPS, percentile
from benchmarks.busy import cores_to_keep_busy, spinning
from benchmarks.first import allreduce_of, name_of, valued
from benchmarks.ticker import ticker

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["LARGE", "measure"]

LARGE = 64 << 20
MIDDLE = 4 << 20

_LATE_SECONDS = 2.0
_PEER_COMPUTES_SECONDS = 0.1
_PARKED_SECONDS = 0.05
_BUSY_SECONDS = 0.3
_STORM_SECONDS = 1.0
_PARAMETERS = 1000


async def measure(session: Session) -> list[Record]:
    """Measure all of them."""
    records = []
    for measured in (
        _parked_cpu,
        _peer_computes_cpu,
        _wake_up,
        _loop_lag_idle,
        partial(_lag_beside, op="loop_lag", nbytes=LARGE, times=4),
        partial(_lag_beside, op="loop_lag_small", nbytes=4, times=200),  # a storm of awaits
        _progress_busy,
        _backward_beside_pending,
        _await_busy,
    ):
        records += await measured(session)
    return records


def _tensor(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes // 4,), 0.0)


async def _anew(session: Session, t: torch.Tensor) -> None:
    """Overwrite a large tensor between two barriers, as before each timed call."""
    await session.fence()
    t.fill_(1)
    await session.fence()


def _last(session: Session) -> bool:
    """True on the rank that the others wait for."""
    return session.coll.size > 1 and session.coll.rank == session.coll.size - 1


# --- waiting for a rank that is late -----------------------------------------------------------------------------


async def _parked_cpu(session: Session) -> list[Record]:
    """Measure CPU seconds per second of the waiting ranks while the last rank sleeps for 2 s."""
    share = await _cpu_of_wait(session, lambda: asyncio.sleep(_LATE_SECONDS))
    return await valued(session, "parked_cpu", name_of(session), share, 4)


async def _peer_computes_cpu(session: Session) -> list[Record]:
    """Measure CPU seconds per second of the waiting ranks while the last rank computes for 100 ms."""
    a = torch.ones(192, 192)

    async def late() -> None:
        _compute(a, _PEER_COMPUTES_SECONDS)

    shares = [await _cpu_of_wait(session, late) for _ in range(session.plan.repeat or 20)]
    known = [share for share in shares if share is not None]
    return await valued(session, "peer_computes_cpu", name_of(session), statistics.median(known) if known else None, 4)


async def _cpu_of_wait(session: Session, late: Callable[[], Awaitable[object]]) -> float | None:
    """Run `late` on the last rank before its call; return the CPU share of the others, and None on the last."""
    t = _tensor(4)
    await session.fence()
    if _last(session):
        await late()
    began, used = perf_counter(), process_time()
    await allreduce_of(session)(t)
    return None if _last(session) else (process_time() - used) / (perf_counter() - began)


async def _wake_up(session: Session) -> list[Record]:
    """Measure the time from the call of the last rank, 50 ms late, until the others continue.

    For comparison, the loop of the other ranks watches a named pipe for a byte, or their thread reads it.
    Several hosts have no common clock, so nothing is measured there.
    """
    coll = session.coll
    if coll.nodes > 1 or coll.size == 1:
        return []
    t = _tensor(4)
    folder = await coll.broadcast_object(mkdtemp(prefix="aiodist-") if coll.rank == 0 else "")
    pipe = _Pipe(Path(folder), coll.size - 1)
    if not _last(session):
        pipe.open(coll.rank)
    await session.fence()
    if _last(session):
        pipe.open_all()

    async def reduce() -> None:
        await allreduce_of(session)(t)

    ways = {
        name_of(session): (reduce, reduce),
        "pipe:add_reader": (pipe.readable, pipe.write),
        "pipe:read": (pipe.read, pipe.write),
    }
    woken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARMUPS + (session.plan.repeat or 40)):
        for name, (wait, wake) in ways.items():
            await session.fence()
            if _last(session):
                await asyncio.sleep(_PARKED_SECONDS)
            called = perf_counter()
            await (wake if _last(session) else wait)()
            resumed = perf_counter()
            late = await coll.broadcast_object(called, root=coll.size - 1)
            if turn >= WARMUPS and not _last(session):
                woken[name].append(resumed - late)
    pipe.close()
    await session.fence()
    if coll.rank == 0:
        rmtree(folder)
    return await session.timed("wake_up", 4, woken)


class _Pipe:
    """A named pipe for each rank but the last, which writes to all of them."""

    def __init__(self, folder: Path, readers: int) -> None:
        self._paths = [folder / str(rank) for rank in range(readers)]
        self._fds: list[int] = []

    def open(self, rank: int) -> None:
        """Make the pipe of a reader and open its end."""
        os.mkfifo(self._paths[rank])
        self._fds = [os.open(self._paths[rank], os.O_RDWR)]

    def open_all(self) -> None:
        """Open the ends of the writer."""
        self._fds = [os.open(path, os.O_WRONLY) for path in self._paths]

    async def write(self) -> None:
        """Wake all readers."""
        for fd in self._fds:
            os.write(fd, b".")

    async def readable(self) -> None:
        """Wait on the loop."""
        loop, (fd,) = asyncio.get_running_loop(), self._fds
        came = loop.create_future()
        loop.add_reader(fd, came.set_result, None)
        await came
        loop.remove_reader(fd)
        os.set_blocking(fd, True)
        os.read(fd, 1)

    async def read(self) -> None:
        """Wait on the thread, which blocks the loop."""
        os.read(self._fds[0], 1)

    def close(self) -> None:
        """Close all ends."""
        for fd in self._fds:
            os.close(fd)


# --- a ticker on the loop ----------------------------------------------------------------------------------------


async def _loop_lag_idle(session: Session) -> list[Record]:
    """Measure a ticker on an idle loop: the lateness of timers on this machine."""
    async with ticker() as lateness:
        await asyncio.sleep(_STORM_SECONDS)
    return await valued(session, "loop_lag_idle", "none", percentile(lateness, 99))


async def _lag_beside(session: Session, *, op: str, nbytes: int, times: int) -> list[Record]:
    """Measure a ticker while reductions are awaited, one after the other, for about a second.

    Nothing is overwritten here, as this would block the loop.
    """
    t = _tensor(nbytes)

    async def repeat() -> None:
        for _ in range(times):
            await allreduce_of(session)(t)

    await repeat()
    await session.fence()
    async with ticker() as lateness:
        began = perf_counter()
        going = True
        while going:  # on every rank as often
            await repeat()
            going = await session.coll.allreduce(int(perf_counter() - began < _STORM_SECONDS), op="min") > 0
    return await valued(session, op, name_of(session), percentile(lateness, 99), nbytes)


# --- computing threads -------------------------------------------------------------------------------------------


async def _progress_busy(session: Session) -> list[Record]:
    """Measure the await of 64 MiB after 300 ms of torch on the loop's thread, divided by the transfer's time."""
    t, a = _tensor(LARGE), torch.ones(192, 192)
    own, after = [], []
    for turn in range(2 + min(session.plan.repeat or 5, 10)):
        alone = await _clocked(session, t)
        await _anew(session, t)
        handle = allreduce_of(session)(t)
        _compute(a, _BUSY_SECONDS)
        began = perf_counter()
        await handle
        if turn >= 2:
            own.append(alone)
            after.append(perf_counter() - began)
    ratio = statistics.median(after) / statistics.median(own)
    return await valued(session, "progress_busy", name_of(session), ratio, LARGE)


def _compute(a: torch.Tensor, seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        a @ a


async def _clocked(session: Session, t: torch.Tensor) -> float:
    """Return the seconds of one awaited allreduce of new data, after a barrier of all ranks.

    A peer's barrier releases the GIL, and a rank that waits for the GIL starts up to 5 ms later.
    """
    await _anew(session, t)
    for _ in range(2):
        await session.coll.barrier()
    began = perf_counter()
    await allreduce_of(session)(t)
    return perf_counter() - began


async def _backward_beside_pending(session: Session) -> list[Record]:
    """Measure backward of 1,000 small parameters on a thread, with a pending receive and without, in turn."""
    coll, dst = session.coll, (session.coll.rank + 1) % session.coll.size
    message, into = _tensor(4), _tensor(4)
    parameters = [torch.ones(16, requires_grad=True) for _ in range(_PARAMETERS)]
    ready: list[torch.Tensor] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready.append)  # as data-parallel training has them
    alone, beside = [], []
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as compute:
        for turn in range(3 + (session.plan.repeat or 20)):
            await session.fence()
            without = await loop.run_in_executor(compute, _backward, parameters)
            await session.fence()
            handle = coll.recv(into, (coll.rank - 1) % coll.size)
            with_one = await loop.run_in_executor(compute, _backward, parameters)
            await session.fence()
            await coll.send(message, dst)
            await handle
            if turn >= 3:
                alone.append(without)
                beside.append(with_one)
    assert ready
    ratio = statistics.median(beside) / statistics.median(alone)
    return await valued(session, "backward_beside_pending", name_of(session), ratio)


def _backward(parameters: list[torch.Tensor]) -> float:
    loss = torch.stack([(p * 2.0).sum() for p in parameters]).sum()
    began = perf_counter()
    loss.backward()
    return perf_counter() - began


async def _await_busy(session: Session) -> list[Record]:
    """Measure the mean of 4 MiB awaits with a thread of pure Python, divided by the mean without it.

    For comparison, a process spins on each core, and needs no GIL. Further figures, of the awaits with the thread: the
    share of their time in which the thread ran, with the GIL, and how often it began to run, per await.
    """
    t = _tensor(MIDDLE)
    cores = await cores_to_keep_busy(session.coll)
    for _ in range(WARMUPS):
        await allreduce_of(session)(t)
    idle, busy, spun = list[float](), list[float](), list[float]()
    held = list[float]()
    for _ in range(session.plan.repeat or 20):
        idle += [await _clocked(session, t) for _ in range(5)]
        with _busy_thread() as holds:
            awaits = []
            for _ in range(5):
                busy.append(await _clocked(session, t))
                ended = perf_counter()
                awaits.append((ended - busy[-1], ended))
        for began, ended in awaits:
            inside = (min(stop, ended) - max(start, began) for start, stop in holds)
            held += [seconds for seconds in inside if seconds > 0]
        with spinning(cores):
            spun += [await _clocked(session, t) for _ in range(5)]
    mean, name = statistics.fmean(idle), name_of(session)
    return [
        *await valued(session, "await_busy", name, statistics.fmean(busy) / mean, MIDDLE),
        *await valued(session, "await_busy_processes", name, statistics.fmean(spun) / mean, MIDDLE),
        *await valued(session, "await_busy_held", name, sum(held) / sum(busy), MIDDLE),
        *await valued(session, "await_busy_handovers", name, len(held) / len(busy), MIDDLE),
    ]


_SWITCHED_SECONDS = 1e-5


@contextmanager
def _busy_thread() -> Iterator[list[tuple[float, float]]]:
    """Run a thread of pure Python; yield a growing list of the times in which it ran, with the GIL."""
    stop = False
    holds: list[tuple[float, float]] = []

    def burn() -> None:
        start = last = perf_counter()
        while not stop:
            now = perf_counter()
            if now - last > _SWITCHED_SECONDS:
                holds.append((start, last))
                start = now
            last = now

    thread = threading.Thread(target=burn, daemon=True)
    thread.start()
    try:
        yield holds
    finally:
        stop = True
        thread.join()
