"""How full buckets are reduced: what torch calls a communication hook."""

from __future__ import annotations

from typing import Any, Literal

from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.nn.buckets import Bucket


class CommHook:
    """Reduces the buckets of one net; on the loop, in an order that is the same on every rank."""

    nbytes = 0
    """What this rank has given to collectives so far, in bytes."""

    def reduce(self, bucket: Bucket) -> Handle[Any]:
        """Return the handle of the reduction of `bucket.data`, in place; raise what the communicator raises."""
        raise NotImplementedError

    def settle(self, bucket: Bucket) -> None:
        """Bucket is reduced on all ranks, and its gradients are given out; not called where a pass failed."""

    async def aclose(self) -> None:
        """Give back what it has; nothing is under way."""

    def abort(self) -> None:
        """Give it back at once: the net was given up."""


class Allreduce(CommHook):
    """The sum or mean of all ranks, as it is."""

    def __init__(self, data: Communicator, op: Literal["mean", "sum"]) -> None:
        self._data = data
        self._op = op

    def reduce(self, bucket: Bucket) -> Handle[Any]:
        """See `CommHook`."""
        self.nbytes += bucket.nbytes
        return self._data.allreduce(bucket.data, self._op)
