"""N19, N5: each rank keeps submodules, parameters and buffers of a net's own module for itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

import aiodist
from aiodist import Communicator, Engine, nn
from aiodist.codecs import BFloat16
from aiodist.nn import DataParallel, assert_synchronized
from tests.nn.conftest import Trial

if TYPE_CHECKING:
    from pathlib import Path


class Experts(torch.nn.Module):
    """A gate that ranks share, and an expert of each: rank r has that of r, one process has all."""

    def __init__(self, size: int, mine: int | None = None, coll: Communicator | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate = torch.nn.Linear(6, size, dtype=torch.float64)
        every = [torch.nn.Linear(6, 3, dtype=torch.float64) for _ in range(size)]
        self.experts = torch.nn.ModuleList(every if mine is None else [every[mine]])
        self.coll = coll

    def forward(self, x: Tensor) -> Tensor:
        """Send every fourth row, and so on, to the expert whose turn it is, weighted by the gate."""
        size = self.gate.out_features
        weights = self.gate(x).softmax(1)
        turns = torch.arange(len(x)) % size
        order = turns.argsort(stable=True)
        rows = x[order]
        counts = turns.bincount(minlength=size).tolist()
        if self.coll is None:
            made = torch.cat([expert(r) for expert, r in zip(self.experts, rows.split(counts), strict=True)])
        else:
            mine = [counts[self.coll.rank]] * size
            there = nn.functional.alltoall(rows, self.coll, counts, mine).wait()
            made = nn.functional.alltoall(self.experts[0](there), self.coll, mine, counts).wait()
        out: Tensor = made[order.argsort()] * weights.gather(1, turns[:, None])
        return out


class Headed(torch.nn.Module):
    """A body that ranks share, and a head of this rank, with statistics and a shape of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.body = Trial.Mlp()
        torch.manual_seed(50 + rank)
        self.head = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2 + rank)).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


def loss_of(net: Any, rank: int, step: int) -> Tensor:
    x, y = Trial.batch(rank, step)
    out: Tensor = net(x)
    return mse_loss(out, y[:, :1].expand_as(out))


def plain(size: int, steps: int, clip: float | None = None, momentum: float = 0.0) -> list[Headed]:
    """Return what one process makes of a body and the heads of all ranks; each module has the body."""
    ranks = [Headed(rank) for rank in range(size)]
    body = ranks[0].body
    opt = SGD(body.parameters(), lr=0.1, momentum=momentum)
    own = [SGD(each.head.parameters(), lr=0.1, momentum=momentum) for each in ranks]
    for each in ranks:
        each.body = body
    for step in range(steps):
        for one in (opt, *own):
            one.zero_grad()
        for rank, each in enumerate(ranks):
            loss_of(each, rank, step).backward()
        for p in body.parameters():
            assert p.grad is not None
            p.grad /= size
        for module in (body, *(each.head for each in ranks)):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        for one in (opt, *own):
            one.step()
    return ranks


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
async def test_n19_experts_of_each_rank_equal_one_process(coll: Communicator, optimizer: str) -> None:
    size, rank = coll.size, coll.rank
    model = Experts(size, rank, await coll.dup(thread=True))
    net = await DataParallel.create(model, coll, per_rank="experts")
    for p in model.experts.parameters():  # the others' losses have their part in it, which the net takes the mean of
        p.register_hook(lambda grad: grad / size)
    opt = Trial.OPTIMIZERS[optimizer](model.parameters())
    whole = Experts(size)
    reference = Trial.OPTIMIZERS[optimizer](whole.parameters())
    for step in range(4):
        await net.step(partial(Trial.loss, net, rank, step), opt)
        reference.zero_grad()
        (torch.stack([Trial.loss(whole, each, step) for each in range(size)]).sum() / size).backward()
        reference.step()
    Trial.assert_same(model.gate, whole.gate)
    Trial.assert_same(model.experts[0], whole.experts[rank])
    await assert_synchronized(net, coll)
    await assert_synchronized(model.gate, coll)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("how", ["name", "names", "module", "parameters", "ddp"])
async def test_n19_heads_with_shapes_of_each_rank(coll: Communicator, clip: float | None, how: str) -> None:
    model = Headed(coll.rank)
    names = [f"head.{name}" for name in model.head.state_dict()]
    if how == "ddp":
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    given: dict[str, Any] = {
        "name": "head",
        "names": names,
        "module": model.head,
        "parameters": [*model.head.parameters(), *model.head.buffers()],
        "ddp": None,
    }
    net = await DataParallel.create(model, coll, per_rank=given[how], clip_norm=clip)
    assert [id(p) for p in net.per_rank] == [id(p) for p in model.head.parameters()]
    opt = SGD(net.parameters(), lr=0.1)
    for step in range(3):
        await net.step(partial(loss_of, net, coll.rank, step), opt)
    await net.synchronize_buffers()
    expected = plain(coll.size, 3, clip)[coll.rank]
    Trial.assert_same(net, expected)
    assert all(map(torch.equal, model.head.buffers(), expected.head.buffers()))
    await assert_synchronized(net, coll)
    if coll.size > 1:
        with pytest.raises(aiodist.MismatchError, match=r"head\.1\.weight"):
            await assert_synchronized(model, coll)
    assert set(net.state_dict()) == set(model.state_dict())


