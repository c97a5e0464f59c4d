"""`save` writes a checkpoint during later steps; `load` restores the newest sound one."""

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
from aiodist.checkpoints.format import Layout, commit, lay_out, write_file
from aiodist.checkpoints.kinds import kind_of, kinds_differ, misfit, name_of
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
from aiodist.checkpoints.writer import Writer, together
from aiodist.communicator import Communicator
from aiodist.errors import CheckpointDamaged, MismatchError
from aiodist.handles import Handle
from aiodist.types import Elsewhere, Stateful, renamed

_Written = tuple[Json, Json, Json]
"""Facts and entries of a rank's file, and the rank's own state, as JSON."""


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
    """Write a checkpoint in the folder `path`, while training continues.

    Every rank calls it in the same place, with the same `path`, which all ranks see. The checkpoint has the state after
    the steps requested before: the compute thread of `net` copies this rank's share before its next step, after earlier
    saves are written. The call itself copies a module without a compute thread. Each rank then writes a file, and rank
    0 renames the folder when all files are on the disk.

    Args:
        path: the folder of the checkpoints; each has a folder of its own in it.
        net: a `DataParallel`, or a module, which needs `coll`.
        *parts: optimizers, schedulers, scalers, modules and pieces (`checkpoints.InPieces`): objects with a
            `state_dict`, alike on all ranks, which write a share each. Pending updates and averages are made first, as
            by `flush`.
        metadata: a value that `load` returns, the same on all ranks: None, bool, int, float, str, tensors, arrays of
            numpy, and lists, tuples and dicts of these.
        per_rank: generators, loaders, queues of shards and other objects with a state of this rank's own. The random
            states of Python, torch and numpy, the residuals of compressed gradients, parameters that are `per_rank` of
            `net`, and a rank's own state in an `nn.LocalSGD` are saved without being named.
        keep_last: number of checkpoints to keep in `path`; None keeps all.
        coll: the communicator of all ranks; None is that of `net`.

    Returns:
        A handle of the checkpoint's own folder.

    Raises:
        TypeError: at the call, for an object without state, for `metadata` that cannot be written, with its path, and
            for a sharded or pipelined optimizer of divided layers, which goes into `per_rank`.
        ValueError: at the call, for a wrong `keep_last`, and an optimizer with parameters that are `per_rank` of `net`.
        MismatchError: on await, if ranks differ in a value that is the same on all (buffers of `net` may differ).
        RemoteError: on await, for an error of another rank; that rank raises the error itself. Older checkpoints stay.

    Example:
        ```python
        saving = aiodist.save("runs/7", net, opt, metadata={"step": step}, per_rank=[loader], keep_last=3)
        ...  # the next steps
        folder = await saving
        ```

    Cost: once for a communicator a duplicate of it, a thread, and memory for this rank's share; each time a pass over
    all tensors that are alike on the ranks, a copy of that share, three small exchanges, and a pass over the share for
    its CRC-32. While a compute thread is busy, the writing thread sleeps 40 times as long as it uses a core: a GB for
    each rank then takes about 10 seconds.
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
        """Take the state that belongs to the loop's thread, at the call."""
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
        """Number of the unfinished checkpoint on rank 0, or 0."""
        self._copying: Handle[None] | None = None
        self._failed: Exception | None = None
        self._buffer: Tensor | None = None
        # Results of `_copy`:
        self._layout: Layout
        self._structure: Json
        self._part_states: list[Json]
        self._own_state: Json

    def begin(self, writer: Writer) -> None:
        """Copy after the steps requested before, or immediately without a compute thread."""
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
            layout.fill(buffer, [t for _, t in written])
        except BaseException:
            release(buffer)
            raise
        self._layout, self._structure, self._part_states, self._own_state = layout, structure, taken.parts, own
        self._buffer = buffer

    async def finish(self, writer: Writer, keep: int | None) -> Path:
        """Write the checkpoint, at the same time on all ranks."""
        coll, what = writer.coll, f"the checkpoint in {self._path}"
        try:
            numbers = await together(coll, what, self._begin_files(writer))
            part = folders.folder_of(self._path, numbers[0], ".part")
            work = self._write(writer, part / folders.file_name(coll.rank))
            written = await together(coll, what, work, same=self._structure)
            committed = await together(coll, what, self._commit(writer, part, written, keep))
            return Path(committed[0])
        except BaseException as error:
            if isinstance(error, MismatchError):
                error.add_note("values that differ by rank belong in per_rank=")
            if self._number:
                with suppress(RuntimeError):  # the thread for files was aborted: the next save removes the folder
                    writer.stream.submit(folders.discard, self._path, self._number).detach()
            raise
        finally:
            if self._buffer is not None:
                writer.buffers.release(self._buffer)
            self._parts, self._copying, self._buffer = [], None, None

    async def _begin_files(self, writer: Writer) -> int:
        """Return the number of the checkpoint, 0 on other ranks than the first."""
        if self._copying is not None:
            await self._copying
        if self._failed is not None:
            raise self._failed
        if writer.coll.rank == 0:
            self._number = await writer.stream.submit(folders.begin, self._path)
        return self._number

    async def _write(self, writer: Writer, file: Path) -> _Written:
        """Write the file of this rank; return its entries in the manifest."""
        assert self._buffer is not None
        sources = self._layout.parts(self._buffer)
        written = writer.stream.submit(write_file, file, self._layout, sources, writer.progress.computing)
        facts, entries = await written
        return facts, entries, self._own_state

    async def _commit(self, writer: Writer, part: Path, written: list[_Written], keep: int | None) -> str:
        """Make the folder a checkpoint (rank 0)."""
        if writer.coll.rank != 0:
            return str(part)
        states = self._part_states
        folder = await writer.stream.submit(commit, self._path, self._number, written, states, self._metadata)
        self._number = 0  # no longer a folder to remove after an error
        if keep is not None:
            await writer.stream.submit(folders.remove_old, self._path, keep)
        return str(folder)


