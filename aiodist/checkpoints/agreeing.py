"""How ranks agree on a checkpoint: each tells how its part went, and all raise where one failed."""

from __future__ import annotations

import json
import traceback
from hashlib import sha256
from typing import Any, NamedTuple

from aiodist.checkpoints.values import Json
from aiodist.communicator import Communicator
from aiodist.errors import MismatchError, RemoteError


class RankReport(NamedTuple):
    """What a rank tells the others."""

    value: Any
    error: tuple[str, str] | None
    """What it raised, as text, and the traceback."""


async def exchange(coll: Communicator, what: str, value: object, error: BaseException | None = None) -> list[Any]:
    """Return what each rank gives, by rank.

    If this rank gives an `error`, it is raised here, and on the other ranks a `RemoteError`, which names this one.
    """
    told = None if error is None else (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
    reports = [RankReport(*report) for report in await coll.allgather_object(RankReport(value, told))]
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report.error is not None:
            text, trace = report.error
            raise RemoteError(f"{what}: rank {rank} failed: {text}", raised_by=rank, traceback=trace, rank=coll.rank)
    return [report.value for report in reports]


def digest(said: Json) -> bytes:
    """Return a hash of JSON."""
    return sha256(json.dumps(said, sort_keys=True).encode()).digest()


async def check_alike(coll: Communicator, said: Json, digests: list[bytes]) -> None:
    """Raise `MismatchError` on all ranks unless all say the same; `digests` are those of what they say."""
    if len(set(digests)) == 1:
        return
    theirs = await coll.broadcast_object(said)
    found = await coll.allgather_object(difference(theirs, said))
    rank = next(rank for rank, differs in enumerate(found) if differs)
    path, first, other = found[rank]
    raise MismatchError(
        f"ranks disagree on what a checkpoint has once for all of them: {path} is {first} on rank 0, {other} on rank "
        f"{rank}; what each rank has of its own goes to own="
    )


def difference(theirs: Json, mine: Json, path: str = "") -> tuple[str, str, str] | None:
    """Return where two JSON values differ, and what each has there; None where they are alike."""
    if type(theirs) is type(mine) and isinstance(theirs, dict):
        for key in [*theirs, *(key for key in mine if key not in theirs)]:
            if key not in theirs or key not in mine:
                return (f"{path}/{key}", "there", "missing") if key in theirs else (f"{path}/{key}", "missing", "there")
            if (found := difference(theirs[key], mine[key], f"{path}/{key}")) is not None:
                return found
        return None
    if type(theirs) is type(mine) and isinstance(theirs, list) and len(theirs) == len(mine):
        for number, (a, b) in enumerate(zip(theirs, mine, strict=True)):
            if (found := difference(a, b, f"{path}/{number}")) is not None:
                return found
        return None
    return None if type(theirs) is type(mine) and theirs == mine else (path, f"{theirs!r:.60}", f"{mine!r:.60}")
