"""P2: tensors on CUDA devices at the server's calls, by way of the host, behind what is queued on their streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.codecs import Int8
from aiodist.ps import SGD, ParameterServer
from tests.support.simulated_cuda.device import SimulatedCuda

pytestmark = pytest.mark.ranks(2)
SIZES = (0, 1, 5, 20_001, 300_001)


def drawn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("more", [{}, {"servers": 1}, {"codec": Int8(), "rule": "copy"}, {"checkpoints": True}])
async def test_p2_cuda_tensors_are_as_those_of_the_host(
    simulated_cuda: SimulatedCuda, coll: Communicator, more: dict[str, Any]
) -> None:
    del simulated_cuda
    settings: dict[str, Any] = {"rule": "add", "split_bytes": 4096, **more}
    async with ParameterServer(coll, **settings) as ps:
        if ps.rank == 0:
            for numel in SIZES:
                host, device = drawn(numel, 1), drawn(numel, 1).cuda()
                await ps.init([f"host {numel}", f"device {numel}"], [host, device])
                for seed in (2, 3):
                    value = drawn(numel, seed)
                    on_device = value.cuda() * 1  # a kernel that may not have run yet
                    await ps.push(f"host {numel}", value, alpha=1.0)
                    await ps.push(f"device {numel}", on_device)
                expected = await ps.pull(f"host {numel}")
                found = await ps.pull(f"device {numel}")
                assert found is device
                assert found.is_cuda
                assert torch.equal((found + 1).cpu(), expected + 1)
                into = torch.empty(numel)
                assert torch.equal(await ps.pull(f"device {numel}", into), expected)
                assert torch.equal((await ps.push_pull(f"device {numel}", on_device * 0)).cpu().abs() * 0, into * 0)


async def test_p2_cuda_calls_keep_their_order(simulated_cuda: SimulatedCuda, coll: Communicator) -> None:
    del simulated_cuda
    async with ParameterServer(coll, rule="add", servers=1) as ps:
        if ps.rank == 0:
            await ps.init(["a", "b"], [torch.zeros(50_000).cuda(), torch.zeros(3)])
            handles = []
            for turn in range(6):  # later requests wait for a copy
                handles += [ps.push("a", torch.ones(50_000, device="cuda")), ps.push("a", torch.ones(50_000))]
                handles += [ps.push("b", torch.ones(3)), ps.push("b", torch.ones(3, device="cuda"))]
                one, two = ps.pull("a"), ps.pull("b", torch.empty(3))
                assert (await one).cpu()[0] == 2 * turn + 2
                assert (await two)[0] == 2 * turn + 2
            for handle in handles:
                await handle
            last = ps.push("b", torch.ones(3, device="cuda"))
            await ps.sync()
            assert last.done()
            assert (await ps.pull("b", torch.empty(3)))[0] == 13


async def test_p2_cuda_parameters_are_trained(simulated_cuda: SimulatedCuda, coll: Communicator) -> None:
    del simulated_cuda
    net, other = torch.nn.Linear(40, 3).cuda(), torch.nn.Linear(40, 3)
    other.load_state_dict({name: t.cpu() for name, t in net.state_dict().items()})
    async with ParameterServer(coll, dict(net.named_parameters()), rule=SGD(lr=0.1), servers=[1], workers=[0, 1]) as ps:
        other.load_state_dict({name: t.detach().cpu() for name, t in net.state_dict().items()})
        if ps.rank == 0:
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            for step in range(3):
                x = drawn(80, step).view(2, 40)
                async with ps.pushing(net):
                    net(x.cuda()).square().sum().backward()
                await ps.pull()
                optimizer.zero_grad()
                other(x).square().sum().backward()
                optimizer.step()
                net.zero_grad()
            for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
                assert torch.allclose(mine.detach().cpu(), theirs.detach(), atol=1e-6)
        await ps.barrier()


async def test_p2_rows_on_a_device_are_refused(simulated_cuda: SimulatedCuda, coll: Communicator) -> None:
    del simulated_cuda
    async with ParameterServer(coll) as ps:
        table = await ps.embedding("rows", 3, init=0.0)
        with pytest.raises(ValueError, match=r"values lives on cuda:0: a table takes rows on the CPU"):
            table.push(torch.arange(2), torch.ones(2, 3).cuda())
