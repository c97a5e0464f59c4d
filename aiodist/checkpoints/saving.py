"""`save`: a checkpoint, taken between two steps and written beside the next ones; `load`: the newest sound one."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from aiodist.checkpoints import folders
from aiodist.checkpoints.format import FileFacts, Layout, TensorEntry, commit, copy_into, lay_out, parts_of, write_file
from aiodist.checkpoints.kinds import UNKNOWN, kind_of, kinds_differ, misfit, name_of
from aiodist.checkpoints.own import OwnState, check_own, own_buffers, own_loaders, own_states
from aiodist.checkpoints.parts import (
    Cut,
    Cuts,
    InPieces,
    Net,
    OfRanks,
    Part,
    Taken,
    check_parts,
    check_shared,
    join_own,
    make_updates,
    parameters_of,
)
from aiodist.checkpoints.reading import PartsDiffer, Reader, StoredTensor, of_all
from aiodist.checkpoints.values import Json, decode, encode
from aiodist.checkpoints.writer import Writer, check_alike, digest, together
from aiodist.communicator import Communicator
from aiodist.errors import CheckpointDamaged
from aiodist.handles import Handle
from aiodist.types import Elsewhere, Stateful, renamed

_Told = tuple[FileFacts, list[TensorEntry], Json]
"""What the manifest says of a rank's file, and of what the rank has of its own."""


@renamed(extra="metadata", own="per_rank", keep="keep_last")
def save(
    path: str | os.PathLike[str],
    net: Net | Part,
    *parts: Part,
    metadata: object = None,
    per_rank: Sequence[object] = (),
    keep_last: int | None = None,
    coll: Communicator | None = None,
) -> Handle[Path]:
    """Return the handle of a new checkpoint in the folder `path`; its result is the checkpoint's own folder.

    ```python
    saving = aiodist.save("runs/7", net, opt, metadata={"step": step}, per_rank=[loader], keep_last=3)
    ...                                     # the next steps
    await saving
    ```
    Every rank calls it in the same place, with a `path` that all of them see. The state is that behind the steps which
    were asked for before: the compute thread of `net` copies what this rank writes before it makes another step. If an
    earlier save is not written yet, the copy waits for that on the compute thread, and steps with it. A module without
    a compute thread is copied by the call, and needs `coll`. All else goes on beside the next steps: the ranks compare
    what they have, each writes a file, and rank 0 renames the folder once all of it is on the disk.

    `net` and `parts` are modules, nets, optimizers, schedulers, scalers: all that has a `state_dict`, or pieces
    (`checkpoints.InPieces`). All ranks have the same, which they divide among them; the state that each rank has of its
    own in an `nn.LocalSGD`, and what is `per_rank` of a net's module, it writes itself. Updates that are pending are
    made first, and averages too, as by `flush`. `metadata` is kept for you, the same on all ranks: None, bool, int,
    float, str, tensors of any shape, arrays of numpy, and lists, tuples and dicts of these. `per_rank` are generators,
    and loaders, queues of shards and the like, with a state of this rank's own; that of Python, torch and numpy, and
    what `net` keeps of compressed gradients, need not be named. `keep_last` is how many checkpoints are left in `path`,
    None all. `coll` has all ranks; None is that of `net`.

    Raises TypeError at the call for what has no state, for a sharded or pipelined optimizer of divided layers, which
    `per_rank` takes, and for `metadata` that cannot be written, with its path in it; ValueError for a wrong
    `keep_last`, and for an optimizer with parameters that are `per_rank` of `net`. On await, on all ranks alike: what a
    rank's state, copy or file raised, elsewhere as `RemoteError`, which names that rank; `MismatchError` where ranks
    differ in what they have to have the same, values of tensors too (buffers of `net` may differ); what the
    communicator raises. The checkpoints before are untouched then.

    Cost: once for a communicator a duplicate of it, a thread, and memory for this rank's share; each time a pass
    over all tensors that ranks have alike, a copy of that share, three small exchanges, and a pass over the share for
    its CRC-32. While a compute thread is busy the thread that writes rests 40 times as long as it uses a core: a GB for
    each rank takes about 10 seconds then.
    """
    check_keep(keep_last)
    coll, replica = ranks_of(net, parts, per_rank, coll)
    job = _Save(Path(path), [net, *parts], metadata, per_rank, coll, replica)
    writer = Writer.of(coll, "save")
    job.begin(writer)
    return writer.later("save", partial(job.finish, writer, keep_last))


def check_keep(keep: object) -> None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep_last={keep!r}: expected how many checkpoints to keep, at least 1, or None for all")


