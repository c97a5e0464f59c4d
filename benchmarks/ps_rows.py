"""Rows of a table, and a plain tensor with the same bytes: `aiodist run -n 2 benchmarks/ps_rows.py [SERVERS]`.

The first rank pushes and pulls, the last ranks serve. All calls take turns; medians, in milliseconds, and the ratio to
the plain tensor's. `grouped` are the calls that `Embedding` makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

import aiodist
from aiodist.ps import ParameterServer

_DIM = 64
_ROWS = ((16, 2000), (4096, 60), (65536, 20))
"""Numbers of rows, and rounds for each."""
_WARMUPS = 3


async def main() -> None:
    """Measure each number of rows."""
    torch.set_num_threads(1)
    servers = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    async with aiodist.init() as coll, ParameterServer(coll, servers=servers if servers < coll.size else None) as ps:
        for count, rounds in _ROWS:
            await _measure(ps, count, rounds)


async def _measure(ps: ParameterServer, count: int, rounds: int) -> None:
    await ps.init(f"plain{count}", torch.zeros(count * _DIM))
    table = await ps.embedding(f"rows{count}", _DIM, init=0.0)
    if ps.rank == 0:
        ids = torch.randint(0, 1 << 40, (count,), generator=torch.Generator().manual_seed(1))
        chosen = table.group(ids)
        name, plain, rows = f"plain{count}", torch.ones(count * _DIM), torch.ones(count, _DIM)
        grouped = torch.ones(chosen.ids.numel(), _DIM)
        ways: dict[str, Callable[[], Any]] = {
            "push": lambda: ps.push(name, plain),
            "push rows": lambda: table.push(ids, rows),
            "push grouped": lambda: table.push_grouped(chosen, grouped),
            "pull": lambda: ps.pull(name, plain),
            "pull rows": lambda: table.pull(ids, rows),
            "pull grouped": lambda: table.pull_grouped(chosen),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_WARMUPS + rounds):
            for way, call in ways.items():
                began = perf_counter()
                await call()
                seconds[way].append(perf_counter() - began)
        medians = {way: 1e3 * median(taken[_WARMUPS:]) for way, taken in seconds.items()}
        for way, milliseconds in medians.items():
            ratio = milliseconds / medians[way.split()[0]]
            sys.stdout.write(f"{plain.nbytes / 1e6:6.1f} MB {way:12} {milliseconds:8.4f} ms, {ratio:.2f} times\n")
    if ps.is_worker:
        await ps.barrier()


if __name__ == "__main__":
    aiodist.run(main)
