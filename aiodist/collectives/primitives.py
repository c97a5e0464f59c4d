"""Operations on flat tensors in wire dtype, each with its implementation and its prerequisites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch

from aiodist.backends.base import Exchange, Primitive, Wanted
from aiodist.collectives.choice.table import COMPARED_BYTES
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.program import Call, Endpoint, Implementation, Nested, Program
from aiodist.collectives.traffic import Traffic

_CPU = torch.device("cpu")
_FINISHED = ("allreduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Primitives:
    """Runs each operation in the way that `impl` names, or as the repertoire's selector says."""

    ep: Endpoint
    _repertoire: Repertoire
    impl: str = "auto"
    _: KW_ONLY
    together: bool = False
    """Other tensors of the same operation share the endpoint."""
    later: bool = False
    """See `afterwards`."""
    device: torch.device = _CPU
    """Where this rank computes."""

    def afterwards(self) -> Primitives:
        """Return those for any step but an operation's first.

        Libraries match collectives by the order of their calls. All ranks begin operations in the same order; when
        a second step is due differs from rank to rank. So it is left to what tells operations apart by their tags.
        """
        return replace(self, later=True)

    def finishes(self, operation: Primitive) -> bool:
        """Return True where 16-bit floats and means need no preparation: what is picked rounds and divides itself."""
        return operation.kind in _FINISHED and self._pick(operation.wanted).finishes

    def run(self, operation: Primitive) -> Program[None]:
        """Run an operation on tensors in wire dtype."""
        wanted = operation.wanted
        chosen = self._pick(wanted)
        if self.ep.traffic is not None:
            self.ep.traffic.way = chosen.name
        return self._checked(chosen, wanted.nbytes, chosen.run(self.ep, operation))

    def exchange(self, exchange: Exchange, ahead: Sequence[Call] = ()) -> Program[None]:
        """Send and receive tensors: in messages, or without any where all ranks can; `ahead` are made before.

        All ranks must know whether the tensors lie on the CPU or on CUDA devices.
        """
        o = exchange
        exchanger = None if o.t.is_cpu or self.impl not in ("auto", "nccl") else self._repertoire.exchanger
        if exchanger is not None and self.ep.size > 1:
            yield ahead
            ahead = ()
            if (yield from self._all_say(exchanger.takes(self.ep, o))):
                program = exchanger.run(self.ep, o)
                yield from program if self.ep.traffic is None else _beyond_recall(self.ep.traffic, program)
                return
        receives = [self.ep.recv(t, rank) for rank, t in o.receives]
        yield [*ahead, *receives, *(self.ep.send(t, rank) for rank, t in o.sends)]

    def release(self) -> None:
        """Know that the operation exchanges nothing on devices, where it might have: others need not wait for it."""
        if self._repertoire.exchanger is not None:
            self._repertoire.exchanger.release(self.ep)

    def _all_say(self, mine: bool) -> Program[bool]:
        """Return True on all ranks where each of them says so."""
        said = torch.empty(self.ep.size, dtype=torch.bool, device="cpu")
        host = Primitives(self.ep, self._repertoire, "doubling", together=True, later=True)
        yield from host.run(Primitive("allgather", torch.tensor([mine], device="cpu"), said, counts=[1] * self.ep.size))
        yield from self.ep.known()
        return bool(said.all())

    def _pick(self, wanted: Wanted) -> Implementation:
        return self._repertoire.pick(wanted, self.impl, later=self.later, together=self.together)

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
    """Have `program` begin as soon as all ranks agree, no matter what other tensors of the operation wait for.

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
