"""All shards of one server."""

from __future__ import annotations

from collections.abc import Iterable

from aiodist.ps.requests import Mark
from aiodist.ps.shard import Shard


class Shards(dict[int, Shard]):
    """By key; every method runs with the transport lock held."""

    def mark(self, mark: Mark) -> None:
        """Put a mark behind all that its client has sent to tensors that this server leads."""
        for shard in self.led():
            shard.arrivals.mark(mark)

    def led(self) -> list[Shard]:
        """Return those of which this server has the machine."""
        return [shard for shard in self.values() if shard.machine is not None]

    def rest(self, clients: Iterable[int]) -> None:
        """Have no step wait for `clients`."""
        for shard in self.led():
            for client in clients:
                shard.rest(client)

    def held(self) -> set[int]:
        """Return the workers of which a push waits for others here."""
        machines = [shard.machine for shard in self.led() if shard.machine is not None]
        return {push.worker for machine in machines for push in machine.waiting().pushes}
