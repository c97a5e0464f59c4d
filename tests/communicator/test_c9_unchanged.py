"""C9: a call that raises leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiodist import BufferInFlight, Communicator
from aiodist.communicator import parts_of


def _state(coll: Communicator, t: torch.Tensor) -> tuple[Any, ...]:
    """Return all facts that an issue changes."""
    dispatcher = parts_of(coll).dispatcher
    timers = len(dispatcher.progress.timers)
    return timers, dict(dispatcher.recent), coll.seq, len(dispatcher.operations), t._version


@pytest.mark.ranks(2, backend=("openmpi", "gloo", "shm"))
async def test_c9_a_refused_call_leaves_no_deadline_and_no_record(coll: Communicator) -> None:
    t = torch.ones(3)
    receive = coll.recv(t, 1 - coll.rank)
    before = _state(coll, t)
    with pytest.raises(BufferInFlight):
        coll.allreduce([t], timeout=50)
    assert _state(coll, t) == before
    with pytest.raises(ValueError, match="timeout=-1"):
        coll.allreduce([torch.ones(3)], timeout=-1)
    assert _state(coll, t) == before
    assert receive.cancel()
    assert await coll.allreduce([t], timeout=50) == [t]


@pytest.mark.ranks(2, backend=("openmpi", "gloo", "shm"))
async def test_c9_a_call_whose_work_cannot_be_made_leaves_nothing(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(*_: object) -> None:
        raise RuntimeError("no work")

    t = torch.ones(3)
    before = _state(coll, t)
    with monkeypatch.context() as patch:
        patch.setattr("aiodist.communicator.plans.Plans.program", program)
        with pytest.raises(RuntimeError, match="no work"):
            coll.exscan(t, timeout=50)
    assert _state(coll, t) == before
    await coll.exscan(t)
