"""The benchmarks with the options of `aiodist bench`, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiodist.bench.cli import Options, planned
from aiodist.bench.plan import IMPLS, Plan, parse_names
from aiodist.errors import ConfigError

__all__ = ["BENCHMARKS", "MODELS", "Benchmark", "Study", "batches", "models", "own", "servers", "studied"]

MODELS = {"mlp": (32, 256), "conv": (32,), "transformer": (4, 32), "tiny1000": (1,)}
"""The trained models, and the batches of one rank with targets."""
_SIZES = tuple((64 << 10) * 4**power for power in range(6))  # 64 KiB to 64 MiB


@dataclass(frozen=True)
class Study(Plan):
    """One run of a benchmark of this folder."""

    module: str = "benchmarks.reductions"
    """The module with `async def measure(session) -> list[Record]`."""
    targets: str | None = None
    """The module with `reached(records) -> list[Table]`, for targets."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Options of this benchmark only."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark; only ranks import its module."""

    module: str
    impls: tuple[str, ...]
    """Possible values of `--impl`."""
    peers: tuple[str, ...]
    """Possible values of `--against`, and the default."""
    usual: tuple[str, ...] = ()
    """Default implementations; empty: all."""
    sizes: tuple[int, ...] | None = None
    """Default sizes in bytes; None: the module's."""
    sized: bool = False
    """True allows `--sizes`, `--dtype` and `--plot`."""
    targets: str = "benchmarks.targets"


def studied(op: str, options: Options, **given: Any) -> Study:  # noqa: ANN401  - options of some benchmarks only
    """Return the plan for the options of a benchmark; raise `ConfigError` for invalid ones."""
    if op not in BENCHMARKS:
        raise ConfigError(f"{op}: expected one of {', '.join(BENCHMARKS)}")
    known = BENCHMARKS[op]
    plan = planned(op, options, known.impls, known.peers, known.usual or known.impls, sized=known.sized)
    fields = vars(plan) | {"sizes": plan.sizes or known.sizes}
    study = Study(**fields, module=known.module, targets=known.targets, own=given)
    _check(study)
    return study


def own(plan: Plan) -> Mapping[str, Any]:
    """Return the options of a benchmark of this folder only."""
    assert isinstance(plan, Study)
    return plan.own


def models(plan: Plan) -> tuple[str, ...]:
    """Return the models of the plan."""
    known = tuple(MODELS) if plan.op in ("train", "engine") else ()
    given = own(plan).get("model")
    if given is None:
        return known
    if not known:
        raise ConfigError(f"--model: {plan.op} has no model")
    return parse_names("--model", given, known)


def batches(plan: Plan, model: str) -> tuple[int, ...]:
    """Return the batches of one rank for a model."""
    given: str | None = own(plan).get("batch")
    if given is None:
        return MODELS[model]
    for part in given.split(","):
        if not re.fullmatch(r"\s*0*[1-9]\d*\s*", part):
            raise ConfigError(f"--batch {part.strip()!r}: expected how many samples one rank has, such as 32")
    return tuple(map(int, given.split(",")))


def servers(plan: Plan) -> int:
    """Return the number of ranks that serve, the last ones."""
    return own(plan).get("servers") or 1


def _check(plan: Plan) -> None:
    models(plan)
    if own(plan).get("busy") and plan.op != "await":
        raise ConfigError(f"--busy: {plan.op} is measured on cores that are free")
    if plan.op == "await" and plan.dtype != "float32":
        raise ConfigError("--dtype: await is measured with float32")
    if own(plan).get("batch") is not None and plan.op not in ("train", "engine"):
        raise ConfigError(f"--batch: {plan.op} has none")
    batches(plan, "mlp")
    if plan.op != "ps" and own(plan).get("servers") is not None:
        raise ConfigError(f"--servers: in {plan.op} no rank serves")
    if plan.op == "ps":
        if servers(plan) >= plan.ranks:
            raise ConfigError(f"--servers {servers(plan)}: expected fewer than --ranks {plan.ranks}, one is to work")
        if plan.dtype == "bool":
            raise ConfigError(f"--dtype bool: {plan.op} adds")


_AWAITS = "benchmarks.await_targets"
_PEERS = ("mpi4py", "gloo")
_BY_SIZE = Benchmark(
    "benchmarks.reductions", IMPLS, (*_PEERS, "copy"), ("auto", "arena"), _SIZES, sized=True, targets=_AWAITS
)
BENCHMARKS = {
    **dict.fromkeys(("allreduce", "broadcast", "reduce_scatter", "allgather"), _BY_SIZE),
    "await": Benchmark("benchmarks.awaits", IMPLS, _PEERS, ("auto", "gloo"), sized=True, targets=_AWAITS),
    "train": Benchmark(
        "benchmarks.training",
        ("datapar", "pipelined", "sharded", "sync", "reduce", "reduce-ordinary", "powersgd", "topk", "bf16"),
        ("none", "ddp"),
        ("datapar", "pipelined", "sharded", "sync"),
    ),
    "engine": Benchmark("benchmarks.engine_steps", ("engine",), ("bare",)),
    "prefetch": Benchmark("benchmarks.prefetching", ("prefetch",), ("plain", "dataloader")),
    "reading": Benchmark("benchmarks.reading", ("records", "queue"), ("plain",)),
    "codecs": Benchmark("benchmarks.coding", ("int8", "sign", "topk"), ("int8-hook",)),
    "checkpoint": Benchmark("benchmarks.checkpointing", ("save",), ("gloo",)),
    "ps": Benchmark("benchmarks.ps", ("ps", "ps-arena"), ("rpc", "mpi"), sized=True),
}
