"""The command `aiodist`. Each subcommand imports what it needs when it is called: the launcher loads no torch."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the working directory, where a file `select.py` would be taken for the standard module

import asyncio
import math
import os
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aiodist.env import alias, otlp_interval, variables, wants_full_tracebacks
from aiodist.errors import AiodistError, ConfigError, pointer

if TYPE_CHECKING:
    from aiodist.launch.hosts import Host

app = typer.Typer(
    name="aiodist",
    help="Run and inspect PyTorch programs on several ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Ranks = Annotated[
    str,
    typer.Option("-n", metavar="N|auto", help="Number of ranks; auto is one per GPU, or one per core without GPUs."),
]
_Mpi = Annotated[
    str,
    typer.Option(
        metavar="auto|openmpi|mpich|none|PATH",
        help="The mpirun to use; auto looks for Open MPI, then MPICH, else uses none.",
    ),
]
_Hosts = Annotated[
    str, typer.Option(metavar="A:2,B:2", help="Hosts, each with its number of ranks; the numbers are optional with -n.")
]
_Hostfile = Annotated[
    Path | None, typer.Option(metavar="F", help="A file with one host per line: NAME, NAME:N or NAME slots=N.")
]
_Rsh = Annotated[
    str,
    typer.Option(
        metavar="PROGRAM", help="The program that runs commands on hosts, as PROGRAM HOST COMMAND; default: ssh."
    ),
]
_Iface = Annotated[
    str, typer.Option(metavar="NAME|NETWORK", help="The network between hosts, such as eth1 or 10.0.0.0/24.")
]
_Options = {"allow_interspersed_args": False}  # what follows the script belongs to the script
_Everything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> int:
    """Run the command line; an error that aiodist raised on purpose, or the system, is one line and exit code 2."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # it is closed: something of ours would get its number, and be taken for it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if isinstance(sys.stdout, TextIOWrapper):  # its encoding may lack what we print
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except (AiodistError, OSError) as error:
        if wants_full_tracebacks():
            raise
        shown = pointer(error)
        print(f"aiodist: {error}{f' ({shown})' if shown else ''}", file=sys.stderr)  # noqa: T201
    return 2


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("aiodist"))
        except PackageNotFoundError:
            raise ConfigError("this checkout is not installed, so it has no version: pip install -e .") from None
        raise typer.Exit