_log = logging.getLogger("aiodist")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: Path
    """The folder."""
    number: int | None
    """Number of the checkpoint, or None if its folder was renamed."""
    ranks: int
    """Number of ranks that saved the checkpoint."""
    metadata: Any
    """The `metadata` argument of `save`."""
    extra = Elsewhere("extra", "metadata")


@renamed(own="per_rank")
def load(
    path: str | os.PathLike[str],
    net: Net | Part,
    *parts: Part,
    per_rank: Sequence[object] = (),
    coll: Communicator | None = None,
) -> Handle[Checkpoint]:
    """Restore a checkpoint into `net` and `parts`.

    Every rank calls it in the same place, with the same `parts` in the same order as `save`, on any number of ranks. It
    begins after the saves and steps requested before. All ranks compare every byte that they use with its checksum
    before anything is changed. Nothing is unpickled.

    The kind of each part is compared first. Nets and modules are one kind, whose names and shapes are compared; the
    kind of another object is the name of its class, or its attribute `checkpoint_kind`. A `ShardedOptimizer` has the
    kind of its optimizer.

    Rank r restores the random states and the generators that rank r saved; a rank without any gets seeds derived from
    them. The other states of `per_rank`, residuals of compressed gradients and the optimizer in an `nn.LocalSGD` are
    restored only if as many ranks saved them; otherwise they stay as they are, and each buffer of the net comes from
    one of the ranks (`net.synchronize_buffers()` before the save makes them alike). An object with `load_state_dicts`,
    such as a `data.ShardQueue`, gets the states of all ranks. A net with parts that are `per_rank` needs as many ranks
    as saved it, with the same `per_rank`.

    Args:
        path: a checkpoint's own folder; or a folder of several: the newest one that all ranks find sound is loaded.
            A warning in the log reports the fault of a newer one.
        net: as in `save`.
        *parts: as in `save`.
        per_rank: as in `save`.
        coll: the communicator of all ranks; None is that of `net`.

    Returns:
        A handle of a `checkpoints.Checkpoint`, with its `path`, `number`, `ranks` and `metadata`.

    Raises:
        TypeError: at the call, as in `save`.
        ValueError: on await, on all ranks, if the checkpoint has other parts; nothing was changed.
        FileNotFoundError: on await, on all ranks, if there is no checkpoint.
        CheckpointDamaged: on await, on all ranks, if none is sound; it names file and place.
        RemoteError: on await, for an error of another rank while a part took its state. Some parts have it then.

    Example:
        ```python
        await aiodist.save("runs/7", net, opt, metadata={"step": step})
        found = await aiodist.load("runs/7", net, opt)
        print(found.metadata["step"])
        ```

    Cost: each rank reads what it needs, and holds it in memory until it is restored.
    """
    coll, _ = ranks_of(net, parts, per_rank, coll)
    writer = Writer.of(coll, "load")
    return writer.later("load", _Load(Path(path), [cast(Part, net), *parts], per_rank, writer).run)


