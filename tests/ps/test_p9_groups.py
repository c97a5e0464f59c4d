"""P9: data-parallel groups at the server: the group's rank 0 talks, once for all, and a group is one client."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator, ParameterServer
from aiodist.errors import RemoteError
from aiodist.nn import DataParallel
from aiodist.ps import EAMSGD, EASGD, SGD, AsySGInCon, Downpour, elastic_alpha

Make = Callable[..., Any]
STEPS = 7


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def gradients(model: nn.Module, group: int, step: int) -> None:
    """Give `model` what its group found in a step, as DataParallel leaves it on each of its ranks."""
    model.zero_grad()
    draw = torch.Generator().manual_seed(100 * group + step)
    model(torch.randn(5, 3, generator=draw, dtype=torch.float64)).square().mean().backward()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


ALPHA = elastic_alpha(0.9, 3)
MAKERS: dict[str, tuple[str, Make]] = {
    "easgd": ("add", lambda ps, m, **how: EASGD(ps, m, sgd(m), tau=2, alpha=ALPHA, **how)),
    "prefetch": ("add", lambda ps, m, **how: EASGD(ps, m, sgd(m), tau=3, alpha=ALPHA, warmup=1, prefetch=2, **how)),
    "eamsgd": ("add", lambda ps, m, **how: EAMSGD(ps, m, sgd(m), tau=2, alpha=ALPHA, momentum=0.5, **how)),
    "downpour": ("add", lambda ps, m, **how: Downpour(ps, m, sgd(m), n_push=2, n_pull=3, **how)),
    "asysg": ("sgd", lambda ps, m, **how: AsySGInCon(ps, m, n_pull=STEPS + 1, **how)),  # its reads see anything
}


async def train(
    coll: Communicator, group: Communicator | None, number: int, roots: Sequence[int], case: str
) -> tuple[list[Tensor], list[Tensor], int]:
    """Return this rank's weights, the centre and how often it pushed, after steps that groups make in turns."""
    rule, make = MAKERS[case]
    model = build(number if group is None else coll.rank)
    async with ParameterServer(coll, model, rule=SGD(lr=0.1) if rule == "sgd" else rule, workers=roots) as ps:
        async with make(ps, model, group=group) as client:
            await coll.barrier()  # all have rank 0's weights
            for step in range(STEPS):
                for turn in range(len(roots)):
                    if turn == number:
                        gradients(model, number, step)
                        await client.step()
                        if ps.is_worker:
                            await ps.sync()
                    await coll.barrier()
        centre = [torch.empty_like(p) for p in model.parameters()]
        if ps.is_worker:
            await ps.pull(model, centre)
        pushes = ps.statistics().pushes
    return [p.detach() for p in model.parameters()], centre, pushes


@pytest.mark.drawn(1)
@pytest.mark.ranks(7)
@pytest.mark.parametrize("case", MAKERS)
async def test_p9_uneven_groups_are_as_many_clients(coll: Communicator, case: str) -> None:
    number = coll.rank // 3
    group = await coll.split(number)  # 3, 3 and 1 ranks
    weights, centre, pushes = await train(coll, group, number, [0, 3, 6], case)
    roots = await coll.group([0, 3, 6])
    if coll.rank in (0, 3, 6):
        expected, expected_centre, expected_pushes = await train(roots, None, number, [0, 1, 2], case)
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(centre, expected_centre)
        assert pushes == expected_pushes > 0
    else:
        assert pushes == 0
    for t in weights:
        for other in await group.allgather(t):
            assert torch.equal(other, t)


class Broken:
    """A server whose pulls fail at will; on ranks that are not to talk, every call is a mistake."""

    def __init__(self, talks: bool) -> None:
        self.talks = talks
        self.fails = False

    def push(self, what: Any, values: Any, *, rule: str | None = None) -> "Broken.Over":
        assert self.talks
        return Broken.Over(None)

    def pull(self, what: Any, out: Any, *, reads: Any = None) -> "Broken.Over":
        assert self.talks
        for t in out:
            t.fill_(3.0)
        return Broken.Over(ValueError("no such server") if self.fails else None)

    class Over:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def done(self) -> bool:
            return True

        def __await__(self) -> Generator[Any, None, None]:
            if self.error is not None:
                raise self.error
            yield from ()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("prefetch", [0, 1])
async def test_p9_what_rank_0_cannot_fetch_is_raised_by_the_whole_group(coll: Communicator, prefetch: int) -> None:
    w = nn.Parameter(torch.ones(3))
    ps = Broken(talks=coll.rank == 0)
    client = EASGD(ps, [w], torch.optim.SGD([w], lr=0.0), tau=2, alpha=0.5, prefetch=prefetch, group=coll)
    w.grad = torch.ones(3)
    ps.fails = True
    await client.step()
    if coll.rank == 0:
        with pytest.raises(ValueError, match="no such server"):
            await client.step()
    else:
        with pytest.raises(RemoteError, match=r"rank 0 of the group.*raised ValueError: no such server") as raised:
            await client.step()
        assert raised.value.raised_by == 0
    assert torch.equal(w.detach(), torch.ones(3))
    ps.fails = False
    await client.step()  # the same step again
    assert client.steps == 2
    assert torch.equal(w.detach(), torch.full((3,), 2.0))
    await client.aclose()


@pytest.mark.ranks(2)
async def test_p9_a_group_is_one_that_this_rank_belongs_to(coll: Communicator) -> None:
    group = await coll.group([0])
    w = nn.Parameter(torch.ones(3))
    if coll.rank == 0:
        AsySGInCon(Broken(talks=True), [w], group=group)
    else:
        with pytest.raises(ValueError, match="expected a communicator that this rank belongs to"):
            AsySGInCon(Broken(talks=False), [w], group=group)


@pytest.mark.ranks(5)
async def test_p9_lock_free_reads_of_a_group_are_the_same_on_all_its_ranks(coll: Communicator) -> None:
    group = await coll.split(coll.rank // 3)
    model = build(coll.rank)
    async with (
        ParameterServer(coll, model, rule=SGD(lr=0.1), workers=[0, 3]) as ps,
        AsySGInCon(ps, model, group=group) as client,
    ):
        for step in range(STEPS):
            gradients(model, coll.rank // 3, step)
            await client.step()
            for t in model.parameters():
                for other in await group.allgather(t.detach()):
                    assert torch.equal(other, t)


@pytest.mark.ranks(3)
async def test_p9_data_parallel_groups_train_against_the_centre(coll: Communicator) -> None:
    number = coll.rank // 2
    group = await coll.split(number)  # 2 ranks and 1
    draw = torch.Generator().manual_seed(coll.rank)
    true = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    async with ParameterServer(coll, model, workers=[0, 2]) as ps, await DataParallel.create(model, group) as net:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
        alpha = elastic_alpha(0.9, 2)
        async with EASGD(ps, net, optimizer, tau=4, alpha=alpha, prefetch=1, group=group, run=net.submit) as client:
            for _ in range(60):
                x = torch.randn(16, 3, generator=draw, dtype=torch.float64)

                def forward(x: Tensor = x) -> Tensor:
                    missed: Tensor = net(x).squeeze(1) - x @ true
                    return missed.square().mean()

                optimizer.zero_grad()
                await net.backward(await net.submit(forward))
                await client.step()
        if ps.is_worker:
            await ps.barrier()
            [centre] = await ps.pull(model, [torch.empty(1, 3, dtype=torch.float64)])
            torch.testing.assert_close(centre[0], true, rtol=0, atol=0.02)
        await coll.barrier()
    for other in await group.allgather(model.weight.detach()):
        assert torch.equal(other, model.weight)
