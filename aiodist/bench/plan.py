"""Plans of measurements: sizes, implementations, peers. Ranks get them as JSON; nothing here loads torch."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from aiodist.env import Environment
from aiodist.errors import BackendUnavailable, ConfigError

COLLECTIVES = (
    *("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter"),
    *("alltoall", "alltoall_single", "scan", "exscan", "sendrecv", "barrier"),
)
BACKENDS = ("mpi", "gloo", "local")
SCHEDULES = ("ring", "doubling", "halving", "tree", "chain", "bruck", "direct")
IMPLS = ("auto", "arena", "shm", "hierarchical", "leaders", *SCHEDULES, *BACKENDS)
PEERS = ("mpi4py", "gloo")
DTYPES = {
    **{"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8},
    **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16},
}
"""Bytes per element of each dtype."""
_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_KICK = 13  # an odd number: powers of two plus 13 neither divide evenly nor stay aligned


@dataclass(frozen=True)
class Errand:
    """Base class of plans: numbers, strings, and tuples of them."""

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a plan from its JSON."""
        fields = json.loads(text).items()
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields})

    async def start(self, module: str, ranks: int, **options: Any) -> int:  # noqa: ANN401  - those of `Job`
        """Start ranks that run `module` with this plan as the argument; return the exit code."""
        from aiodist.launch import job
        from aiodist.launch.commands import Job, own_path

        command = (*own_path(Path.cwd()), "-m", module, self.to_json())
        return await job.run(Job(command=command, ranks=ranks, prefix=False, **options))


def carry_out(do: Callable[[str], object]) -> None:
    """Call `do` with the argument of this process; on a wrong plan rank 0 prints the error, and all exit with 2."""
    try:
        do(sys.argv[1])
    except (ConfigError, BackendUnavailable) as error:
        if Environment.read().rank == 0:
            print(f"aiodist: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


@dataclass(frozen=True)
class Plan(Errand):
    """One run of a benchmark."""

    op: str
    ranks: int
    impls: tuple[str, ...]
    peers: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    """Sizes in bytes; None: the default of the operation."""
    dtype: str = "float32"
    repeat: int | None = None
    """Samples of each figure; None: a default for the size."""
    json: str | None = None
    plot: str | None = None
    width: int = 120
    """Columns of the terminal."""


def parse_sizes(text: str, itemsize: int) -> tuple[int, ...]:
    """Return bytes from a list such as `1024,64MiB`, each a multiple of `itemsize`.

    >>> parse_sizes("64, 1KiB,2kB,1.5MiB", 4)
    (64, 1024, 2000, 1572864)
    """
    sizes = []
    for part in map(str.strip, text.split(",")):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", part)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f"--sizes {part!r}: expected bytes such as 1024, 64KiB, 64MiB or 1GB")
        nbytes = float(match[1]) * unit
        if nbytes < itemsize or nbytes % itemsize:
            raise ConfigError(f"--sizes {part}: expected a multiple of {itemsize} bytes, one element, and at least one")
        sizes.append(int(nbytes))
    return tuple(sizes)


def default_sizes(itemsize: int) -> tuple[int, ...]:
    """Return 2^8 to 2^23 elements, each plus an odd kick, in bytes."""
    return tuple([((1 << power) + _KICK) * itemsize for power in range(8, 24)])


def parse_names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a list such as `auto,mpi`, each once; raise `ConfigError` for one that is not `known`.

    >>> parse_names("--impl", "auto,mpi", IMPLS)
    ('auto', 'mpi')
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name or repr(name)}: expected some of {', '.join(known)}")
    return names


def writable(option: str, path: Path | None) -> str | None:
    """Return the absolute path of a file; raise `ConfigError` before the run if the file cannot be written."""
    if path is None:
        return None
    absolute = path.absolute()
    there = absolute if absolute.exists() else absolute.parent
    if absolute.is_dir() or absolute.parent.is_file() or not os.access(there, os.W_OK):
        raise ConfigError(f"{option} {path}: expected a file that can be written")
    return str(absolute)
