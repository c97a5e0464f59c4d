"""What is to be measured: sizes, implementations, peers; travels to the ranks as JSON and imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiodist.bench.errand import Errand
from aiodist.errors import ConfigError

BACKENDS = ("mpi", "gloo", "local")
SCHEDULES = ("ring", "doubling", "halving", "tree", "chain", "bruck", "direct")
IMPLS = ("auto", "arena", "shm", "hierarchical", "leaders", *SCHEDULES, *BACKENDS)
PEERS = ("mpi4py", "gloo", "copy")
LOOPS = ("auto", "asyncio", "uvloop")
DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of each dtype."""
_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_KICK = 13  # an odd number more than a power of two: nothing divides evenly, nothing stays aligned


@dataclass(frozen=True)
class Plan(Errand):
    """One run of a benchmark."""

    op: str
    ranks: int
    impls: tuple[str, ...]
    peers: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    """Bytes; None: those of the benchmark."""
    module: str = "aiodist.bench.collectives"
    """Where `async def measure(session) -> list[Record]` is."""
    targets: str | None = None
    """Where `verdicts(records) -> list[Verdict]` is, for speeds to reach."""
    dtype: str = "float32"
    repeat: int | None = None
    """Samples of each figure; None: as many as the size allows."""
    loop: str = "auto"
    json: str | None = None
    plot: str | None = None
    busy: bool = False
    """A process spins on every core meanwhile."""
    width: int = 120
    colour: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)
    """What was said by options that only this benchmark has."""


def parse_sizes(text: str, itemsize: int) -> tuple[int, ...]:
    """Return bytes from a list such as `1024,64MiB`, each a multiple of `itemsize`.

    >>> parse_sizes("64, 1KiB,2kB,1.5MiB", 4)
    (64, 1024, 2000, 1572864)
    """
    return tuple([_parse_size(part.strip(), itemsize) for part in text.split(",")])


def _parse_size(text: str, itemsize: int) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"--sizes {text!r}: expected bytes such as 1024, 64KiB, 64MiB or 1GB")
    nbytes = float(match[1]) * unit
    if nbytes < itemsize or nbytes % itemsize:
        raise ConfigError(f"--sizes {text}: expected a multiple of {itemsize} bytes, one element, and at least one")
    return int(nbytes)


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


def default_sizes(itemsize: int) -> tuple[int, ...]:
    """Return 2^8 to 2^23 elements, each plus an odd kick, in bytes."""
    return tuple([((1 << power) + _KICK) * itemsize for power in range(8, 24)])