def ranks_of(
    net: object, parts: Sequence[object], own: Sequence[object], coll: Communicator | None
) -> tuple[Communicator, int]:
    """Return the communicator of all ranks that save or load together, and which of those with equal blocks this is.

    Raises `TypeError` for parts that have no state, or no communicator, and as `Cuts.check`; `ValueError` for one that
    is too small.
    """
    check_parts([net, *parts])
    check_own(own)
    check_shared(net, parts)
    mine = net.coll if isinstance(net, Net) else None
    coll = mine if coll is None else coll
    if not isinstance(coll, Communicator):
        raise TypeError(f"coll is {type(coll).__name__}: expected a Communicator, since {type(net).__name__} has none")
    cuts = Cuts.of(net)
    for part in parts:
        cuts.check(part)
    shared = cuts.ranks
    replicas = coll.size // shared if mine is None else mine.size
    if replicas * shared != coll.size and shared > 1:
        raise ValueError(
            f"coll has {coll.size} ranks: expected the {replicas} x {shared} that train the net and share its layers"
        )
    if mine is None and replicas > 1 and shared > 1:
        raise TypeError(f"net is {type(net).__name__}: expected a DataParallel, since ranks that share its layers do")
    return coll, 0 if mine is None else mine.rank


class _Save:
    """One checkpoint, on one rank."""

    def __init__(
        self, path: Path, parts: list[Any], metadata: object, own: Sequence[object], coll: Communicator, replica: int
    ) -> None:
        """At the call: take what the loop's thread knows."""
        self._path = path
        self._parts = parts
        self._own = own
        self._place = (coll.rank, coll.size)
        self._replica = replica
        found: dict[str, Tensor] = {}
        self._metadata = encode(metadata, "metadata", found)
        self._given = {name: t.clone() for name, t in found.items()}
        self._loaders, self._of_loaders = own_loaders(own, coll.rank)
        self._number = 0
        """That of the checkpoint, on rank 0."""
        self._copying: Handle[None] | None = None
        self._failed: Exception | None = None
        self._buffer: Tensor | None = None
        # What `_copy` finds:
        self._layout: Layout
        self._structure: Json
        self._said: list[Json]
        self._said_own: Json

    def begin(self, writer: Writer) -> None:
        """Have the copy taken: behind the steps that were asked for, or now where nothing computes beside."""
        net, buffers = self._parts[0], writer.buffers
        if isinstance(net, Net):
            self._copying = net.submit(self._copy, buffers.borrow, buffers.release)
        else:
            try:
                self._copy(buffers.borrow_nowait, buffers.release)
            except Exception as error:  # noqa: BLE001  - told to all
                self._failed = error

    def _copy(self, borrow: Callable[[int], Tensor], release: Callable[[Tensor], None]) -> None:
        net = self._parts[0]
        taken = Taken(alike=dict(self._given))
        taken.take(self._parts, writes_blocks=self._replica == 0)
        mine = dict(self._of_loaders)
        own = own_states(net, self._own, taken.own, self._place[0], mine) | {"loaders": self._loaders}
        taken.keep_own(mine)
        structure = {**taken.structure(f"net/{name}" for name in own_buffers(net)), "metadata": self._metadata}
        written = taken.mine_to_write(*self._place)
        layout = lay_out([entry for entry, _ in written])
        buffer = borrow(layout.nbytes)
        try:
            copy_into(buffer, layout, [t for _, t in written])
        except BaseException:
            release(buffer)
            raise
        self._layout, self._structure, self._said, self._said_own = layout, structure, taken.parts, own
        self._buffer = buffer

    async def finish(self, writer: Writer, keep: int | None) -> Path:
        """Write it; every rank does so at the same time."""
        coll, what = writer.coll, f"the checkpoint in {self._path}"
        try:
            begun = await together(coll, what, self._begin_files(writer))
            await check_alike(coll, self._structure, [each for _, each in begun])
            part = folders.folder_of(self._path, begun[0][0], ".part")
            written = await together(coll, what, self._write(writer, part / folders.file_name(coll.rank)))
            return (await together(coll, what, self._commit(writer, part, written, keep)))[0]
        except BaseException:
            if self._number:
                with suppress(RuntimeError):  # the thread for files was given up: the next save removes it
                    writer.stream.submit(folders.discard, self._path, self._number).detach()
            raise
        finally:
            if self._buffer is not None:
                writer.buffers.release(self._buffer)
            self._parts, self._copying, self._buffer = [], None, None

    async def _begin_files(self, writer: Writer) -> tuple[int, bytes]:
        """Return the number of the checkpoint, which rank 0 knows, and what ranks compare."""
        if self._copying is not None:
            await self._copying
        if self._failed is not None:
            raise self._failed
        if writer.coll.rank == 0:
            self._number = await writer.stream.submit(folders.begin, self._path)
        return self._number, digest(self._structure)

    async def _write(self, writer: Writer, file: Path) -> _Told:
        """Write the file of this rank; return what the manifest says of it."""
        assert self._buffer is not None
        sources = parts_of(self._buffer, self._layout)
        written = writer.stream.submit(write_file, file, self._layout, sources, writer.progress.computing)
        return *await written, self._said_own

    async def _commit(self, writer: Writer, part: Path, written: list[_Told], keep: int | None) -> Path:
        """Have the folder be a checkpoint; rank 0."""
        if writer.coll.rank != 0:
            return part
        folder = await writer.stream.submit(commit, self._path, self._number, written, self._said, self._metadata)
        if keep is not None:
            await writer.stream.submit(folders.remove_old, self._path, keep)
        return folder


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
    metadata: Any
    """The `metadata` that `save` was given."""
    extra = Elsewhere("extra", "metadata")