@app.callback()
def _aiodist(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(context_settings=_Options)
def run(  # noqa: PLR0913 - one for each option
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file; a module with -m; or a program, such as python.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Arguments of SCRIPT. Options of run come before SCRIPT."),
    ] = None,
    ranks: _Ranks = "auto",
    servers: Annotated[
        int, typer.Option(metavar="S", help="Start S more ranks, the last ones, that only serve parameters.")
    ] = 0,
    module: Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, like python -m.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="gloo|nccl|mpi",
            help="Give aiodist to a program of torch.distributed that asks for this backend, or for none.",
        ),
    ] = None,
    mpi: _Mpi = "auto",
    hosts: _Hosts = "",
    hostfile: _Hostfile = None,
    rsh: _Rsh = "",
    iface: _Iface = "",
    pin: Annotated[
        bool | None,
        typer.Option(
            "--pin/--no-pin", help="Bind each rank to cores of its own; default: if each rank gets two or more."
        ),
    ] = None,
    mpi_arg: Annotated[
        list[str] | None, typer.Option(metavar="ARG", help="An argument for mpirun; may be repeated.")
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option("-x", metavar="NAME[=VALUE]", help="An environment variable for the ranks; may be repeated."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the output of each rank to DIR/rank-0.out, DIR/rank-0.err, ..."),
    ] = None,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Begin each line of output with [RANK].")] = True,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="End the job after S seconds with exit code 124.")
    ] = None,
    kill_after: Annotated[
        float, typer.Option(metavar="S", min=0, help="Seconds between SIGTERM and SIGKILL when the job stops.")
    ] = 3.0,
    finish_within: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0,
            help="Seconds for the other ranks to end after a rank that never used aiodist ends with 0; "
            "default: 5, without a limit with --as.",
        ),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the other ranks continue when a rank fails; with --mpi none.")
    ] = False,
    elastic: Annotated[
        str,
        typer.Option(
            metavar="MIN:MAX",
            help="Continue while MIN ranks live, and grow to MAX; for init(elastic=True), not with MPICH.",
        ),
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Record a trace of all ranks in DIR/trace.json, for ui.perfetto.dev."),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT|DIR|otlp",
            help="Publish metrics of all ranks for Prometheus at PORT, or in DIR/rank-0.prom, ..., or by OTLP alone.",
        ),
    ] = "",
    stragglers: Annotated[
        bool, typer.Option("--stragglers", help="Print at the end which rank the others waited for, and how long.")
    ] = False,
    debug: Annotated[
        str,
        typer.Option(
            metavar="RANK[:PORT]",
            help="Let debugpy wait on RANK for a debugger, at 127.0.0.1:5678 or PORT; deadlines of the job are off.",
        ),
    ] = "",
    report: Annotated[bool, typer.Option("--report", hidden=True)] = False,
) -> None:
    """Run SCRIPT on N ranks, on this host or several.

    The exit code is the first that is not zero, or 128 + n for signal n.
    """
    from aiodist.launch import job
    from aiodist.launch.commands import Job, debug_place, elastic_range
    from aiodist.launch.discover import command_of
    from aiodist.watch.exposition import Target
    from aiodist.watch.merging import prepare

    if report:
        raise ConfigError("--report: use --stragglers")
    if ranks == "p" and script.isdecimal():  # what click makes of -np 2
        raise ConfigError(f"-np {script}: expected -n {script}")
    count, where = _placed(ranks, hosts, hostfile, servers)
    search = variables().get("PATH", os.defpath)
    program, *command = command_of((script, *(args or ())), module=module, search=search)
    wanted = elastic_range(elastic)
    backend = backend or alias()
    patience = (5.0 if backend is None else math.inf) if finish_within is None else finish_within
    own = [] if pin is None else [f"AIODIST_PIN={int(pin)}"]
    if stragglers:
        own.append("AIODIST_STRAGGLERS=1")
    if debug:
        own.append("AIODIST_DEBUG=1")
    if trace is not None:
        prepare(trace)
        own.append(f"AIODIST_TRACE={trace.resolve()}")
    if metrics:
        target = Target.parse(metrics, otlp=otlp_interval(variables()) is not None)
        own.append(f"AIODIST_METRICS={metrics if target.folder is None else target.folder.resolve()}")
    todo = Job(
        program=program,
        command=tuple(command),
        ranks=count,
        servers=servers,
        mpi="none" if (wanted or backend) and mpi == "auto" else mpi,
        mpi_args=tuple(mpi_arg or ()),
        exports=(*own, *(export or ())),
        log_dir=log_dir,
        prefix=prefix,
        timeout=timeout,
        kill_after=kill_after,
        finish_within=patience,
        keep_going=keep_going,
        elastic=wanted,
        alias=backend,
        hosts=where,
        rsh=rsh,
        iface=iface,
        debug=debug_place(debug),
    )
    try:
        code = asyncio.run(job.run(todo))
    finally:
        if trace is not None:
            _show_trace(trace)
    raise typer.Exit(code)


def _show_trace(folder: Path) -> None:
    """Merge what was recorded; the job has its exit code by now."""
    try:
        merge_trace(folder)
    except (ConfigError, OSError) as error:
        typer.echo(f"aiodist: {error}", err=True)


@app.command("trace")
def merge_trace(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of the trace, after ranks that did not end in order.")
    ],
) -> None:
    """Merge the trace files of the ranks in DIR into one."""
    from aiodist.watch.merging import merge

    if (merged := merge(folder)) is None:
        raise ConfigError(f"no rank has recorded anything in {folder}")
    typer.echo(f"trace: {merged}", err=True)


def _hosts(listed: str, file: Path | None) -> tuple[Host, ...]:
    """Return the hosts that the options name; none means this one."""
    from aiodist.launch.hosts import parse_hosts, read_hostfile

    if listed and file:
        raise ConfigError("--hosts and --hostfile are two ways to say the same: give one of them")
    return parse_hosts(listed) if listed else read_hostfile(file) if file else ()


def _placed(ranks: str, listed: str, file: Path | None, servers: int = 0) -> tuple[int, tuple[Host, ...]]:
    """Return how many ranks there are, the servers too, and how many of them each host has."""
    from aiodist.launch.discover import auto_ranks
    from aiodist.launch.hosts import placed

    if ranks != "auto" and not ranks.isdecimal():
        raise ConfigError(f"-n {ranks}: expected a number of ranks, or auto")
    count = None if ranks == "auto" else int(ranks)
    if where := _hosts(listed, file):
        where = placed(where, count, servers)
        return sum(host.ranks or 0 for host in where), where
    return (auto_ranks(variables()) if count is None else count) + servers, ()


