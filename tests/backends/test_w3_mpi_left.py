"""W3: MPI that is left is not called any more, and nothing stays pending in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.testing.seams.progress import transport_lock
from aiodist.types import ReduceOp

mpi = pytest.importorskip("aiodist.backends.mpi", reason="mpi4py is not installed", exc_type=ImportError)


class Silent:
    """A communicator of MPI's whose requests never end; it counts its calls."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.calls = 0

    def _called(self, *_: object) -> Any:
        self.calls += 1
        return self

    Isend = Irecv = Iallreduce = Ibcast = _called

    def Set_errhandler(self, _: object) -> None:
        """Take what a transport sets."""

    def Test(self) -> bool:
        self.calls += 1
        return False


async def test_w3_what_is_pending_in_mpi_fails_when_it_is_left_and_later_calls_do_not_reach_it() -> None:
    from aiodist.backends.mpi.requests import Requests

    comm, progress = Silent(), Progress.current()
    requests = Requests(progress)
    world = mpi.MpiTransport((comm, comm), progress, requests)
    ended: list[BaseException | None] = []
    t, large = torch.zeros(100), torch.zeros(128 << 20)  # 512 MiB: more pieces than Python has frames
    plan = world.native.plan_allreduce(torch.float32, 100, ReduceOp.SUM)

    def issue() -> None:
        world.isend(t, 1, 0, ended.append)
        world.irecv(t, 1, 0, ended.append)
        plan(t, 0, ended.append)
        world.native.plan_allreduce(torch.float32, large.numel(), ReduceOp.MEAN)(large, 0, ended.append)

    with transport_lock:
        issue()
    assert not ended
    world.leave()
    calls = comm.calls
    assert calls
    assert len(ended) == 4
    with transport_lock:
        issue()
        assert not requests.poll()
    world.leave()
    assert comm.calls == calls
    assert len(ended) == 8
    for error in ended:
        assert isinstance(error, BackendError)
        assert "MPI is no longer used" in str(error)
