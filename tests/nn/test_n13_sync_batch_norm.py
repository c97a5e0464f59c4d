"""N13: batch norm over the batches of all ranks, against torch's over the joined batch."""

from __future__ import annotations

import asyncio
import copy
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.nn import DataParallel, SyncBatchNorm, assert_synchronized

CHANNELS = 3
COUNTS = [3, 1, 0, 2]
"""How many examples each rank has."""
LAYERS: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "plain": (nn.BatchNorm2d, (2, 4), {}),
    "two dimensions": (nn.BatchNorm1d, (), {"eps": 0.1, "momentum": 0.3}),
    "cumulative": (nn.BatchNorm1d, (4,), {"momentum": None}),
    "without weights": (nn.BatchNorm3d, (2, 1, 2), {"affine": False}),
    "without statistics": (nn.BatchNorm2d, (2, 2), {"track_running_stats": False}),
}


def parts_of(size: int, shape: tuple[int, ...], step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return each rank's batch: values far from 0, so that plain sums of squares would lose digits."""
    random = torch.Generator().manual_seed(10 * step + size)
    counts = [3] if size == 1 else COUNTS[:size]
    drawn = [torch.randn(n, CHANNELS, *shape, generator=random, dtype=torch.float64) for n in counts]
    return [(t * (rank + 1) + 100 + rank).to(dtype) for rank, t in enumerate(drawn)]


def given(layer: str) -> Any:
    kind, _, options = LAYERS[layer]
    torch.manual_seed(0)
    made: Any = kind(CHANNELS, **options)
    if made.affine:
        nn.init.uniform_(made.weight, 0.5, 2)
        nn.init.uniform_(made.bias)
    return made


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.drawn(4)
async def test_n13_training_is_that_of_the_joined_batch(
    coll: Communicator, layer: str, dtype: torch.dtype, within: float
) -> None:
    own = await coll.dup(thread=True)
    shape = LAYERS[layer][1]
    close: dict[str, Any] = {"rtol": within, "atol": within}
    alone = given(layer).double()
    mine: Any = SyncBatchNorm.convert(given(layer).to(dtype), own)
    for step in range(3):
        xs = [t.requires_grad_() for t in parts_of(coll.size, shape, step, dtype)]
        joined = torch.cat([t.detach().double() for t in xs]).requires_grad_()
        y = alone(joined)
        alone.zero_grad()
        (y.sin() * y).sum().backward()
        x = xs[coll.rank]

        def both(x: Tensor = x) -> Tensor:
            y = mine(x)
            mine.zero_grad()
            (y.sin() * y).sum().backward()
            return y  # type: ignore[no-any-return]

        ours = await asyncio.to_thread(both)
        start = [0, *accumulate(map(len, xs))][coll.rank]
        torch.testing.assert_close(ours.double(), y[start : start + len(x)], **close)
        assert x.grad is not None
        assert joined.grad is not None
        torch.testing.assert_close(x.grad.double(), joined.grad[start : start + len(x)], **close)
        for p, whole in zip(mine.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close((await coll.allreduce(p.grad)).double(), whole.grad, **close)
        for seen, expected in zip(mine.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(seen.double(), expected.double(), **close)
    if layer != "without statistics":
        x = parts_of(coll.size, shape, 9, dtype)[0]
        torch.testing.assert_close(mine.eval()(x).double(), alone.eval()(x.double()), **close)  # on the loop's thread
        await assert_synchronized(mine, coll, rtol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [16, 32])
async def test_n13_inputs_of_16_bits(coll: Communicator, dtype: torch.dtype, weights: int) -> None:
    """Weights and statistics have 16 or 32 bits."""
    own = await coll.dup(thread=True)
    mine: Any = SyncBatchNorm.convert(given("plain").to(dtype if weights == 16 else torch.float32), own)
    alone = given("plain")
    xs = [(t / 10 - 10).requires_grad_() for t in parts_of(2, (2, 4), 0, dtype)]
    joined = torch.cat([t.detach().float() for t in xs]).requires_grad_()
    alone(joined).sin().sum().backward()
    y = await asyncio.to_thread(mine, xs[coll.rank])
    await asyncio.to_thread(y.float().sin().sum().backward)
    x, start = xs[coll.rank], COUNTS[0] * coll.rank
    assert y.dtype is dtype
    assert x.grad is not None
    assert joined.grad is not None
    assert x.grad.dtype is dtype
    assert mine.weight.grad.dtype is mine.weight.dtype
    torch.testing.assert_close(mine.running_var.float(), alone.running_var, rtol=0.02, atol=0.02)
    torch.testing.assert_close(x.grad.float(), joined.grad[start : start + len(x)], rtol=0.1, atol=0.1)


@pytest.mark.ranks(2)
async def test_n13_one_that_comes_twice_is_replaced_twice(coll: Communicator) -> None:
    """A layer occurs twice in one container: both places share its parameters and its statistics."""
    own = await coll.dup(thread=True)
    layer = nn.BatchNorm1d(CHANNELS)
    module: Any = SyncBatchNorm.convert(nn.Sequential(layer, nn.Tanh(), layer), own)
    x = torch.randn(4, CHANNELS) + coll.rank
    await asyncio.to_thread(module, x)
    assert [type(each) for each in module] == [SyncBatchNorm, nn.Tanh, SyncBatchNorm]
    assert module[0].weight is module[2].weight is layer.weight
    assert module[0].num_batches_tracked == module[2].num_batches_tracked == 2
    await assert_synchronized(module, coll, rtol=0)


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.BatchNorm2d(2)]
        super().__init__(*layers, nn.Flatten())
        self.double()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.drawn(2)
async def test_n13_a_converted_net_trains_under_data_parallel_as_one_process(coll: Communicator) -> None:
    module = Convolutions()
    parameters = list(module.parameters())
    converted = SyncBatchNorm.convert(module, await coll.dup(thread=True))
    assert converted is module
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert [type(layer) for layer in module].count(SyncBatchNorm) == 2
    net = await DataParallel.create(module, coll, bucket_bytes=100, first_bucket_bytes=1)
    alone = Convolutions()
    opt, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, alone))
    for step in range(4):
        xs = torch.randn(coll.size, 2, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        theirs.zero_grad()
        alone(xs.flatten(0, 1)).sin().mean().backward()
        theirs.step()
        await net.step(lambda xs=xs: net(xs[coll.rank]).sin().mean(), opt)
    for key, expected in alone.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], expected)
    twin = copy.deepcopy(module).eval()
    x = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(twin(x), alone.eval()(x))


@pytest.mark.ranks(2)
async def test_n13_what_batch_norm_cannot_do(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    layer = SyncBatchNorm(CHANNELS, own)
    assert isinstance(SyncBatchNorm.convert(nn.BatchNorm1d(2).eval(), own), SyncBatchNorm)
    assert not SyncBatchNorm.convert(nn.BatchNorm1d(2).eval(), own).training
    assert type(SyncBatchNorm.convert(nn.ReLU(), own)) is nn.ReLU
    with pytest.raises(RuntimeError, match="thread=True"):
        SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(2)), coll)
    with pytest.raises(ValueError, match="LazyBatchNorm1d has no parameters yet"):
        SyncBatchNorm.convert(nn.LazyBatchNorm1d(), own)
    with pytest.raises(ValueError, match=r"shape \[2, 4\]: expected \(n, 3, \.\.\.\)"):
        layer(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="would block the event loop"):
        layer(torch.ones(2, CHANNELS))
    with pytest.raises(ValueError, match="together have 1 values per channel"):
        await asyncio.to_thread(layer, torch.ones(coll.rank, CHANNELS))
