"""`save`: a checkpoint of a training, taken between two steps and written beside the next ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from aiodist.checkpoints import folders
from aiodist.checkpoints.agreeing import check_alike, digest, together
from aiodist.checkpoints.format import FileFacts, Layout, TensorEntry, commit, copy_into, lay_out, write_file
from aiodist.checkpoints.own import check_own, own_buffers, own_loaders, own_states
from aiodist.checkpoints.parts import Net, Part, Taken, check_parts
from aiodist.checkpoints.pieces import Cuts
from aiodist.checkpoints.values import Json, encode
from aiodist.checkpoints.writer import WritePace, Writer
from aiodist.communicator import Communicator
from aiodist.handles import Handle


def save(
    path: str | os.PathLike[str],
    net: Net | Part,
    *parts: Part,
    extra: object = None,
    own: Sequence[object] = (),
    keep: int | None = None,
    coll: Communicator | None = None,
) -> Handle[Path]:
    """Return the handle of a new checkpoint in the folder `path`; its result is the checkpoint's own folder.

    ```python
    saving = aiodist.save("runs/7", net, opt, extra={"step": step}, own=[loader], keep=3)
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
    own in an `nn.LocalSGD` it writes itself. Updates that are pending are made first, and averages too, as by `flush`.
    `extra` is kept for you, the same on all ranks: None, bool, int, float, str, tensors of any shape, arrays of numpy,
    and lists, tuples and dicts of these. `own` are generators, and loaders, queues of shards and the like, with a state
    of this rank's own; that of Python, torch and numpy, and what `net` keeps of compressed gradients, need not be
    named. `keep` is how many checkpoints are left in `path`, None all. `coll` has all ranks; None is that of `net`.

    Raises TypeError at the call for what has no state, and for an `extra` that cannot be written, with its path in it;
    ValueError for a wrong `keep`. On await, on all ranks alike: what a rank's state, copy or file raised, elsewhere as
    `RemoteError`, which names that rank; `MismatchError` where ranks differ in what they have to have the same, values
    of tensors too (buffers of `net` may differ); what the communicator raises. The checkpoints before are untouched
    then.

    Cost: once for a communicator a duplicate of it, a thread, and memory for this rank's share; each time a pass
    over all tensors that ranks have alike, a copy of that share, three small exchanges, and a pass over the share for
    its CRC-32. While a compute thread is busy the thread that writes rests 40 times as long as it uses a core: a GB for
    each rank takes about 10 seconds then.
    """
    check_keep(keep)
    coll, replica = ranks_of(net, parts, own, coll)
    job = _Save(Path(path), [net, *parts], own, keep, (coll.rank, coll.size), replica)
    job.say(extra)
    writer = Writer.of(coll)
    job.begin(writer)
    return writer.later("save", partial(job.finish, writer))


def check_keep(keep: object) -> None:
    """Raise `ValueError` unless it is a number of checkpoints, or None."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={keep!r}: expected how many checkpoints to keep, at least 1, or None for all")


def ranks_of(
    net: object, parts: Sequence[object], own: Sequence[object], coll: Communicator | None
) -> tuple[Communicator, int]:
    """Return the communicator of all ranks that save or load together, and which of those with equal blocks this is.

    Raises `TypeError` for parts that have no state, or no communicator; `ValueError` for one that is too small.
    """
    check_parts([net, *parts])
    check_own(own)
    mine = net.coll if isinstance(net, Net) else None
    coll = mine if coll is None else coll
    if not isinstance(coll, Communicator):
        raise TypeError(f"coll is {type(coll).__name__}: expected a Communicator, since {type(net).__name__} has none")
    shared = Cuts.of(net).ranks
    replicas = coll.size // shared if mine is None else mine.size
    if replicas * shared != coll.size and shared > 1:
        raise ValueError(
            f"coll has {coll.size} ranks: expected the {replicas} x {shared} that train the net and share its layers"
        )
    if mine is None and replicas > 1 and shared > 1:
        raise TypeError(f"net is {type(net).__name__}: expected a DataParallel, since ranks that share its layers do")
    return coll, 0 if mine is None else mine.rank


@dataclass
class _Copied:
    """What a rank writes, in memory of its own."""

    layout: Layout
    buffer: Tensor
    structure: Json
    parts: list[Json]
    own: Json


@dataclass
class _Save:
    """One checkpoint, on one rank."""

    path: Path
    parts: list[Any]
    own: Sequence[object]
    keep: int | None
    place: tuple[int, int]
    replica: int
    extra: Json = None
    loaders: list[Json] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the tensors in `extra`."""
    of_loaders: dict[str, Tensor] = field(default_factory=dict)
    copying: Handle[_Copied] | _Copied | None = None
    copied: _Copied | None = None
    number: int = 0
    """That of the checkpoint, on rank 0."""

    # --- at the call --------------------------------------------------------------------------------------------------

    def say(self, extra: object) -> None:
        """Take what the loop's thread knows."""
        found: dict[str, Tensor] = {}
        self.extra = encode(extra, "extra", found)
        self.given = {name: t.clone() for name, t in found.items()}
        self.loaders, self.of_loaders = own_loaders(self.own, self.place[0])

    def begin(self, writer: Writer) -> None:
        """Have the copy taken: behind the steps that were asked for, or now where nothing computes beside."""
        net, buffers = self.parts[0], writer.buffers
        if isinstance(net, Net):
            self.copying = net.run(self._copy, buffers.borrow, buffers.release)
        else:
            self.copying = self._copy(buffers.borrow_nowait, buffers.release)

    def _copy(self, borrow: Callable[[int], Tensor], release: Callable[[Tensor], None]) -> _Copied:
        net = self.parts[0]
        taken = Taken(alike=dict(self.given))
        taken.take(self.parts, writes_blocks=self.replica == 0)
        mine = dict(self.of_loaders)
        own = own_states(net, self.own, taken.own, self.place[0], mine) | {"loaders": self.loaders}
        taken.keep_own(mine)
        structure = {**taken.structure(f"net/{name}" for name in own_buffers(net)), "extra": self.extra}
        written = taken.mine_to_write(*self.place)
        layout = lay_out([entry for entry, _ in written])
        buffer = borrow(layout.nbytes)
        try:
            copy_into(buffer, layout, [t for _, t in written])
        except BaseException:
            release(buffer)
            raise
        return _Copied(layout, buffer, structure, taken.parts, own)

    # --- beside the steps ---------------------------------------------------------------------------------------------

    async def finish(self, writer: Writer) -> Path:
        """Write it; every rank does so at the same time."""
        coll, what = writer.coll, f"the checkpoint in {self.path}"
        try:
            begun = await together(coll, what, self._begin_files(writer))
            assert self.copied is not None
            await check_alike(coll, self.copied.structure, [each for _, each in begun])
            part = folders.folder_of(self.path, begun[0][0], ".part")
            written = await together(coll, what, self._write(writer, part))
            return (await together(coll, what, self._commit(writer, part, written)))[0]
        except BaseException:
            if self.number:
                with suppress(RuntimeError):  # the thread for files was given up: the next save removes it
                    writer.stream.submit(folders.discard, self.path, self.number).detach()
            raise
        finally:
            if self.copied is not None:
                writer.buffers.release(self.copied.buffer)
            self.parts, self.copying, self.copied = [], None, None

    async def _begin_files(self, writer: Writer) -> tuple[int, bytes]:
        """Return the number of the checkpoint, which rank 0 knows, and what ranks compare."""
        self.copied = copied = await self.copying if isinstance(self.copying, Handle) else self.copying
        assert copied is not None
        if writer.coll.rank == 0:
            self.number = await writer.stream.submit(folders.begin, self.path)
        return self.number, digest(copied.structure)

    async def _write(self, writer: Writer, part: Path) -> tuple[FileFacts, list[TensorEntry], Json]:
        """Write the file of this rank; return what the manifest says of it."""
        assert self.copied is not None
        layout = self.copied.layout
        file = part / folders.file_name(writer.coll.rank)
        entries = await writer.stream.submit(self._write_file, file, writer.progress.computing)
        return FileFacts.of(layout), entries, self.copied.own

    def _write_file(self, file: Path, computing: set[int]) -> list[TensorEntry]:
        assert self.copied is not None
        return write_file(file, self.copied.layout, self.copied.buffer, WritePace(computing).rest)

    async def _commit(
        self, writer: Writer, part: Path, written: list[tuple[FileFacts, list[TensorEntry], Json]]
    ) -> Path:
        """Have the folder be a checkpoint; rank 0."""
        if writer.coll.rank != 0:
            return part
        assert self.copied is not None
        folder = await writer.stream.submit(commit, self.path, self.number, written, self.copied.parts, self.extra)
        if self.keep is not None:
            await writer.stream.submit(folders.remove_old, self.path, self.keep)
        return folder
