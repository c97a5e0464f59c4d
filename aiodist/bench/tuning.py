"""`aiodist tune`: measures every implementation and writes a table of the best ones; loads no torch.

The ranks run `aiodist.bench.tuning_worker`. The table goes to the user's cache. The next `init` with the same ranks,
hosts and versions reads it (see `aiodist.collectives.choice.tablefile`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist.bench.plan import Errand, parse_names, parse_sizes, writable
from aiodist.types import OPERATIONS

if TYPE_CHECKING:
    from aiodist.launch.hosts import Host

_SIZES = tuple(1 << power for power in range(8, 27, 2))  # 256 B to 64 MiB
_QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20)
_REPEAT, _QUICK_REPEAT = 15, 3


@dataclass(frozen=True)
class Tuning(Errand):
    """The plan of `aiodist tune`."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of one rank's input, in ascending order
    repeat: int  # samples of each figure
    output: str | None = None  # None is the cache
    dry: bool = False  # write nothing


def tuning(operations: str | None, sizes: str | None, output: Path | None, *, quick: bool, dry: bool) -> Tuning:
    """Return the plan for the options; raise `ConfigError` for invalid ones."""
    return Tuning(
        operations=OPERATIONS if operations is None else parse_names("--operations", operations, OPERATIONS),
        sizes=(_QUICK_SIZES if quick else _SIZES) if sizes is None else tuple(sorted(set(parse_sizes(sizes, 4)))),
        repeat=_QUICK_REPEAT if quick else _REPEAT,
        output=writable("--output", output),
        dry=dry,
    )


def run(todo: Tuning, ranks: int, mpi: str, hosts: Sequence[Host] = (), rsh: str = "", iface: str = "") -> int:
    """Measure on `ranks` ranks of this host, or of `hosts`; return the exit code."""
    started = todo.start("aiodist.bench.tuning_worker", ranks, mpi=mpi, hosts=tuple(hosts), rsh=rsh, iface=iface)
    return asyncio.run(started)
