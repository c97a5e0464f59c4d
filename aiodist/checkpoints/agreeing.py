"""How ranks agree: each tells how its part went, and all raise where one failed; what must be alike is compared."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from hashlib import sha256
from typing import TypeVar, cast

from aiodist.checkpoints.values import Json
from aiodist.communicator import Communicator
from aiodist.errors import MismatchError, RemoteError
from aiodist.world.tracebacks import cause_in, folded

T = TypeVar("T")


async def exchange(coll: Communicator | None, what: str, value: T, error: Exception | None = None) -> list[T]:
    """Return what each rank gives, by rank; None for `coll` is this rank alone.

    Raises the `error` that this rank gives; where another rank gives one a `RemoteError`, which names that rank.
    Collective, one allgather of objects.
    """
    mine = value, None if error is None else folded(error, programs=True)
    try:
        told = [mine] if coll is None else await coll.allgather_object(mine)
    except Exception as lost:
        if error is not None:
            raise error from lost
        raise
    if error is not None:
        raise error
    for rank, (_, trace) in enumerate(told):
        if trace is not None:
            text = f"rank {rank} failed in {what}: {cause_in(trace)}"
            raise RemoteError(text, raised_by=rank, traceback=trace, rank=None if coll is None else coll.rank)
    return [value for value, _ in told]


async def together(coll: Communicator, what: str, mine: Awaitable[T]) -> list[T]:
    """Return what `mine` comes to on each rank, by rank; raises as `exchange`."""
    value, error = None, None
    try:
        value = await mine
    except Exception as raised:  # noqa: BLE001  - told to all
        error = raised
    return await exchange(coll, what, cast(T, value), error)


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
    if isinstance(theirs, list) and isinstance(mine, list):
        theirs, mine = dict(enumerate(theirs)), dict(enumerate(mine))
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in theirs | mine:
            where = f"{path}/{key}"
            if key not in theirs or key not in mine:
                return (where, "there", "missing") if key in theirs else (where, "missing", "there")
            if (found := difference(theirs[key], mine[key], where)) is not None:
                return found
        return None
    return None if type(theirs) is type(mine) and theirs == mine else (path, f"{theirs!r:.60}", f"{mine!r:.60}")
