"""The NCCL communicators of one world, each made once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from aiodist.backends.nccl.group import NcclGroup
from aiodist.backends.nccl.library import Library
from aiodist.handles import Handle, Progress
from aiodist.streams import Staging

_Key = tuple[str, tuple[int, ...], int, torch.device]


class NcclGroups:
    """All groups of one world: what `progress` polls.

    `poll` runs with the transport lock held, in any thread; all else belongs to the loop's. To iterate goes over the
    groups that were not released.
    """

    rings = False

    def __init__(self, library: Library, progress: Progress) -> None:
        self._library = library
        self._progress = progress
        self._groups: dict[_Key, NcclGroup] = {}
        self._polled: tuple[NcclGroup, ...] = ()
        """Replaced and never changed, since other threads go through it; released ones, too, until they are over."""
        progress.add_poller(self)

    def of(self, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> NcclGroup:
        """Return the group of these ranks, named alike on all of them, and my device: always the same object."""
        key = (name, tuple(ranks), rank, device)
        group = self._groups.get(key)
        if group is None:
            staging = Staging.of(self._progress)
            group = self._groups[key] = NcclGroup(self._library, name, ranks, rank, device, staging)
            self._polled = (*self._polled, group)
        return group

    def __iter__(self) -> Iterator[NcclGroup]:
        return iter(tuple(self._groups.values()))

    def __len__(self) -> int:
        return sum([group.pending for group in self._polled])

    def poll(self, until: float = 0.0) -> bool:
        moved = False
        for group in self._polled:
            moved = group.poll() or moved
        return moved

    async def release(self, group: NcclGroup, *, drained: bool) -> None:
        """Release `group`, see there, and wait until that is over; `of` makes a new one from now on."""
        self._groups = {key: known for key, known in self._groups.items() if known is not group}
        ended: Handle[None] = Handle(self._progress, "release")
        self._progress.start(partial(group.release, lambda _: ended.resolve(None), drained=drained))
        await ended
        self._polled = tuple([known for known in self._polled if known is not group])

    async def aclose(self, *, drained: bool) -> None:
        """Release all; with `drained` every rank calls it and nothing is in flight. It takes some seconds at most."""
        try:
            await asyncio.gather(*(self.release(group, drained=drained) for group in self))
        finally:
            self._progress.remove_poller(self)
