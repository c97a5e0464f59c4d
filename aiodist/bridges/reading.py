"""The reading side of a bridge: receives each version from all ranks that publish."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from aiodist.bridges.cut import StateTable
from aiodist.bridges.union import Union
from aiodist.bridges.versions import TOPIC
from aiodist.checkpoints.parts import Extent
from aiodist.checkpoints.values import decode
from aiodist.errors import MismatchError
from aiodist.handles import gather


class Reading:
    """Versions of the other job, as this rank receives them, one after the other."""

    def __init__(self, union: Union, ranks: Sequence[int]) -> None:
        """`ranks` are those that publish, in the union."""
        self._union = union
        self._ranks = ranks
        self._layouts: dict[int, tuple[StateTable, list[Extent]]] = {}
        self._shipped: asyncio.Queue[int | None] = asyncio.Queue()
        """Versions in flight, or None if none follows."""
        self._receiving: asyncio.Task[tuple[int, Any] | None] | None = None
        self._awaited = False
        self._ended = False

    def shipped(self, version: int | None) -> None:
        """Note that the ranks send a version; None ends the reading."""
        self._shipped.put_nowait(version)

    async def after(self, version: int) -> tuple[int, Any] | None:
        """Return a version after `version` with its state, or None if none follows.

        A cancellation loses nothing: the next call returns what this one has asked for.
        """
        if self._ended:
            return None
        if self._awaited:
            raise RuntimeError("another loop waits for a version of this bridge: expected one at a time")
        if self._receiving is None:
            self._union.channel.send(self._ranks[0], TOPIC, ["want", version])
            self._receiving = asyncio.create_task(self._receive(), name="a version of a bridge")
        self._awaited = True
        try:
            received = await asyncio.shield(self._receiving)
        finally:
            self._awaited = False
        self._receiving, self._ended = None, received is None
        return received

    def close(self) -> None:
        """End the reading."""
        self._ended = True
        self.shipped(None)

    async def _receive(self) -> tuple[int, Any] | None:
        shipped = await self._shipped.get()
        if shipped is None:
            return None
        comm = self._union.weights
        values = None
        headers = await gather(*[comm.recv_object(rank) for rank in self._ranks])
        for number, (rank, (version, layout, said)) in enumerate(zip(self._ranks, headers, strict=True)):
            if version != shipped:
                sent = f"version {version}" if version > 0 else "no state"
                raise MismatchError(f"rank {number} of the other job sends {sent}: expected {shipped}, as rank 0 has")
            if layout is not None:
                self._layouts[rank] = StateTable(layout[0]), layout[1]
            values = said if values is None else values
        table = self._checked_table()
        block = torch.empty(table.nbytes, dtype=torch.uint8)
        await gather(
            *[
                comm.recv(block[begin:end], rank)
                for rank in self._ranks
                for begin, end in table.runs(self._layouts[rank][1])
            ]
        )
        numbers = {entry.name: number for number, entry in enumerate(table.entries)}
        return shipped, decode(values, lambda name: table.tensor(block, numbers[name]))

    def _checked_table(self) -> StateTable:
        """Return the table of the tensors. Raises MismatchError unless the ranks send each element once."""
        table = self._layouts[self._ranks[0]][0]
        filled = [0] * len(table.entries)
        for number, rank in enumerate(self._ranks):
            its, extents = self._layouts[rank]
            if its.entries != table.entries:
                raise MismatchError(
                    f"ranks 0 and {number} of the other job publish different tensors: expected the same"
                )
            for at, start, stop in extents:
                filled[at] += stop - start
        for entry, count in zip(table.entries, filled, strict=True):
            if count != entry.numel:
                message = f"the ranks of the other job publish {count} elements of {entry.name!r}"
                raise MismatchError(f"{message}, which has {entry.numel}: expected each element once")
        return table