@renamed(own="per_rank")
def load(
    path: str | os.PathLike[str],
    net: Net | Part,
    *parts: Part,
    per_rank: Sequence[object] = (),
    coll: Communicator | None = None,
) -> Handle[Checkpoint]:
    """Return the handle of giving `net` and `parts` the state of a checkpoint, and what was kept beside it.

    `path` is a checkpoint's own folder, or one with several: then the newest is taken that all ranks find sound, and a
    warning in the log says of each newer one what is wrong with it. Every rank calls it in the same place; it begins
    behind the saves and the steps that were asked for. All ranks compare every byte that they use with its checksum
    before anything is changed; what nobody uses they divide. Nothing is unpickled.

    Give the same `parts` in the same order as to `save`, on any number of ranks: a checkpoint has the kind of each
    part, and of each object of `per_rank`, which are compared before anything is changed. Nets and modules are one
    kind, whose names and shapes are compared; the kind of all else is the name of its class, a subclass is another, and
    an attribute `checkpoint_kind` (a text) replaces that name. A `ShardedOptimizer` is of the kind of its optimizer.
    Rank r takes the random states, and the generators of `per_rank`, that rank r saved; a rank that saved none seeds
    its own anew, with seeds that follow from what was saved. Loaders of `per_rank`, residuals of compressed gradients,
    and the optimizer within an `nn.LocalSGD` belong to a rank: where another number of ranks saved them, they stay as
    they are here, and that optimizer begins anew. Each buffer of the net then comes from one of the ranks, so
    `net.synchronize_buffers()` before the save if they differ. A net with parts that are `per_rank` loads only what as
    many ranks saved, with the same `per_rank`. What of `per_rank` has `load_state_dicts`, such as a `data.ShardQueue`,
    is given all ranks' states.

    Raises TypeError and ValueError at the call as `save`. On await, on all ranks alike: FileNotFoundError where there
    is no checkpoint; `CheckpointDamaged`, which names file and place, where none is sound; ValueError where it is of
    other parts, with both kinds, before anything has changed; what a part raises when it takes its state, elsewhere as
    `RemoteError`: then some parts have it, and others do not. Cost: each rank reads all that it needs, and holds it in
    memory until it is taken.
    """
    coll, _ = ranks_of(net, parts, per_rank, coll)
    writer = Writer.of(coll, "load")
    return writer.later("load", _Load(Path(path), [cast(Part, net), *parts], per_rank, writer).run)


