"""The NCCL communicators of one world, each made once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from aiodist.backends.base import Done
from aiodist.backends.nccl.group import NcclGroup
from aiodist.backends.nccl.library import Library
from aiodist.handles import Progress
from aiodist.streams import Staging

__all__ = ["NcclGroups"]

_Key = tuple[str, tuple[int, ...], int, torch.device]


class NcclGroups:
    """All groups of one world: what `progress` polls.

    All methods are called with the transport lock held, except for `aclose`, which belongs to the loop, and for `of`
    and iteration (over the groups that were not released), which may do without on the loop's thread.
    """

    rings = False

    def __init__(self, library: Library, progress: Progress) -> None:
        self._library = library
        self._progress = progress
        self._groups: dict[_Key, NcclGroup] = {}
        self._polled: tuple[NcclGroup, ...] = ()
        """Replaced and never changed, since other threads go through it; released ones, too, until they are over."""
        self._ending: list[NcclGroup] = []
        self._closed: asyncio.Future[None] | None = None
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

    def destroy(self, group: NcclGroup, done: Done, *, drained: bool) -> None:
        """Release `group`: see there. `of` makes a new one afterwards."""
        for key, known in tuple(self._groups.items()):
            if known is group:
                del self._groups[key]
        self._ending.append(group)

        def ended(error: BaseException | None) -> None:
            self._ending.remove(group)
            self._polled = tuple([known for known in self._polled if known is not group])
            done(error)
            self._tell()

        group.destroy(ended, drained=drained)

    def __len__(self) -> int:
        return sum([group.pending for group in self._polled])

    def poll(self, until: float = 0.0) -> bool:
        """See `Poller`."""
        moved = False
        for group in self._polled:
            moved = group.poll() or moved
        return moved

    async def aclose(self, *, drained: bool) -> None:
        """Release all; with `drained` every rank calls it and nothing is in flight. It takes some seconds at most."""
        if self._closed is not None:
            return
        self._closed = closed = asyncio.get_running_loop().create_future()

        def destroy() -> None:
            for group in self:
                self.destroy(group, lambda error: None, drained=drained)
            self._tell()

        try:
            self._progress.start(destroy)
            await closed
        finally:
            self._progress.remove_poller(self)

    def _tell(self) -> None:
        """Tell `aclose`, which waits for it, when nothing is left."""
        if self._closed is not None and not self._groups and not self._ending:
            self._progress.post(partial(_resolve, self._closed))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
