"""`load`: the newest sound checkpoint, for as many ranks as there are now."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from aiodist.checkpoints import folders
from aiodist.checkpoints.agreeing import together
from aiodist.checkpoints.own import OwnState
from aiodist.checkpoints.parts import Delayed, Net, Part
from aiodist.checkpoints.pieces import Cuts, InPieces, OfRanks
from aiodist.checkpoints.reading import Reader, StoredTensor
from aiodist.checkpoints.saving import ranks_of
from aiodist.checkpoints.values import Json, decode
from aiodist.checkpoints.writer import Writer
from aiodist.communicator import Communicator
from aiodist.errors import CheckpointDamaged
from aiodist.handles import Handle

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

    Give the same `parts` in the same order as to `save`, on any number of ranks. Rank r takes the random states, and
    the generators of `own`, that rank r saved; a rank that saved none seeds its own anew, with seeds that follow from
    what was saved. Loaders of `own`, residuals of compressed gradients, and the optimizer within an `nn.LocalSGD`
    belong to a rank: where another number of ranks saved them, they stay as they are here, and that optimizer begins
    anew. Each buffer of the net then comes from one of the ranks, so `net.synchronize_buffers()` before the save if
    they differ. What of `own` has `load_state_dicts`, such as a `data.ShardQueue`, is given all ranks' states.

    Raises TypeError and ValueError at the call as `save`. On await, on all ranks alike: FileNotFoundError where there
    is no checkpoint; `CheckpointDamaged`, which names file and place, where none is sound; ValueError where it is of
    other parts; what a part raises when it takes its state, elsewhere as `RemoteError`: then some parts have it, and
    others do not. Cost: each rank reads all that it needs, and holds it in memory until it is taken.
    """
    coll, _ = ranks_of(net, parts, own, coll)
    writer = Writer.of(coll)
    return writer.later("load", _Load(Path(path), [cast(Part, net), *parts], own, writer).run)


