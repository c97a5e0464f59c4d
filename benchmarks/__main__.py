"""`python -m benchmarks NAME`: checks the options and starts the ranks; loads no torch."""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import Annotated

import typer

from aiodist.bench import cli
from benchmarks.suite import BENCHMARKS, studied

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_OWN_OPTIONS = {
    name: name.replace("-", "_")
    for name in ("scale", "ps-convergence", "gpu", "faults", "recovery", "results", "tails")
}
_NAME_HELP = (
    f"What to measure: {', '.join(BENCHMARKS)}; results and tails print the tables of benchmarks/RESULTS.md, "
    "scale simulates, ps-convergence trains, faults kills ranks and counts how the others end, recovery kills ranks "
    "and starts others, gpu measures a CUDA device: each of these has its own options "
    "(python -m benchmarks scale --help)."
)
_TRAIN = BENCHMARKS["train"]


def main(args: list[str]) -> int:
    """Run the command with `args`; return the exit code, which is 2 for invalid arguments."""
    if args[:1] and args[0] in _OWN_OPTIONS:
        module = importlib.import_module(f"benchmarks.{_OWN_OPTIONS[args[0]]}")
        return cli.called(module.app, args[1:], f"python -m benchmarks {args[0]}")
    return cli.called(app, args, "python -m benchmarks")


@app.command()
def measure(  # noqa: PLR0913 - one for each option
    name: Annotated[str, typer.Argument(metavar="NAME", help=_NAME_HELP)],
    ranks: cli.Ranks = None,
    sizes: cli.Sizes = None,
    model: Annotated[str | None, typer.Option(metavar="mlp,conv", help="Models (all).")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="32,256", help="Samples of one rank in a step (as each model's targets).")
    ] = None,
    impl: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Ours; train: some of {','.join(_TRAIN.impls)} (all).")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Beside; train: some of {','.join(_TRAIN.peers)} (all).")
    ] = None,
    json: cli.Json = None,
    plot: cli.Plot = None,
    servers: Annotated[int | None, typer.Option(metavar="S", min=1, help="ps: how many ranks serve (1).")] = None,
    dtype: cli.Dtype = "float32",
    repeat: cli.Repeat = None,
    mpi: cli.Mpi = "auto",
    busy: Annotated[bool, typer.Option("--busy", help="await: with a process that spins on every core.")] = False,
) -> None:
    """Measure on N ranks of this host, with other libraries in the same run."""
    options = cli.Options(ranks, sizes, impl, against, json, plot, dtype, repeat, mpi)
    study = studied(name, options, model=model, batch=batch, servers=servers, busy=busy)
    raise typer.Exit(asyncio.run(study.start("benchmarks.worker", study.ranks, mpi=mpi)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
