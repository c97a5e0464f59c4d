"""The module `aiodist._core`, as it was built."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from random import Random
from zlib import crc32

import numpy as np
import pytest

import aiodist._core as core
from aiodist.checkpoints.folders import pages, write_past_cache
from tests.support.processor import best_kernels


def test_c2_kernels_are_the_best_that_the_processor_runs() -> None:
    assert core.kernels() == best_kernels()


def test_c2_a_plan_that_is_dropped_keeps_nothing() -> None:
    def otherwise(*_: object) -> None: ...

    plan = core.Plan("what", "allreduce", otherwise, 0, 0, 0, 0, 0, 0, 0, 4, 4, True, (), ())
    kept = weakref.ref(otherwise)
    del plan, otherwise
    assert kept() is None


def _open(path: Path, past_cache: bool) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if past_cache:
        write_past_cache(fd)
    return fd


@pytest.mark.thorough
@pytest.mark.parametrize("past_cache", [False, True])
def test_c2_what_is_written_has_the_checksum_of_zlib(tmp_path: Path, past_cache: bool) -> None:
    random, path = Random(1), tmp_path / "file"
    data = np.frombuffer(random.randbytes(1 << 16), np.uint8)
    for _ in range(500):
        parts, expected = [], []
        for _ in range(random.randrange(6)):
            start, nbytes, crc = random.randrange(4096), random.choice([0, 1, 63, 64, 65, 4000]), random.getrandbits(32)
            nbytes = random.choice([nbytes, random.randrange(300), random.randrange(60_000)])
            parts.append((data.ctypes.data + start, nbytes, crc))
            expected.append((data[start : start + nbytes].tobytes(), crc))
        memory, fd = pages(2 * random.choice([4096, 8192, 65_536])), _open(path, past_cache)
        sums = core.write_checked(fd, memory.numpy().data, parts)
        os.close(fd)
        assert sums == [crc32(part, crc) for part, crc in expected]
        assert path.read_bytes() == b"".join(part for part, _ in expected)


@pytest.mark.parametrize(("nbytes", "begins"), [(1, 0), (8192, 0), (40_001, 0), (40_001, 7)])
def test_c2_what_cannot_go_past_the_cache_goes_through_it(tmp_path: Path, nbytes: int, begins: int) -> None:
    """It is the end that is no whole page, or all, where the memory does not begin at one as here or at the system."""
    data, memory, fd = np.random.default_rng(1).bytes(nbytes), pages(3 * 8192), _open(tmp_path / "file", True)
    source = np.frombuffer(data, np.uint8)
    past_cache = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    core.write_checked(fd, memory[begins : begins + 2 * 8192].numpy().data, [(source.ctypes.data, nbytes, 0)])
    if past_cache:
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == (nbytes == 8192)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == data


def test_c2_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    data, memory = np.zeros(100_000, np.uint8), pages(8192).numpy().data
    parts = [(data.ctypes.data, 100_000, 0)]
    with open("/dev/full", "wb") as full, pytest.raises(OSError, match="No space left on device"):
        core.write_checked(full.fileno(), memory, parts)
    with open("/dev/null", "rb") as closed, pytest.raises(OSError, match="Bad file descriptor"):
        core.write_checked(closed.fileno(), memory, parts)
    with open(tmp_path / "file", "wb") as file, pytest.raises(ValueError, match="memory of 1 bytes: expected two"):
        core.write_checked(file.fileno(), bytearray(1), parts)