class _Load:
    """One call of `load`, on one rank."""

    def __init__(self, path: Path, parts: Sequence[Part], own: Sequence[object], writer: Writer) -> None:
        self._path = path
        self._parts = parts
        self._own = own
        self._writer = writer
        self._loaded: Loaded

    async def run(self) -> Checkpoint:
        """Read, and then give everything its state; each on all ranks, or all raise."""
        coll, what = self._writer.coll, f"loading {self._path}"
        await together(coll, what, self._compute(self._look))
        folder = await self._newest(what)
        loaded = self._loaded
        await together(coll, what, self._compute(self._restore))
        await together(coll, what, self._restore_loaders())
        if loaded.ranks != coll.size and coll.rank == 0:
            _log.info("%s is of %d ranks, loaded by %d", folder, loaded.ranks, coll.size)
        return Checkpoint(folder, folders.number_of(folder), loaded.ranks, loaded.extra)

    async def _compute(self, fn: Callable[[], None]) -> None:
        """Call `fn` where the parts are computed."""
        net = self._parts[0]
        if isinstance(net, Net):
            await net.run(fn)
        else:
            fn()

    def _look(self) -> None:
        for part in self._parts:
            if isinstance(part, Delayed):
                part.make_updates()

    async def _candidates(self) -> list[Path] | str:
        """Return the checkpoints that rank 0 sees, the newest first, or in words that it sees none."""
        if self._writer.coll.rank != 0:
            return []
        try:
            return await self._writer.stream.submit(folders.candidates, self._path)
        except FileNotFoundError as error:
            return str(error)

    async def _newest(self, what: str) -> Path:
        """Return the newest checkpoint that all ranks find sound; `_loaded` has it then.

        The others are told in the log; where none is sound, all ranks raise what they found in the newest.
        """
        coll = self._writer.coll
        candidates = (await together(coll, what, self._candidates()))[0]
        if isinstance(candidates, str):
            raise FileNotFoundError(candidates)
        damages = []
        for folder in candidates:
            told = await together(coll, what, self._damage(folder))
            seen = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
            if seen is None:
                return folder
            damages.append(f"{seen[1]} (rank {seen[0]} found it)")
            if coll.rank == 0:
                _log.warning("checkpoint %s is not used: %s", folder, damages[-1])
        damaged = CheckpointDamaged(damages[0], rank=coll.rank)
        for other in damages[1:]:
            damaged.add_note(f"and an older one: {other}")
        raise damaged

    async def _damage(self, folder: Path) -> str | None:
        """Read; return what is wrong with the checkpoint, None where it is sound."""
        try:
            await self._writer.stream.submit(self._read, folder)
        except CheckpointDamaged as error:
            return str(error)
        return None

    # --- reading, on the thread for files -----------------------------------------------------------------------------

    def _read(self, folder: Path) -> None:
        """Read what this rank needs, and check what no rank does; nothing of it is in use yet."""
        with Reader(folder) as reader:
            try:
                self._loaded = self._read_parts(reader)
            except (_PartsDiffer, CheckpointDamaged):
                raise
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointDamaged(f"{folder / folders.MANIFEST}: {error}") from error  # nobody here wrote it

    def _read_parts(self, reader: Reader) -> Loaded:
        manifest, coll = reader.manifest, self._writer.coll
        own = OwnState.read(manifest.own, reader.tensor, coll.rank, coll.size)
        for what, seen, expected in (
            ("parts", len(manifest.parts), len(self._parts)),
            ("objects of a rank's own", len(own.loaders[0]), len(self._own)),
        ):
            if seen != expected:
                raise _PartsDiffer(f"{reader.folder} has {seen} {what}: expected {expected}, which are to be loaded")
        cuts = Cuts.of(self._parts[0])
        states = [_state(part, said, cuts, reader) for part, said in zip(self._parts, manifest.parts, strict=True)]
        extra = decode(manifest.extra, reader.tensor)
        reader.check_rest(coll.rank, coll.size)
        return Loaded(states, extra, own, len(manifest.files))

    # --- restoring ----------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Have all but loaders go on from it; where they are computed."""
        loaded = self._loaded
        for number, (part, state) in enumerate(zip(self._parts, loaded.states, strict=True)):
            if isinstance(part, OfRanks):
                part.load_states(state, loaded.own.of_part(number))
            else:
                part.load_state_dict(state)
                for opt, of_opt in _optimizers(part, state):
                    keep_dtypes(opt, of_opt)
        loaded.own.restore(self._parts[0], self._own)

    async def _restore_loaders(self) -> None:
        self._loaded.own.restore_loaders(self._own)


@dataclass
class Loaded:
    """What was read, for one rank."""

    states: list[Any]
    """Of each part, as it takes it."""
    extra: Any
    own: OwnState
    ranks: int


class _PartsDiffer(ValueError):
    """The checkpoint is sound, but of something else."""


def _optimizers(part: object, state: Any) -> Iterable[tuple[Optimizer, dict[str, Any]]]:  # noqa: ANN401
    """Return the optimizers of torch that `part` is, or is made of (`nn.PipelinedOptimizer`), each with its state."""
    if isinstance(part, Optimizer):
        return [(part, state)]
    optimizers = getattr(part, "optimizers", None)
    return zip(optimizers, state, strict=True) if isinstance(optimizers, list) and isinstance(state, list) else ()


def keep_dtypes(opt: Optimizer, state: Mapping[str, Any]) -> None:
    """Have the state in the dtypes in which it was saved: torch has made them those of the parameters."""
    parameters = [p for group in opt.param_groups for p in group["params"]]
    for index, of_parameter in state["state"].items():
        loaded = opt.state[parameters[index]]
        for key, value in of_parameter.items():
            if isinstance(value, Tensor) and loaded[key].dtype is not value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _state(part: Part, said: Json, cuts: Cuts, reader: Reader) -> Any:  # noqa: ANN401
    if isinstance(part, InPieces):
        whole = decode(said["state"], partial(StoredTensor, reader))
        try:
            return part.divided(whole)
        except CheckpointDamaged:
            raise
        except ValueError as error:
            raise _PartsDiffer(f"{reader.folder}: {error}") from error
    state = decode(said["state"], reader.tensor)
    if "versions" in said:
        state = OrderedDict(state)
        state._metadata = decode(said["versions"], reader.tensor)  # type: ignore[attr-defined]
    return cuts.cut(part, state)
