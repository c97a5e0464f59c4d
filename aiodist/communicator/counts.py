"""Counts of the operations of one communicator by kind, for metrics.

The log counts collectives when it replaces old records. Messages and named operations are counted here. Each number has
one writer at a time, and any thread reads.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from aiodist.communicator.oplog import OpLog
from aiodist.handles import Account


class Count(NamedTuple):
    """Numbers of one kind of operation, such as "allreduce"."""

    operations: int = 0
    """Number of issued operations."""
    nbytes: int = 0
    """Bytes of this rank's tensors; of a receive, the bytes that have arrived."""
    waited: float = 0.0
    """Seconds of all awaits and blocked threads, summed."""


class Counts:
    """The counts of one communicator, from now on."""

    def __init__(self, oplog: OpLog, account: Account) -> None:
        oplog.counts()
        self._oplog = oplog
        self._waits = account.waits = {}
        self.issued: Counter[str] = Counter()
        """Number of messages and named operations by kind. The issuing thread writes."""
        self.nbytes: Counter[str] = Counter()
        """Their bytes. The issuing thread writes, for receives the holder of the transport lock."""

    def read(self) -> dict[str, Count]:
        """Return the counts by kind (any thread). The copy of a dict is atomic."""
        found = {kind: Count(*numbers) for kind, numbers in self._oplog.counts().items()}
        added = [(kind, Count(operations)) for kind, operations in dict(self.issued).items()]
        added += [(kind, Count(0, nbytes)) for kind, nbytes in dict(self.nbytes).items()]
        added += [(kind, Count(0, 0, seconds)) for (kind, _), seconds in self._waits.copy().items()]
        for kind, (operations, nbytes, waited) in added:
            before = found.get(kind, Count())
            found[kind] = Count(before.operations + operations, before.nbytes + nbytes, before.waited + waited)
        return found
