"""The benchmarks by name. Each lives in a module with `async def measure(session) -> list[Record]`."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodist.bench.plan import IMPLS, JOBS, MODELS, PEERS
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
    impls: tuple[str, ...] = IMPLS
    """What `--impl` may name."""
    peers: tuple[str, ...] = PEERS
    """What `--against` may name, and what is measured without it."""
    default_impls: tuple[str, ...] = ("auto",)
    models: tuple[str, ...] = ()
    """What `--model` may name."""
    sized: bool = True
    """It has sizes in bytes; else neither `--sizes` nor `--plot` is for it."""
    batched: bool = False
    """`--batch` is for it."""
    serves: bool = False
    """Some ranks serve the others: `--servers` is for it, and it takes two ranks at least."""
    judged: bool = False
    """There are speeds to reach."""

    def load(self) -> Callable[[Session], Awaitable[list[Record]]]:
        """Return the function that measures; every rank calls it, rank 0 gets records, the others none."""
        measure: Callable[[Session], Awaitable[list[Record]]] = importlib.import_module(self.module).measure
        return measure


BENCHMARKS = {
    **{name: Benchmark(name, "aiodist.bench.collectives") for name in COLLECTIVES},
    "await": Benchmark("await", "aiodist.bench.awaits", default_impls=("auto", "gloo"), judged=True),
    "train": Benchmark(
        "train",
        "aiodist.bench.training",
        impls=("datapar", "pipelined", "sync"),
        peers=("none", "ddp"),
        default_impls=("datapar", "pipelined", "sync"),
        models=tuple(MODELS),
        sized=False,
        batched=True,
        judged=True,
    ),
    "prefetch": Benchmark(
        "prefetch",
        "aiodist.bench.prefetching",
        impls=("prefetch",),
        peers=("plain", "dataloader"),
        default_impls=("prefetch",),
        sized=False,
        judged=True,
    ),
    "end2end": Benchmark(
        "end2end",
        "aiodist.bench.endtoend",
        impls=("datapar",),
        peers=("ddp",),
        default_impls=("datapar",),
        models=JOBS,
        sized=False,
        judged=True,
    ),
    "ps": Benchmark(
        "ps",
        "aiodist.bench.ps",
        impls=("ps", "ps-arena"),
        peers=("rpc", "mpi"),
        default_impls=("ps", "ps-arena"),
        serves=True,
        judged=True,
    ),
}


def find(name: str) -> Benchmark:
    """Return the benchmark of that name, or raise `ConfigError`."""
    if name not in BENCHMARKS:
        raise ConfigError(f"bench {name}: expected one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