@pytest.mark.ranks(2)
async def test_n19_settings_keep_what_create_left_out(coll: Communicator) -> None:
    model, other = Headed(coll.rank), torch.nn.Linear(2, 2)
    net = await DataParallel.create(model, coll, per_rank=[model.head, other])
    kept = [*model.head.parameters(), *other.parameters()]
    assert [id(p) for p in net.per_rank] == list(map(id, kept))
    for again in ("head", "head.1.weight", model.head.parameters(), None):
        net.configure(per_rank=again)
        assert [id(p) for p in net.per_rank] == list(map(id, kept[:4]))
    with pytest.raises(ValueError, match=r"per_rank has 'body\.0\.weight', a parameter of the net"):
        net.configure(per_rank=["body"])
    await net.step(partial(loss_of, net, coll.rank, 0), SGD(net.parameters(), lr=0.1))


@pytest.mark.ranks(2)
async def test_n5_what_cannot_be_left_out(coll: Communicator) -> None:
    model = Headed(coll.rank)
    with pytest.raises(ValueError, match=r"per_rank has 'hat': expected a module, a parameter or a buffer of the He"):
        await DataParallel.create(model, coll, per_rank="hat")
    with pytest.raises(TypeError, match="per_rank has int"):
        await DataParallel.create(model, coll, per_rank=[3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no parameter to train"):
        await DataParallel.create(model, coll, per_rank=model)
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2), "c": torch.nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(ValueError, match=r"per_rank has 'b\.weight', which the net has as 'a\.weight' too"):
        await DataParallel.create(tied, coll, per_rank=tied["b"])
    net = await DataParallel.create(tied, coll, per_rank=[tied["a"].weight])
    assert [name for name, _ in net.shared.named_parameters()] == ["a.bias", "b.bias", "c.weight", "c.bias"]
    column = nn.ColumnLinear(4, 4, await coll.dup(thread=True))
    with pytest.raises(ValueError, match="a layer that is divided among ranks"):
        await DataParallel.create(torch.nn.Sequential(column, torch.nn.Linear(4, 1)), coll, per_rank="0")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [{}, Trial.SMALL])
async def test_n5_what_is_left_out_travels_in_no_way(coll: Communicator, size: dict[str, Any]) -> None:
    model = Headed(coll.rank)
    mine = [t.clone() for t in (*model.head.parameters(), *model.head.buffers())]
    net = await DataParallel.create(model, coll, per_rank="head", compress=BFloat16(), **size)
    assert all(map(torch.equal, mine, (*model.head.parameters(), *model.head.buffers())))
    (model.head(torch.randn(4, 3, dtype=torch.float64)).sum()).backward()  # a backward of this rank's own
    gradients = [p.grad for p in model.head.parameters()]
    assert all(g is not None for g in gradients)
    with net.no_sync():
        await net.backward(loss_of(net, coll.rank, 0))
    await net.backward(loss_of(net, coll.rank, 1))
    assert all(p.grad is g for p, g in zip(model.head.parameters(), gradients, strict=True))
    assert net.statistics().nbytes == 8 * sum(p.numel() for p in model.body.parameters())
    if coll.rank == 0:  # each rank loads what it likes of its own
        state = model.state_dict()
        net.load_state_dict({name: t * 2 if name.startswith("head") else t for name, t in state.items()})
    else:
        net.load_state_dict(model.state_dict())
    await net.backward(loss_of(net, coll.rank, 2))
    model.head[1].requires_grad_(coll.rank == 0)  # or freezes
    await net.step(partial(loss_of, net, coll.rank, 3), SGD(net.parameters(), lr=0.1))


