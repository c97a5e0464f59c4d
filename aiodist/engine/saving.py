"""Checkpoints of a training: when they are taken, and that one is written before the next is taken."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from aiodist import checkpoints
from aiodist.engine.state import State


class Saving:
    """Saves net, optimizer and engine to the folder `path`, every `every` steps, or with None behind each epoch."""

    def __init__(self, path: Path, every: int | None, keep: int | None, parts: list[Any], own: list[Any]) -> None:
        self.path = path
        self._every = every
        self._keep = keep
        self._parts = parts
        self._own = own
        self._under_way: Awaitable[object] | None = None

    async def update(self, state: State) -> None:
        """A step was made, and all ranks are here."""
        if self._every is not None and state.step % self._every == 0:
            await self._save()

    async def epoch(self, state: State) -> None:
        """An epoch is over."""
        if self._every is None:
            await self._save()

    def check_uneven(self) -> None:
        """Raise ValueError where checkpoints are to be taken within an epoch in which ranks share no step."""
        if self._every is not None:
            raise ValueError(
                f"every={self._every}, and ranks may have different numbers of batches, so share no step: expected "
                "every=None, a checkpoint behind each epoch, or as many batches on every rank"
            )

    async def _save(self) -> None:
        """Have a checkpoint taken now, and written beside the next steps."""
        await self.finish()
        self._under_way = checkpoints.save(self.path, *self._parts, own=self._own, keep=self._keep)

    async def finish(self, state: State | None = None) -> None:
        """Return when the last one is written; raise what that raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            await under_way

    async def load(self) -> bool:
        """Take the newest checkpoint; return False where there is none."""
        try:
            await checkpoints.load(self.path, *self._parts, own=self._own)
        except FileNotFoundError:
            return False
        return True
