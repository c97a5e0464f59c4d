"""Settings from the environment. No other module of aiodist reads `os.environ`.

A process learns its place in the job from its starter: `aiodist run`, an MPI launcher, `torchrun` or Slurm. Without a
starter, the process is the only rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from aiodist.errors import ConfigError


def variables() -> dict[str, str]:
    """Return a copy of all environment variables."""
    return dict(os.environ)


def replace_variables(new: Mapping[str, str]) -> None:
    """Set variables of this process, for a program that will replace it."""
    os.environ.update(new)


def wants_full_tracebacks() -> bool:
    """Return True if tracebacks show the frames of aiodist and asyncio too: AIODIST_TRACEBACK=full."""
    return os.environ.get("AIODIST_TRACEBACK", "").lower() == "full"


def is_launched() -> bool:
    """Return True if `aiodist run` has started this process."""
    return "AIODIST_TOKEN" in os.environ


START_UP = 'import os; os.environ.get("AIODIST_AS") and __import__("aiodist.alias.startup").alias.startup.install()\n'
"""The line that `aiodist hook --install` lets each start of Python run. It imports nothing without AIODIST_AS."""
ALIASES = ("gloo", "nccl", "mpi")
"""Backends of torch in whose place programs can get aiodist."""


def alias(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the backend in whose place programs get aiodist (AIODIST_AS, `aiodist run --as`), or None.

    Raises `ConfigError` for an unknown name.
    """
    name = (variables() if environ is None else environ).get("AIODIST_AS") or None
    if name is not None and name not in ALIASES:
        raise ConfigError(f"AIODIST_AS={name!r}: expected one of {', '.join(ALIASES)}")
    return name


