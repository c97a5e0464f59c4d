"""P15: sparse gradients of embeddings are reduced by rows; the results are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from tests.nn.conftest import Trial

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's optimizers make sparse tensors
SIZES: list[dict[str, Any]] = [Trial.SMALL, {}]
each_size = pytest.mark.parametrize("sizes", SIZES, ids=["each", "all"])


class Words(nn.Module):
    """Two tables of rows, the second not always used, and a dense layer."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(11, 5, sparse=sparse)
        self.bags = nn.EmbeddingBag(7, 5, mode="mean", sparse=sparse)
        self.head = nn.Linear(5, 2)
        self.double()

    def forward(self, words: Tensor, bags: Tensor | None) -> Tensor:
        x = self.table(words).sum(1)
        return self.head(torch.tanh(x if bags is None else x + self.bags(bags)))  # type: ignore[no-any-return]


def loss_of(module: Any, rank: int, step: int) -> Tensor:
    """Ranks have different numbers of words, some of them twice; no rank has word 10; ranks skip the bags in turns."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, 10, (3 + rank, 2 + step % 3), generator=generator)
    words[-1] = words[0]
    bags = torch.randint(0, 7, (3 + rank, 2), generator=generator) if (rank + step) % 3 and step != 4 else None
    return module(words, bags).square().mean()  # type: ignore[no-any-return]


class Both:
    """SparseAdam for rows, Adam for the rest, as one: what a program of torch has."""

    def __init__(self, module: nn.Module) -> None:
        rows = [p for name, p in module.named_parameters() if "head" not in name]
        dense = [p for name, p in module.named_parameters() if "head" in name]
        self.parts = [torch.optim.SparseAdam(rows, lr=0.05), torch.optim.Adam(dense, lr=0.05)]

    def step(self) -> None:
        for part in self.parts:
            part.step()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.3)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3, 4)
@each_size
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("optimizer", [sgd, adagrad])
async def test_p15_rows_equal_dense_gradients_of_one_process(
    coll: Communicator,
    sizes: dict[str, Any],
    op: Literal["mean", "sum"],
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> None:
    module = Words()
    net = await DataParallel.create(module, coll, op=op, **sizes)
    opt = optimizer(net.parameters())
    for step in range(6):
        await net.step(partial(loss_of, net, coll.rank, step), opt)
        grad = module.table.weight.grad
        assert grad is not None
        assert grad.is_sparse
        assert grad.is_coalesced()
        assert grad._nnz() < 11
    make = partial(Words, sparse=False)
    Trial.assert_same(net, Trial.alone(coll.size, 6, make=make, loss=loss_of, optimizer=optimizer, op=op))
    await assert_synchronized(module, coll)


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
async def test_p15_sparse_adam_beside_adam(coll: Communicator) -> None:
    module, alone = Words(), Words()
    net = await DataParallel.create(module, coll)
    ours, theirs = Both(module), Both(alone)
    for step in range(6):
        net.zero_grad()
        await net.backward(await net.submit(loss_of, net, coll.rank, step))
        alone.zero_grad()
        torch.stack([loss_of(alone, rank, step) for rank in range(coll.size)]).mean().backward()
        if step == 4:  # no rank has used the second table: its moments stay as they are, as torch's do
            assert module.bags.weight.grad is None
            assert alone.bags.weight.grad is None
        await net.submit(ours.step)
        theirs.step()
    Trial.assert_same(net, alone)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float16, (4e4, 4e4, 5e4)), (torch.bfloat16, (256, 1, 1))])
async def test_p15_rows_of_16_bits_are_summed_in_32(
    coll: Communicator, dtype: torch.dtype, sizes: tuple[float, ...]
) -> None:
    """Rows are summed like dense gradients: a mean is finite even if the sum overflows, and is rounded once."""
    module = nn.Embedding(4, 2, sparse=True).to(dtype)
    net = await DataParallel.create(module, coll)
    await net.backward((net(torch.tensor([1])).double() * sizes[coll.rank]).sum())
    assert module.weight.grad is not None
    assert module.weight.grad.is_coalesced()
    mean = torch.tensor(sizes).to(dtype).float().mean().to(dtype)
    assert torch.equal(module.weight.grad.to_dense()[1], mean.expand(2))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("synced", [False, True])
async def test_p15_rows_add_up(coll: Communicator, op: Literal["mean", "sum"], synced: bool) -> None:
    """Rows add up on each rank in `no_sync`; otherwise the reduced rows of all ranks add up."""
    net = await DataParallel.create(Words(), coll, op=op)
    opt = sgd(net.parameters())
    for step in range(6):
        if step % 3 == 0:
            opt.zero_grad()
        if step % 3 < 2 and not synced:
            with net.no_sync():
                await net.backward(loss_of(net, coll.rank, step))
        else:
            await net.backward(loss_of(net, coll.rank, step))
        if step % 3 == 2:
            await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(coll.size, 6, make=Words, loss=loss_of, optimizer=sgd, op=op, every=3))


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_p15_ranks_whose_data_end_bring_no_rows(coll: Communicator, op: Literal["mean", "sum"]) -> None:
    counts = [2, 5, 3][: coll.size]
    net = await DataParallel.create(Words(), coll, op=op)
    opt = sgd(net.parameters())
    async with net.join():
        for step in range(counts[coll.rank]):
            await net.step(partial(loss_of, net, coll.rank, step), opt)
    alone = Words()
    their = sgd(alone.parameters())
    for step in range(max(counts)):
        their.zero_grad()
        losses = torch.stack([loss_of(alone, rank, step) for rank, count in enumerate(counts) if step < count])
        (losses.mean() if op == "mean" else losses.sum()).backward()
        their.step()
    Trial.assert_same(net, alone)


@pytest.mark.ranks(1, 2)
async def test_p15_pipelined(coll: Communicator) -> None:
    net = await DataParallel.create(Words(), coll)
    opt = await PipelinedOptimizer.create(net, sgd)
    for step in range(5):
        await net.step(partial(loss_of, net, coll.rank, step), opt)
    await opt.flush()
    Trial.assert_same(net, Trial.alone(coll.size, 5, make=Words, loss=loss_of, optimizer=sgd))


@pytest.mark.ranks(2, 3)
async def test_p15_gradients_as_they_arrive(coll: Communicator) -> None:
    net = await DataParallel.create(Words(), coll)
    alone = Words()
    for step in range(6):
        net.zero_grad()
        alone.zero_grad()
        torch.stack([loss_of(alone, rank, step) for rank in range(coll.size)]).mean().backward()
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        names = {p: name for name, p in net.named_parameters()}
        seen = {}
        async for parameter, grad in net.backward_iter(loss_of(net, coll.rank, step)):
            assert parameter.grad is grad
            seen[names[parameter]] = grad
        assert seen.keys() == expected.keys()
        for name, grad in seen.items():
            torch.testing.assert_close(grad.to_dense(), expected[name].to_dense())


@pytest.mark.ranks(2)
async def test_p15_frozen_and_thawed(coll: Communicator) -> None:
    module, alone = Words(), Words()
    net = await DataParallel.create(module, coll)
    ours, theirs = sgd(net.parameters()), sgd(alone.parameters())
    for step in range(6):
        for one in (module, alone):
            one.table.requires_grad_(step not in (2, 3))
        await net.step(partial(loss_of, net, coll.rank, step), ours)
        theirs.zero_grad()
        torch.stack([loss_of(alone, rank, step) for rank in range(coll.size)]).mean().backward()
        theirs.step()
    Trial.assert_same(net, alone)


@pytest.mark.ranks(2)
async def test_p15_bytes_of_rows_are_counted(coll: Communicator) -> None:
    """4 of 1,000 rows travel, each with its number."""
    net = await DataParallel.create(nn.Embedding(1000, 6, sparse=True), coll)
    words = torch.tensor([3, 998, 3, 5 + coll.rank, 7])
    await net.step(lambda: net(words).sum(), sgd(net.parameters()))
    assert net.statistics().nbytes == 4 * (6 * 4 + 8)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("scaled", [False, True])
async def test_p15_rows_count_in_the_norm_that_is_clipped(coll: Communicator, scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000) if scaled else None
    net = await DataParallel.create(Words(), coll, clip_norm=0.05, scaler=scaler)
    opt = sgd(net.parameters())
    alone = Words(sparse=False)
    theirs = sgd(alone.parameters())
    for step in range(6):
        await net.step(partial(loss_of, net, coll.rank, step), opt)
        theirs.zero_grad()
        torch.stack([loss_of(alone, rank, step) for rank in range(coll.size)]).mean().backward()
        assert nn.utils.clip_grad_norm_(alone.parameters(), 0.05) > 0.05, "it is clipped"
        theirs.step()
    Trial.assert_same(net, alone)


@pytest.mark.ranks(2)
async def test_p15_ranks_must_agree_on_what_is_sparse(coll: Communicator) -> None:
    with pytest.raises(aiodist.MismatchError, match=r"sparse gradients of .*: rank 0: weight; rank 1: none"):
        await DataParallel.create(nn.Embedding(4, 2, sparse=coll.rank == 0), coll)


class Tied(nn.Module):
    """A table whose weight gets rows from `rows`, and a dense gradient from `tied`."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=sparse)

    def rows(self, words: Tensor) -> Tensor:
        return F.embedding(words, self.table.weight, sparse=True).sum()

    def tied(self) -> Tensor:
        return self.table.weight.square().sum()


