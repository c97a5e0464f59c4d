"""H7: a step that an aborted operation comes to after its carrier was closed fails, and keeps no memory in flight."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aiodist.errors import BackendError
from aiodist.testing.seams.carriers import LocalHub, LocalTransport
from tests.support.transports import started


async def test_h7_what_a_closed_end_in_this_process_sends_or_receives_fails() -> None:
    hub = LocalHub()
    one, other = (LocalTransport(hub, rank, 2) for rank in range(2))
    await one.aclose(drained=False)
    for step in (one.isend, one.irecv):
        async with asyncio.timeout(10):
            with pytest.raises(BackendError, match="rank 0 of 'world' has left"):
                await started(lambda done: step(torch.zeros(3), 1, 0, done))  # noqa: B023
    waiting = started(lambda done: other.irecv(torch.zeros(3), 0, 0, done))
    await other.aclose(drained=False)
    with pytest.raises(BackendError):
        await waiting
