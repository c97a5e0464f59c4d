"""`load`: the newest sound checkpoint, for as many ranks as there are now."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from aiodist.checkpoints import folders
from aiodist.checkpoints.agreeing import exchange
from aiodist.checkpoints.parts import Delayed, Net, Part
from aiodist.checkpoints.pieces import InPieces, Piece
from aiodist.checkpoints.reading import Reader
from aiodist.checkpoints.restoring import Loaded, Targets
from aiodist.checkpoints.saving import ranks_of
from aiodist.checkpoints.writer import Writer
from aiodist.communicator import Communicator
from aiodist.errors import CheckpointDamaged
from aiodist.handles import Handle

T = TypeVar("T")

_log = logging.getLogger("aiodist")


@dataclass(frozen=True)
class Checkpoint:
    """What `load` found, beside the state that it gave back."""

    path: Path
    """Its folder."""
    number: int | None
    """Its place among those of its training; None where its folder was renamed."""
    ranks: int
    """How many ranks saved it."""
    extra: Any
    """What was given as `extra`."""


def load(
    path: str | os.PathLike[str],
    net: Net | Part,
    *parts: Part,
    own: Sequence[object] = (),
    coll: Communicator | None = None,
) -> Handle[Checkpoint]:
    """Return the handle of giving `net` and `parts` the state of a checkpoint, and what was kept beside it.

    `path` is a checkpoint's own folder, or one with several: then the newest is taken that all ranks find sound, and a
    warning in the log says of each newer one what is wrong with it. Every rank calls it in the same place; it begins
    behind the saves and the steps that were asked for. All ranks compare every byte that they use with its checksum
    before anything is changed; what nobody uses they divide. Nothing is unpickled.

    Give the same `parts` in the same order as to `save`, on any number of ranks. Random states, generators and loaders
    of `own`, residuals of compressed gradients, and the optimizer within an `nn.LocalSGD` belong to a rank: where
    another number of ranks saved them, they stay as they are here, and that optimizer begins anew. Each buffer of the
    net then comes from one of the ranks, so `net.synchronize_buffers()` before the save if they differ. What of `own`
    has `load_state_dicts`, such as a `data.ShardQueue`, is given the list of all ranks' states.

    Raises TypeError and ValueError at the call as `save`. On await, on all ranks alike: FileNotFoundError where there
    is no checkpoint; `CheckpointDamaged`, which names file and place, where none is sound; ValueError where it is of
    other parts; what a part raises when it takes its state, elsewhere as `RemoteError`: then some parts have it, and
    others do not. Cost: each rank reads all that it needs, and holds it in memory until it is taken.
    """
    coll, _ = ranks_of(net, parts, own, coll)
    writer = Writer.of(coll)
    return writer.later("load", _Load(Path(path), Targets([cast(Part, net), *parts], own), writer).run)


class _Load:
    """One call of `load`, on one rank."""

    def __init__(self, path: Path, targets: Targets, writer: Writer) -> None:
        self._path = path
        self._targets = targets
        self._writer = writer

    async def run(self) -> Checkpoint:
        """Read, and then give everything its state."""
        coll, what, targets = self._writer.coll, f"loading {self._path}", self._targets
        targets.wanted = await self._together(what, partial(self._compute, self._wanted))
        folder, loaded, ranks = await self._newest(what)
        await self._together(what, partial(self._compute, loaded.restore, targets))
        await self._together(what, partial(self._restore_loaders, loaded))
        if ranks != coll.size and coll.rank == 0:
            _log.info("%s is of %d ranks, loaded by %d: random states stay as they are", folder, ranks, coll.size)
        return Checkpoint(folder, folders.number_of(folder), ranks, loaded.extra)

    # --- one step after the other, on all ranks ---------------------------------------------------------------------

    async def _together(self, what: str, do: Callable[[], Awaitable[T]]) -> T:
        """Return what `do` comes to, once it has on all ranks; raise where it failed on one."""
        value, error = None, None
        try:
            value = await do()
        except Exception as raised:  # noqa: BLE001  - told to all
            error = raised
        await exchange(self._writer.coll, what, None, error)
        return cast(T, value)

    async def _compute(self, fn: Callable[..., T], *args: Any) -> T:  # noqa: ANN401
        """Return `fn(*args)`, called where the parts are computed."""
        net = self._targets.parts[0]
        if isinstance(net, Net):
            value: T = await net.run(fn, *args)
            return value
        return fn(*args)

    def _wanted(self) -> list[dict[str, Piece]]:
        for part in self._targets.parts:
            if isinstance(part, Delayed):
                part.make_updates()
        return [part.wanted() if isinstance(part, InPieces) else {} for part in self._targets.parts]

    async def _candidates(self, what: str) -> list[Path]:
        """Return the checkpoints that rank 0 sees, the newest first; all raise FileNotFoundError where it sees none."""
        coll, stream = self._writer.coll, self._writer.stream
        found: list[Path] = []
        missing = error = None
        if coll.rank == 0:
            try:
                found = await stream.submit(folders.candidates, self._path)
            except FileNotFoundError as raised:
                missing = str(raised)
            except OSError as raised:
                error = raised
        found, missing = (await exchange(coll, what, (found, missing), error))[0]
        if missing is not None:
            raise FileNotFoundError(missing)
        return found

    async def _newest(self, what: str) -> tuple[Path, Loaded, int]:
        """Return the newest checkpoint that all ranks find sound, and what it has for this one.

        The others are told in the log; where none is sound, all ranks raise what they found in the newest.
        """
        candidates = await self._candidates(what)
        damages = []
        for folder in candidates:
            loaded, damage, error = None, None, None
            try:
                loaded = await self._writer.stream.submit(self._read, folder)
            except CheckpointDamaged as raised:
                damage = str(raised)
            except Exception as raised:  # noqa: BLE001  - told to all
                error = raised
            told = await exchange(self._writer.coll, what, damage, error)
            seen = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
            if seen is None:
                assert loaded is not None
                return folder, *loaded
            damages.append(f"{seen[1]} (rank {seen[0]} found it)")
            if self._writer.coll.rank == 0:
                _log.warning("checkpoint %s is not used: %s", folder, damages[-1])
        damaged = CheckpointDamaged(damages[0], rank=self._writer.coll.rank)
        for other in damages[1:]:
            damaged.add_note(f"and an older one: {other}")
        raise damaged

    def _read(self, folder: Path) -> tuple[Loaded, int]:
        with Reader(folder) as reader:
            coll = self._writer.coll
            return Loaded.read(reader, self._targets, coll.rank, coll.size), len(reader.manifest.files)

    async def _restore_loaders(self, loaded: Loaded) -> None:
        loaded.own.restore_loaders(self._targets.own)
