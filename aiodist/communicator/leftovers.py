"""Warns at the end of messages without a receive, and of communicators that the program never closed."""

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
    """Return `origin` if the program called this package, or None if another part of aiodist did."""
    frame = _getframe(1)
    while frame.f_back is not None and _OWN in frame.f_code.co_filename:
        frame = frame.f_back
    return None if is_ours(frame.f_code.co_filename) else origin


def warn_of_open(made: Iterable[tuple[str, Origin]]) -> None:
    """Warn of communicators that the program did not close before the end of the world."""
    for name, origin in made:
        text = f"communicator {name!r}, made at {origin}, was never closed: expected `await comm.aclose()`"
        warnings.warn_explicit(text, ResourceWarning, origin.filename, origin.lineno)


async def unreceived(coll: Any, seconds: float) -> list[str]:  # noqa: ANN401
    """Return and warn of the unreceived messages from and to this rank, as texts.

    All ranks make this call after every message has arrived. The sender's warning has the line of the send, the
    receiver's warning the line of the close.
    """
    mailbox: Any = parts_of(coll).dispatcher.mailbox
    mine = mailbox.leftovers()
    if coll.size > 1 and not int((await coll.allreduce(torch.tensor([len(mine)], device="cpu"), timeout=seconds))[0]):
        return []
    found = await coll.allgather_object(mine, timeout=seconds)
    sent = {
        (rank, number): (what, mailbox.lines.get(number))
        for rank, left in enumerate(found)
        for source, number, what in left
        if source == coll.rank
    }
    called = {key: line and described(line[0], line[1], Origin(*line[2:])) for key, (_, line) in sent.items()}
    calls = await coll.allgather_object(called, timeout=seconds)
    texts = []
    for (rank, number), (what, line) in sent.items():
        text = f"rank {rank} never received a message on communicator {coll.name!r}: {what}"
        texts.append(_by(text, called[rank, number]))
        if line is not None:
            origin = Origin(*line[2:])
            warnings.warn_explicit(texts[-1], RuntimeWarning, origin.filename, origin.lineno)
    if mine:
        arrived = [_by(text, calls[source].get((coll.rank, number))) for source, number, text in mine]
        texts.append(_never_received(coll, arrived))
    return texts


def _by(text: str, called: str | None) -> str:
    return text if called is None else f"{text} by {called}"


def _never_received(coll: Any, arrived: list[str]) -> str:  # noqa: ANN401
    more = f" and {len(arrived) - _SHOWN} more" if len(arrived) > _SHOWN else ""
    what = f"{len(arrived)} message{'s' * (len(arrived) > 1)}: {', '.join(arrived[:_SHOWN])}{more}"
    text = f"communicator {coll.name!r} is closed, and rank {coll.rank} never received {what}"
    line = Origin.here()
    warnings.warn_explicit(text, RuntimeWarning, line.filename, line.lineno)
    return text
