"""The folders of finished, unfinished and removed checkpoints.

`checkpoint-00000008.part` is being written, or was when its program ended, `checkpoint-00000004.old` is being removed.
A folder becomes a checkpoint by its renaming, once all that is in it is on the disk.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

MANIFEST = "manifest.json"
_log = logging.getLogger("aiodist")
_NAME = re.compile(r"checkpoint-(\d{8,15})(\.part|\.old)?")


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def folder_of(path: Path, number: int, suffix: str = "") -> Path:
    return path / f"checkpoint-{number:08}{suffix}"


def _found(path: Path, suffix: str | None) -> list[int]:
    with os.scandir(path) as entries:
        names = [match for entry in entries if (match := _NAME.fullmatch(entry.name))]
    return sorted(int(match[1]) for match in names if match[2] == suffix)


def candidates(path: Path) -> list[Path]:
    """Return `path` itself if it is a checkpoint, else all checkpoints in it, the newest first.

    Raises `FileNotFoundError` where there is none.
    """
    if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: there is no such checkpoint")
        return [path]
    numbers = _found(path, None) if path.is_dir() else []
    if not numbers:
        raise FileNotFoundError(f"{path}: expected a checkpoint, or a folder with checkpoints, and there is none")
    return [folder_of(path, number) for number in reversed(numbers)]


def number_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def begin(path: Path) -> int:
    """Make the folder of the next checkpoint, and return its number. Remove leftovers of earlier saves."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    os.makedirs(path, exist_ok=True)
    for folder in made:
        sync_folder(folder.parent)
    for suffix in (".part", ".old"):
        for number in _found(path, suffix):
            shutil.rmtree(folder_of(path, number, suffix))
    number = max(_found(path, None), default=0) + 1
    os.mkdir(folder_of(path, number, ".part"))
    return number


def commit(path: Path, number: int) -> Path:
    """Make the folder of `number`, whose files are on the disk, a checkpoint."""
    part, whole = folder_of(path, number, ".part"), folder_of(path, number)
    sync_folder(part)
    os.rename(part, whole)
    sync_folder(path)
    return whole


def remove_old(path: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`. The next save tries again to remove the rest."""
    try:
        for old in _found(path, None)[:-keep]:
            os.rename(folder_of(path, old), folder_of(path, old, ".old"))
            shutil.rmtree(folder_of(path, old, ".old"))
    except OSError as error:
        _log.warning("a checkpoint was written in %s, but one before it could not be removed: %s", path, error)


def discard(path: Path, number: int) -> None:
    """Remove the folder of the failed checkpoint `number`. The next save tries again."""
    try:
        shutil.rmtree(folder_of(path, number, ".part"))
    except OSError as error:
        _log.warning("%s could not be removed: %s", folder_of(path, number, ".part"), error)


def sync_folder(path: Path) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def pages(nbytes: int) -> Tensor:
    """Return flat memory that begins at a page, as `write_past_cache` needs."""
    memory = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % mmap.PAGESIZE
    return memory[begin : begin + nbytes]


def write_past_cache(fd: int) -> None:
    """Let writes bypass the kernel's cache if the file system can, which halves the CPU time."""
    with suppress(OSError):  # it cannot
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Open a new file for a block, and sync the file at the end of the block."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        yield fd
        os.fsync(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
