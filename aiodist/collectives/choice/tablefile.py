"""Table files of the user, and files that `aiodist tune` measured for these hosts and versions.

A line is an edit (see `choice.table`) or a condition such as `made-for torch 2.13.0`. A `#` begins a comment. A file is
used as a whole or not at all. An invalid line, two lines about the same size, or a condition that is not met raises a
`ConfigError` with the file, the line and the cause.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiodist.collectives.choice.table import Edit, LimitEdit, RangeEdit, parse_edit
from aiodist.collectives.columns import columns
from aiodist.collectives.implementations import Repertoire
from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.topology import Topology

if TYPE_CHECKING:
    from aiodist.control import Channel

_MADE_FOR = "made-for"
_KEY = "selector/table"  # key of rank 0's table for the others
_SHOWN = 120


async def edits_at_start(
    asked: str | os.PathLike[str] | None, channel: Channel, world: Repertoire, topology: Topology, *, seconds: float
) -> list[Edit]:
    """Return, on every rank, the edits of rank 0's file.

    `asked` is the file's path, or "none" for no file. None asks for the file that was measured for these hosts, if any.
    All ranks raise the errors of `read_edits` on rank 0. The other ranks wait for rank 0 for at most `seconds`.
    """
    if channel.rank == 0:
        answer: dict[str, Any] = {}
        try:
            answer["edits"] = [str(edit) for edit in _edits_here(asked, world, topology)]
        except (ConfigError, BackendUnavailable) as error:
            answer = {"error": str(error), "config": isinstance(error, ConfigError)}
        await channel.set(_KEY, json.dumps(answer).encode())
    else:
        answer = json.loads(await channel.get(_KEY, timeout=seconds))
    if "error" in answer:
        raise (ConfigError if answer["config"] else BackendUnavailable)(answer["error"])
    return [parse_edit(text) for text in answer["edits"]]


def _edits_here(asked: str | os.PathLike[str] | None, world: Repertoire, topology: Topology) -> Sequence[Edit]:
    if asked == "none" or (asked is None and (len(topology.host_of) == 1 or not cache_folder().is_dir())):
        return []
    here = conditions(world, topology)
    path = tuned_path(here) if asked is None else Path(asked)
    return [] if asked is None and not path.exists() else read_edits(path, here, world)


def read_edits(path: Path, here: Mapping[str, str], repertoire: Repertoire) -> list[Edit]:
    """Return the edits of a file. `here` has the conditions of this job.

    Raises ConfigError for an invalid file or a condition that is not met, and `BackendUnavailable` for an entry whose
    implementation is not available. Both errors name the line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"selector {path}: {error.strerror if isinstance(error, OSError) else error}") from error
    found: list[tuple[int, Edit]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"{path}:{number}"
        try:
            if words.split()[0] == _MADE_FOR:
                _check_condition(words, here)
                continue
            edit = parse_edit(words)
            _check_new(edit, found)
        except ValueError as error:
            raise ConfigError(f"{where}: {str(error)[: _SHOWN * 4]}") from error
        if (reason := repertoire.unavailable(edit)) is not None:
            raise BackendUnavailable(f"{where}: {reason}")
        found.append((number, edit))
    return [edit for _, edit in found]


def _check_condition(words: str, here: Mapping[str, str]) -> None:
    parts = words.split(maxsplit=2)
    if len(parts) < 3 or parts[1] not in here:
        raise ValueError(f"{words!r}: expected {_MADE_FOR} NAME VALUE, the name one of {', '.join(here)}")
    if here[parts[1]] != parts[2]:
        raise ValueError(f"made for {parts[1]} {parts[2]}, but here it is {here[parts[1]]}: aiodist tune makes another")


def _check_new(edit: Edit, found: Sequence[tuple[int, Edit]]) -> None:
    for number, other in found:
        if isinstance(edit, RangeEdit) and isinstance(other, RangeEdit) and edit.overlaps(other):
            raise ValueError(f"{edit} and {other} (line {number}) are about the same sizes")
        if isinstance(edit, LimitEdit) and isinstance(other, LimitEdit) and edit.name == other.name:
            raise ValueError(f"{edit}: line {number} has set it already")


def render(edits: Sequence[Edit], here: Mapping[str, str], title: str) -> str:
    """Return the text of a file with these edits, made for `here`."""
    lines = [f"# {line}" for line in title.splitlines()]
    lines += [f"{_MADE_FOR} {name} {value}" for name, value in here.items()]
    ranges = [str(edit).split() for edit in edits if isinstance(edit, RangeEdit)]
    lines.append(columns(("device", "hosts", "operation", "from", "below", "implementation"), ranges))
    lines += [str(edit) for edit in edits if isinstance(edit, LimitEdit)]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file atomically. Raise ConfigError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(fd, "w") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


# --- measured tables -------------------------------------------------------------------------------------------


def conditions(repertoire: Repertoire, topology: Topology) -> dict[str, str]:
    """Return the conditions of a measurement: topology, versions, implementations, cores of this host."""
    ranks_per_host = [len(topology.ranks_on(host)) for host in topology.hosts]
    library = repertoire.carrier
    if library == "mpi":  # the other libraries have the version of torch or aiodist
        from aiodist.backends.mpi import library_version

        library = library_version().partition(",")[0]
    return {
        "aiodist": _version("aiodist"),
        "torch": _version("torch"),
        "library": library,
        "hosts": str(len(ranks_per_host)),
        "ranks-per-host": ",".join(map(str, ranks_per_host)),
        "cores": str(os.cpu_count()),
        "implementations": ",".join(repertoire.all),
    }


def cache_folder() -> Path:
    """Return the folder of the tables that `aiodist tune` writes for this user."""
    import platformdirs

    return platformdirs.user_cache_path("aiodist") / "selector"


def tuned_path(here: Mapping[str, str]) -> Path:
    """Return the path of the table for these conditions, which need not exist."""
    digest = hashlib.sha256("\n".join(f"{name} {value}" for name, value in here.items()).encode())
    return cache_folder() / f"{digest.hexdigest()[:16]}.txt"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"
