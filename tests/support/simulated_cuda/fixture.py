"""The fixture `simulated_cuda`, which loads torch where a test asks for it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.simulated_cuda.device import SimulatedCuda


@pytest.fixture
def simulated_cuda(request: pytest.FixtureRequest) -> Iterator[SimulatedCuda]:
    """Two simulated CUDA devices, with delays that the test's name fixes.

    The test fails where memory was used after it had been freed; one that means to do so clears `hazards`.
    """
    from tests.support.simulated_cuda.simulation import simulated_cuda as opened

    with opened(devices=2, seed=zlib.crc32(request.node.nodeid.encode())) as device:
        print(device)  # shown where the test fails
        yield device
    if device.hazards:
        pytest.fail("\n".join(device.hazards), pytrace=False)
