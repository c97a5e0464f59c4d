"""Reads a checkpoint, and compares checksums before use."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiodist.checkpoints.folders import MANIFEST, file_name
from aiodist.checkpoints.format import DTYPES, UNREADABLE, Manifest, TensorEntry
from aiodist.errors import AiodistError, CheckpointDamaged


class PartsDiffer(ValueError):
    """The checkpoint is sound, but has other parts."""


class StoredTensor:
    """A tensor of an open checkpoint, read on demand on the thread for files."""

    def __init__(self, reader: Reader, name: str, dims: tuple[int, ...] | None = None) -> None:
        self._reader = reader
        self._name = name
        stored = reader.pieces(name)[0].shape
        self._dims = tuple(range(len(stored))) if dims is None else dims
        self.shape = torch.Size(stored[d] for d in self._dims)

    def permute(self, dims: Sequence[int]) -> StoredTensor:
        return StoredTensor(self._reader, self._name, tuple(self._dims[d] for d in dims))

    def item(self) -> Any:  # noqa: ANN401
        return self.whole().item()

    def whole(self) -> Tensor:
        return self._reader.tensor(self._name).permute(self._dims)

    def elements(self, start: int, stop: int) -> Tensor:
        """Return a range of the flat elements, and read no others if the range is contiguous in the file."""
        if list(self._dims) == sorted(self._dims):
            return self._reader.part(self._name, start, stop - start)
        return self.whole().reshape(-1)[start:stop].clone()


class Reader:
    """The tensors of one checkpoint, whose files are open; a context manager. For one thread.

    Raises `CheckpointDamaged` where a file is missing, shorter or longer than it was, or not as it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._fds: list[int] = []
        self._read: set[tuple[int, int]] = set()
        """The pieces that were compared, by file and offset."""

    def __enter__(self) -> Reader:
        try:
            for rank in range(len(self.manifest.files)):
                self._open(rank)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the files; an error of a wrong manifest becomes `CheckpointDamaged`."""
        self._close()
        if isinstance(error, UNREADABLE) and not isinstance(error, AiodistError | PartsDiffer):
            raise CheckpointDamaged(f"{self.folder / MANIFEST}: {error}") from error

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, rank: int) -> None:
        path, facts = self.folder / file_name(rank), self.manifest.files[rank]
        try:
            self._fds.append(os.open(path, os.O_RDONLY))
            nbytes = os.fstat(self._fds[-1]).st_size
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from error
        if nbytes != facts.nbytes:
            raise CheckpointDamaged(f"{path} has {nbytes} bytes: expected {facts.nbytes}")
        header = torch.empty(facts.header, dtype=torch.uint8, device="cpu")
        if self._filled(rank, 0, header) != facts.crc:
            raise CheckpointDamaged(f"{path}, bytes 0 to {facts.header}: the header is not as it was written")

    def pieces(self, name: str) -> Sequence[TensorEntry]:
        if name not in self.manifest.tensors:
            raise CheckpointDamaged(f"{self.folder / MANIFEST}: there is no tensor {name!r}")
        return self.manifest.tensors[name]

    def tensor(self, name: str) -> Tensor:
        first = self.pieces(name)[0]
        return self.part(name, 0, prod(first.shape)).view(first.shape)

    def part(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements `start` … `start + numel` of the tensor, made flat."""
        pieces = self.pieces(name)
        out = torch.empty(numel, dtype=DTYPES[pieces[0].dtype], device="cpu")
        for piece in pieces:
            begins, ends = piece.start, piece.start + piece.numel
            first, last = max(start, begins), min(start + numel, ends)
            if (first, last) == (begins, ends):
                self._read_piece(piece, out[begins - start : ends - start])
            elif first < last:
                read = torch.empty(piece.numel, dtype=out.dtype, device="cpu")
                self._read_piece(piece, read)
                out[first - start : last - start] = read[first - begins : last - begins]
        return out

    def check_rest(self, rank: int, size: int) -> None:
        """Compare what was not read so far, as one of `size` ranks that divide the files among them."""
        for pieces in self.manifest.tensors.values():
            for piece in pieces:
                if piece.file % size == rank and (piece.file, piece.offset) not in self._read:
                    self._read_piece(piece, torch.empty(piece.numel, dtype=DTYPES[piece.dtype], device="cpu"))

    def _read_piece(self, entry: TensorEntry, into: Tensor) -> None:
        if not entry.numel:
            return
        if self._filled(entry.file, entry.offset, into.view(torch.uint8)) != entry.crc:
            raise CheckpointDamaged(
                f"{self.folder / file_name(entry.file)}, bytes {entry.offset} to {entry.offset + entry.nbytes}: "
                f"tensor {entry.name!r} is not as it was written (its CRC-32 differs)"
            )
        self._read.add((entry.file, entry.offset))

    def _filled(self, rank: int, offset: int, raw: Tensor) -> int:
        data = raw.numpy().data
        path = self.folder / file_name(rank)
        while data:
            try:
                count = os.preadv(self._fds[rank], [data], offset)
            except OSError as error:
                raise CheckpointDamaged(f"{path}, byte {offset}: it cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointDamaged(f"{path} ends at byte {offset}, while it is read")
            data, offset = data[count:], offset + count
        return zlib.crc32(raw.numpy().data)


def of_all(damages: Sequence[str], rank: int | None = None) -> CheckpointDamaged:
    """Return one error for the damages of several checkpoints, the newest first."""
    damaged = CheckpointDamaged(damages[0], rank=rank)
    for other in damages[1:]:
        damaged.add_note(f"and an older one: {other}")
    return damaged
