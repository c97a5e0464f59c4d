"""The leaders of the hosts compare what they have issued, before anything depends on it.

A dissemination barrier whose messages carry the word of the operation (Hensgen, Finkel and Manber, Two algorithms for
barrier synchronization, 1988): in step k leader i sends to leader i + 2^k and hears from leader i - 2^k, modulo h of
them. A leader that has met another word than its own says so in all that it sends from then on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aiodist.backends.base import Transport, tag_of
from aiodist.backends.words import merged
from aiodist.collectives.program import Endpoint, Program, run
from aiodist.collectives.scheduled import LANE_TAGS, SubEndpoint
from aiodist.schedules.plan import MAX_LANES

__all__ = ["Between"]

_FRAME = struct.Struct("<Q?")  # word, whether anybody differs
_LANE = MAX_LANES * LANE_TAGS  # above the lanes of schedules


@dataclass(eq=False)
class Between:
    """This leader among the others."""

    _transport: Transport
    _leaders: Sequence[int]
    """Ranks of the transport's, of which this is one."""
    _broken: Callable[[BaseException], None] = lambda _: None
    """Told of what its messages meet."""

    def compare(self, seq: int, word: int, differs: bool, told: Callable[[bool], None]) -> None:
        """Call `told(whether any leader differs)`, which may be before all have come; `differs`: this one's host does.

        With the transport lock held, now and later.
        """
        ep = SubEndpoint(Endpoint(self._transport, tag_of(seq) + _LANE), self._leaders)
        run(_compare(ep, word, differs, told), self._over)

    def _over(self, _: None, error: BaseException | None) -> None:
        if error is not None:
            self._broken(error)


def _compare(ep: Endpoint, word: int, differs: bool, told: Callable[[bool], None]) -> Program[None]:
    if differs:
        told(True)
    distance = 1
    while distance < ep.size:
        mine = torch.frombuffer(bytearray(_FRAME.pack(word, differs)), dtype=torch.uint8)
        heard = bytearray(_FRAME.size)
        theirs = torch.frombuffer(heard, dtype=torch.uint8)  # on the host, also where the default device is another
        yield [ep.recv(theirs, (ep.rank - distance) % ep.size), ep.send(mine, (ep.rank + distance) % ep.size)]
        seen, flag = _FRAME.unpack(heard)
        both = merged(word, seen)
        word = word if both is None else both
        if (flag or both is None) and not differs:
            differs = True
            told(True)
        distance *= 2
    if not differs:
        told(False)
