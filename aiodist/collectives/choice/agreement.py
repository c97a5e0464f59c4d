"""All ranks have the same table: rank 0's at the start, and then every edit of it compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch

from aiodist.backends.base import Operation
from aiodist.collectives.choice.table import Edit, parse_edit
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.program import Program
from aiodist.control import Channel
from aiodist.errors import BackendUnavailable, ConfigError, MismatchError

__all__ = ["compared", "rank_zeros"]

_FRAME_BYTES = 192
_KEY = "selector/table"


def compared(p: Primitives, edit: Edit, differ: Callable[[MismatchError], None]) -> Program[None]:
    """Return once all ranks have made the same edit; else call `differ` with what shows two sides, and raise it."""
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
    packed = as_tensor(str(edit).encode())
    frame[: packed.numel()] = packed
    everything = torch.empty(_FRAME_BYTES * p.ep.size, dtype=torch.uint8)
    yield from p.run(Operation("allgather", frame, everything, counts=[_FRAME_BYTES] * p.ep.size))
    texts = [as_bytes(part).rstrip(b"\0").decode() for part in everything.split(_FRAME_BYTES)]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
    if other:
        sides = "; ".join(f"rank {rank}: {texts[rank]}" for rank in (0, other))
        error = MismatchError(f"ranks edit the selector differently: {sides}")
        differ(error)
        raise error


async def rank_zeros(channel: Channel, read: Callable[[], Sequence[Edit]], seconds: float) -> list[Edit]:
    """Return what `read` returns on rank 0, on every rank; what it raises there of ours is raised on all."""
    if channel.rank == 0:
        told: dict[str, object] = {}
        try:
            told["edits"] = [str(edit) for edit in read()]
        except (ConfigError, BackendUnavailable) as error:
            told = {"error": str(error), "config": isinstance(error, ConfigError)}
        await channel.set(_KEY, json.dumps(told).encode())
    else:
        told = json.loads(await channel.get(_KEY, timeout=seconds))
    if "error" in told:
        kind = ConfigError if told["config"] else BackendUnavailable
        raise kind(str(told["error"]))
    edits = told["edits"]
    assert isinstance(edits, list)
    return [parse_edit(text) for text in edits]
