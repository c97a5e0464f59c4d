"""What to start: pure functions from a `Job` to command lines and environments.

Beside each variable and option stands the trap that it removes; the user never meets them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aiodist.errors import ConfigError

__all__ = [
    "Flavour",
    "Job",
    "Mpi",
    "Place",
    "exported",
    "flavour",
    "guard_command",
    "inherited",
    "library_names",
    "mpirun_command",
    "mpirun_environment",
    "place_variables",
]


class Flavour(StrEnum):
    """Whose mpirun it is, which decides the options it takes."""

    OPENMPI = "openmpi"
    MPICH = "mpich"
    OTHER = "other"


@dataclass(frozen=True)
class Mpi:
    """One mpirun, and the library that belongs to it."""

    mpirun: str
    flavour: Flavour
    version: str
    library: str | None
    """The file that mpi4py must load to be part of the job; None: not found beside mpirun."""


@dataclass(frozen=True)
class Job:
    """What to run, and how."""

    command: tuple[str, ...]
    """What Python is given: `("train.py", "--lr", "0.1")` or `("-m", "package.module")`."""
    ranks: int
    mpi: str = "auto"
    """`auto`, `openmpi`, `mpich`, `none`, or the path of an mpirun."""
    mpi_args: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    """`NAME=VALUE`, or `NAME` for the value it has here."""
    log_dir: Path | None = None
    prefix: bool = True
    timeout: float | None = None
    kill_after: float = 3.0
    """Seconds from the request to stop until SIGKILL."""
    finish_within: float = 5.0
    """Seconds that the others have to end, once a rank that never joined the job ended with exit code 0."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"{self.ranks} ranks: expected at least 1")
        if not self.command:
            raise ConfigError("there is no script to run")
        if self.mpi == "none" and self.mpi_args:
            raise ConfigError(f"--mpi-arg {self.mpi_args[0]} needs an mpirun, but --mpi is none")


@dataclass(frozen=True)
class Place:
    """Where a job's ranks and guards find the launcher, and the secret that lets them in."""

    guards: str
    rendezvous: str
    token: str


def flavour(version_text: str) -> tuple[Flavour, str]:
    r"""Return flavour and version that the output of `mpirun --version` shows.

    >>> flavour("mpirun (Open MPI) 5.0.11\n")
    (<Flavour.OPENMPI: 'openmpi'>, '5.0.11')
    >>> flavour("HYDRA build details:\n    Version:     4.3.0\n")
    (<Flavour.MPICH: 'mpich'>, '4.3.0')
    """
    first = version_text.strip().splitlines()[0] if version_text.strip() else ""
    if "Open MPI" in first or "OpenRTE" in first:
        return Flavour.OPENMPI, first.rpartition(" ")[2]
    if first.startswith("HYDRA"):
        for line in version_text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Version":
                return Flavour.MPICH, value.strip()
        return Flavour.MPICH, ""
    return Flavour.OTHER, first


def library_names(kind: Flavour) -> tuple[str, ...]:
    """Return the names under which the flavour installs its library, best first.

    >>> library_names(Flavour.OPENMPI)
    ('libmpi.so.40', 'libmpi.so')
    """
    return {
        Flavour.OPENMPI: ("libmpi.so.40", "libmpi.so"),
        Flavour.MPICH: ("libmpi.so.12", "libmpich.so.12", "libmpich.so", "libmpi.so"),
        Flavour.OTHER: ("libmpi.so",),
    }[kind]


_STALE = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_", "HYDRA_PROXY")
_STALE_EXACT = frozenset(
    f"AIODIST_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "RENDEZVOUS", "TOKEN")
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what another launcher wrote: started from inside a rank, this is a new job."""
    return {name: value for name, value in environ.items() if not name.startswith(_STALE) and name not in _STALE_EXACT}


def common_variables(environ: Mapping[str, str], place: Place) -> dict[str, str]:
    """Return what every process of the job inherits."""
    return {
        **inherited(environ),
        "AIODIST_RENDEZVOUS": place.rendezvous,
        "AIODIST_TOKEN": place.token,
        # Python buffers whole blocks when it writes to a pipe: lines would come late, or never from a killed rank.
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
    }


def place_variables(rank: int, size: int) -> dict[str, str]:
    """Return the variables that tell a rank its place where no MPI does."""
    return {
        "AIODIST_RANK": str(rank),
        "AIODIST_SIZE": str(size),
        "AIODIST_LOCAL_RANK": str(rank),
        "AIODIST_LOCAL_SIZE": str(size),
    }


def exported(exports: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `-x` names; raise `ConfigError` for one that has no value here."""
    variables = {}
    for export in exports:
        name, given, value = export.partition("=")
        if not name or (not given and name not in environ):
            raise ConfigError(f"-x {export}: expected NAME=VALUE, or the NAME of a variable that is set here")
        variables[name] = value if given else environ[name]
    return variables


def guard_command(address: str, cwd: Path) -> list[str]:
    """Return the command that starts one guard.

    -P keeps the working directory out of its path, where a file `select.py` would be imported for the
    standard module; only in a checkout that is not installed is aiodist itself found there.
    """
    safe = [] if cwd == Path(__file__).parents[2] else ["-P"]
    return [sys.executable, *safe, "-m", "aiodist.launch.worker", address]


def mpirun_command(job: Job, mpi: Mpi, guard: list[str]) -> list[str]:
    """Return the command that starts a guard for each rank; the user's own arguments replace ours."""
    options: list[str] = []
    if mpi.flavour is Flavour.OPENMPI:
        given = {argument.lstrip("-").partition("=")[0] for argument in job.mpi_args}
        if not given & {"map-by", "oversubscribe", "rankfile"}:
            options += ["--map-by", ":OVERSUBSCRIBE"]  # else more ranks than cores are refused
        if not given & {"bind-to", "rankfile"}:
            options += ["--bind-to", "none"]  # else two ranks get one core each, for all of their threads
    return [mpi.mpirun, "-n", str(job.ranks), *options, *job.mpi_args, *guard]


def mpirun_environment(mpi: Mpi, environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """Return the variables that mpirun and the ranks below it need beside `environ`."""
    variables = {}
    if mpi.flavour is Flavour.OPENMPI:
        if root:  # else mpirun refuses to run
            variables["OMPI_ALLOW_RUN_AS_ROOT"] = variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        variables["OMPI_MCA_osc"] = environ.get("OMPI_MCA_osc", "^ucx")  # else a harmless error is printed
    if mpi.library is not None:
        # mpi4py loads the first library it finds: of another MPI, every rank would be alone in a world of one.
        variables["MPI4PY_LIBMPI"] = mpi.library
        folder = str(Path(mpi.library).parent)
        if not folder.startswith(("/usr/lib", "/lib")):
            rest = [part for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part not in ("", folder)]
            variables["LD_LIBRARY_PATH"] = ":".join([folder, *rest])
    return variables
