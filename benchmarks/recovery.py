"""`python -m benchmarks recovery`: seconds to recover from a killed rank, and to grow; loads no torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_WORKER = ("--elastic", "2:4", "-m", "benchmarks.recovery_worker")


@app.command()
def recovery(
    *,
    two_hosts: Annotated[
        bool, typer.Option("--two-hosts", help="Two ranks each on two hosts: network namespaces of this machine.")
    ] = False,
    open_mpi: Annotated[
        bool, typer.Option("--open-mpi", help="Under its mpirun: the first death of each of eight jobs.")
    ] = False,
) -> None:
    """Kill one of four ranks and start another in its place, eight times."""
    if open_mpi:  # which the first death leaves behind
        command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "4", "--mpi", "openmpi", *_WORKER, "1"]
        ends = [subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode for _ in range(8)]
        raise typer.Exit(max(map(abs, ends)))  # below 0 where a signal ended it
    with ExitStack() as stack:
        command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "4", *_WORKER]
        if two_hosts:
            from tests.hosts.conftest import two_hosts as made  # it has pytest, and no program needs it

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aiodist-hosts-"))
            hosts = stack.enter_context(made(Path(folder)))
            hosts.mpi = "none"
            command = hosts.command(*_WORKER)
        raise typer.Exit(subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode)
