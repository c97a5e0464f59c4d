"""Processes that answer the questions of `probe`, each under a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiodist.launch.commands import own_path
from aiodist.launch.hosts import Host


@dataclass(frozen=True)
class Answer:
    """The object that a process printed, or the reason why there is none."""

    said: Mapping[str, Any] | None
    trouble: str = ""


def ask(question: str) -> Answer:
    """Ask a question of `probe` in a process of this host."""
    return ask_command([sys.executable, *own_path(Path.cwd()), "-m", "aiodist.doctor.probe", question])


def ask_ranks(mpi: str, question: str, hosts: Sequence[Host] = (), rsh: str = "", iface: str = "") -> Answer:
    """Ask a question of `probe` in two ranks, or one on each host, that `aiodist run --mpi MPI` starts."""
    path = own_path(Path.cwd())
    options = ["--no-prefix", "--timeout=60", f"-n{len(hosts) or 2}", f"--mpi={mpi}"]
    if hosts:
        options += [f"--hosts={','.join(host.name for host in hosts)}", f"--rsh={rsh}", f"--iface={iface}"]
    program = ["python", *path, "-m", "aiodist.doctor.probe", question]
    return ask_command([sys.executable, *path, "-m", "aiodist", "run", *options, *program])


def ask_command(command: Sequence[str], sent: str = "", seconds: float = 120.0) -> Answer:
    """Return the last JSON object that a command prints for the input `sent`."""
    try:
        done = subprocess.run(
            command, input=sent, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {seconds:g} s")
    except OSError as error:
        return Answer(None, str(error))
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return Answer(None, (errors or lines or [f"exit code {done.returncode}"])[-1])
    for line in reversed(done.stdout.splitlines()):
        with suppress(ValueError):
            if isinstance(said := json.loads(line), dict):
                return Answer(said)
    return Answer(None, "the process printed no answer")
