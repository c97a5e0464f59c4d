"""`agree`: one exchange of the facts and errors of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, takewhile
from typing import Any

from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.communicator import Communicator
from aiodist.control import disagreement
from aiodist.errors import MismatchError, PeerLost, RemoteError
from aiodist.world.tracebacks import cause_in, folded


class _Missing:
    """A key or item that a rank lacks."""

    def __repr__(self) -> str:
        return "(missing)"


_MISSING = _Missing()
_TEXT_LENGTH = 200
"""Characters of a value in the text of an error, from shortly before the first difference."""


async def agree(
    coll: Communicator | None, what: str, fact: object = None, *, same: object = None, error: Exception | None = None
) -> list[Any]:
    """Return the fact of every rank, by rank; collective.

    A rank that failed takes part with its error, so that no other rank waits.

    Args:
        coll: The ranks; None is this rank alone.
        what: The subject, for texts of errors.
        fact: A value in JSON's types. Tuples arrive as lists.
        same: A value in JSON's types that must be equal on all ranks, apart from the order of keys.
        error: The error of this rank, or None. `fact` and `same` do not count with an error.

    Raises:
        Exception: `error`, on its rank; `TypeError` or `ValueError` if `fact` or `same` cannot be written as JSON, such
            as a tensor, a cycle, or a dict with keys of several types.
        RemoteError: On the other ranks, with the traceback of the first rank that failed.
        MismatchError: On all ranks, if `same` differs; the text has the first difference, with the value of each rank.
        PeerLost: If a rank is lost; the cause is `error`, which may follow from the loss.

    Cost: an allgather of the facts as JSON, with a hash of `same`. Only a difference costs an allgather of `same`.
    """
    rank, comm = (None, None) if coll is None else (coll.rank, coll.name)
    digest = ""
    if error is None:
        try:
            json.dumps(fact)
            digest = sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
        except Exception as unsuitable:  # noqa: BLE001  - raised below, when the other ranks know
            unsuitable.add_note(f"JSON cannot hold the facts of {what}")
            error = unsuitable
    failure = None if error is None else folded(error, programs=True)
    try:
        told = await _gather(coll, [None if error else fact, digest, failure])
    except PeerLost as lost:
        raise lost from error
    except Exception as lost:
        if error is not None:
            raise error from lost
        raise
    if error is not None:
        raise error
    for other, (_, _, traceback) in enumerate(told):
        if traceback is not None:
            text = f"rank {other} failed in {what}: {cause_in(traceback)}"
            raise RemoteError(text, raised_by=other, traceback=traceback, rank=rank)
    if len({digest for _, digest, _ in told}) > 1:
        path, texts = _difference(await _gather(coll, same)) or ("values", ["unlike the others"] * len(told))
        raise MismatchError(disagreement(f"{path} of {what}", texts), rank=rank, comm=comm)
    return [each for each, _, _ in told]


async def _gather(coll: Communicator | None, value: object) -> list[Any]:
    code = json.dumps(value).encode()
    codes = [code] if coll is None else map(as_bytes, await coll.allgather(as_tensor(code)))
    return [json.loads(each) for each in codes]


def _difference(values: Sequence[Any], path: str = "") -> tuple[str, list[str]] | None:
    """Return the path of the first difference between JSON values, with the text of each value there.

    >>> _difference([{"lr": 1.0, "names": ["a", "b"]}, {"lr": 1.0, "names": ["a"]}])
    ('names/1', ['b', '(missing)'])
    """
    tables = [dict(enumerate(value)) if isinstance(value, list) else value for value in values]
    if len({type(value) for value in values}) > 1 or not isinstance(tables[0], dict):
        if len({repr(value) for value in values}) == 1:
            return None
        texts = [str(value) for value in values]
        alike = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False)))
        start = max(0, alike - _TEXT_LENGTH // 2)
        return path, [("…" if start else "") + text[start : start + _TEXT_LENGTH] for text in texts]
    for key in dict.fromkeys(chain(*tables)):
        inside = [table.get(key, _MISSING) for table in tables]
        if found := _difference(inside, f"{path}/{key}" if path else str(key)):
            return found
    return None
