"""`aiodist bench OP`: checks the options and starts the ranks; loads no torch."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from aiodist.bench.plan import COLLECTIVES, DTYPES, IMPLS, PEERS, Plan, parse_names, parse_sizes, writable
from aiodist.env import variables
from aiodist.errors import AiodistError, ConfigError
from aiodist.launch.discover import find_mpi

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")


class Options(NamedTuple):
    """The options of all benchmarks as typed; None is the default of the benchmark."""

    ranks: int | None = None
    sizes: str | None = None
    impl: str | None = None
    against: str | None = None
    json: Path | None = None
    plot: Path | None = None
    dtype: str = "float32"
    repeat: int | None = None
    mpi: str = "auto"


Ranks = Annotated[int | None, typer.Option("--ranks", metavar="N", min=1, help="Number of ranks; default: 2.")]
Sizes = Annotated[
    str | None,
    typer.Option(
        metavar="64,1KiB,64MiB", help="Sizes of one rank's input; default: 2^8 to 2^23 elements and a few more."
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
    op: Annotated[str, typer.Argument(metavar="OP", help=f"The operation to measure: {', '.join(COLLECTIVES)}.")],
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
    if op not in COLLECTIVES:
        raise ConfigError(f"{op}: expected one of {', '.join(COLLECTIVES)}")
    todo = planned(op, Options(ranks, sizes, impl, against, json, plot, dtype, repeat, mpi))
    raise typer.Exit(asyncio.run(todo.start("aiodist.bench.worker", todo.ranks, mpi=mpi)))


def planned(
    op: str,
    options: Options,
    impls: Sequence[str] = IMPLS,
    peers: Sequence[str] = PEERS,
    usual: Sequence[str] = ("auto",),
    *,
    sized: bool = True,
) -> Plan:
    """Return the plan for the options; raise `ConfigError` for invalid ones.

    `impls` and `peers` are the known names, `usual` the default implementations. True for `sized` allows `--sizes`,
    `--dtype` and `--plot`.
    """
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype}: expected one of {', '.join(DTYPES)}")
    with_mpi = find_mpi(options.mpi, variables().get("PATH", os.defpath)) is not None
    no_peers = options.against == "none" and "none" not in peers
    plan = Plan(
        op=op,
        ranks=options.ranks or 2,
        impls=_chosen("--impl", options.impl, impls, usual, with_mpi=with_mpi),
        peers=() if no_peers else _chosen("--against", options.against, peers, peers, with_mpi=with_mpi),
        sizes=None if options.sizes is None else parse_sizes(options.sizes, DTYPES[options.dtype]),
        dtype=options.dtype,
        repeat=options.repeat,
        json=writable("--json", options.json),
        plot=writable("--plot", options.plot),
        width=max(100, shutil.get_terminal_size((120, 40)).columns),
    )
    if "local" in plan.impls and plan.ranks > 1:
        raise ConfigError(f"--impl local: it has one process, and this is measured on {plan.ranks} ranks")
    if plan.sizes is not None and (op == "barrier" or not sized):
        raise ConfigError(f"--sizes: {op} has no sizes")
    if plan.dtype != "float32" and not sized:
        raise ConfigError(f"--dtype: {op} is measured with float32")
    if plan.dtype == "bool" and op in _REDUCTIONS:
        raise ConfigError(f"--dtype bool: a {op} is measured as a sum, which bool has not")
    if plan.plot is not None:
        from aiodist.bench.plots import check_plot

        if not plan.plot.endswith((".png", ".svg")):
            raise ConfigError(f"--plot {os.path.relpath(plan.plot)}: expected FILE.png or FILE.svg")
        if not sized:
            raise ConfigError(f"--plot: {op} has no sizes to draw by")
        check_plot()
    return plan


def _chosen(
    option: str, given: str | None, known: Sequence[str], usual: Sequence[str], *, with_mpi: bool
) -> tuple[str, ...]:
    """Return the given names, or the default names that this host can measure."""
    names = tuple(usual) if given is None else parse_names(option, given, known)
    of_mpi = [name for name in names if name in ("mpi4py", "mpi") and not with_mpi]
    if of_mpi and given is not None:
        raise ConfigError(f"{option} {of_mpi[0]}: no MPI was found to start the ranks with")
    return tuple([name for name in names if name not in of_mpi])


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
