"""What waiting costs: small awaits, many at once, parked ones, and what others on the loop feel of it."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import torch

from aiodist.bench import collectives
from aiodist.bench.timing import WARMUPS, percentile, ticker
from aiodist.handles import Handle, gather

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["LARGE", "MANY", "SMALL", "measure"]

SMALL = (4, 64, 1024)
LARGE = 64 << 20
MIDDLE = 4 << 20
MANY = 1000

_LATE_SECONDS = 2.0
_BUSY_SECONDS = 0.3
_STORM_SECONDS = 1.0
_PARAMETERS = 1000


async def measure(session: Session) -> list[Record]:
    """Measure small awaits on every session's communicator, and everything else on the first."""
    records = []
    for nbytes in session.plan.sizes or SMALL:
        records += await collectives.measure_size(session, "allreduce", nbytes, name="await_small")
    if not session.first:
        return records
    for measured in (
        _many,
        _large,
        _parked_cpu,
        _loop_lag,
        _loop_lag_small,
        _progress_busy,
        _backward_beside_pending,
        _await_busy,
    ):
        records += await measured(session)
    return records


def _name(session: Session) -> str:
    return f"aiodist:{session.impls[0]}"


def _ones(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes // 4,), 0.0)


_Allreduce = Callable[[torch.Tensor], Handle[torch.Tensor]]


def _allreduce(session: Session) -> _Allreduce:
    """Return what issues allreduces as the first implementation of the plan."""
    keywords: Any = session.keywords(session.impls[0])
    return partial(session.coll.allreduce, **keywords)


# --- many at once ------------------------------------------------------------------------------------------------


async def _many(session: Session) -> list[Record]:
    """Issue 1,000 and gather them, in turn with asyncio's gather and with ours."""
    allreduce = _allreduce(session)
    tensors = [_ones(4) for _ in range(MANY)]
    issue: list[float] = []
    waits: dict[str, list[float]] = {"gather_1000": [], "aiodist_gather_1000": []}
    gathers: dict[str, Callable[..., Awaitable[Any]]] = {"gather_1000": asyncio.gather, "aiodist_gather_1000": gather}
    for turn in range(WARMUPS + (session.plan.repeat or 20)):
        for op, gathered in gathers.items():
            await session.fence()
            began = perf_counter()
            handles = [allreduce(t) for t in tensors]
            issued = perf_counter()
            await gathered(*handles)
            done = perf_counter()
            if turn >= WARMUPS:
                issue.append((issued - began) / MANY)
                waits[op].append((done - issued) / MANY)
    records: list[Record] = []
    for op, samples in [*waits.items(), ("issue", issue)]:
        records += await session.timed(op, 4, {_name(session): samples})
    return records


async def _large(session: Session) -> list[Record]:
    return await collectives.measure_size(session, "allreduce", LARGE)


# --- what is felt beside it ----------------------------------------------------------------------------------------


async def _parked_cpu(session: Session) -> list[Record]:
    """The last rank comes 2 s late: CPU seconds per second of those who wait."""
    allreduce = _allreduce(session)
    t = _ones(4)
    late = session.coll.size > 1 and session.coll.rank == session.coll.size - 1
    await session.fence()
    if late:
        await asyncio.sleep(_LATE_SECONDS)
    began, used = perf_counter(), process_time()
    await allreduce(t)
    share = None if late else (process_time() - used) / (perf_counter() - began)
    return await session.valued("parked_cpu", _name(session), share, 4)


async def _loop_lag(session: Session) -> list[Record]:
    """A ticker while 64 MiB reductions are awaited, one after the other."""
    return await _lag_beside(session, "loop_lag", LARGE, 4)


async def _loop_lag_small(session: Session) -> list[Record]:
    """A ticker during a storm of 4 B awaits."""
    return await _lag_beside(session, "loop_lag_small", 4, 200)


async def _lag_beside(session: Session, op: str, nbytes: int, times: int) -> list[Record]:
    allreduce = _allreduce(session)
    t = _ones(nbytes)
    await _repeat(allreduce, t, times)
    await session.fence()
    async with ticker() as lateness:
        await _for_seconds(session, lambda: _repeat(allreduce, t, times))
    return await session.valued(op, _name(session), percentile(lateness, 99), nbytes)


async def _repeat(allreduce: _Allreduce, t: torch.Tensor, times: int) -> None:
    for _ in range(times):
        await allreduce(t)


async def _for_seconds(session: Session, body: Callable[[], Awaitable[None]]) -> None:
    """Repeat `body` for about a second, on every rank as often."""
    began = perf_counter()
    going = True
    while going:
        await body()
        going = await session.coll.allreduce(int(perf_counter() - began < _STORM_SECONDS), op="min") > 0


async def _progress_busy(session: Session) -> list[Record]:
    """64 MiB, then 300 ms of torch on the loop's thread: the await after it, over the transfer's own time."""
    allreduce = _allreduce(session)
    t, a = _ones(LARGE), torch.ones(192, 192)
    own, after = [], []
    for turn in range(2 + min(session.plan.repeat or 5, 10)):
        await session.fence()
        began = perf_counter()
        await allreduce(t)
        alone = perf_counter() - began
        await session.fence()
        handle = allreduce(t)
        _compute(a)
        began = perf_counter()
        await handle
        if turn >= 2:
            own.append(alone)
            after.append(perf_counter() - began)
    return await session.valued(
        "progress_busy", _name(session), statistics.median(after) / statistics.median(own), LARGE
    )


def _compute(a: torch.Tensor) -> None:
    until = perf_counter() + _BUSY_SECONDS
    while perf_counter() < until:
        a @ a


async def _backward_beside_pending(session: Session) -> list[Record]:
    """Backward of 1,000 small parameters on a thread, with a receive pending on the loop and without, in turn."""
    coll, dst = session.coll, (session.coll.rank + 1) % session.coll.size
    message, into = _ones(4), _ones(4)
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
    return await session.valued("backward_beside_pending", _name(session), ratio)


def _backward(parameters: list[torch.Tensor]) -> float:
    loss = torch.stack([(p * 2.0).sum() for p in parameters]).sum()
    began = perf_counter()
    loss.backward()
    return perf_counter() - began


async def _await_busy(session: Session) -> list[Record]:
    """The mean of 4 MiB awaits beside a thread of pure Python, over the mean without it, in turn."""
    allreduce = _allreduce(session)
    t = _ones(MIDDLE)
    await _repeat(allreduce, t, WARMUPS)
    idle, busy = [], []
    for _ in range(session.plan.repeat or 20):
        await session.fence()
        idle.append(await _clocked(allreduce, t))
        with _busy_thread():
            await session.fence()
            busy.append(await _clocked(allreduce, t))
    ratio = statistics.fmean(busy) / statistics.fmean(idle)
    return await session.valued("await_busy", _name(session), ratio, MIDDLE)


async def _clocked(allreduce: _Allreduce, t: torch.Tensor) -> float:
    began = perf_counter()
    await _repeat(allreduce, t, 5)
    return perf_counter() - began


@contextmanager
def _busy_thread() -> Iterator[None]:
    stop = False

    def burn() -> None:
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=burn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()
