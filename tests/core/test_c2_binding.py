"""The module `aiodist._core`, as it was built."""

from __future__ import annotations

from random import Random
from zlib import crc32

import numpy as np
import pytest

import aiodist._core as core
from tests.support.processor import best_kernels


def test_c2_kernels_are_the_best_that_the_processor_runs() -> None:
    assert core.kernels() == best_kernels()


@pytest.mark.skipif(not core.CHECKS, reason="this processor does not multiply without carries")
def test_c2_copies_have_the_checksum_of_zlib() -> None:
    random = Random(1)
    data = np.frombuffer(random.randbytes(1 << 16), np.uint8)
    for _ in range(2000):
        into, parts, expected = bytearray(12_000), [], []
        for _ in range(random.randrange(4)):
            start, nbytes, crc = random.randrange(4096), random.choice([0, 1, 63, 64, 65, 4000]), random.getrandbits(32)
            nbytes = random.choice([nbytes, random.randrange(300)])
            parts.append((data.ctypes.data + start, nbytes, crc))
            expected.append((data[start : start + nbytes].tobytes(), crc))
        sums = core.copy_checked(into, parts)
        assert sums == [crc32(part, crc) for part, crc in expected]
        copied = b"".join(part for part, _ in expected)
        assert into == copied.ljust(12_000, b"\0")
    with pytest.raises(ValueError, match="the parts are longer than the 3 bytes"):
        core.copy_checked(bytearray(3), [(data.ctypes.data, 2, 0), (data.ctypes.data, 2, 0)])
