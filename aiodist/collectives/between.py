"""Comparison of issued operations by messages: between the leaders of the hosts, or between all ranks.

A dissemination barrier whose messages carry the word of the operation (Hensgen, Finkel and Manber, Two algorithms for
barrier synchronization, 1988): in step k rank i sends to rank i + 2^k and hears from rank i - 2^k, modulo as many as
there are. A rank that has met another word than its own says so in all that it sends from then on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aiodist.backends.base import Transport, ignore
from aiodist.backends.words import merged
from aiodist.collectives.endpoint import Endpoint
from aiodist.collectives.scheduled import LANE_TAGS, SubEndpoint
from aiodist.handles.kernel import run, transfers
from aiodist.schedules.plan import MAX_LANES

_FRAME = struct.Struct("<Q?")  # word, whether anybody differs
_LANE = MAX_LANES * LANE_TAGS  # above the lanes of schedules


@dataclass(eq=False)
class Between:
    """This rank among the others."""

    _transport: Transport
    _ranks: Sequence[int]
    """Those of the transport's that compare, of which this is one."""
    _broken: Callable[[BaseException], None] = lambda _: None
    """Told of what its messages meet."""

    def compare(
        self,
        tag: int,
        word: int,
        *,
        differs: bool = False,
        told: Callable[[bool], object] = ignore,
        over: Callable[[bool], object] = ignore,
    ) -> None:
        """Compare the `word` of the operation that has `tag`; `differs`: the ranks that this one stands for do.

        Call `told(whether any rank differs)`, which may be before all have come, and `over` with the same when they
        have and nothing of it is on its way here. With the transport lock held, now and later.
        """
        ep = SubEndpoint(Endpoint(self._transport, tag + _LANE), self._ranks)

        def finish(found: bool | None, error: BaseException | None) -> None:
            if error is not None:
                self._broken(error)
            else:
                over(bool(found))

        run(_compare(ep, word, differs, told), finish)


async def _compare(ep: Endpoint, word: int, differs: bool, told: Callable[[bool], object]) -> bool:
    if differs:
        told(True)
    distance = 1
    while distance < ep.size:
        mine = torch.frombuffer(bytearray(_FRAME.pack(word, differs)), dtype=torch.uint8)
        heard = bytearray(_FRAME.size)
        theirs = torch.frombuffer(heard, dtype=torch.uint8)  # on the host, also where the default device is another
        before, after = (ep.rank - distance) % ep.size, (ep.rank + distance) % ep.size
        await transfers([ep.recv(theirs, before), ep.send(mine, after)])
        seen, flag = _FRAME.unpack(heard)
        both = merged(word, seen)
        word = word if both is None else both
        if (flag or both is None) and not differs:
            differs = True
            told(True)
        distance *= 2
    if not differs:
        told(False)
    return differs
