"""A9 on a CUDA device: a tensor on the device, or in memory pinned for it, stays where it is."""

from __future__ import annotations

import pytest
import torch

from aiodist.testing.seams.memory import Arena, move
from tests.support.moving import needs_moving

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), needs_moving]


def test_a9_what_a_device_has_stays() -> None:
    arena, host = Arena(), torch.ones(5)
    for t, why in ((host.cuda(), "t is on cuda:0: expected the CPU"), (host.pin_memory(), "t is pinned for a CUDA")):
        with pytest.raises(ValueError, match=why):
            move(arena, {"host": host, "t": t})
    assert not arena.segments
    move(arena, {"host": host})
    assert arena.locate(host.data_ptr(), host.nbytes) is not None
