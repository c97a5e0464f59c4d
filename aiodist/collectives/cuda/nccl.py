"""NCCL among the implementations: it is opened by the first operation that needs it, and called in that of issue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from aiodist.backends.base import Operation, Wanted
from aiodist.backends.nccl import LaunchSlot, NcclGroup, NcclNative, supports
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.collectives.operations import broadcast_bytes
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.program import Endpoint, Implementation, Program, run
from aiodist.collectives.scheduled import on_lane

__all__ = ["Nccl"]

_ID_LANE = 1  # its messages and those of the operation that needs it go side by side


class Nccl(Implementation):
    """See `Implementation`; `slot_of` knows the group of an operation on such tensors, and its slot there."""

    name = "nccl"
    compares = True  # the device is not held up

    def __init__(self, slot_of: Callable[[int, Tensor], tuple[NcclGroup, LaunchSlot]], repertoire: Repertoire) -> None:
        """`repertoire` carries the id from rank 0 to the others."""
        self._slot_of = slot_of
        self._repertoire = repertoire

    def lacks(self, wanted: Wanted) -> str | None:
        """Return why it cannot do that, None where it can."""
        if supports(wanted.operation, wanted.kind, wanted.op):
            return None
        return f"NCCL has no {wanted}"

    def run(self, ep: Endpoint, operation: Operation) -> Program[None]:
        """Queue it at its place in the launch order."""
        yield [lambda done: self._native(ep, operation.t).start(operation, done)]

    def _native(self, ep: Endpoint, t: Tensor) -> NcclNative:
        group, slot = self._slot_of(ep.tag, t)
        if not group.opened:  # in launch order: all ranks have the id carried by the messages of the same operation
            slot.run(partial(group.open, partial(self._exchange, ep)))
        return NcclNative(group, slot)

    def _exchange(
        self, ep: Endpoint, mine: bytes | None, then: Callable[[bytes | None, BaseException | None], None]
    ) -> None:
        """Carry rank 0's message to the others, by way of the host."""
        p = Primitives(on_lane(ep, _ID_LANE), self._repertoire, "tree", together=True)
        told = None if mine is None else as_tensor(mine)

        def finish(result: Tensor | None, error: BaseException | None) -> None:
            then(None if result is None else as_bytes(result), error)

        run(broadcast_bytes(p, told, 0), finish)
