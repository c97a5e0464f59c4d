"""S5: a transport that takes memory of devices, as a CUDA-aware MPI does, is given it directly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aiodist import init
from aiodist.backends import local
from aiodist.backends.arithmetic import copy
from aiodist.testing import run_ranks
from aiodist.testing.seams.transport import Capabilities
from tests.support.simulated_cuda.simulation import simulated_cuda


def at_once(into: torch.Tensor, t: torch.Tensor) -> None:
    """Copy as MPI does, without streams: the copy has finished when the call returns."""
    copy(into.view(-1).view(torch.uint8)[: t.nbytes], t.cpu().view(-1).view(torch.uint8))
    if into.is_cuda:
        torch.cuda.current_stream(into.device).synchronize()


@pytest.fixture(autouse=True)
def aware(monkeypatch: pytest.MonkeyPatch) -> None:
    able = Capabilities(short_receives=True, devices=frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(local.LocalTransport, "capabilities", lambda self: able)
    monkeypatch.setattr(local, "copy", at_once)


async def everything() -> None:
    async with init() as coll:
        staged = coll.availability().of("allreduce", "staged", "cuda")
        assert (staged.state, staged.reason[:13]) == ("not possible here", "the transport")
        for impl in ("ring", "doubling", "direct"):
            for numel in (1, 1001):
                x = (torch.arange(numel) + coll.rank).to(coll.device)
                await coll.allreduce(x, impl=impl)
                assert x.tolist() == [i * coll.size + sum(range(coll.size)) for i in range(numel)]
        lists = [torch.full((n,), float(coll.rank)).to(coll.device) for n in (3, 1000)]
        gathered = await coll.gather(lists)
        if coll.rank == 0:
            assert [[p.tolist() for p in parts] for parts in gathered] == [
                [[float(r)] * n for r in range(coll.size)] for n in (3, 1000)
            ]
        sent = coll.send(x, (coll.rank + 1) % coll.size)
        received = await coll.recv()
        assert received.is_cuda
        assert received.tolist() == x.tolist()
        await sent


@pytest.mark.parametrize("size", [1, 2, 3])
def test_s5_memory_of_devices_goes_directly(size: int) -> None:
    with simulated_cuda(devices=3, delay=1e-4) as device:
        run_ranks(size, everything)
        assert not device.hazards


def test_s5_the_mpi_library_says_whether_it_takes_it() -> None:
    mpi = pytest.importorskip("aiodist.backends.mpi.transport")
    devices = mpi.MpiTransport.capabilities(SimpleNamespace(near=None)).devices
    assert "cpu" in devices
    assert ("cuda" in devices) == mpi.cuda_aware()
    if "cuda" in devices:
        pytest.skip("this MPI takes memory of devices; those of the package registry do not")
    assert devices == {"cpu"}
