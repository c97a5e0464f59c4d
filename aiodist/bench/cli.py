"""`aiodist bench OP`: checks the options and starts the ranks; loads no torch.

Other suites of benchmarks, with their own commands, also use `Options` and `run`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from aiodist.bench.plan import BENCHMARKS, DTYPES, IMPLS, PEERS, Benchmark, Plan, parse_names, parse_sizes
from aiodist.env import variables
from aiodist.errors import AiodistError, ConfigError
from aiodist.launch.discover import find_mpi

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def called(command: typer.Typer, args: list[str], name: str) -> int:
    """Run a command; return the exit code, which is 2 for invalid arguments."""
    try:
        command(args=args, prog_name=name)
    except AiodistError as error:
        print(f"{name}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


_MPI = ("mpi4py", "mpi")


class Options(NamedTuple):
    """The options as typed; None is the default of the benchmark."""

    ranks: int | None = None
    sizes: str | None = None
    impl: str | None = None
    against: str | None = None
    json: Path | None = None
    plot: Path | None = None
    dtype: str = "float32"
    repeat: int | None = None
    mpi: str = "auto"
    own: Mapping[str, Any] = {}  # options of some benchmarks only


Ranks = Annotated[int | None, typer.Option("--ranks", metavar="N", min=1, help="Number of ranks; default: 2.")]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="64,1KiB,64MiB",
        help="Sizes of one rank's input; default: 2^8 to 2^23 elements and a few more.",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the records to FILE.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the records to FILE.png.")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="The dtype of the tensors.")]
Repeat = Annotated[int | None, typer.Option("--repeat", metavar="R", min=1, help="Number of samples for each figure.")]
Mpi = Annotated[
    str, typer.Option("--mpi", metavar="auto|openmpi|mpich|none|PATH", help="The mpirun to use, as in aiodist run.")
]


@app.command()
def bench(  # noqa: PLR0913 - one for each option
    op: Annotated[str, typer.Argument(metavar="OP", help=f"The operation to measure: {', '.join(BENCHMARKS)}.")],
    ranks: Ranks = None,
    sizes: Sizes = None,
    impl: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=f"Implementations of aiodist, of {','.join(IMPLS)}; default: auto."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=f"Libraries to compare with, of {','.join(PEERS)}, or none; default: all."),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    dtype: Dtype = "float32",
    repeat: Repeat = None,
    mpi: Mpi = "auto",
) -> None:
    """Measure an operation on N ranks of this host, and plain library calls in the same processes."""
    options = Options(ranks, sizes, impl, against, json, plot, dtype, repeat, mpi)
    raise typer.Exit(run(op, BENCHMARKS, options))


def run(op: str, benchmarks: Mapping[str, Benchmark], options: Options) -> int:
    """Measure `op` of `benchmarks` on ranks of this host; return the exit code."""
    if op not in benchmarks:
        raise ConfigError(f"{op}: expected one of {', '.join(benchmarks)}")
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype}: expected one of {', '.join(DTYPES)}")
    benchmark = benchmarks[op]
    with_mpi = find_mpi(options.mpi, variables().get("PATH", os.defpath)) is not None
    plan = Plan(
        op=op,
        ranks=options.ranks or 2,
        impls=_chosen("--impl", options.impl, benchmark.impls, benchmark.default_impls, with_mpi=with_mpi),
        peers=()
        if options.against == "none" and "none" not in benchmark.peers
        else _chosen("--against", options.against, benchmark.peers, benchmark.peers, with_mpi=with_mpi),
        sizes=benchmark.sizes if options.sizes is None else parse_sizes(options.sizes, DTYPES[options.dtype]),
        module=benchmark.module,
        targets=benchmark.targets,
        dtype=options.dtype,
        repeat=options.repeat,
        json=writable("--json", options.json),
        plot=writable("--plot", options.plot),
        width=max(100, shutil.get_terminal_size((120, 40)).columns),
        own=options.own,
    )
    _check(plan, benchmark)
    benchmark.check(plan)
    return asyncio.run(plan.start("aiodist.bench.worker", plan.ranks, mpi=options.mpi))


def _check(plan: Plan, benchmark: Benchmark) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    if "local" in plan.impls and plan.ranks > 1:
        raise ConfigError(f"--impl local: it has one process, and this is measured on {plan.ranks} ranks")
    if plan.sizes is not None and (plan.op == "barrier" or not benchmark.sized):
        raise ConfigError(f"--sizes: {plan.op} has no sizes")
    if plan.dtype != "float32" and not benchmark.sized:
        raise ConfigError(f"--dtype: {plan.op} is measured with float32")
    if plan.dtype == "bool" and plan.op in ("allreduce", "reduce", "reduce_scatter", "scan", "exscan"):
        raise ConfigError(f"--dtype bool: a {plan.op} is measured as a sum, which bool has not")
    if plan.plot is not None:
        if not plan.plot.endswith((".png", ".svg")):
            raise ConfigError(f"--plot {os.path.relpath(plan.plot)}: expected FILE.png or FILE.svg")
        from aiodist.bench.plots import check_plot

        if not benchmark.sized:
            raise ConfigError(f"--plot: {plan.op} has no sizes to draw by")
        check_plot()


def _chosen(
    option: str, given: str | None, known: Sequence[str], usual: Sequence[str], *, with_mpi: bool
) -> tuple[str, ...]:
    """Return the given names, or the default names that this host can measure."""
    names = tuple(usual) if given is None else parse_names(option, given, known)
    if lacking := [name for name in names if name in _MPI and not with_mpi]:
        if given is not None:
            raise ConfigError(f"{option} {lacking[0]}: no MPI was found to start the ranks with")
        return tuple([name for name in names if name not in _MPI])
    return names


def writable(option: str, path: Path | None) -> str | None:
    """Return the absolute path of a file; raise `ConfigError` before the run if the file cannot be written."""
    if path is None:
        return None
    absolute = path.absolute()
    there = absolute if absolute.exists() else absolute.parent
    if absolute.is_dir() or absolute.parent.is_file() or not os.access(there, os.W_OK):
        raise ConfigError(f"{option} {path}: expected a file that can be written")
    return str(absolute)
