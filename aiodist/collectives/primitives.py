"""The reductions and broadcasts that every implementation may have, chosen per call.

Every function here takes flat tensors in wire dtype, with counts that all ranks know already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiodist.collectives.implementations import Implementation, Messages, Wanted
from aiodist.collectives.program import Endpoint, Program
from aiodist.collectives.repertoire import Repertoire
from aiodist.types import ReduceOp

__all__ = ["Primitives"]

_CPU = torch.device("cpu")


class Primitives:
    """Runs each primitive in the way that `impl` names, or as the repertoire's selector says."""

    __slots__ = ("_later", "_repertoire", "_together", "device", "ep", "impl")

    def __init__(
        self,
        ep: Endpoint,
        repertoire: Repertoire,
        impl: str = "auto",
        *,
        together: bool = False,
        later: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        """`together`: other tensors of the same operation share the endpoint; `device`: where this rank computes."""
        self.ep = ep
        self.device = device
        self.impl = impl
        self._repertoire = repertoire
        self._together = together
        self._later = later

    def afterwards(self) -> Primitives:
        """Return those for any step but an operation's first.

        Libraries match collectives by the order of their calls. All ranks begin operations in the same order; when
        a second step is due differs from rank to rank. So it is left to what tells operations apart by their tags.
        """
        return Primitives(self.ep, self._repertoire, self.impl, together=self._together, later=True, device=self.device)

    def finishes(self, operation: str, t: Tensor, op: ReduceOp) -> bool:
        """Return True where 16-bit floats and means need no preparation: what is picked rounds and divides itself."""
        return self._pick(operation, t, op).finishes

    def _pick(self, operation: str, t: Tensor, op: ReduceOp | None = None) -> Implementation:
        wanted = Wanted(operation, t.dtype, op, t.numel(), "cpu" if t.is_cpu else "cuda")
        return self._repertoire.pick(wanted, self.impl, later=self._later, together=self._together)

    def broadcast(self, t: Tensor, root: int) -> Program[None]:
        """Overwrite `t` with root's."""
        return self._pick("broadcast", t).broadcast(self.ep, t, root)

    def allreduce(self, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` in place."""
        return self._pick("allreduce", t, op).allreduce(self.ep, t, op)

    def reduce(self, t: Tensor, op: ReduceOp, root: int) -> Program[None]:
        """Reduce into root's `t`."""
        return self._pick("reduce", t, op).reduce(self.ep, t, op, root)

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
        """Fill `out` with everybody's elements, in rank order."""
        return self._pick("allgather", out).allgather(self.ep, t, out, counts)

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp) -> Program[None]:
        """Reduce `t`; `out` is my block."""
        return self._pick("reduce_scatter", t, op).reduce_scatter(self.ep, t, out, counts, op)

    def alltoall(self, t: Tensor, out: Tensor) -> Program[None]:
        """Send block r of `t` to rank r, by Bruck's schedule; all blocks of all ranks are of one size."""
        return Messages("bruck").alltoall(self.ep, t, out)

    def scan(self, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` over the ranks up to mine."""
        return self._pick("scan", t, op).scan(self.ep, t, op)
