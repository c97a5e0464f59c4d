"""What `python -m benchmarks` measures with the options of `aiodist bench`, by name."""

from __future__ import annotations

from aiodist.bench.registry import Benchmark

__all__ = ["BENCHMARKS", "JOBS", "MODELS"]

MODELS = {"mlp": (32, 256), "conv": (32,), "transformer": (4, 32), "tiny1000": (1,)}
"""What is trained, and the batches of one rank for which there are speeds to reach."""
JOBS = ("digits", "transformer")
"""What is trained from end to end, with loader, evaluation and checkpoints."""
_TARGETS = "benchmarks.targets"

BENCHMARKS = {
    "train": Benchmark(
        "train",
        "benchmarks.training",
        impls=("datapar", "pipelined", "sync"),
        peers=("none", "ddp"),
        default_impls=("datapar", "pipelined", "sync"),
        models=tuple(MODELS),
        sized=False,
        batched=True,
        targets=_TARGETS,
    ),
    "prefetch": Benchmark(
        "prefetch",
        "benchmarks.prefetching",
        impls=("prefetch",),
        peers=("plain", "dataloader"),
        default_impls=("prefetch",),
        sized=False,
        targets=_TARGETS,
    ),
    "end2end": Benchmark(
        "end2end",
        "benchmarks.endtoend",
        impls=("datapar",),
        peers=("ddp",),
        default_impls=("datapar",),
        models=JOBS,
        sized=False,
        targets=_TARGETS,
    ),
    "ps": Benchmark(
        "ps",
        "benchmarks.ps",
        impls=("ps", "ps-arena"),
        peers=("rpc", "mpi"),
        default_impls=("ps", "ps-arena"),
        serves=True,
        targets=_TARGETS,
    ),
}
