"""N14: a stopped training continues exactly at its last step."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import aiodist
from aiodist import Communicator, Engine
from aiodist.data import IndexShards, ShardQueue, ShardSampler
from aiodist.engine import State
from aiodist.nn import DataParallel, PipelinedOptimizer
from tests.engine.conftest import Job

STEPS = 4  # an epoch


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 3)).double()


def loader(coll: Communicator, kind: str) -> Any:
    """Return shuffled batches: by the epoch, the same permutation for all ranks, or by torch's generator."""
    x, y = (torch.cat(parts) for parts in zip(*Job.pairs(0, 8), strict=True))  # 24
    if kind == "epoch":
        sampler = ShardSampler(len(x), coll, shuffle=True)
        return DataLoader(TensorDataset(x, y), batch_size=24 // coll.size // STEPS, sampler=sampler)
    return DataLoader(TensorDataset(x, y), batch_size=24 // STEPS, shuffle=True)


async def made(coll: Communicator, *, pipelined: bool) -> tuple[Any, Any, Engine]:
    net = await DataParallel.create(build(), coll)
    opt: Any = (
        await PipelinedOptimizer.create(net, Job.OPTIMIZERS["adam"])
        if pipelined
        else Job.OPTIMIZERS["adam"](net.parameters())
    )
    return net, opt, Engine(net, opt, mse_loss, metrics={"mae": lambda o, t: (o - t).abs().mean()}, **Job.QUIET)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1)
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", ["epoch", "generator"])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize(("event", "at"), [("update", 1), ("update", 6), ("epoch", 4), ("update", 8)])
async def test_n14_goes_on_to_the_bit(coll: Communicator, kind: str, pipelined: bool, event: Any, at: int) -> None:
    """With dropout and a shuffled order."""
    torch.manual_seed(coll.rank)
    net, opt, engine = await made(coll, pipelined=pipelined)
    torch.manual_seed(7 + coll.rank)
    saved: list[Any] = []

    @engine.on(event)
    async def save(state: State) -> None:
        if state.step == at:
            if pipelined:
                await opt.flush()
            saved.append(copy.deepcopy([net.state_dict(), opt.state_dict(), engine.state_dict()]))

    figures = await engine.train(loader(coll, kind), epochs=3)
    expected = copy.deepcopy(net.state_dict())
    await net.aclose()

    torch.manual_seed(99)
    net, opt, engine = await made(coll, pipelined=pipelined)
    torch.randn(13)
    (weights, states, position) = saved[0]
    net.load_state_dict(weights)
    opt.load_state_dict(states)
    engine.load_state_dict(position)
    steps = []
    engine.on("update", lambda state: steps.append(state.step))
    assert await engine.train(loader(coll, kind), epochs=3) == figures
    assert steps == [*range(at + 1, 3 * STEPS + 1)]
    assert all(torch.equal(t, expected[name]) for name, t in net.state_dict().items())
    await net.aclose()


@pytest.mark.drawn(1)
@pytest.mark.ranks(1)
@pytest.mark.ranks(2, backend="gloo")
async def test_n14_a_stop_changes_nothing(coll: Communicator) -> None:
    """In the same process, after a stop in the middle of an epoch: rank 0 asks, and all ranks stop."""
    ends = []
    for stops in ([], [2, 3, 7]):
        net, _, engine = await made(coll, pipelined=False)
        torch.manual_seed(7 + coll.rank)

        @engine.on("update")
        def stop(state: State, stops: list[int] = stops) -> None:
            state.stop = state.stop or (coll.rank == 0 and state.step in stops)

        data = loader(coll, "generator")
        for _ in range(1 + len(stops)):
            figures = await engine.train(data, epochs=3)
        assert engine.state.step == 3 * STEPS
        ends.append((figures, copy.deepcopy(net.state_dict())))
        await net.aclose()
    (plain, expected), (stopped, seen) = ends
    assert plain == stopped
    assert all(torch.equal(t, expected[name]) for name, t in seen.items())


@pytest.mark.ranks(1)
async def test_n14_states_that_are_none(coll: Communicator) -> None:
    _, _, engine = await made(coll, pipelined=False)
    with pytest.raises(ValueError, match=r"state with epoch: expected epoch, step, batch, order, random"):
        engine.load_state_dict({"epoch": 3})

    @engine.on("update")
    def load(state: State) -> None:
        engine.load_state_dict(engine.state_dict())

    with pytest.raises(RuntimeError, match="in a training"):
        await engine.train(Job.pairs(0, 1), epochs=1)


@pytest.mark.ranks(1)
async def test_n14_a_state_is_made_of_tensors_and_numbers(coll: Communicator, tmp_path: Any) -> None:
    _, _, engine = await made(coll, pipelined=False)

    @engine.on("update")
    def save(state: State) -> None:
        torch.save(engine.state_dict(), tmp_path / "engine.pt")

    await engine.train(Job.pairs(0, 2), epochs=1)
    read = torch.load(tmp_path / "engine.pt", weights_only=True)
    assert (read["epoch"], read["step"], read["batch"]) == (0, 2, 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks", [1, 2, 3])
async def test_n14_goes_on_from_disk_with_a_queue_on_any_number_of_ranks(
    coll: Communicator, tmp_path: Path, ranks: int
) -> None:
    """Each record is trained on once in the epoch that was interrupted."""
    folder = Path(await coll.broadcast_object(str(tmp_path)))

    async def begun(group: Communicator) -> tuple[Any, Any, ShardQueue[int], Engine, list[int]]:
        net = await DataParallel.create(nn.Linear(1, 1).double(), group)
        opt = torch.optim.SGD(net.parameters(), lr=1e-6)
        queue = ShardQueue(IndexShards(60, 5), group, batch_size=4, shuffle=True)
        engine = Engine(net, opt, split=lambda batch: (batch, None), **Job.QUIET)
        seen: list[int] = []

        @engine.on("sample")
        def prepare(state: State) -> None:
            seen.extend(state.sample)
            state.sample = torch.tensor(state.sample)[:, None].double()

        engine.on("forward", lambda state: setattr(state, "output", state.output.mean()))
        return net, opt, queue, engine, seen

    net, opt, queue, engine, seen = await begun(coll)

    @engine.on("update")
    async def save(state: State) -> None:
        if state.step == 2:
            await aiodist.save(folder, net, opt, per_rank=[engine, queue])
            state.stop = True

    await engine.train(queue, epochs=1)
    mine = seen[:8]  # before the save
    group = await coll.group(range(ranks))
    if coll.rank < ranks:
        net, opt, queue, engine, seen = await begun(group)
        await aiodist.load(folder, net, opt, per_rank=[engine, queue])
        assert (engine.state_dict()["step"], queue.epoch) == (2, 0)
        await engine.train(queue, epochs=1)
        mine = mine + seen
    assert sorted(itertools.chain(*await coll.allgather_object(mine))) == list(range(60))
