"""N1, N2, N10 on CUDA devices: parameters, buffers and gradients of a whole module, correct on any stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator, MismatchError
from aiodist.nn import DataParallel, assert_synchronized, synchronize_gradients, synchronize_parameters
from tests.support.simulated_cuda.device import SimulatedCuda


class Net(nn.Module):
    """A large tensor, a small one, one that is transposed, a buffer of floats and one of integers."""

    def __init__(self, fill: float, place: torch.device | str, small: torch.device | str | None = None) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.full((20_000,), fill).to(place))
        self.small = nn.Parameter(torch.full((3,), fill).to(place if small is None else small))
        self.turned = nn.Parameter(torch.full((4, 5), fill).to(place).t())
        self.register_buffer("mean", torch.full((7,), fill).to(place))
        self.register_buffer("count", torch.full((2,), int(fill)).to(place))

    def tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers()]


def read_elsewhere(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU, read on streams that nothing was ordered for."""
    seen = []
    for t in tensors:
        if t.is_cuda:
            with torch.cuda.stream(torch.cuda.Stream(t.device)):
                seen.append(t.detach().cpu())
        else:
            seen.append(t.detach())
    return seen


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["root", "mean"])
@pytest.mark.parametrize("small", [None, "cpu"])
async def test_n1_cuda_parameters_and_buffers(
    coll: Communicator, simulated_cuda: SimulatedCuda, how: str, small: str | None
) -> None:
    root = coll.size - 1
    module = Net(float(coll.rank + 1), coll.device, small)
    await synchronize_parameters(module, coll, how=how, root=root)
    mean = (coll.size + 1) / 2 if how == "mean" else root + 1
    for t in read_elsewhere(module.tensors()):
        assert t.eq(mean if t.is_floating_point() else root + 1).all()


@pytest.mark.ranks(2)
async def test_n1_cuda_made_on_a_side_stream(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    with torch.cuda.stream(torch.cuda.Stream(coll.device)):
        net = await DataParallel.create(Net(float(coll.rank + 1), coll.device), coll)
    for t in read_elsewhere(cast(Net, net.module).tensors()):
        assert t.eq(1).all()
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n1_cuda_buffers_are_ordered_for_a_stream(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    module = Net(float(coll.rank + 1), coll.device)
    net = await DataParallel.create(Net(0.0, coll.device), coll)
    net.module.load_state_dict(module.state_dict())
    await net.synchronize_buffers("mean")
    mean, count = read_elsewhere(list(net.module.buffers()))
    assert mean.eq(1.5).all()
    assert count.eq(1).all()
    await net.aclose()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_n2_cuda_gradients(coll: Communicator, simulated_cuda: SimulatedCuda, op: Literal["mean", "sum"]) -> None:
    module = Net(0.0, coll.device, "cpu")
    for i, p in enumerate(module.parameters()):
        if (i + coll.rank) % 2 == 0 or i == 0:
            p.grad = torch.ones_like(p) * (coll.rank + 1)
    await synchronize_gradients(module, coll, op=op)
    grads = [p.grad for p in module.parameters()]
    for i, grad in enumerate(grads):
        brought = [rank + 1 for rank in range(coll.size) if (i + rank) % 2 == 0 or i == 0]
        if not brought:
            assert grad is None
            continue
        assert grad is not None
        expected = torch.tensor(sum(brought) / (coll.size if op == "mean" else 1))
        torch.testing.assert_close(read_elsewhere([grad])[0], expected.expand(grad.shape))


@pytest.mark.ranks(2)
async def test_n10_cuda_what_is_the_same_and_what_is_not(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    with torch.cuda.stream(torch.cuda.Stream(coll.device)):  # behind what this one has queued
        module = Net(2.0, coll.device, "cpu")
        await assert_synchronized(module, coll)
        with torch.no_grad():
            module.turned.add_(coll.rank)
        with pytest.raises(MismatchError, match=r"disagree on turned: rank 0: abs-mean 2\.0.*; rank 1: abs-mean 3\.0"):
            await assert_synchronized(module, coll)
