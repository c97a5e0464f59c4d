"""The reductions and broadcasts that an implementation may have natively, chosen per call.

Every function here takes flat tensors in wire dtype, with counts that all ranks know already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, dtype

from aiodist.collectives import direct
from aiodist.collectives.program import Endpoint, Program
from aiodist.types import ReduceOp

__all__ = ["Primitives", "implementations"]


def implementations(native_name: str | None) -> tuple[str, ...]:
    """Return the names that `impl=` takes beside "auto"."""
    return ("direct",) if native_name is None else (native_name, "direct")


class Primitives:
    """Runs each primitive natively where the library has it, unless `impl` is "direct"."""

    __slots__ = ("ep", "impl")

    def __init__(self, ep: Endpoint, impl: str) -> None:
        self.ep = ep
        self.impl = impl

    def afterwards(self) -> Primitives:
        """Return those for any step but an operation's first.

        Libraries match collectives by the order of their calls. All ranks begin operations in the same order; when
        a second step is due differs from rank to rank. So it is made of messages, which the tag tells apart.
        """
        return Primitives(self.ep, "direct")

    def _natively(self, operation: str, kind: dtype, op: ReduceOp | None, numel: int) -> bool:
        native = self.ep.transport.native
        return native is not None and self.impl != "direct" and native.supports(operation, kind, op, numel)

    def broadcast(self, t: Tensor, root: int) -> Program[None]:
        """Overwrite `t` with root's."""
        native = self.ep.transport.native
        if native is not None and self._natively("broadcast", t.dtype, None, t.numel()):
            yield [partial(native.broadcast, t, root)]
        else:
            yield from direct.broadcast(self.ep, t, root)

    def allreduce(self, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` in place."""
        native = self.ep.transport.native
        if native is not None and self._natively("allreduce", t.dtype, op, t.numel()):
            yield [partial(native.allreduce, t, op)]
        else:
            yield from direct.allreduce(self.ep, t, op)

    def reduce(self, t: Tensor, op: ReduceOp, root: int) -> Program[None]:
        """Reduce into root's `t`."""
        native = self.ep.transport.native
        if native is not None and self._natively("reduce", t.dtype, op, t.numel()):
            yield [partial(native.reduce, t, op, root)]
        else:
            yield from direct.reduce(self.ep, t, op, root)

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
        """Fill `out` with everybody's elements, in rank order."""
        native = self.ep.transport.native
        if native is not None and self._natively("allgather", t.dtype, None, out.numel()):
            yield [partial(native.allgather, t, out, counts)]
        else:
            yield from direct.allgather(self.ep, t, out, counts)

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp) -> Program[None]:
        """Reduce `t`; `out` is my block."""
        native = self.ep.transport.native
        if native is not None and self._natively("reduce_scatter", t.dtype, op, t.numel()):
            yield [partial(native.reduce_scatter, t, out, counts, op)]
        else:
            yield from direct.reduce_scatter(self.ep, t, out, counts, op)

    def scan(self, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` over the ranks up to mine."""
        native = self.ep.transport.native
        if native is not None and self._natively("scan", t.dtype, op, t.numel()):
            yield [partial(native.scan, t, op)]
        else:
            yield from direct.scan(self.ep, t, op)
