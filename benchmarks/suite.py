"""The benchmarks with the options of `aiodist bench`, by name."""

from __future__ import annotations

import re

from aiodist.bench.plan import Benchmark, Plan, parse_names
from aiodist.errors import ConfigError

__all__ = ["BENCHMARKS", "MODELS", "batches", "models", "servers"]

MODELS = {"mlp": (32, 256), "conv": (32,), "transformer": (4, 32), "tiny1000": (1,)}
"""The trained models, and the batches of one rank with targets."""
_SIZES = tuple((64 << 10) * 4**power for power in range(6))  # 64 KiB to 64 MiB
_TARGETS = "benchmarks.targets"
_OF_AWAITS = "benchmarks.await_targets"


def models(plan: Plan) -> tuple[str, ...]:
    """Return the models of the plan."""
    known = tuple(MODELS) if plan.op in ("train", "engine") else ()
    given = plan.own.get("model")
    if given is None:
        return known
    if not known:
        raise ConfigError(f"--model: {plan.op} has no model")
    return parse_names("--model", given, known)


def batches(plan: Plan, model: str) -> tuple[int, ...]:
    """Return the batches of one rank for a model."""
    given: str | None = plan.own.get("batch")
    if given is None:
        return MODELS[model]
    for part in given.split(","):
        if not re.fullmatch(r"\s*0*[1-9]\d*\s*", part):
            raise ConfigError(f"--batch {part.strip()!r}: expected how many samples one rank has, such as 32")
    return tuple(map(int, given.split(",")))


def servers(plan: Plan) -> int:
    """Return the number of ranks that serve, the last ones."""
    return plan.own.get("servers") or 1


def _check(plan: Plan) -> None:
    models(plan)
    if plan.own.get("busy") and plan.op != "await":
        raise ConfigError(f"--busy: {plan.op} is measured on cores that are free")
    if plan.op == "await" and plan.dtype != "float32":
        raise ConfigError("--dtype: await is measured with float32")
    if plan.own.get("batch") is not None and plan.op not in ("train", "engine"):
        raise ConfigError(f"--batch: {plan.op} has none")
    batches(plan, "mlp")
    if plan.op != "ps" and plan.own.get("servers") is not None:
        raise ConfigError(f"--servers: in {plan.op} no rank serves")
    if plan.op == "ps":
        if servers(plan) >= plan.ranks:
            raise ConfigError(f"--servers {servers(plan)}: expected fewer than --ranks {plan.ranks}, one is to work")
        if plan.dtype == "bool":
            raise ConfigError(f"--dtype bool: {plan.op} adds")


BENCHMARKS = {
    **{
        op: Benchmark(
            sizes=_SIZES,
            default_impls=("auto", "arena"),
            check=_check,
            targets=_OF_AWAITS,
        )
        for op in ("allreduce", "broadcast", "reduce_scatter", "allgather")
    },
    "await": Benchmark("benchmarks.awaits", default_impls=("auto", "gloo"), check=_check, targets=_OF_AWAITS),
    "train": Benchmark(
        "benchmarks.training",
        impls=("datapar", "pipelined", "sharded", "sync", "powersgd", "topk", "bf16"),
        peers=("none", "ddp"),
        default_impls=("datapar", "pipelined", "sharded", "sync"),
        sized=False,
        check=_check,
        targets=_TARGETS,
    ),
    "engine": Benchmark(
        "benchmarks.engine_steps",
        impls=("engine",),
        peers=("bare",),
        default_impls=("engine",),
        sized=False,
        check=_check,
        targets=_TARGETS,
    ),
    "prefetch": Benchmark(
        "benchmarks.prefetching",
        impls=("prefetch",),
        peers=("plain", "dataloader"),
        default_impls=("prefetch",),
        sized=False,
        check=_check,
        targets=_TARGETS,
    ),
    "reading": Benchmark(
        "benchmarks.reading",
        impls=("records", "queue"),
        peers=("plain",),
        default_impls=("records", "queue"),
        sized=False,
        check=_check,
        targets=_TARGETS,
    ),
    "codecs": Benchmark(
        "benchmarks.coding",
        impls=("int8", "sign", "topk"),
        peers=("int8-hook",),
        default_impls=("int8", "sign", "topk"),
        sized=False,
        check=_check,
        targets=_TARGETS,
    ),
    "checkpoint": Benchmark(
        "benchmarks.checkpointing",
        impls=("save",),
        peers=(),
        default_impls=("save",),
        sized=False,
        check=_check,
        targets=_TARGETS,
    ),
    "ps": Benchmark(
        "benchmarks.ps",
        impls=("ps", "ps-arena"),
        peers=("rpc", "mpi"),
        default_impls=("ps", "ps-arena"),
        check=_check,
        targets=_TARGETS,
    ),
}
