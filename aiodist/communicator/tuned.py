"""The table that a world starts with: a file that was asked for, or what was measured for such a world."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist.collectives.choice.table import Edit
from aiodist.collectives.choice.tablefile import cache_folder, conditions, read_edits, tuned_path

if TYPE_CHECKING:
    from aiodist.communicator import Communicator

__all__ = ["conditions_of", "edits_at_start"]


def edits_at_start(world: Communicator, asked: str | os.PathLike[str] | None) -> Sequence[Edit]:
    """Return what the file `asked` for says, with None what was measured, or nothing where nothing was.

    "none" is neither. Raises what `read_edits` does.
    """
    if asked == "none" or (asked is None and (world.size == 1 or not cache_folder().is_dir())):
        return []
    here = conditions_of(world)
    path = tuned_path(here) if asked is None else Path(asked)
    if asked is None and not path.exists():
        return []
    return read_edits(path, here, world.parts.repertoire)


def conditions_of(world: Communicator) -> dict[str, str]:
    """Return what the speeds of `world` depend on."""
    topology = world.topology
    return conditions(
        world.parts.repertoire, [len(topology.ranks_on(host)) for host in topology.hosts], _library(world)
    )


def _library(world: Communicator) -> str:
    """Return the library that carries it, with its version where that is not torch's."""
    if world.backend != "mpi":
        return world.backend
    from aiodist.backends.mpi import library_version

    return library_version().partition(",")[0]
