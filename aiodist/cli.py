"""The command `aiodist`. Each subcommand imports what it needs when it is called: the launcher loads no torch."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from aiodist.env import variables
from aiodist.errors import AiodistError, ConfigError

__all__ = ["app", "main"]

app = typer.Typer(
    name="aiodist",
    help="An asyncio-native distributed runtime for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Options = {"allow_interspersed_args": False}  # what follows the script belongs to the script
_Everything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> int:
    """Run the command line; an error that aiodist raised on purpose is one line and exit code 2."""
    try:
        app()
    except AiodistError as error:
        print(f"aiodist: {error}", file=sys.stderr)  # noqa: T201
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
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m a module.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to it.")] = None,
    ranks: Annotated[
        str, typer.Option("-n", metavar="N|auto", help="How many ranks; auto: one per GPU, else per core.")
    ] = "auto",
    module: Annotated[bool, typer.Option("-m", help="SCRIPT names a module.")] = False,
    mpi: Annotated[
        str,
        typer.Option(metavar="auto|openmpi|mpich|none|PATH", help="Which mpirun; auto: Open MPI or MPICH, or none."),
    ] = "auto",
    mpi_arg: Annotated[list[str] | None, typer.Option(metavar="ARG", help="One argument for mpirun.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option("-x", metavar="NAME[=VALUE]", help="A variable for the ranks."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write DIR/rank-0.out, DIR/rank-0.err and so on.")
    ] = None,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Put [RANK] before each line.")] = True,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="End the job after S seconds with exit code 124.")
    ] = None,
    kill_after: Annotated[
        float, typer.Option(metavar="S", min=0, help="Seconds from the request to stop until SIGKILL.")
    ] = 3.0,
    finish_within: Annotated[
        float,
        typer.Option(
            metavar="S", min=0, help="Once a rank that never used aiodist ended with 0, seconds for the others to end."
        ),
    ] = 5.0,
) -> None:
    """Run SCRIPT on N ranks of this host; exit with the first non-zero code, 128 + n for signal n."""
    from aiodist.launch import job
    from aiodist.launch.commands import Job
    from aiodist.launch.discover import auto_ranks

    if not module and not Path(script).is_file():
        raise ConfigError(f"{script}: there is no such file")
    if ranks != "auto" and not ranks.isdecimal():
        raise ConfigError(f"-n {ranks}: expected a number of ranks, or auto")
    command = (*(("-m",) if module else ()), script, *(args or ()))
    todo = Job(
        command=command,
        ranks=auto_ranks(variables()) if ranks == "auto" else int(ranks),
        mpi=mpi,
        mpi_args=tuple(mpi_arg or ()),
        exports=tuple(export or ()),
        log_dir=log_dir,
        prefix=prefix,
        timeout=timeout,
        kill_after=kill_after,
        finish_within=finish_within,
    )
    raise typer.Exit(asyncio.run(job.run(todo)))


@app.command()
def doctor(
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write the findings there, - prints them.")] = None,
) -> None:
    """Say what is installed here, what works, and how to install what is missing; 1 if no several ranks can work."""
    from rich.console import Console

    from aiodist.doctor import examine, show

    report = examine(variables())
    if json == "-":
        typer.echo(report.to_json())
    else:
        show(report, Console())
        if json is not None:
            try:
                Path(json).write_text(report.to_json() + "\n")
            except OSError as error:
                raise ConfigError(f"--json {json}: {error.strerror}") from error
    raise typer.Exit(0 if report.usable else 1)


@app.command(context_settings=_Everything, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure operations, beside plain library calls in the same processes."""
    from aiodist.bench import cli as bench_cli

    raise typer.Exit(bench_cli.main(context.args))


if __name__ == "__main__":
    sys.exit(main())
