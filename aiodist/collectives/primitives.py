"""Operations on flat tensors in wire dtype: which implementation runs each, and what it has to wait for."""

from __future__ import annotations

import torch

from aiodist.backends.base import Operation, Wanted
from aiodist.collectives.choice.table import COMPARED_BYTES
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.program import Endpoint, Implementation, Nested, Program
from aiodist.collectives.traffic import Traffic

__all__ = ["Primitives"]

_CPU = torch.device("cpu")
_FINISHED = ("allreduce", "reduce_scatter")


class Primitives:
    """Runs each operation in the way that `impl` names, or as the repertoire's selector says."""

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

    def finishes(self, operation: Operation) -> bool:
        """Return True where 16-bit floats and means need no preparation: what is picked rounds and divides itself."""
        return operation.kind in _FINISHED and self._pick(operation.wanted).finishes

    def run(self, operation: Operation) -> Program[None]:
        """Run an operation on tensors in wire dtype."""
        wanted = operation.wanted
        chosen = self._pick(wanted)
        return self._checked(chosen, wanted.nbytes, chosen.run(self.ep, operation))

    def _pick(self, wanted: Wanted) -> Implementation:
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