@dataclass
class _Load:
    """One call of `load`, on one rank. The thread for files reads; no object uses the result before `_restore`."""

    path: Path
    parts: Sequence[Part]
    own: Sequence[object]
    writer: Writer
    states: list[Any] = field(default_factory=list)
    """State of each part, for its `load_state_dict`."""
    metadata: Any = None
    of_rank: OwnState = field(init=False)
    ranks: int = 0

    async def run(self) -> Checkpoint:
        """Read, then restore; each succeeds on all ranks, or all ranks raise."""
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

    async def _candidates(self) -> list[str] | str:
        """Return the checkpoints that rank 0 sees, the newest first, or the text of an error if there are none."""
        if self.writer.coll.rank != 0:
            return []
        try:
            return list(map(str, await self.writer.stream.submit(folders.candidates, self.path)))
        except FileNotFoundError as error:
            return str(error)

    async def _newest(self, what: str) -> Path:
        """Read the newest checkpoint that is sound on all ranks, and return its folder.

        The log warns of newer ones. If none is sound, all ranks raise the damage of the newest.
        """
        coll = self.writer.coll
        candidates = (await together(coll, what, self._candidates()))[0]
        if isinstance(candidates, str):
            raise FileNotFoundError(candidates)
        damages = []
        for folder in map(Path, candidates):
            told = await together(coll, what, self._damage(folder))
            seen = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
            if seen is None:
                return folder
            damages.append(f"{seen[1]} (rank {seen[0]} found it)")
            if coll.rank == 0:
                _log.warning("checkpoint %s is not used: %s", folder, damages[-1])
        raise of_all(damages, rank=coll.rank)

    async def _damage(self, folder: Path) -> str | None:
        """Read the checkpoint; return its damage, or None if it is sound."""
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
            kinds = [of_part["kind"] for of_part in manifest.parts]
            _check(folder, kinds_differ(kinds, list(map(kind_of, self.parts))))
            self.of_rank = own = OwnState.read(manifest.own, reader.tensor, coll.rank, coll.size)
            _check(folder, kinds_differ(own.states["kinds"], list(map(kind_of, self.own)), own=True))
            _check(folder, own.compressor_differs(self.parts[0]))
            cuts = Cuts.of(self.parts[0])
            said = zip(self.parts, manifest.parts, strict=True)
            self.states = [_state(part, of_part, cuts, reader) for part, of_part in said]
            self._take_own(folder, len(manifest.own))
            for number, (part, state) in enumerate(zip(self.parts, self.states, strict=True)):
                if (why := misfit(part, state)) is not None:
                    raise PartsDiffer(f"{folder}: {name_of(number)}: {why}")
            self.metadata = decode(manifest.metadata, reader.tensor)
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
        """Restore all but loaders (compute thread)."""
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
    """Load `state` into `part`. An optimizer keeps the dtypes of `state`, unlike in torch."""
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
