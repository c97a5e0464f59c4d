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
from aiodist.doctor.findings import Finding, Report, State, fail, ok
from aiodist.doctor.here import cores
from aiodist.env import variables
from aiodist.launch import discover
from aiodist.launch.commands import Flavour, own_path
from aiodist.launch.hosts import Host, meeting_address, shell_on

_DAEMONS = {Flavour.OPENMPI: ("prted", "orted"), Flavour.MPICH: ("hydra_pmi_proxy",), Flavour.OTHER: ()}
_PORTS = "open all TCP ports between these hosts in the firewall, or choose another network: --iface"
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
            answers = pool.map(lambda name: _ask(name, question, asked), names)
            found = {name: judge(name, answer, here, asked) for name, answer in zip(names, answers, strict=True)}
    checks = [(f"{host}: {name}", one) for host, by_name in found.items() for name, one in by_name.items()]
    if failed := [f"{where}: {one}" for where, one in checks if one.state is State.FAIL]:
        return Report(False, f"not ready: {'; '.join(failed)}", found)
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


def judge(name: str, answer: Answer, here: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Finding]:
    """Return the findings about one host, compared with this one."""
    there = answer.said
    if there is None:
        remedy = f"ssh-copy-id {name}, then `ssh {name} true` must ask no question; another program: --rsh"
        if "Host key verification failed" in answer.trouble:
            remedy = f"ssh {name}, once, to accept its key"
        elif "not resolve" in answer.trouble:
            remedy = "use a name in DNS, /etc/hosts or ~/.ssh/config"
        return {"reachable": fail(answer.trouble, remedy)}
    found = {"reachable": ok("without a password")}
    if "no python" in there:
        remedy = "install the same Python at the same path, or share the folder"
        return {**found, "Python": fail(f"no {there['no python']}", remedy)}
    if asked["daemons"]:
        missing = fail(f"no {asked['daemons'][0]}", "install the same MPI at the same path")
        found["MPI"] = ok(there["daemon"]) if there["daemon"] else missing
    for part, mine in here["parts"].items():
        theirs = there["parts"][part]
        remedy = "share the folder, or copy it to the same path"
        if part in asked["packages"]:
            remedy = f"{sys.executable} -m pip install {part}=={mine}"
        if mine is not None:
            found[part] = ok(mine) if theirs == mine else fail(f"{theirs or 'missing'}, here {mine}", remedy)
    found["ports"] = fail(f"to this host: {there.get('trouble')}", _PORTS)
    if there["address"]:
        found["ports"] = ok(f"open, at {there['address']}")
    return {**found, "cores": cores(there["cores"], there["all cores"])}
