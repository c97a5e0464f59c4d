"""P15: dense layers by allreduce and rows by the servers, in one step, equal one process with the joined batch."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator, OperationTimeout, ParameterServer, data
from aiodist.nn import DataParallel
from aiodist.ps import SGD, Adagrad, Adam, Embedding, Normal, Synchronous, Table

DIM, STEPS, WORDS = 5, 6, 9
HIGH = 2**63 - 1
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=0.3), lambda params: torch.optim.SGD(params, lr=0.3)),
    "adagrad": (
        Adagrad(lr=0.3, lr_decay=0.1, initial_accumulator_value=0.2),
        lambda params: torch.optim.Adagrad(params, lr=0.3, lr_decay=0.1, initial_accumulator_value=0.2),
    ),
    "adam": (
        Adam(lr=0.05, betas=(0.8, 0.95), eps=1e-3),
        lambda params: torch.optim.SparseAdam(params, lr=0.05, betas=(0.8, 0.95), eps=1e-3),
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's optimizers make sparse tensors


class Net(nn.Module):
    """An embedding, which may be used twice, below dense layers."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words
        torch.manual_seed(3)
        self.head = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(self, words: Tensor, others: Tensor | None = None) -> Tensor:
        x = self.words(words).sum(1)
        if others is not None:
            x = x - self.words(others).sum(1)
        return self.head(x)  # type: ignore[no-any-return]


def ids_of(rank: int, step: int) -> Tensor:
    """Return ids of a rank's batch, `(3 + rank, 4)`: some twice, some of all ranks, in step 3 none of odd ranks."""
    generator = torch.Generator().manual_seed(50 * step + rank)
    ids = torch.randint(0, WORDS, (3 + rank, 4), generator=generator)
    ids[-1] = ids[0]
    return ids[:, :0] if step == 3 and rank % 2 else ids


