"""The benchmarks by name. Each lives in a module with `async def measure(session) -> list[Record]`."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodist.errors import ConfigError

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["BENCHMARKS", "COLLECTIVES", "Benchmark", "find"]

COLLECTIVES = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "scan",
    "exscan",
    "sendrecv",
    "barrier",
)


@dataclass(frozen=True)
class Benchmark:
    """What can be measured under one name; its module is imported by the ranks alone."""

    name: str
    module: str
    default_impls: tuple[str, ...] = ("auto",)
    default_peers: tuple[str, ...] = ("mpi4py", "gloo")

    def load(self) -> Callable[[Session], Awaitable[list[Record]]]:
        """Return the function that measures; every rank calls it, rank 0 gets records, the others none."""
        measure: Callable[[Session], Awaitable[list[Record]]] = importlib.import_module(self.module).measure
        return measure


BENCHMARKS = {
    **{name: Benchmark(name, "aiodist.bench.collectives") for name in COLLECTIVES},
    "await": Benchmark("await", "aiodist.bench.awaits", default_impls=("auto", "gloo")),
}


def find(name: str) -> Benchmark:
    """Return the benchmark of that name, or raise `ConfigError`."""
    if name not in BENCHMARKS:
        raise ConfigError(f"bench {name}: expected one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
