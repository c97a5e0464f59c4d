"""`aiodist bench OP`: checks what is asked and starts the ranks; loads no torch."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from aiodist.bench import registry
from aiodist.bench.plan import BACKENDS, DTYPES, IMPLS, LOOPS, PEERS, Plan, parse_batches, parse_names, parse_sizes
from aiodist.env import Environment, Starter
from aiodist.errors import AiodistError, ConfigError
from aiodist.launch.discover import find_mpi

__all__ = ["app", "main", "writable"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(args: list[str]) -> int:
    """Run the command with `args`; return the exit code, 2 for arguments that make no sense."""
    try:
        if args[:1] == ["scale"]:
            from aiodist.bench import scale

            scale.app(args=args[1:], prog_name="aiodist bench scale")
        elif args[:1] == ["ps-convergence"]:
            from aiodist.bench import ps_convergence

            ps_convergence.app(args=args[1:], prog_name="aiodist bench ps-convergence")
        elif args[:1] == ["gpu"]:
            from aiodist.bench import gpu

            gpu.app(args=args[1:], prog_name="aiodist bench gpu")
        else:
            app(args=args, prog_name="aiodist bench")
    except AiodistError as error:
        print(f"aiodist: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


_OP_HELP = (
    f"What to measure: {', '.join(registry.BENCHMARKS)}; scale simulates, ps-convergence trains, gpu measures all that "
    "is to be reached on a CUDA device: each has options of its own (aiodist bench scale --help)."
)
_MPI = ("mpi4py", "mpi")
_TRAIN = registry.BENCHMARKS["train"]
_IMPL_HELP = f"Ours: some of {','.join(IMPLS)} (auto); train: {','.join(_TRAIN.impls)} (all)."
_AGAINST_HELP = f"Beside: some of {','.join(PEERS)}, or none; train: {','.join(_TRAIN.peers)} (all)."


@app.command()
def bench(  # noqa: PLR0913 - one for each option
    op: Annotated[str, typer.Argument(metavar="OP", help=_OP_HELP)],
    ranks: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many ranks (2).")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="64,1KiB,64MiB", help="Bytes of one rank's input; 2^8 to 2^23 elements and a few more."),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="mlp,conv", help="What is trained (all).")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="32,256", help="Samples of one rank in a step (as each model's targets).")
    ] = None,
    impl: Annotated[str | None, typer.Option(metavar="NAMES", help=_IMPL_HELP)] = None,
    against: Annotated[str | None, typer.Option(metavar="NAMES", help=_AGAINST_HELP)] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the records there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw them there.")] = None,
    servers: Annotated[int | None, typer.Option(metavar="S", min=1, help="ps: how many ranks serve (1).")] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of the tensors.")] = "float32",
    repeat: Annotated[int | None, typer.Option(metavar="R", min=1, help="Samples of each figure.")] = None,
    loop: Annotated[str, typer.Option(metavar="|".join(LOOPS), help="The event loop.")] = "auto",
    mpi: Annotated[str, typer.Option(metavar="auto|openmpi|mpich|none|PATH", help="As in aiodist run.")] = "auto",
) -> None:
    """Measure an operation on N ranks of this host, beside plain library calls in the same processes.

    Started by mpirun, srun or torchrun it measures on the ranks of that job.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if loop not in LOOPS:
        raise ConfigError(f"--loop {loop}: expected one of {', '.join(LOOPS)}")
    benchmark = registry.find(op)
    environment = Environment.read()
    in_job = _job_size(ranks, environment)
    path = environment.variables.get("PATH", os.defpath)
    with_mpi = environment.mpi if in_job else find_mpi(mpi, path) is not None
    plan = Plan(
        op=op,
        ranks=in_job or ranks or 2,
        impls=_impls(impl, benchmark, with_mpi),
        peers=_peers(against, benchmark, with_mpi),
        sizes=None if sizes is None else parse_sizes(sizes, DTYPES[dtype]),
        models=_models(model, benchmark),
        batches=None if batch is None else parse_batches(batch),
        dtype=dtype,
        servers=_servers(servers, benchmark),
        repeat=repeat,
        loop=loop,
        json=writable("--json", json),
        plot=writable("--plot", plot),
        width=max(100, shutil.get_terminal_size((120, 40)).columns),
        colour=sys.stdout.isatty() and "NO_COLOR" not in environment.variables,
    )
    _check(plan, benchmark)
    raise typer.Exit(_here(plan) if in_job else _launched(plan, mpi))


