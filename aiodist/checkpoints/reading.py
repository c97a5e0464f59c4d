"""Reading a checkpoint: every byte that is used was compared with its checksum, before anything of it is used."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from aiodist.checkpoints.manifest import MANIFEST, Manifest, Stored, block_shape, file_name
from aiodist.checkpoints.safetensors_file import DTYPES, Block
from aiodist.errors import CheckpointDamaged


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
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
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
        header = torch.empty(facts.header, dtype=torch.uint8)
        self._fill(rank, 0, header)
        if zlib.crc32(header.numpy().data) != facts.crc:
            raise CheckpointDamaged(f"{path}, bytes 0 to {facts.header}: the header is not as it was written")

    # --- tensors ----------------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor."""
        if name not in self.manifest.tensors:
            raise CheckpointDamaged(f"{self.folder / MANIFEST}: there is no tensor {name!r}")
        pieces = self.manifest.tensors[name]
        first = pieces[0].entry
        flat = torch.empty(prod(first.shape), dtype=DTYPES[first.dtype])
        for block, members in _by_block(pieces):
            shape = block_shape(first.shape, block)
            into = flat if block is None else torch.empty(prod(shape), dtype=flat.dtype)
            for piece in members:
                self._read_piece(piece, into[piece.entry.start : piece.entry.start + piece.entry.numel])
            if block is not None:
                whole = flat.view(first.shape)
                whole[tuple(slice(*bounds) for bounds in block)] = into.view(shape)
        return flat.view(first.shape)

    def part(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements `start` … `start + numel` of the tensor, made flat."""
        pieces = self.manifest.tensors[name]
        out = torch.empty(numel, dtype=DTYPES[pieces[0].entry.dtype])
        if any(piece.entry.block is not None for piece in pieces):
            return out.copy_(self.tensor(name).view(-1)[start : start + numel])
        for piece in pieces:
            begins = piece.entry.start
            first, last = max(start, begins), min(start + numel, begins + piece.entry.numel)
            if first < last:
                read = torch.empty(piece.entry.numel, dtype=out.dtype)
                self._read_piece(piece, read)
                out[first - start : last - start] = read[first - begins : last - begins]
        return out

    def check_rest(self, rank: int, size: int) -> None:
        """Compare what was not read so far, as one of `size` ranks that divide the files among them."""
        for pieces in self.manifest.tensors.values():
            for piece in pieces:
                if piece.file % size == rank and (piece.file, piece.entry.offset) not in self._read:
                    self._read_piece(piece, torch.empty(piece.entry.numel, dtype=DTYPES[piece.entry.dtype]))

    def _read_piece(self, piece: Stored, into: Tensor) -> None:
        entry = piece.entry
        if not entry.numel:
            return
        raw = into.view(torch.uint8)
        self._fill(piece.file, entry.offset, raw)
        if zlib.crc32(raw.numpy().data) != entry.crc:
            raise CheckpointDamaged(
                f"{self.folder / file_name(piece.file)}, bytes {entry.offset} to {entry.offset + entry.nbytes}: "
                f"tensor {entry.name!r} is not as it was written (its CRC-32 differs)"
            )
        self._read.add((piece.file, entry.offset))

    def _fill(self, rank: int, offset: int, raw: Tensor) -> None:
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


def _by_block(pieces: Sequence[Stored]) -> Iterator[tuple[Block | None, list[Stored]]]:
    found: dict[Block | None, list[Stored]] = {}
    for piece in pieces:
        found.setdefault(piece.entry.block, []).append(piece)
    yield from found.items()