def named(ids: Tensor) -> Tensor:
    """Return the ids as the table has them: anywhere in int64."""
    return torch.where(ids == 0, HIGH, torch.where(ids == 1, 0, ids * (HIGH // WORDS)))


async def all_rows(table: Table) -> Tensor:
    return await table.pull(named(torch.arange(WORDS)))


def alone(size: int, rows: Tensor, make: Callable[[Any], torch.optim.Optimizer], *, twice: bool) -> Net:
    """Train on the joined batch in one process."""
    net = Net(nn.Embedding.from_pretrained(rows.clone(), freeze=False, sparse=True))
    sparse, dense = make(net.words.parameters()), torch.optim.SGD(net.head.parameters(), lr=0.1)
    for step in range(STEPS):
        net.zero_grad()
        torch.stack([loss_of(net, ids_of(rank, step), twice=twice) for rank in range(size)]).mean().backward()
        sparse.step()
        dense.step()
    return net


def loss_of(net: Any, ids: Tensor, others: Tensor | None = None, *, twice: bool = False) -> Tensor:
    if twice and others is None:
        others = ids.flip(0)[:, :3]
    return net(ids, others).square().mean()  # type: ignore[no-any-return]


async def check_same(coll: Communicator, net: Net, table: Table, expected: Net, *, within: float = 1e-10) -> None:
    words = expected.words
    assert isinstance(words, nn.Embedding)
    torch.testing.assert_close(await all_rows(table), words.weight.detach(), rtol=0, atol=within)
    for ours, theirs in zip(net.head.parameters(), expected.head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=within)


@pytest.mark.drawn(3)
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("servers", [None, (0,), (0, 1), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
async def test_p15_dense_and_sparse_equal_one_process(
    coll: Communicator, servers: tuple[int, ...] | None, optimizer: str, ahead: bool
) -> None:
    if servers is not None and max(servers) >= coll.size:
        servers = tuple(rank for rank in servers if rank < coll.size)
    rule, make = OPTIMIZERS[optimizer]
    everybody = range(coll.size)
    async with ParameterServer(coll, servers=servers, workers=everybody, consistency=Synchronous("mean")) as ps:
        table = await ps.embedding("words", DIM, optimizer=rule, dtype=torch.float64, seed=7, timeout=60)
        expected = alone(coll.size, await all_rows(table), make, twice=False)
        await ps.barrier()
        words = Embedding(table)
        module = Net(words)
        net = await DataParallel.create(module, coll)
        opt = torch.optim.SGD(module.parameters(), lr=0.1)
        batches = [named(ids_of(coll.rank, step)) for step in range(STEPS)]
        async with data.prefetch(batches, depth=3, transform=words.prefetch if ahead else None) as prepared:
            async for ids in prepared:
                await net.step(partial(loss_of, net, ids), opt)
        await check_same(coll, module, table, expected)
        await ps.barrier()
        assert ps.statistics().pushes == STEPS
        assert len(module.state_dict()) == 4  # the dense layers alone


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("ahead", [False, True])
async def test_p15_a_layer_that_is_used_twice_pushes_once(coll: Communicator, ahead: bool) -> None:
    rule, make = OPTIMIZERS["adam"]
    async with ParameterServer(coll, rule=rule, consistency=Synchronous("mean")) as ps:
        table = await ps.embedding("words", DIM, dtype=torch.float64)  # with the server's own rule
        expected = alone(coll.size, await all_rows(table), make, twice=True)
        await ps.barrier()
        words = Embedding(table)
        module = Net(words)
        net = await DataParallel.create(module, coll)
        opt = torch.optim.SGD(module.parameters(), lr=0.1)
        pulls = ps.statistics().pulls
        batches = [named(ids_of(coll.rank, step)) for step in range(STEPS)]
        pairs = [(ids, ids.flip(0)[:, :3].contiguous()) for ids in batches]
        transform = (lambda pair: words.prefetch(*pair)) if ahead else None
        async with data.prefetch(pairs, depth=2, transform=transform) as prepared:
            async for ids, others in prepared:
                await net.step(partial(loss_of, net, ids, others), opt)
        assert ps.statistics().pushes == STEPS
        assert ps.statistics().pulls - pulls == 2 * STEPS  # none was too old
        await check_same(coll, module, table, expected)


@pytest.mark.ranks(2)
async def test_p15_rows_that_are_prefetched_are_taken_and_not_pulled_twice(coll: Communicator) -> None:
    async with ParameterServer(coll, consistency=Synchronous("sum")) as ps:
        words = Embedding(await ps.embedding("words", DIM))
        ids = torch.tensor([4, 4, coll.rank])
        assert words.prefetch(ids) is ids
        for _ in range(2):  # the second time without a prefetch
            rows = await asyncio.to_thread(words, ids)
            torch.testing.assert_close(rows.detach(), await words.table.pull(ids))
        assert ps.statistics().pulls == 4


@pytest.mark.ranks(1)
async def test_p15_rows_that_came_are_taken_though_the_batch_before_is_not_used(coll: Communicator) -> None:
    async with ParameterServer(coll) as ps:
        words = Embedding(await ps.embedding("words", DIM))
        _, second = words.prefetch(torch.tensor([1])), words.prefetch(torch.tensor([2]))
        await words.table.pull(second)  # those that were prefetched came before
        await asyncio.to_thread(words, second)
        assert ps.statistics().pulls == 3


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
async def test_p15_rows_are_up_to_date_whichever_batches_were_prefetched_and_used(coll: Communicator) -> None:
    """Ranks prefetch at random, drop what they prefetched, and see batches without a backward."""
    dice = random.Random(coll.rank)
    async with ParameterServer(coll, consistency=Synchronous("sum"), timeout=60) as ps:
        table = await ps.embedding("words", 1, init=0.0)
        for _ in range(3):
            await table.push(torch.tensor([0]), torch.ones(1, 1))
        await ps.sync()
        await ps.barrier()
        words = Embedding(table)
        batches = [torch.tensor([0, coll.rank]) for _ in range(40)]

        def train(ids: Tensor) -> float:
            value = words(ids)[0]
            value.sum().backward()
            return float(value.detach())

        for step, ids in enumerate(batches):
            for ahead in batches[step : step + dice.randrange(4)]:
                if dice.random() < 0.5:
                    words.prefetch(ahead)
            if dice.random() < 0.2:
                words.prefetch(torch.tensor([0]))  # prefetched, never used
            if dice.random() < 0.2:
                await asyncio.to_thread(words, ids)
            assert await asyncio.to_thread(train, ids) == (3 + step) * coll.size
        await ps.sync()
        await ps.barrier()


@pytest.mark.ranks(1, 2)
async def test_p15_batches_without_a_backward_hold_up_nothing(coll: Communicator) -> None:
    async with ParameterServer(coll, consistency=Synchronous("sum")) as ps:
        table = await ps.embedding("words", 1, init=Normal(std=0.1))
        words = Embedding(table)
        ids = [torch.tensor([step]) for step in range(4)]
        for one in ids:
            words.prefetch(one)
        for one in ids[:3]:  # seen, and left
            await asyncio.to_thread(words, one)
        rows = await asyncio.to_thread(words, ids[3])
        torch.testing.assert_close(rows.detach(), await table.pull(ids[3]))
        words.eval()
        words.prefetch(ids[0])
        assert not (await asyncio.to_thread(words, ids[0])).requires_grad
        words.train()
        words.prefetch(ids[1])
        assert not (await asyncio.to_thread(torch.no_grad()(words.forward), ids[1])).requires_grad
        await asyncio.to_thread(lambda: words(ids[2]).sum().backward())
        await ps.barrier()
        assert ps.statistics().pushes == 1


@pytest.mark.ranks(2)
async def test_p15_a_layer_on_the_loop_raises_since_it_would_block(coll: Communicator) -> None:
    async with ParameterServer(coll, servers=[0, 1]) as ps:
        words = Embedding(await ps.embedding("words", DIM, optimizer=SGD(lr=0.1)))
        with pytest.raises(RuntimeError, match="would block the event loop: call the model on a compute thread"):
            words(torch.tensor([1]))
        with pytest.raises(ValueError, match="id -1: expected 0 to"):
            words.prefetch(torch.tensor([-1]))
        other = copy.deepcopy(nn.Sequential(words))[0]
        assert isinstance(other, Embedding)
        assert other.table is words.table
        with pytest.raises(TypeError, match="table is int: expected what"):
            Embedding(3)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
async def test_p15_what_makes_a_push_fail_is_raised_by_the_next_forward(coll: Communicator) -> None:
    async with ParameterServer(coll, workers=[0]) as ps:
        words = Embedding(await ps.embedding("words", DIM))
        if coll.rank == 1:  # a reader
            await asyncio.to_thread(lambda: words(torch.tensor([1])).sum().backward())
            with pytest.raises(ValueError, match="push on rank 1: expected a worker, one of"):
                await asyncio.to_thread(words, torch.tensor([1]))
            words.eval()
            await asyncio.to_thread(words, torch.tensor([1]))


@pytest.mark.ranks(1, 2)
async def test_p15_several_backward_passes_are_one_push_where_that_is_said(coll: Communicator) -> None:
    async with ParameterServer(coll, consistency=Synchronous("sum")) as ps:
        words = Embedding(await ps.embedding("words", 2, init=0.0, optimizer=SGD(lr=1.0), dtype=torch.float64))
        head = nn.Linear(2, 1, bias=False).double()
        net = await DataParallel.create(nn.Sequential(words, head), coll)
        opt = torch.optim.SGD(net.parameters(), lr=0.0)
        ids = torch.tensor([[1], [coll.rank]]), torch.tensor([[1], [1]])
        with words.accumulating():
            await net.step([lambda one=one: net(one).sum() for one in ids], opt)
            with pytest.raises(RuntimeError, match="in another such block"):
                words.accumulating().__enter__()
        assert ps.statistics().pushes == 1
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(left_by_an_error, words)
        assert ps.statistics().pushes == 1
        found = await words.table.pull(torch.tensor([1, 0]))
        times = torch.tensor([[3.0 * coll.size + (coll.size > 1)], [1.0]])  # that all ranks' passes used each row
        torch.testing.assert_close(found, -times * head.weight.detach())


def left_by_an_error(words: Embedding) -> None:
    with words.accumulating():
        words(torch.tensor([1])).sum().backward()
        raise ZeroDivisionError


@pytest.mark.ranks(1)
async def test_p15_a_backward_that_raises_pushes_nothing_and_the_next_one_does(coll: Communicator) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

    spoilt: Any = Bad.apply
    async with ParameterServer(coll) as ps:
        words = Embedding(await ps.embedding("words", 1, init=0.0))

        def train(*, bad: bool) -> None:
            first, second = words(torch.tensor([1])), words(torch.tensor([2]))
            loss = (spoilt(first) if bad else first).sum() + 3 * second.sum()
            loss.backward()

        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(train, bad=True)
        await asyncio.to_thread(train, bad=False)
        assert (await words.table.pull(torch.tensor([1, 2, 3]))).flatten().tolist() == [1, 3, 0]
        assert ps.statistics().pushes == 1


@pytest.mark.ranks(2)
async def test_p15_rows_that_never_come_are_an_error_in_time(coll: Communicator) -> None:
    consistency = Synchronous("sum")
    async with ParameterServer(coll, consistency=consistency, servers=[0], workers=[0, 1], timeout=0.3) as ps:
        words = Embedding(await ps.embedding("words", 1))
        if coll.rank == 1:
            ids = [torch.tensor([step]) for step in range(2)]
            await asyncio.to_thread(lambda: words(ids[0]).sum().backward())
            with pytest.raises(OperationTimeout, match=r"pull_rows .*late: rank 0 .*'words'"):
                await asyncio.to_thread(words, ids[1])
        await coll.barrier()  # until now rank 0 was neither resting nor pushing