def _check(plan: Plan, benchmark: registry.Benchmark) -> None:
    """Raise `ConfigError` for options that do not go together."""
    if "local" in plan.impls and plan.ranks > 1:
        raise ConfigError(f"--impl local: it has one process, and this is measured on {plan.ranks} ranks")
    if plan.sizes is not None and (plan.op == "barrier" or not benchmark.sized):
        raise ConfigError(f"--sizes: a {plan.op} has none")
    if plan.dtype != "float32" and (plan.op == "await" or not benchmark.sized):
        raise ConfigError(f"--dtype: {plan.op} is measured with float32")
    if plan.batches is not None and not benchmark.batched:
        raise ConfigError(f"--batch: {plan.op} has none")
    if benchmark.serves:
        if plan.servers >= plan.ranks:
            raise ConfigError(f"--servers {plan.servers}: expected fewer than --ranks {plan.ranks}, one is to work")
        if plan.dtype == "bool":
            raise ConfigError(f"--dtype bool: {plan.op} adds")
    if plan.plot is not None:
        from aiodist.bench.report import check_plot

        if not benchmark.sized:
            raise ConfigError(f"--plot: {plan.op} has no sizes to draw by")
        check_plot()


def _job_size(asked: int | None, environment: Environment) -> int | None:
    """Return how many ranks the job has that this process already belongs to, None where it is to start them."""
    if environment.starter is Starter.ALONE:
        return None
    if asked not in (None, environment.size):
        raise ConfigError(f"--ranks {asked}: {environment.starter} started {environment.size} of them")
    return environment.size


def _servers(given: int | None, benchmark: registry.Benchmark) -> int:
    if given is not None and not benchmark.serves:
        raise ConfigError(f"--servers: in {benchmark.name} no rank serves")
    return given or 1


def _models(given: str | None, benchmark: registry.Benchmark) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not benchmark.models:
        raise ConfigError(f"--model: {benchmark.name} trains nothing")
    return parse_names("--model", given, benchmark.models)


def _impls(given: str | None, benchmark: registry.Benchmark, with_mpi: bool) -> tuple[str, ...]:
    if given is None:
        return tuple([impl for impl in benchmark.default_impls if impl not in BACKENDS or _has_backend(impl)])
    impls = parse_names("--impl", given, benchmark.impls)
    if "mpi" in impls and not with_mpi:
        raise ConfigError("--impl mpi: no MPI was found to start the ranks with")
    return impls


def _has_backend(name: str) -> bool:
    return importlib.util.find_spec(f"aiodist.backends.{name}") is not None


def _peers(given: str | None, benchmark: registry.Benchmark, with_mpi: bool) -> tuple[str, ...]:
    if given is None:
        return tuple([peer for peer in benchmark.peers if with_mpi or peer not in _MPI])
    if given == "none" and given not in benchmark.peers:
        return ()
    peers = parse_names("--against", given, benchmark.peers)
    for peer in peers:
        if peer in _MPI and not with_mpi:
            raise ConfigError(f"--against {peer}: no MPI was found to start the ranks with")
    return peers


def writable(option: str, path: Path | None) -> str | None:
    """Return where to write; say now, and not after the measuring, that it cannot be."""
    if path is None:
        return None
    absolute = path.absolute()
    if absolute.is_dir() or not os.access(absolute if absolute.exists() else absolute.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: expected a file that can be written")
    return str(absolute)


def _here(plan: Plan) -> int:
    from aiodist.bench import worker

    return worker.main(plan)


def _launched(plan: Plan, mpi: str) -> int:
    from aiodist.launch import job
    from aiodist.launch.commands import Job

    command = ("-m", "aiodist.bench.worker", plan.to_json())
    return asyncio.run(job.run(Job(command=command, ranks=plan.ranks, mpi=mpi, prefix=False)))