@dataclass
class _Load:
    """One call of `load`, on one rank; the thread for files reads, and nothing of that is in use before `_restore`."""

    path: Path
    parts: Sequence[Part]
    own: Sequence[object]
    writer: Writer
    states: list[Any] = field(default_factory=list)
    """Of each part, as it takes it."""
    metadata: Any = None
    of_rank: OwnState = field(init=False)
    ranks: int = 0

    async def run(self) -> Checkpoint:
        """Read, and then give everything its state; each on all ranks, or all raise."""
        coll, what = self.writer.coll, f"loading {self.path}"
        await together(coll, what, self._compute(partial(make_updates, self.parts)))
        folder = await self._newest(what)
        await together(coll, what, self._compute(self._restore))
        await together(coll, what, self._restore_loaders())
        if self.ranks != coll.size and coll.rank == 0:
            _log.info("%s is of %d ranks, loaded by %d", folder, self.ranks, coll.size)
        return Checkpoint(folder, folders.number_of(folder), self.ranks, self.metadata)

    async def _compute(self, fn: Callable[[], None]) -> None:
        net = self.parts[0]
        if isinstance(net, Net):
            await net.submit(fn)
        else:
            fn()

    async def _candidates(self) -> list[Path] | str:
        """Return the checkpoints that rank 0 sees, the newest first, or in words that it sees none."""
        if self.writer.coll.rank != 0:
            return []
        try:
            return await self.writer.stream.submit(folders.candidates, self.path)
        except FileNotFoundError as error:
            return str(error)

    async def _newest(self, what: str) -> Path:
        """Return the newest checkpoint that all ranks find sound, which they have read then.

        The others are told in the log; where none is sound, all ranks raise what they found in the newest.
        """
        coll = self.writer.coll
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
        raise of_all(damages, rank=coll.rank)

    async def _damage(self, folder: Path) -> str | None:
        """Read; return what is wrong with the checkpoint, None where it is sound."""
        try:
            await self.writer.stream.submit(self._read, folder)
        except CheckpointDamaged as error:
            return str(error)
        return None

    def _read(self, folder: Path) -> None:
        """Read what this rank needs, and check what no rank does."""
        coll = self.writer.coll
        with Reader(folder) as reader:
            manifest = reader.manifest
            kinds = [of_part.get("kind", UNKNOWN) for of_part in manifest.parts]
            _check(folder, kinds_differ(kinds, list(map(kind_of, self.parts))))
            self.of_rank = own = OwnState.read(manifest.own, reader.tensor, coll.rank, coll.size)
            _check(folder, kinds_differ(own.kinds, list(map(kind_of, self.own)), own=True))
            _check(folder, own.compressor_differs(self.parts[0]))
            cuts = Cuts.of(self.parts[0])
            said = zip(self.parts, manifest.parts, strict=True)
            self.states = [_state(part, of_part, cuts, reader) for part, of_part in said]
            self._take_own(folder, len(manifest.own))
            for number, (part, state) in enumerate(zip(self.parts, self.states, strict=True)):
                if (why := misfit(part, state)) is not None:
                    raise PartsDiffer(f"{folder}: {name_of(number)}: {why}")
            self.metadata = decode(manifest.extra, reader.tensor)
            reader.check_rest(coll.rank, coll.size)
            self.ranks = len(manifest.files)

    def _take_own(self, folder: Path, ranks: int) -> None:
        """Put what each rank keeps for itself of a net into its state."""
        other = None if self.of_rank.same_size else ranks
        for number, part in enumerate(self.parts):
            own = None if isinstance(part, OfRanks) else self.of_rank.of_part(number)
            try:
                self.states[number] = join_own(part, self.states[number], own, other)
            except ValueError as error:
                raise PartsDiffer(f"{folder}: {name_of(number)}: {error}") from error

    def _restore(self) -> None:
        """Have all but loaders go on from it; where they are computed."""
        for number, (part, state) in enumerate(zip(self.parts, self.states, strict=True)):
            if isinstance(part, OfRanks):
                part.load_states(state, self.of_rank.of_part(number))
            else:
                load_exactly(part, state)
        self.of_rank.restore(self.parts[0], self.own)

    async def _restore_loaders(self) -> None:
        self.of_rank.restore_loaders(self.own)


def _check(folder: Path, difference: str | None) -> None:
    if difference is not None:
        raise PartsDiffer(f"{folder}: {difference}")


def load_exactly(part: Stateful | InPieces, state: Any) -> None:  # noqa: ANN401
    """Have `part` go on from `state`, an optimizer in the dtypes of that: torch makes them those of the parameters."""
    part.load_state_dict(state)
    if not isinstance(part, Optimizer) or "state" not in state:  # what has a form of its own sees to it
        return
    parameters = parameters_of(part)
    for index, of_parameter in state["state"].items():
        loaded = part.state[parameters[index]]
        for key, value in of_parameter.items():
            if isinstance(value, Tensor) and key in loaded and loaded[key].dtype is not value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _state(part: Part, said: Json, cuts: Cuts, reader: Reader) -> Any:  # noqa: ANN401
    if isinstance(part, InPieces):
        whole = decode(said["state"], partial(StoredTensor, reader))
        try:
            return part.divided(whole)
        except CheckpointDamaged:
            raise
        except ValueError as error:
            raise PartsDiffer(f"{reader.folder}: {error}") from error
    state = decode(said["state"], reader.tensor)
    if "versions" in said:
        state = OrderedDict(state)
        state._metadata = decode(said["versions"], reader.tensor)  # type: ignore[attr-defined]
    return cuts.changed(part, state, Cut.of)
