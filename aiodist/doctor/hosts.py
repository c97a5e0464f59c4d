"""Other hosts: one remote shell asks each of them for the parts that a job there needs."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiodist.doctor import probe
from aiodist.doctor.ask import Answer, ask_command, ask_ranks
from aiodist.doctor.findings import Finding, Report, State
from aiodist.doctor.here import cores
from aiodist.env import variables
from aiodist.launch import discover
from aiodist.launch.commands import Flavour, own_path
from aiodist.launch.hosts import Host, meeting_address, shell_on

_DAEMONS = {Flavour.OPENMPI: ("prted", "orted"), Flavour.MPICH: ("hydra_pmi_proxy",), Flavour.OTHER: ()}
_PROGRAM = (
    "import sys; sys.path = [*filter(None, sys.path)]; import json; sent = json.loads(sys.stdin.readline()); "
    'sys.path[:0] = sent["path"]; exec(sent["code"])'
)
"""The command line of the Python on another host. All users there can see it, so it names nothing of the job.

The module path has no working directory, where a file could have the name of a module.
"""


@dataclass(frozen=True)
class Question:
    """The hosts, and the options of the job on them."""

    hosts: Sequence[Host]
    rsh: str = ""
    iface: str = ""
    mpi: str = "auto"
    script: str | None = None
    packages: Sequence[str] = ("aiodist", "torch", "numpy", "mpi4py", "openmpi", "mpich", "uvloop")
    """Packages whose versions must be equal."""
    seconds: float = 30.0
    """Time limit for the answer of a host."""


def examine_hosts(question: Question) -> Report:
    """Report on all hosts, and on ranks that meet over all of them; takes some seconds.

    Raises `ConfigError` for an interface that this host does not have.
    """
    mpi = discover.find_mpi(question.mpi, variables().get("PATH", os.defpath))
    bin_ = os.path.dirname(os.path.abspath(mpi.mpirun)) if mpi else ""
    names = [host.name for host in question.hosts]
    address = meeting_address(names, question.iface)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(names)) as server:  # the kernel accepts
        asked = {
            "launcher": server.getsockname()[:2],
            "packages": question.packages,
            "folder": str(Path.cwd()),
            "script": question.script and str(Path.cwd() / question.script),
            "daemons": [os.path.join(bin_, name) for name in _DAEMONS[mpi.flavour]] if mpi else [],
        }
        here = probe.host(asked)
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(_ask, names, [question] * len(names), [asked] * len(names)))
    found = {name: judge(name, answer, here, asked) for name, answer in zip(names, answers, strict=True)}
    problems = [f"{name}: {one}" for name in found for one in found[name] if one.state is State.UNUSABLE]
    if problems:
        return Report(False, f"not ready: {'; '.join(problems)}", found)
    answer = ask_ranks(mpi.mpirun if mpi else "none", "ranks", question.hosts, question.rsh, question.iface)
    if answer.said is None:
        return Report(False, f"not ready: the ranks did not meet: {answer.trouble}", found)
    over = answer.said.get("library", answer.said["backend"])
    if answer.said["size"] != len(names):
        return Report(False, f"not ready: each rank is alone: {over}", found)
    return Report(True, f"ready: a rank on each of {len(names)} hosts met: {over}", found)


def _ask(name: str, question: Question, asked: Mapping[str, Any]) -> Answer:
    folders = variables().get("PYTHONPATH", "").split(os.pathsep)
    if not own_path(Path.cwd()):  # a checkout that is not installed
        folders.append(str(Path.cwd()))
    sent = {"path": [folder for folder in folders if folder], "code": Path(probe.__file__).read_text()}
    python = shlex.quote(sys.executable)
    missing = shlex.quote(json.dumps({"no python": sys.executable}))
    # one line, since a csh ends a quoted word at the end of a line
    script = f"if test -x {python}; then exec {python} -c {shlex.quote(_PROGRAM)}; else echo {missing}; fi"
    command = shell_on(name, question.rsh, script)
    return ask_command(command, f"{json.dumps(sent)}\n{json.dumps(asked)}\n", question.seconds)


def judge(name: str, answer: Answer, here: Mapping[str, Any], asked: Mapping[str, Any]) -> list[Finding]:
    """Return the findings about one host, compared with this one."""
    there = answer.said
    if there is None:
        return [Finding("reachable", State.UNUSABLE, answer.trouble, _reach(name, answer.trouble))]
    found = [Finding("reachable", State.AVAILABLE, "without a password")]
    if "no python" in there:
        remedy = "install the same Python at the same path, or share the folder"
        return [*found, Finding("Python", State.UNUSABLE, f"no {there['no python']}", remedy)]
    if there["daemon"]:
        found.append(Finding("MPI", State.AVAILABLE, there["daemon"]))
    elif asked["daemons"]:
        found.append(
            Finding("MPI", State.UNUSABLE, f"no {asked['daemons'][0]}", "install the same MPI at the same path")
        )
    for part, mine in here["parts"].items():
        theirs = there["parts"][part]
        remedy = "share the folder, or copy it to the same path"
        if part in asked["packages"]:
            remedy = f"{sys.executable} -m pip install {part}=={mine}"
        if mine is not None and theirs == mine:
            found.append(Finding(part, State.AVAILABLE, mine))
        elif mine is not None:
            found.append(Finding(part, State.UNUSABLE, f"{theirs or 'missing'}, here {mine}", remedy))
    if there["address"]:
        found.append(Finding("ports", State.AVAILABLE, f"open, at {there['address']}"))
    else:
        remedy = "open all TCP ports between these hosts in the firewall, or choose another network: --iface"
        found.append(Finding("ports", State.UNUSABLE, f"to this host: {there['trouble']}", remedy))
    return [*found, cores(there["cores"], there["all cores"])]


def _reach(name: str, trouble: str) -> str:
    if "Host key verification failed" in trouble:
        return f"ssh {name}, once, to accept its key"
    if "not resolve" in trouble:
        return "use a name in DNS, /etc/hosts or ~/.ssh/config"
    return f"ssh-copy-id {name}, then `ssh {name} true` must ask no question; another program: --rsh"
