"""The benchmarks of `aiodist bench` by name. Each has a module with `async def measure(session) -> list[Record]`."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodist.bench.plan import IMPLS, PEERS

if TYPE_CHECKING:
    from aiodist.bench.plan import Plan
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

COLLECTIVES = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "alltoall_single",
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
    impls: tuple[str, ...] = IMPLS
    """What `--impl` may name."""
    peers: tuple[str, ...] = PEERS
    """What `--against` may name, and what is measured without it."""
    default_impls: tuple[str, ...] = ("auto",)
    sized: bool = True
    """It has sizes in bytes; else neither `--sizes` nor `--plot` is for it."""
    check: Callable[[Plan], None] = lambda plan: None
    """Raises `ConfigError` for options of its own that make no sense."""
    targets: str | None = None
    """The module that says which speeds are to be reached."""


def load(module: str) -> Callable[[Session], Awaitable[list[Record]]]:
    """Return what measures; every rank calls it, rank 0 gets records, the others none."""
    measure: Callable[[Session], Awaitable[list[Record]]] = importlib.import_module(module).measure
    return measure


BENCHMARKS = {
    **{name: Benchmark(name, "aiodist.bench.collectives") for name in COLLECTIVES},
    "await": Benchmark("await", "aiodist.bench.awaits", default_impls=("auto", "gloo")),
}
