"""Leftovers at the end: messages that no rank received, and communicators that the program never closed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from sys import _getframe
from typing import Any

import torch

from aiodist.communicator.base import parts_of
from aiodist.handles import Origin
from aiodist.handles.origin import described, is_ours

_SHOWN = 8
_OWN = "/aiodist/communicator/"


def made_by_program(origin: Origin | None) -> Origin | None:
    """Return `origin` where the program itself made the call of this package below here; None where aiodist did."""
    frame = _getframe(1)
    while frame.f_back is not None and _OWN in frame.f_code.co_filename:
        frame = frame.f_back
    return None if is_ours(frame.f_code.co_filename) else origin


def warn_of_open(made: Iterable[tuple[str, Origin]]) -> None:
    """Warn of communicators that the end of the world closes, since the program did not."""
    for name, origin in made:
        text = f"communicator {name!r}, made at {origin}, was never closed: expected `await comm.aclose()`"
        warnings.warn_explicit(text, ResourceWarning, origin.filename, origin.lineno)


async def unreceived(coll: Any, seconds: float) -> list[str]:  # noqa: ANN401
    """Return what this rank sent that no rank received, and what it never received, as words; warn of each.

    All ranks call it when every message has come. A warning is at the line of the send, and at the rank that received
    nothing at the line that closes.
    """
    mailbox: Any = parts_of(coll).dispatcher.mailbox
    mine = mailbox.leftovers()
    if coll.size > 1 and not int((await coll.allreduce(torch.tensor([len(mine)], device="cpu"), timeout=seconds))[0]):
        return []
    found = await coll.allgather_object(mine, timeout=seconds)
    sent = {
        (rank, number): (what, mailbox.line_of(number))
        for rank, left in enumerate(found)
        for source, number, what in left
        if source == coll.rank
    }
    called = {key: line and described(line[0], line[1], Origin(*line[2:])) for key, (_, line) in sent.items()}
    told = await coll.allgather_object(called, timeout=seconds)
    words = []
    for (rank, number), (what, line) in sent.items():
        text = f"rank {rank} never received a message on communicator {coll.name!r}: {what}"
        words.append(_by(text, called[rank, number]))
        if line is not None:
            origin = Origin(*line[2:])
            warnings.warn_explicit(words[-1], RuntimeWarning, origin.filename, origin.lineno)
    if mine:
        came = [_by(text, told[source].get((coll.rank, number))) for source, number, text in mine]
        words.append(_never_received(coll, came))
    return words


def _by(text: str, called: str | None) -> str:
    return text if called is None else f"{text} by {called}"


def _never_received(coll: Any, came: list[str]) -> str:  # noqa: ANN401
    more = f" and {len(came) - _SHOWN} more" if len(came) > _SHOWN else ""
    what = f"{len(came)} message{'s' * (len(came) > 1)}: {', '.join(came[:_SHOWN])}{more}"
    text = f"communicator {coll.name!r} is closed, and rank {coll.rank} never received {what}"
    line = Origin.here()
    warnings.warn_explicit(text, RuntimeWarning, line.filename, line.lineno)
    return text