@pytest.mark.ranks(2, 3)
async def test_n11_uneven_loops_with_a_head_of_each_rank(coll: Communicator) -> None:
    model = Headed(coll.rank)
    net = await DataParallel.create(model, coll, per_rank="head")
    opt = SGD([*model.body.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9)
    await net.step(partial(loss_of, net, coll.rank, 0), opt)
    async with net.join():
        for step in range(1, 2 + coll.rank):
            await net.step(partial(loss_of, net, coll.rank, step), opt)
    body = [opt.state[p]["momentum_buffer"] for p in model.body.parameters()]
    await assert_synchronized([net, body], coll)
    weight = model.head.get_parameter("1.weight")
    assert opt.state[weight]["momentum_buffer"].shape == weight.shape
    await net.step(partial(loss_of, net, coll.rank, 9), opt)
    await assert_synchronized(net, coll)


@pytest.mark.ranks(2)
async def test_n3_create_gives_the_shared_state_of_an_optimizer(coll: Communicator) -> None:
    model = Headed(coll.rank)
    groups: list[dict[str, Any]] = [{"params": model.head.parameters()}, {"params": model.body.parameters()}]
    groups[1]["lr"] = 0.01 + coll.rank
    opt = Adam(groups)
    for _ in range(1 + coll.rank):
        loss_of(model, coll.rank, 0).backward()
        opt.step()
    mine = [t.clone() for p in model.head.parameters() for t in opt.state[p].values()]
    net = await DataParallel.create(model, coll, opt, per_rank="head")
    assert opt.param_groups[1]["lr"] == 0.01
    assert all(map(torch.equal, mine, [t for p in model.head.parameters() for t in opt.state[p].values()]))
    await assert_synchronized([list(opt.state[p].values()) for p in model.body.parameters()], coll)
    assert [float(opt.state[p]["step"]) for p in model.parameters()] == [1.0] * 6 + [1.0 + coll.rank] * 4
    await net.step(partial(loss_of, net, coll.rank, 1), opt)


class Loads(SGD):
    """The state may have any form, so ranks do not share it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.ranks(2)
async def test_n11_what_a_join_block_refuses_is_used_after_it(coll: Communicator) -> None:
    net = await DataParallel.create(Headed(coll.rank), coll, per_rank="head")
    opt = Loads(net.parameters(), lr=0.1)
    async with net.join(SGD(net.shared.parameters())):
        with pytest.raises(ValueError, match="join: Loads has parameters that each rank keeps for itself"):
            await net.step(partial(loss_of, net, coll.rank, 0), opt)
    await net.step(partial(loss_of, net, coll.rank, 1), opt)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["local", "pipelined", "sharded"])
async def test_n19_drivers_of_a_net_with_a_head_of_each_rank(coll: Communicator, kind: str) -> None:
    model = Headed(coll.rank)
    net = await DataParallel.create(model, coll, per_rank="head")
    own = SGD(model.head.parameters(), lr=0.1)
    opt: Any
    if kind == "local":
        opt = await nn.LocalSGD.create(net, SGD(net.shared.parameters(), lr=0.1), every=1)
    elif kind == "pipelined":
        opt = await nn.PipelinedOptimizer.create(net, lambda params: SGD(params, lr=0.1))
    else:
        opt = await nn.ShardedOptimizer.create(net, lambda params: SGD(params, lr=0.1))
    for step in range(3):
        await net.step(partial(loss_of, net, coll.rank, step), opt)
        await net.submit(own.step)
        own.zero_grad()
    await opt.flush()
    Trial.assert_same(net, plain(2, 3)[coll.rank])
    if kind == "sharded":
        opt.close()
        with pytest.raises(ValueError, match="expected parameters of the net"):
            await nn.ShardedOptimizer.create(net, lambda params: SGD(params, lr=0.1), params=list(net.parameters()))


@pytest.mark.ranks(2)
async def test_n14_an_engine_with_experts_of_each_rank(coll: Communicator) -> None:
    model = Headed(coll.rank)
    net = await DataParallel.create(model, coll, per_rank="head")

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return mse_loss(out, y[:, :1].expand_as(out))

    engine = Engine(net, SGD(net.parameters(), lr=0.1), criterion, debug=True, dynamic=False, progress=False)
    await engine.train([Trial.batch(coll.rank, step) for step in range(3)], epochs=1)
    Trial.assert_same(net, plain(2, 3)[coll.rank])


@pytest.mark.ranks(2)
async def test_n17_a_checkpoint_has_the_head_of_each_rank(coll: Communicator, tmp_path: Path) -> None:
    path = await coll.broadcast_object(tmp_path)
    model = Headed(coll.rank)
    net = await DataParallel.create(model, coll, per_rank="head")
    mixed = SGD(net.parameters(), lr=0.1, momentum=0.9)
    for call in (aiodist.save, aiodist.load):
        with pytest.raises(ValueError, match=r"part1: SGD has 4 parameters that each rank keeps .*per_rank=\["):
            call(path, net, mixed)
    opt = SGD(net.shared.parameters(), lr=0.1, momentum=0.9)
    own = SGD(model.head.parameters(), lr=0.1, momentum=0.9)

    async def steps(first: int) -> None:
        for step in range(first, first + 2):
            await net.step(partial(loss_of, net, coll.rank, step), opt)
            await net.submit(own.step)
            own.zero_grad()

    await steps(0)
    await aiodist.save(path, net, opt, per_rank=[own])
    await steps(2)
    Trial.assert_same(net, plain(2, 4, momentum=0.9)[coll.rank])
    expected = {name: t.clone() for name, t in net.state_dict().items()}
    await aiodist.load(path, net, opt, per_rank=[own])
    await steps(2)
    assert all(torch.equal(t, expected[name]) for name, t in net.state_dict().items())
    await net.aclose()

    other = await DataParallel.create(model, coll, per_rank="head.1")
    with pytest.raises(ValueError, match=r"'head\.0\.bias' is `per_rank` only in the checkpoint"):
        await aiodist.load(path, other, opt, per_rank=[own], coll=coll)
    await other.aclose()
    alone = Headed(coll.rank)
    me = await coll.split(coll.rank)
    one = await DataParallel.create(alone, me, per_rank="head")
    with pytest.raises(ValueError, match=r"'head\.0\.weight' is `per_rank`.*2 ranks saved the checkpoint"):
        await aiodist.load(path, one, opt, per_rank=[own])
    await one.aclose()
    await me.aclose()
