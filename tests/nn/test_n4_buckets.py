"""N4: buckets by bytes, in the order in which gradients come, the same on every rank for any order there."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import Communicator
from aiodist.nn import DataParallel
from aiodist.nn.buckets import deal
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial
from tests.support.in_backward import in_backward


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abc")), max_size=30),
    st.integers(1, 40),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_n4_deal(parameters: list[tuple[int, str]], first: int, most: int, rng: random.Random) -> None:
    nbytes = [size for size, _ in parameters]
    kinds = [kind for _, kind in parameters]
    order = list(range(len(parameters)))
    rng.shuffle(order)
    dealt = deal(nbytes, kinds, order, first=first, most=most)
    place = {index: when for when, index in enumerate(order)}
    assert sorted(index for bucket in dealt for index in bucket) == sorted(order)
    begun: set[str] = set()
    for bucket in dealt:
        assert len({kinds[index] for index in bucket}) == 1
        assert bucket == sorted(bucket, key=place.__getitem__)
        limit = most if kinds[bucket[0]] in begun else first
        begun.add(kinds[bucket[0]])
        assert len(bucket) == 1 or sum(nbytes[index] for index in bucket) <= limit
    for kind in set(kinds):  # one after another: none is sent before what came earlier
        of_kind = [index for bucket in dealt for index in bucket if kinds[index] == kind]
        assert of_kind == [index for index in order if kinds[index] == kind]
        sizes = [sum(nbytes[i] for i in bucket) for bucket in dealt if kinds[bucket[0]] == kind]
        firsts = [nbytes[bucket[0]] for bucket in dealt if kinds[bucket[0]] == kind]
        for size, following in zip(sizes[1:-1], firsts[2:], strict=True):
            assert size + following > most or size >= most  # no more of them than needed


def test_n4_deal_in_order_of_becoming_full() -> None:
    assert deal([4, 4, 4, 4], "abab", [0, 1, 2, 3], first=8, most=8) == [[0, 2], [1, 3]]
    assert deal([4, 8, 4], "aba", [0, 1, 2], first=8, most=8) == [[1], [0, 2]]
    assert deal([], "", [], first=1, most=1) == []


def names_of(net: DataParallel) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in reducer_of(net).buckets]


@pytest.mark.ranks(3)
async def test_n4_the_order_of_the_first_backward_is_that_of_rank_0(coll: Communicator) -> None:
    layers = nn.ModuleDict({str(i): nn.Linear(6, 6, bias=False).double() for i in range(6)})
    net = await DataParallel.create(layers, coll, **Trial.SMALL)

    def forward(order: list[int]) -> Tensor:
        x, y = Trial.batch(coll.rank, 0)
        for i in order:
            x = layers[str(i)](x)
        return mse_loss(x[:, :3], y)

    mine = random.Random(coll.rank).sample(range(6), 6)
    rank_0 = random.Random(0).sample(range(6), 6)
    for _ in range(3):
        net.zero_grad()
        await net.backward(forward(mine))
    assert names_of(net) == [[f"{i}.weight"] for i in reversed(rank_0)]


@pytest.mark.ranks(1, 2)
async def test_n4_the_first_bucket_is_small(coll: Communicator) -> None:
    module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(9)])  # 256 bytes each
    net = await DataParallel.create(module, coll, bucket_bytes=1024, first_bucket_bytes=512)
    for _ in range(2):
        net.zero_grad()
        await net.backward(module(torch.ones(8)).sum())
    assert [bucket.nbytes for bucket in reducer_of(net).buckets] == [512, 1024, 768]
    assert names_of(net)[0] == ["8.weight", "7.weight"]
    assert net.statistics().passes == 2
    assert net.statistics().nbytes == 2 * 9 * 256
    assert 0 <= net.statistics().hidden <= 1


class Branches(nn.Module):
    """Layers in random order: each forward makes four draws from the five, with repeats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.double()

    def forward(self, x: Tensor, rng: random.Random) -> Tensor:
        for i in rng.choices(range(5), k=4):
            x = torch.tanh(self.layers[i](x))
        return x[:, :3]


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("bucket_bytes", [1, 700])
async def test_n4_branches_drawn_on_each_rank(
    coll: Communicator, bucket_bytes: int, op: Literal["mean", "sum"]
) -> None:
    def loss(module: Any, rank: int, step: int) -> Tensor:
        x, y = Trial.batch(rank, step)
        return mse_loss(module(x, random.Random(f"{rank} {step}")), y)

    for optimizer in ("momentum", "adam"):
        net = await DataParallel.create(Branches(), coll, bucket_bytes=bucket_bytes, first_bucket_bytes=1, op=op)
        opt = Trial.OPTIMIZERS[optimizer](net.parameters())
        for step in range(6):
            await net.step(partial(loss, net, coll.rank, step), opt)
        Trial.assert_same(net, Trial.alone(coll.size, 6, make=Branches, loss=loss, optimizer=optimizer, op=op))
        await net.aclose()


