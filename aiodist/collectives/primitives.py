"""Operations on flat tensors in wire dtype, each with its implementation and its prerequisites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import itemgetter

import torch

from aiodist.backends.base import Exchange, Primitive
from aiodist.collectives.choice.table import COMPARED_BYTES
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.traffic import Traffic
from aiodist.handles.kernel import Transfer, transfers

_CPU = torch.device("cpu")
_FINISHED = ("allreduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Primitives:
    """Runs each operation by the implementation `impl`, or by the selector's choice."""

    ep: Endpoint
    _repertoire: Repertoire
    impl: str = "auto"
    _: KW_ONLY
    later: bool = False
    """True for any step but the first; see `afterwards`."""
    device: torch.device = _CPU
    """This rank's device."""

    def afterwards(self) -> Primitives:
        """Return primitives for a step that is not the first of an operation.

        Libraries match collectives by the order of the calls. All ranks begin operations in the same order, but reach
        second steps in different orders. So implementations that match by tags run these.
        """
        return replace(self, later=True)

    def finishes(self, operation: Primitive) -> bool:
        """Return True if the implementation rounds 16-bit floats and divides means itself."""
        return (
            operation.kind in _FINISHED
            and self._repertoire.pick(operation.wanted, self.impl, later=self.later).finishes
        )

    async def run(self, primitives: Sequence[Primitive]) -> None:
        """Run collectives of one kind on tensors in wire dtype; those of one implementation have joined steps.

        The implementations run one after another, in the same order on all ranks, so they may share tags. A library
        comes first: then the order of its calls is the order of the operations.
        """
        traffic = self.ep.traffic
        groups: dict[tuple[bool, bool], dict[Implementation, list[Primitive]]] = {}
        for o in primitives:
            chosen = self._repertoire.pick(o.wanted, self.impl, later=self.later)
            groups.setdefault((not o.t.is_cpu, not chosen.in_order), {}).setdefault(chosen, []).append(o)
        for _, group in sorted(groups.items(), key=itemgetter(0)):
            for chosen, members in group.items():
                if traffic is None:
                    await chosen.run(self.ep, members)
                    continue
                traffic.way = chosen.name
                traffic.native += not chosen.recallable
                if chosen.in_order or (not chosen.compares and any(o.nbytes >= COMPARED_BYTES for o in members)):
                    await transfers([traffic.agreed])
                await chosen.run(self.ep, members)
                traffic.native -= not chosen.recallable

    async def exchange(self, exchanges: Sequence[Exchange], ahead: Sequence[Transfer] = ()) -> None:
        """Send and receive tensors, after the transfers `ahead`: in messages, or natively if all ranks can.

        All ranks must know which of the tensors are on the CPU, and which on CUDA devices.
        """
        on_cpu = [o for o in exchanges if o.t.is_cpu]
        on_cuda = [o for o in exchanges if not o.t.is_cpu]
        if on_cpu or ahead:
            await transfers([*ahead, *self._messages(on_cpu)])
        exchanger = self._repertoire.exchanger
        if on_cuda and exchanger is not None and self.impl in ("auto", "nccl") and self.ep.size > 1:
            able = await self._all_say([exchanger.takes(self.ep, o) for o in on_cuda])
            native = [o for o, taken in zip(on_cuda, able, strict=True) if taken]
            on_cuda = [o for o, taken in zip(on_cuda, able, strict=True) if not taken]
            if native:
                traffic = self.ep.traffic or Traffic()
                traffic.native += 1
                await exchanger.run(self.ep, native)
                traffic.native -= 1
        if on_cuda:
            await transfers(self._messages(on_cuda))

    def _messages(self, exchanges: Sequence[Exchange]) -> list[Transfer]:
        receives = [self.ep.recv(t, rank) for o in exchanges for rank, t in o.receives]
        return receives + [self.ep.send(t, rank) for o in exchanges for rank, t in o.sends]

    def release(self) -> None:
        """Release the operation's launch slots: it has no exchange on devices."""
        if self._repertoire.exchanger is not None:
            self._repertoire.exchanger.release(self.ep)

    async def _all_say(self, local: Sequence[bool]) -> list[bool]:
        """Return for each of several flags if it is True on all ranks."""
        ranks, count = self.ep.size, len(local)
        said = torch.empty(ranks * count, dtype=torch.bool, device="cpu")
        host = Primitives(self.ep, self._repertoire, "doubling", later=True)
        given = torch.tensor(local, device="cpu")
        await host.run([Primitive("allgather", given, said, counts=[count] * ranks)])
        await self.ep.known()
        return said.view(ranks, count).all(0).tolist()