@app.command()
def doctor(
    script: Annotated[
        str | None, typer.Argument(metavar="[SCRIPT]", help="With hosts: the script to run there.")
    ] = None,
    hosts: _Hosts = "",
    hostfile: _Hostfile = None,
    rsh: _Rsh = "",
    iface: _Iface = "",
    mpi: _Mpi = "auto",
    json: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Write the findings to FILE; - prints them.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Also show the implementation of each operation by size.")
    ] = False,
) -> None:
    """Check this machine: show what works, how to fix the rest, and what is installed.

    With hosts, check whether ranks of SCRIPT, started in this folder, could work together there. The exit code is 1 if
    several ranks cannot work.
    """
    from rich.console import Console

    from aiodist.doctor.here import examine
    from aiodist.doctor.hosts import Question, examine_hosts

    if where := _hosts(hosts, hostfile):
        report = examine_hosts(Question(where, rsh, iface, mpi, script))
    else:
        for what, given in (("SCRIPT", script), ("--rsh", rsh), ("--iface", iface)):
            if given:
                raise ConfigError(f"{what} is for several hosts: say --hosts or --hostfile")
        report = examine(variables(), mpi)
    if json == "-":
        typer.echo(report.to_json())
    else:
        report.show(Console(), verbose=verbose)
        if json is not None:
            try:
                Path(json).write_text(report.to_json() + "\n")
            except OSError as error:
                raise ConfigError(f"--json {json}: {error.strerror}") from error
    raise typer.Exit(0 if report.usable else 1)


@app.command(name="inspect")
def inspect_(
    job: Annotated[
        int | None,
        typer.Argument(metavar="[JOB]", help="The process id of `aiodist run`, or of rank 0; default: the only job."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all data of the ranks as JSON.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Refresh every second, until Ctrl-C.")] = False,
    flight_recorder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a file for each rank to DIR, for `torchfrtrace`.")
    ] = None,
) -> None:
    """Show where each rank of a running job is: which ranks are late, which wait, and at which lines."""
    from aiodist.watch import shown

    if json and live:
        raise ConfigError("--json and --live: expected one of the two")
    shown.show(job, as_json=json, live=live, flight_recorder=flight_recorder)


@app.command()
def explain(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="An exception, such as mismatcherror; default: list them all."),
    ] = None,
) -> None:
    """Print what an exception means and how to cure it: its section of the page "Debug"."""
    from rich.console import Console

    from aiodist.doctor.explain import explain as show

    show(name, Console())


@app.command()
def hook(
    install: Annotated[bool, typer.Option("--install", help="Write the hook into the site-packages.")] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Remove the hook.")] = False,
) -> None:
    """Install a start-up hook in this Python, which lets programs follow AIODIST_AS without `aiodist run --as`.

    torchrun and other starters need it: `AIODIST_AS=gloo torchrun --nproc-per-node 2 train.py`.
    """
    from aiodist.alias import hook as hooks

    if install is uninstall:
        raise ConfigError("aiodist hook: expected --install or --uninstall")
    typer.echo(hooks.install() if install else hooks.uninstall())


@app.command(context_settings=_Everything, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure operations, and plain library calls in the same processes."""
    from aiodist.bench.cli import app as bench_app
    from aiodist.bench.cli import called

    raise typer.Exit(called(bench_app, context.args, "aiodist bench"))


@app.command()
def tune(  # noqa: PLR0913 - one for each option
    ranks: _Ranks = "auto",
    hosts: _Hosts = "",
    hostfile: _Hostfile = None,
    rsh: _Rsh = "",
    iface: _Iface = "",
    mpi: _Mpi = "auto",
    operations: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Operations to measure, such as allreduce; default: all.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="1KiB,64MiB", help="Sizes of one rank's input; default: 256 B to 64 MiB.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure few sizes and samples: seconds, not minutes.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table without writing it.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table to FILE, for AIODIST_SELECTOR, instead of the cache."),
    ] = None,
) -> None:
    """Measure every implementation on N ranks, and use the fastest for each size from the next start on."""
    from aiodist.bench import tuning

    count, where = _placed(ranks, hosts, hostfile)
    if count < 2:
        raise ConfigError(f"-n {count}: there is nothing to choose with fewer than 2 ranks")
    todo = tuning.tuning(operations, sizes, output, quick=quick, dry=dry_run)
    raise typer.Exit(tuning.run(todo, count, mpi, where, rsh, iface))


if __name__ == "__main__":
    sys.exit(main())
