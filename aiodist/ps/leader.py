"""The leader of a tensor: its machine decides, and its orders go to the servers of the other blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aiodist.ps import machines
from aiodist.ps.answers import Change, Pulling, Pushing, Request
from aiodist.ps.block import Block
from aiodist.ps.context import Context
from aiodist.ps.machines import Apply, Drop, Serve
from aiodist.ps.wire import Kind, Order, OrderKind


class Do(NamedTuple):
    """A change of settings, between two steps."""

    client: int
    number: int


Action = machines.Action | Do


class Leader:
    """Decides for all blocks of one tensor (transport lock held)."""

    def __init__(self, context: Context, block: Block) -> None:
        self._context = context
        self._key = block.key
        self.machine = context.policy.machine(context.workers)
        self.followers = block.servers[1:]

    def decide(self, request: Request) -> Sequence[Action]:
        """Return the actions after a request. Raises ValueError for a request that the machine refuses."""
        if isinstance(request, Pushing):
            return self.machine.push(machines.Push(request.client, request.number, request.base))
        if isinstance(request, Pulling):
            return self.machine.pull(machines.Pull(request.client, request.number, request.wants))
        return (Do(request.client, request.number),) if isinstance(request, Change) else ()

    def orders(self, actions: Sequence[Action]) -> list[Order]:
        """Return the orders of actions, which the followers get too."""
        found = []
        for action in actions:
            match action:
                case Apply(version, parts):
                    found.append(self.order(OrderKind.APPLY, version, parts))
                case Serve(client, number, version):
                    found.append(self.order(OrderKind.SERVE, version, ((client, number, 1.0),)))
                case Do(client, number):
                    found.append(self.order(OrderKind.DO, self.machine.version, ((client, number, 1.0),)))
                case Drop(worker, number):
                    found.append(self.order(OrderKind.DROP, self.machine.version, ((worker, number, 1.0),)))
        return found

    def order(self, kind: OrderKind, version: int, parts: tuple[tuple[int, int, float], ...] = ()) -> Order:
        """Return an order, which the followers get too."""
        order = Order(self._key, kind, version, parts)
        for rank in self.followers:
            self._context.coalescer.put(rank, Kind.ORDER, order.pack())
        return order
