"""`save`: a checkpoint of a training, taken between two steps and written beside the next ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from aiodist.checkpoints import folders
from aiodist.checkpoints.agreeing import check_alike, digest, exchange
from aiodist.checkpoints.blocks import Cuts
from aiodist.checkpoints.manifest import MANIFEST, FileFacts, Manifest, Stored, file_name, pieces_of
from aiodist.checkpoints.output import Output
from aiodist.checkpoints.own import check_own, own_loaders, own_states
from aiodist.checkpoints.parts import Net, Part, Taken, check_parts
from aiodist.checkpoints.safetensors_file import Layout, TensorEntry, copy_into, lay_out
from aiodist.checkpoints.values import Json, encode
from aiodist.checkpoints.writer import Writer
from aiodist.communicator import Communicator
from aiodist.handles import Handle

_CHUNK = 1 << 20


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
    `RemoteError`, which names that rank; `MismatchError` where ranks differ in what they have to have the same;
    what the communicator raises. The checkpoints before are untouched then.

    Cost: once for a communicator a duplicate of it, a thread, and memory for this rank's share; each time a copy of
    that share, three small exchanges, and reading it once for its CRC-32. Where torch uses all cores of a rank, the
    thread for files rests while the compute thread computes, so writing takes long, and steps do not.
    """
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={keep!r}: expected how many checkpoints to keep, at least 1, or None for all")
    coll, replicas = ranks_of(net, parts, own, coll)
    job = _Save(Path(path), [net, *parts], own, keep, coll.rank, replicas)
    job.say(extra)
    writer = Writer.of(coll)
    job.begin(writer)
    return writer.later("save", partial(job.finish, writer))


