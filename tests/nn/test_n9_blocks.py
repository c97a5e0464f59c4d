"""N9: layers in blocks, whose backward runs block by block, and whose gradients travel together."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.nn import BlockSequential, DataParallel, PipelinedOptimizer
from aiodist.nn.blocks import balanced
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial
from tests.support.in_backward import in_backward


def test_n9_31_layers_in_7_blocks() -> None:
    net = BlockSequential([nn.Linear(10, 10) for _ in range(31)], blocks=7)
    assert sorted(len(block) for block in net.blocks) == [4, 4, 4, 4, 5, 5, 5]
    assert [layer for block in net.blocks for layer in block] == list(net.children())


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9), data=st.data())
def test_n9_blocks_are_cut_where_the_squares_are_least(sizes: list[int], data: Any) -> None:
    blocks = data.draw(st.integers(1, len(sizes)))

    def squares(cuts: tuple[int, ...]) -> int:
        return sum(sum(sizes[a:b]) ** 2 for a, b in pairwise((0, *cuts, len(sizes))))

    cuts = balanced(sizes, blocks)
    assert cuts == sorted(set(cuts))
    assert len(cuts) == blocks - 1
    assert squares(tuple(cuts)) == min(map(squares, combinations(range(1, len(sizes)), blocks - 1)))


def test_n9_layers_without_parameters_stay_with_the_one_before() -> None:
    layers = [nn.Flatten(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 4), nn.Tanh()]
    assert BlockSequential(layers, 2).blocks == [layers[:4], layers[4:]]
    assert BlockSequential(nn.Sequential(*layers), 1).blocks == [layers]


@pytest.mark.parametrize("blocks", [0, -1, 3])
def test_n9_a_wrong_number_of_blocks(blocks: int) -> None:
    with pytest.raises(ValueError, match=f"blocks={blocks}: expected 1 to 2, the number of layers"):
        BlockSequential([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)], blocks)


class Pair(nn.Module):
    """From one tensor: two tensors, one without a gradient, and a number; from all of these: one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        if isinstance(x, tuple):
            a, b, places, scale = x
            return self.inner(a).sin() + scale * b.cumsum(0)[places]
        return self.inner(x), x * 2, x.argsort(0)[:, 0], 3


class Activated(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.inner(nn.functional.relu_(x))


def linear(inputs: int = 6, outputs: int = 6) -> nn.Module:
    return nn.Linear(inputs, outputs)


def one_twice() -> list[nn.Module]:
    shared = linear()
    return [linear(), shared, nn.Tanh(), shared, linear()]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [linear() for _ in range(5)],
    "in place": lambda: [linear(), nn.ReLU(inplace=True), linear(), nn.BatchNorm1d(6), nn.ReLU(inplace=True), linear()],
    "in place on what comes": lambda: [linear(), *(Activated() for _ in range(4))],
    "tuples": lambda: [linear(), Pair(), Pair(), linear(), Pair(), Pair()],
    "dropout": lambda: [linear(), nn.Dropout(0.3), linear(), nn.Dropout(0.3), linear()],
    "one layer twice": one_twice,
    "frozen": lambda: [linear().requires_grad_(False), linear(), linear().requires_grad_(False), linear()],
    "all but one frozen": lambda: [linear().requires_grad_(False), linear(), linear().requires_grad_(False)],
}


