"""Operations on flat tensors in wire dtype, each with its implementation and its prerequisites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch

from aiodist.backends.base import Exchange, Primitive, Wanted
from aiodist.collectives.choice.table import COMPARED_BYTES
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.traffic import Traffic
from aiodist.handles.kernel import Nested, Program, Transfer, transfers

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

    async def run(self, operation: Primitive) -> None:
        """Run an operation on tensors in wire dtype.

        A library's collective cannot be recalled, and a large one should not be sent in vain: so both begin when all
        hosts are known to have issued the same.
        """
        wanted, traffic = operation.wanted, self.ep.traffic
        chosen = self._pick(wanted)
        if traffic is None:
            await chosen.run(self.ep, operation)
            return
        traffic.way = chosen.name
        traffic.native += not chosen.recallable
        if chosen.in_order:
            # Its own part of the step: all ranks learn of operations in their order, and so call a library in it,
            # unless a call waits for other tensors of the operation.
            await transfers([Nested(_agreed(traffic, chosen.run, self.ep, operation))])
        elif wanted.nbytes >= COMPARED_BYTES and not chosen.compares:
            await _agreed(traffic, chosen.run, self.ep, operation)
        else:
            await chosen.run(self.ep, operation)
        traffic.native -= not chosen.recallable

    async def exchange(self, exchange: Exchange, ahead: Sequence[Transfer] = ()) -> None:
        """Send and receive tensors: in messages, or without any where all ranks can; `ahead` are made before.

        All ranks must know whether the tensors lie on the CPU or on CUDA devices.
        """
        o = exchange
        exchanger = None if o.t.is_cpu or self.impl not in ("auto", "nccl") else self._repertoire.exchanger
        if exchanger is not None and self.ep.size > 1:
            await transfers(ahead)
            ahead = ()
            if await self._all_say(exchanger.takes(self.ep, o)):
                traffic = self.ep.traffic or Traffic()
                traffic.native += 1
                await exchanger.run(self.ep, o)
                traffic.native -= 1
                return
        receives = [self.ep.recv(t, rank) for rank, t in o.receives]
        await transfers([*ahead, *receives, *(self.ep.send(t, rank) for rank, t in o.sends)])

    def release(self) -> None:
        """Know that the operation exchanges nothing on devices, where it might have: others need not wait for it."""
        if self._repertoire.exchanger is not None:
            self._repertoire.exchanger.release(self.ep)

    async def _all_say(self, mine: bool) -> bool:
        """Return True on all ranks where each of them says so."""
        said = torch.empty(self.ep.size, dtype=torch.bool, device="cpu")
        host = Primitives(self.ep, self._repertoire, "doubling", together=True, later=True)
        await host.run(Primitive("allgather", torch.tensor([mine], device="cpu"), said, counts=[1] * self.ep.size))
        await self.ep.known()
        return bool(said.all())

    def _pick(self, wanted: Wanted) -> Implementation:
        return self._repertoire.pick(wanted, self.impl, later=self.later, together=self.together)


async def _agreed(traffic: Traffic, way: Callable[..., Program[None]], ep: Endpoint, operation: Primitive) -> None:
    """Run the operation after all ranks agree."""
    await transfers([traffic.agreed])
    await way(ep, operation)
