"""The reductions and broadcasts that every implementation may have, chosen per call.

Every function here takes flat tensors in wire dtype, with counts that all ranks know already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiodist.collectives.choice.table import COMPARED_BYTES
from aiodist.collectives.implementations import Implementation, ScheduledMessages, Wanted
from aiodist.collectives.program import Endpoint, Nested, Program
from aiodist.collectives.repertoire import Repertoire
from aiodist.collectives.traffic import Traffic
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

    def _checked(self, chosen: Implementation, nbytes: int, program: Program[None]) -> Program[None]:
        """Return `program` behind what has to be known before it: that all hosts have issued the same.

        A library's collective cannot be taken back, and what is large should not be sent in vain.
        """
        traffic = self.ep.traffic
        if traffic is None:
            return program
        if chosen.in_order:
            program = _alone_behind(traffic, program)
        elif nbytes >= COMPARED_BYTES and not chosen.compares:
            program = _behind(traffic, program)
        return program if chosen.recallable else _beyond_recall(traffic, program)

    def broadcast(self, t: Tensor, root: int) -> Program[None]:
        """Overwrite `t` with root's."""
        chosen = self._pick("broadcast", t)
        return self._checked(chosen, t.nbytes, chosen.broadcast(self.ep, t, root))

    def allreduce(self, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` in place."""
        chosen = self._pick("allreduce", t, op)
        return self._checked(chosen, t.nbytes, chosen.allreduce(self.ep, t, op))

    def reduce(self, t: Tensor, op: ReduceOp, root: int) -> Program[None]:
        """Reduce into root's `t`."""
        chosen = self._pick("reduce", t, op)
        return self._checked(chosen, t.nbytes, chosen.reduce(self.ep, t, op, root))

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
        """Fill `out` with everybody's elements, in rank order."""
        chosen = self._pick("allgather", out)
        return self._checked(chosen, out.nbytes, chosen.allgather(self.ep, t, out, counts))

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp) -> Program[None]:
        """Reduce `t`; `out` is my block."""
        chosen = self._pick("reduce_scatter", t, op)
        return self._checked(chosen, t.nbytes, chosen.reduce_scatter(self.ep, t, out, counts, op))

    def alltoall(self, t: Tensor, out: Tensor) -> Program[None]:
        """Send block r of `t` to rank r, by Bruck's schedule; all blocks of all ranks are of one size."""
        return ScheduledMessages("bruck").alltoall(self.ep, t, out)

    def scan(self, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` over the ranks up to mine."""
        chosen = self._pick("scan", t, op)
        return self._checked(chosen, t.nbytes, chosen.scan(self.ep, t, op))


def _alone_behind(traffic: Traffic, program: Program[None]) -> Program[None]:
    """Have `program` begin as soon as all ranks agree, whatever other tensors of the operation wait for beside it.

    All ranks come to know of operations in their order, so in this order they make the calls of a library.
    """
    yield [Nested(_behind(traffic, program))]


def _behind(traffic: Traffic, program: Program[None]) -> Program[None]:
    try:
        yield [traffic.agreed]
    except BaseException:
        program.close()
        raise
    yield from program


def _beyond_recall(traffic: Traffic, program: Program[None]) -> Program[None]:
    traffic.native += 1
    yield from program
    traffic.native -= 1