@pytest.mark.drawn(16)
@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_n9_outputs_and_gradients_are_those_of_the_plain_one(model: str, blocks: int, moving: bool) -> None:
    torch.manual_seed(blocks)
    plain = nn.Sequential(*MODELS[model]()).double()
    blocked = BlockSequential(copy.deepcopy(plain), blocks)
    assert len(blocked.blocks) == blocks
    blocked.load_state_dict(plain.state_dict())
    x = torch.randn(7, 6, dtype=torch.float64)
    seen = []
    for net in (plain, blocked):
        torch.manual_seed(9)
        mine = x.clone().requires_grad_(moving)
        for _ in range(2):  # gradients add up
            y = net(mine * 1.0)
            y.add_(1).square().sum().backward()
        seen.append([y, mine.grad, *(p.grad for p in net.parameters())])
    for ours, theirs in zip(*reversed(seen), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(blocked.eval()(x), plain.eval()(x))


def test_n9_a_graph_that_is_kept_and_copies() -> None:
    net = copy.deepcopy(BlockSequential([linear() for _ in range(4)], 3))
    x = torch.randn(3, 6, requires_grad=True)
    loss = net(x).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None]
    loss.backward()
    torch.testing.assert_close([p.grad for p in (x, *net.parameters())], [2 * grad for grad in once])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("way", ["create_graph", "inputs", "grad"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_n9_what_cannot_cross_blocks(way: str) -> None:
    net = BlockSequential([linear() for _ in range(4)], 2)
    x = torch.randn(2, 6, requires_grad=True)
    loss = net(x).sum()
    how: dict[str, Any] = {way: True if way == "create_graph" else [x]}
    backward = partial(torch.autograd.grad, loss, [x]) if way == "grad" else partial(loss.backward, **how)
    with pytest.raises(RuntimeError, match=r"block by block.* expected neither create_graph, inputs="):
        backward()
    assert all(p.grad is None for p in (x, *net.parameters()))


def blocked(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    widths = [6, 9, 8, 7, 7, 5, 3]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(BlockSequential(layers, blocks=3), nn.Linear(3, 3)).double()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "pipelined"])
async def test_n9_ranks_train_as_one_process(coll: Communicator, optimizer: str) -> None:
    net = await DataParallel.create(blocked(coll.rank), coll, **Trial.SMALL)
    make = Trial.OPTIMIZERS.get(optimizer, Trial.OPTIMIZERS["adam"])
    opt = make(net.parameters()) if optimizer in Trial.OPTIMIZERS else await PipelinedOptimizer.create(net, make)
    for step in range(4):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    if isinstance(opt, PipelinedOptimizer):
        await opt.flush()
    expected = Trial.alone(coll.size, 4, make=blocked, optimizer=make)
    Trial.assert_same(net, expected)
    inner = net.module[0]  # type: ignore[index]
    names = {id(p): name for name, p in net.named_parameters()}
    blocks = [{names[id(p)] for layer in block for p in layer.parameters()} for block in inner.blocks]
    dealt = [{slot.name for slot in bucket.slots} for bucket in reducer_of(net).buckets]
    assert dealt == [{"1.bias"}, {"1.weight"}, *reversed(blocks)]
    assert net.statistics().buckets == 4 * len(dealt)


@pytest.mark.ranks(1, 2, 3)
async def test_n9_31_layers_in_7_blocks_on_many_ranks(coll: Communicator) -> None:
    torch.manual_seed(31)
    plain = nn.Sequential(*(nn.Linear(10, 10) for _ in range(31)))
    xs = torch.randn(coll.size, 5, 10)
    net = await DataParallel.create(BlockSequential(copy.deepcopy(plain), blocks=7), coll)
    y = plain(xs)
    (y.square().sum() / coll.size).backward()
    for _ in range(2):  # the first backward teaches the order
        net.zero_grad()
        outputs = await net.submit(net, xs[coll.rank])
        await net.backward(outputs.square().sum())
    torch.testing.assert_close(outputs, y[coll.rank], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None  # they are of 1e-7 in the first layer, and of 1 in the last one
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5 * float(theirs.grad.abs().max()))
    assert [len(bucket.slots) for bucket in reducer_of(net).buckets] == [2 * len(b) for b in reversed(blocks_of(net))]


def blocks_of(net: DataParallel) -> list[list[nn.Module]]:
    module = net.module
    assert isinstance(module, BlockSequential)
    return module.blocks


class Stops(nn.Linear):
    """A layer whose backward calls `stop` first."""

    stop: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        return in_backward(super().forward(x), self.stop)  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
async def test_n9_a_block_is_reduced_while_the_next_one_runs_backward(coll: Communicator) -> None:
    """The backward of each block waits until the gradients of the next one are reduced."""
    torch.manual_seed(3)
    module = BlockSequential([Stops(6, 6) for _ in range(6)], blocks=3)
    net = await DataParallel.create(module, coll)
    weights = [block[-1].weight for block in module.blocks]
    came = {id(weight): threading.Event() for weight in weights}
    x = torch.arange(24.0).view(4, 6).sin()
    expected = copy.deepcopy(module)
    expected(x).square().sum().backward()
    for step in range(3):
        for event in came.values():
            event.clear()
        if step == 2:  # the order is learnt
            for block, behind in pairwise(module.blocks):
                vars(block[-1])["stop"] = partial(wait_for, came[id(behind[-1].weight)])
        net.zero_grad()
        loss = await net.submit(lambda: net(x).square().sum())
        order = []
        async for parameter, _ in net.backward_iter(loss):
            if id(parameter) in came:
                came[id(parameter)].set()
                order.append([id(weight) for weight in weights].index(id(parameter)))
        assert order == [2, 1, 0] or step < 2
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()])


def wait_for(event: threading.Event) -> None:
    assert event.wait(20), "the gradients of the block behind did not come while this one ran"