Case = tuple[bool, Callable[[Tied], Tensor], Callable[[Tied], Tensor], str]
CASES: Sequence[Case] = [
    (False, Tied.tied, lambda net: net.rows(torch.tensor([1])), r"'table\.weight' has a gradient of layout .*sparse"),
    (True, lambda net: net.rows(torch.tensor([1])), Tied.tied, r"'table\.weight' has a dense gradient"),
]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("sparse", "good", "bad", "match"), CASES, ids=["rows", "dense"])
async def test_p15_the_other_kind_of_gradient_is_an_error(
    coll: Communicator, sparse: bool, good: Callable[[Tied], Tensor], bad: Callable[[Tied], Tensor], match: str
) -> None:
    tied = Tied(sparse=sparse)
    net = await DataParallel.create(tied, coll)
    opt = sgd(net.parameters())
    for step in range(4):
        before = tied.table.weight.detach().clone()
        if step % 2 == 0:
            await net.step(lambda: good(tied), opt)
            assert not torch.equal(before, tied.table.weight)
        elif coll.rank == 0:
            with pytest.raises(TypeError, match=match):
                await net.step(lambda: bad(tied), opt)
        else:
            with pytest.raises(aiodist.RemoteError, match="rank 0 failed"):
                await net.step(lambda: good(tied), opt)
        if step % 2:
            assert torch.equal(before, tied.table.weight)
    await assert_synchronized(tied, coll)
