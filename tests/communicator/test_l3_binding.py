"""L3: which device a rank computes on: number local_rank modulo those it sees; the CPU only where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiodist import Communicator, gather, init
from aiodist.communicator import parts_of
from aiodist.testing import run_ranks
from aiodist.testing.seams.world import current_place
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.simulation import simulated_cuda


def my_rank() -> int | None:
    place: Any = current_place.get()
    return None if place is None else int(place.started_as)


@pytest.mark.ranks(5)
async def test_l3_ranks_take_turns_on_the_devices(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    assert coll.device == torch.device("cuda", coll.rank % 2)
    devices = coll.topology.devices
    assert [device and device.index for device in devices] == [0, 1, 0, 1, 0]
    assert [device and device.physical for device in devices] == ["0", "1", "0", "1", "0"]
    assert coll.topology.device is devices[coll.rank]
    assert "ranks 0 (cuda:0), 1 (cuda:1), 2 (cuda:0), 3 (cuda:1), 4 (cuda:0)" in str(coll.topology)
    odd = await coll.split(coll.rank % 2)
    assert odd.device == coll.device
    assert len({device and device.physical for device in odd.topology.devices}) == 1
    t = torch.full((9,), coll.rank + 1.0).to(coll.device)
    ranks = range(coll.rank % 2, 5, 2)
    assert (await odd.allreduce(t)).tolist() == [float(sum(rank + 1 for rank in ranks))] * 9


@pytest.mark.ranks(4)
async def test_l3_each_host_counts_from_its_first_device(
    two_hosts: None, coll: Communicator, simulated_cuda: SimulatedCuda
) -> None:
    assert [device and device.index for device in coll.topology.devices] == [0, 0, 1, 1]
    assert coll.device.index == coll.local_rank == coll.rank // 2
    t = torch.full((9,), coll.rank + 1.0).to(coll.device)
    assert (await coll.allreduce(t)).tolist() == [10.0] * 9
    offer = coll.availability().of("allreduce", "cuda_ipc", "cuda")
    assert (str(offer.state), offer.reason) == ("not possible here", "the ranks are on 2 hosts")


@pytest.mark.ranks(2)
async def test_l3_the_cpu_where_there_is_no_device(coll: Communicator) -> None:
    assert coll.device == torch.device("cpu")
    assert coll.topology.device is None
    assert coll.topology.devices == ()
    assert "cuda" not in str(coll.topology)


def test_l3_visible_devices_have_names_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-3f")

    async def main() -> tuple[int | None, list[str]]:
        async with init() as coll:
            return coll.device.index, [device.physical for device in coll.topology.devices if device]

    with simulated_cuda(devices=2):
        assert run_ranks(3, main) == [(index, ["5", "GPU-3f", "5"]) for index in (0, 1, 0)]


def test_l3_a_rank_that_sees_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation refuses tensors on devices of the other ranks; tensors on the CPU still work."""
    with simulated_cuda(devices=2), monkeypatch.context() as patch:
        there = torch.cuda.device_count
        patch.setattr(torch.cuda, "device_count", lambda: 0 if my_rank() == 1 else there())

        async def main(rank: int) -> None:
            async with init() as coll:
                assert coll.device.type == ("cpu" if rank == 1 else "cuda")
                t = torch.ones(3).to("cpu" if rank == 1 else "cuda:0")
                if rank != 1:
                    for call in (coll.allreduce, coll.broadcast, coll.allgather, coll.recv):
                        with pytest.raises(ValueError, match=r"t is on cuda:0: .*: rank 1 has no CUDA device"):
                            call(t)
                    with pytest.raises(ValueError, match="rank 1 has no CUDA device"):
                        coll.send(t, 0)
                assert (await coll.allreduce(torch.ones(3))).tolist() == [3.0] * 3
                offer = coll.availability().of("allreduce", "staged", "cuda")
                assert offer.reason == "rank 1 has no CUDA device"
                await coll.allgather_object(rank)
                assert (await coll.sendrecv(torch.ones(2), (rank + 1) % 3, (rank - 1) % 3)).tolist() == [1.0] * 2
                able = await coll.split(None if rank == 1 else 0)
                if rank != 1:
                    assert (await able.allreduce(t)).tolist() == [2.0] * 3

        run_ranks(3, main)


@pytest.mark.ranks(2)
async def test_l3_a_message_that_may_lie_on_a_device_opens_none(
    coll: Communicator, simulated_cuda: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    accelerator = parts_of(coll).registry.resources.accelerator
    assert accelerator is not None
    sent = coll.send(torch.ones(3), 1 - coll.rank)
    assert (await coll.recv()).is_cpu
    await sent
    assert not accelerator.streams
    sent = coll.send(torch.ones(3, device=coll.device), 1 - coll.rank)
    received = await coll.recv()
    await sent
    assert received.device == coll.device
    assert received.tolist() == [1.0] * 3
    assert accelerator.streams


@pytest.mark.ranks(2)
async def test_l3_streams_go_back_to_those_who_need_one(coll: Communicator, simulated_cuda: object) -> None:
    await gather(*[coll.allreduce(torch.ones(5000, device=coll.device), impl="staged") for _ in range(60)])
    accelerator = parts_of(coll).registry.resources.accelerator
    assert accelerator is not None
    streams = accelerator.streams[coll.device]
    assert 0 < len(streams) <= 16
    assert not any(stream.users for stream in streams)


@pytest.mark.ranks(2)
async def test_s4_memory_of_a_device_for_collectives(coll: Communicator, simulated_cuda: object) -> None:
    for shape, size in ((5, (5,)), ((2, 3), (2, 3))):
        t = coll.arena_empty(shape, torch.float64, device=coll.device)
        assert (t.device, t.dtype, tuple(t.shape)) == (coll.device, torch.float64, size)
        t.fill_(coll.rank + 1)
        await coll.allreduce(t, impl="cuda_ipc")
        assert set(t.flatten().tolist()) == {3.0}
    assert coll.arena_empty(3).device == coll.arena_empty(3, device="cpu").device == torch.device("cpu")