class Odd(nn.Module):
    """Parameters with many memory layouts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.image = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.number = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.image(x).mean(dim=(2, 3))  # (N, 4)
        parts = [(y @ self.turned).sum(), (y @ self.gaps).square().sum(), self.number * y.sum(), self.nothing.sum()]
        return torch.stack([*parts, (y * self.complex).abs().sum()]).sum()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
async def test_n4_any_memory_layout(coll: Communicator, bucket_bytes: int) -> None:
    def loss(module: Any, rank: int, step: int) -> Tensor:
        drawn = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * rank + step))
        out: Tensor = module(drawn.contiguous(memory_format=torch.channels_last))
        return out

    net = await DataParallel.create(Odd(), coll, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    for step in range(3):
        await net.step(partial(loss, net, coll.rank, step), opt)
    module = Trial.alone(coll.size, 3, make=Odd, loss=loss, optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    for (name, ours), theirs in zip(net.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=f"{name}: ".__add__)
        assert ours.grad is not None
        assert ours.grad.shape == ours.shape
    grad = net.module.get_parameter("image.weight").grad
    assert grad is not None
    assert grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(2)
async def test_n4_gradients_stay_in_their_places(coll: Communicator) -> None:
    """Gradients in a bucket stay there when they are zeroed in place: no memory is allocated again."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    places = []
    for step in range(4):
        net.zero_grad(set_to_none=step % 2 == 0)
        await net.backward(Trial.loss(net, coll.rank, step))
        places.append([p.grad.data_ptr() for p in net.parameters() if p.grad is not None])
        expected = Trial.Mlp()
        Trial.joined(expected, 2, step).backward()
        Trial.assert_same_gradients(net, expected)
    assert places[1] == places[2] == places[3]
    assert len({p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None}) == 1


class OneGradient(nn.Module):
    """Autograd gives parameters the gradient of a sum, as views not marked as views, and continues with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(3, 5)
        self.place = nn.Parameter(torch.randn(4, 5))
        self.flat = nn.Parameter(torch.randn(20))
        self.meanwhile: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        earlier: Tensor = in_backward(self.first(x), self.meanwhile)
        return (earlier + self.place[None] + self.flat.view(1, 4, 5)).tanh().square().mean()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "all"])
@pytest.mark.parametrize("kept", [True, False])
async def test_n4_a_gradient_that_backward_goes_on_from_is_left_alone(
    coll: Communicator, sizes: dict[str, Any], kept: bool
) -> None:
    module, expected = OneGradient().double(), OneGradient().double()
    net = await DataParallel.create(module, coll, **sizes)

    loop = asyncio.get_running_loop()

    def turns() -> None:
        """Let the loop run, which would reduce the others."""
        for _ in range(50):
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(20)

    module.meanwhile = turns
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(coll.size, 1, 4, 3, dtype=torch.float64)
        for one in () if kept else (net, expected):
            one.zero_grad()
        await net.backward(net(x[coll.rank]))
        (sum(expected(each) for each in x) / coll.size).backward()
        seen, wanted = ([p.grad for p in one.parameters()] for one in (net, expected))
        torch.testing.assert_close(seen, wanted)


@pytest.fixture
def bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.usefixtures("bfloat16")
async def test_n4_a_default_dtype_of_the_user(coll: Communicator) -> None:
    """Messages other than gradients have a fixed dtype, for any default dtype of torch."""
    names = [str(i) for i in range(300)]
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in names})
    net = await DataParallel.create(module, coll, **Trial.SMALL)
    for step in range(2):
        await net.backward(torch.stack([module[name] * (coll.rank + 1) for name in names[step:]]).sum())
    assert [p.grad.item() for p in net.parameters() if p.grad is not None] == [1.5] + [3.0] * 299