def ranks_of(
    net: object, parts: Sequence[object], own: Sequence[object], coll: Communicator | None
) -> tuple[Communicator, tuple[int, int]]:
    """Return the communicator of all ranks that save or load together, and rank and size among those of the net.

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
    return coll, (coll.rank, coll.size) if shared == 1 else (0, 1) if mine is None else (mine.rank, mine.size)


@dataclass
class _Copied:
    """What a rank writes, in memory of its own."""

    layout: Layout
    buffer: Tensor
    structure: Json
    parts: list[Json]
    own: Json
    on_device: bool
    """Some of it lay on a device."""


@dataclass
class _Save:
    """One checkpoint, on one rank."""

    path: Path
    parts: list[Any]
    own: Sequence[object]
    keep: int | None
    rank: int
    replicas: tuple[int, int]
    extra: Json = None
    loaders: list[Json] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the tensors in `extra`."""
    of_loaders: dict[str, Tensor] = field(default_factory=dict)
    copied: Handle[_Copied] | _Copied | None = None

    # --- at the call --------------------------------------------------------------------------------------------------

    def say(self, extra: object) -> None:
        """Take what the loop's thread knows."""
        found: dict[str, Tensor] = {}
        self.extra = encode(extra, "extra", found)
        self.given = {name: t.clone() for name, t in found.items()}
        self.loaders, self.of_loaders = own_loaders(self.own, self.rank)

    def begin(self, writer: Writer) -> None:
        """Have the copy taken: behind the steps that were asked for, or now where nothing computes beside."""
        net = self.parts[0]
        if isinstance(net, Net):
            self.copied = net.run(self._copy, writer, writer.buffers.borrow)
        else:
            self.copied = self._copy(writer, writer.buffers.borrow_nowait)

    def _copy(self, writer: Writer, borrow: Any) -> _Copied:  # noqa: ANN401
        taken = Taken(alike=dict(self.given))
        taken.take(self.parts)
        mine = dict(self.of_loaders)
        own = own_states(self.parts[0], self.own, taken.own, self.rank, mine) | {"loaders": self.loaders}
        taken.keep_own(mine)
        written = taken.mine_to_write((writer.parent.rank, writer.parent.size), self.replicas)
        layout = lay_out([entry for entry, _ in written])
        buffer = borrow(layout.nbytes - len(layout.header))
        try:
            copy_into(buffer, layout, [t for _, t in written])
        except BaseException:
            writer.buffers.release(buffer)
            raise
        on_device = not all(t.is_cpu for _, t in written)
        return _Copied(layout, buffer, {**taken.structure(), "extra": self.extra}, taken.parts, own, on_device)

    # --- beside the steps ---------------------------------------------------------------------------------------------

    async def finish(self, writer: Writer) -> Path:
        """Write it; every rank does so at the same time."""
        copied: _Copied | None = None
        try:
            error: Exception | None = None
            try:
                copied = await self.copied if isinstance(self.copied, Handle) else self.copied
            except Exception as raised:  # noqa: BLE001  - told to all
                error = raised
            return await self._write(writer, copied, error)
        finally:
            if copied is not None:
                writer.buffers.release(copied.buffer)
            self.parts, self.copied = [], None

    async def _write(self, writer: Writer, copied: _Copied | None, error: Exception | None) -> Path:
        coll, what = writer.coll, f"the checkpoint in {self.path}"
        number = 0
        if coll.rank == 0 and error is None:
            try:
                number = await writer.stream.submit(folders.begin, self.path)
            except Exception as raised:  # noqa: BLE001  - told to all
                error = raised
        try:
            said = None if copied is None else digest(copied.structure)
            told = await exchange(coll, what, (number, said), error)
            number = told[0][0]
            assert copied is not None
            await check_alike(coll, copied.structure, [each for _, each in told])
            return await self._write_files(writer, number, copied, what)
        except BaseException:
            if coll.rank == 0 and number:
                with suppress(RuntimeError):  # the thread for files was given up: the next save removes it
                    writer.stream.submit(folders.discard, self.path, number).detach()
            raise

    async def _write_files(self, writer: Writer, number: int, copied: _Copied, what: str) -> Path:
        coll = writer.coll
        facts, error = None, None
        try:
            facts = await self._write_mine(writer, number, copied)
        except Exception as raised:  # noqa: BLE001  - told to all
            error = raised
        told = await exchange(coll, what, facts, error)
        folder = None
        if coll.rank == 0:
            try:
                folder = await writer.stream.submit(self._commit, number, told, copied)
            except Exception as raised:  # noqa: BLE001  - told to all
                error = raised
        path: Path = (await exchange(coll, what, folder, error))[0]
        return path

    async def _write_mine(
        self, writer: Writer, number: int, copied: _Copied
    ) -> tuple[FileFacts, list[TensorEntry], Json]:
        output = Output(copied.layout, copied.buffer)
        stream = writer.stream
        file = folders.folder_of(self.path, number, ".part") / file_name(writer.coll.rank)
        try:
            await stream.submit(output.open, file)
            for at in range(0, output.nbytes, _CHUNK):
                with await writer.lane.acquire(min(_CHUNK, output.nbytes - at)):
                    seconds = await stream.submit(output.write, _CHUNK)
                await writer.rest(seconds, on_device=copied.on_device)
            await stream.submit(output.sync)
        finally:
            output.close()
        return (*output.facts(), copied.own)

    def _commit(self, number: int, told: list[tuple[FileFacts, list[TensorEntry], Json]], copied: _Copied) -> Path:
        """Write the manifest, and have the folder be a checkpoint; rank 0, on the thread for files."""
        part = folders.folder_of(self.path, number, ".part")
        tensors: dict[str, list[Stored]] = {}
        for rank, (facts, entries, _) in enumerate(told):
            file = part / file_name(rank)
            if not file.exists() or file.stat().st_size != facts.nbytes:
                raise FileNotFoundError(
                    f"{file}, which rank {rank} wrote, is not there: do all ranks share the folder?"
                )
            for entry in entries:
                tensors.setdefault(entry.name, []).append(Stored(rank, entry))
        pieces_of(tensors)
        manifest = Manifest(
            [facts for facts, _, _ in told], tensors, copied.parts, self.extra, [own for *_, own in told]
        )
        folders.write_file(part / MANIFEST, manifest.packed())
        return folders.commit(self.path, number, self.keep)