def servers(size: int, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of the job's last ranks that only serve parameters, or None without such ranks.

    The number is AIODIST_SERVERS, which `aiodist run --servers` sets. With other starters, set it equally on all ranks.
    Raises `ConfigError` if the value is not a number of ranks that leaves a worker.
    """
    environ = variables() if environ is None else environ
    if not environ.get("AIODIST_SERVERS"):
        return None
    count = _integer(environ, "AIODIST_SERVERS")
    if not 0 <= count < size:
        raise ConfigError(f"AIODIST_SERVERS={count} of {size} ranks: expected 0 <= servers < ranks")
    return count or None


class Starter(StrEnum):
    """The starter of this process, which decides the variables of its rank."""

    ALONE = "alone"
    AIODIST = "aiodist run"
    MPI = "mpirun"
    SLURM = "srun"
    TORCHRUN = "torchrun"


_PLACES = (
    (Starter.MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    (Starter.MPI, "PMI_RANK", "PMI_SIZE"),  # MPICH; Slurm with PMIx sets SLURM_* too
    (Starter.AIODIST, "AIODIST_RANK", "AIODIST_SIZE"),
    (Starter.TORCHRUN, "RANK", "WORLD_SIZE"),
    (Starter.SLURM, "SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables for the rank and the number of ranks, of each starter. The first ones that are set count."""


@dataclass(frozen=True)
class Generation:
    """The ranks of an elastic job between two changes of its ranks."""

    number: int
    """Number from 0. Each generation has a higher one than all before, also than those that never began."""
    previous: tuple[int | None, ...]
    """Rank of each rank in the generation before, or None for a rank that joined, as all of the first generation."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.previous)

    @property
    def survivors(self) -> list[int]:
        """Ranks, in the generation before, of those that continue."""
        return [rank for rank in self.previous if rank is not None]

    @property
    def joiners(self) -> list[int]:
        """Ranks that were not in the generation before."""
        return [rank for rank, before in enumerate(self.previous) if before is None]


@dataclass(frozen=True)
class Environment:
    """This process's place in its job, and settings from variables."""

    starter: Starter
    rank: int
    size: int
    mpi: bool
    """True if an MPI launcher started this process, so that MPI can be initialised over all ranks."""
    rendezvous: str | None
    """Place where the ranks meet: `tcp://host:port`, `file:///path` or `env://`, or None if alone or over MPI."""
    token: str
    """Secret of the job, which each process must know to join."""
    backend: str | None
    shared_memory: bool
    """True if ranks of a host may share memory (False with AIODIST_SHM=0)."""
    pin: bool | None
    """True if ranks of a host are bound to separate cores. None binds them if each gets more than one core."""
    visible_devices: tuple[str, ...] | None
    """CUDA devices that this process may see, by CUDA_VISIBLE_DEVICES, or None for all of the host."""
    many_ranks_a_device: bool
    """True if several NCCL ranks may share a device (NCCL_MULTI_RANK_GPU_ENABLE=1)."""
    job: int
    """Number of the process that names this job: `aiodist run`, or this process without it."""
    selector: str | None
    """File with the selector's table, or "none" to ignore a measured table too."""
    elastic: tuple[int, int] | None
    """Fewest and most ranks of the job, or None if the job is not elastic."""
    generation: Generation
    """Generation that this process is started for, 0 without an elastic job."""
    trace: str | None
    """Folder for a trace, or None."""
    stragglers: bool
    """True if rank 0 reports at the end for which rank the others waited (AIODIST_STRAGGLERS=1)."""
    metrics: str | None
    """Place of the metrics: a port, a folder or "otlp", or None."""
    otlp_interval: float | None
    """Time between two exports by OTLP, in seconds, or None if no variable of OpenTelemetry names a receiver."""
    debug: bool
    """True if deadlines and reports are off, since a debugger may stop a rank at any time (AIODIST_DEBUG=1)."""
    terminal: str
    """Terminal of the launcher, in the form of `terminal.lent`, or "" without one."""
    variables: Mapping[str, str] = field(repr=False)
    """All variables, for the rendezvous, which reads those of torchrun and Slurm."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Return the settings of `environ`, or of this process for None. Raise `ConfigError` for invalid values."""
        environ = variables() if environ is None else environ
        starter, names = _starter(environ)
        rank, size = _place(environ, *names) if names else (0, 1)
        devices = environ["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in environ else None
        meeting = "env://" if starter in (Starter.TORCHRUN, Starter.SLURM) else None
        return cls(
            starter=starter,
            rank=rank,
            size=size,
            mpi=any(rank in environ for starter, rank, _ in _PLACES if starter is Starter.MPI),
            rendezvous=environ.get("AIODIST_RENDEZVOUS") or meeting,
            token=environ.get("AIODIST_TOKEN", ""),
            backend=environ.get("AIODIST_BACKEND") or None,
            shared_memory=_flag(environ, "AIODIST_SHM", default=True),
            pin=_flag(environ, "AIODIST_PIN") if environ.get("AIODIST_PIN") else None,
            visible_devices=None if devices is None else tuple([name for name in map(str.strip, devices) if name]),
            many_ranks_a_device=environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
            job=_integer(environ, "AIODIST_JOB") if environ.get("AIODIST_JOB") else os.getpid(),
            selector=environ.get("AIODIST_SELECTOR") or None,
            elastic=_elastic(environ),
            generation=_generation(environ, size),
            trace=environ.get("AIODIST_TRACE") or None,
            stragglers=_flag(environ, "AIODIST_STRAGGLERS"),
            metrics=environ.get("AIODIST_METRICS") or None,
            otlp_interval=otlp_interval(environ),
            debug=_flag(environ, "AIODIST_DEBUG"),
            terminal=environ.get("AIODIST_TERMINAL", ""),
            variables=dict(environ),
        )


def otlp_interval(environ: Mapping[str, str]) -> float | None:
    """Return the time between two exports of metrics by OTLP, in seconds, or None without a receiver.

    The variables are those of OpenTelemetry's specification.
    """
    if not (environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return None
    return _integer({"OTEL_METRIC_EXPORT_INTERVAL": "60000", **environ}, "OTEL_METRIC_EXPORT_INTERVAL") / 1e3


def _starter(environ: Mapping[str, str]) -> tuple[Starter, tuple[str, ...]]:
    for starter, *names in _PLACES:
        if starter is Starter.MPI and names[0] in environ:
            return (Starter.AIODIST if "AIODIST_RENDEZVOUS" in environ else starter), tuple(names)
        # Both variables must be set, since `salloc` sets SLURM_NTASKS only, and a shell may export RANK only. Those of
        # aiodist have no other meaning, so one of them alone is a mistake.
        there = [name in environ for name in names]
        if starter is not Starter.MPI and (any(there) if starter is Starter.AIODIST else all(there)):
            return starter, tuple(names)
    return Starter.ALONE, ()


def _place(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _integer(environ, rank_name), _integer(environ, size_name)
    if not 0 <= rank < size:
        raise ConfigError(f"{rank_name}={rank} and {size_name}={size}: expected 0 <= rank < size")
    return rank, size


def _elastic(environ: Mapping[str, str]) -> tuple[int, int] | None:
    if not (said := environ.get("AIODIST_ELASTIC")):
        return None
    least, _, most = said.partition(":")
    try:
        return int(least), int(most)
    except ValueError:
        raise ConfigError(f"AIODIST_ELASTIC={said!r}: expected MIN:MAX") from None


def _generation(environ: Mapping[str, str], size: int) -> Generation:
    number = _integer(environ, "AIODIST_GENERATION") if environ.get("AIODIST_GENERATION") else 0
    said = environ.get("AIODIST_PREVIOUS", "," * (size - 1))
    found = [before for before in said.split(",") if not before or before.isdecimal()]
    if len(found) != size or said.count(",") != size - 1:
        raise ConfigError(f"AIODIST_PREVIOUS={said!r}: expected a rank or nothing for each of {size} ranks")
    return Generation(number, tuple([int(before) if before else None for before in found]))


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise ConfigError(f"{name} is not set, though related variables are") from None
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r}: expected a whole number") from None


def _flag(environ: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    value = environ.get(name, "").lower()
    if not value:
        return default
    if value in ("0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{name}={value!r}: expected 0 or 1")
