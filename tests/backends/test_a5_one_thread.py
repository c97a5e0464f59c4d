"""A5: one thread at a time talks to the other ranks of the host, no matter what the program does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.backends.shm.neighbours import Neighbour
from aiodist.testing.seams.progress import transport_lock


@pytest.mark.drawn(1)
@pytest.mark.parametrize("call", ["send", "flush", "listen"])
@pytest.mark.ranks(2, backend=("gloo", "openmpi", "shm"))
async def test_a5_who_talks_to_a_neighbour_holds_the_lock(
    coll: Communicator, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two send the same message, or none does."""
    real: Callable[..., Any] = getattr(Neighbour, call)
    seen: list[tuple[bool, str]] = []

    def noted(neighbour: Neighbour, *args: Any) -> Any:
        seen.append((transport_lock.locked(), threading.current_thread().name))
        return real(neighbour, *args)

    monkeypatch.setattr(Neighbour, call, noted)
    for impl in ("auto", "shm"):
        side = await coll.dup()
        half = await side.split(0)
        await aiodist.gather(*[half.allreduce(torch.ones(numel), impl=impl) for numel in (3, 300_000)])
        await aiodist.gather(side.send(torch.ones(5000), 1 - coll.rank), side.recv(src=1 - coll.rank))
        await side.aclose()
    assert seen
    assert all(locked for locked, _ in seen), set(seen)
