"""N14: checkpoints of a training, with a library in memory in the place of the one that writes files."""

import asyncio
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import mse_loss

from aiodist import Communicator, Engine, checkpoints
from aiodist.engine import State
from aiodist.nn import DataParallel

if TYPE_CHECKING:
    from tests.engine.conftest import Job


class Memory:
    """`save` takes a copy at the call; what it returns is over later. All ranks share it."""

    def __init__(self) -> None:
        self.kept: dict[int, list[list[Any]]] = {}
        """By rank, the states of net, optimizer and engine of each save."""
        self.written = 0

    def save(self, path: Path, *parts: Any, own: Any, keep: int | None) -> Any:
        assert path == Path("runs/7")
        assert keep == 3
        rank = own[0].state.rank
        self.kept.setdefault(rank, []).append([copy.deepcopy(one.state_dict()) for one in (*parts, *own)])
        return self._write()

    async def _write(self) -> None:
        await asyncio.sleep(0)
        self.written += 1

    async def load(self, path: Path, *parts: Any, own: Any) -> None:
        if not self.kept:
            raise FileNotFoundError(path)
        for part, state in zip((*parts, *own), self.kept[own[0].state.rank][-1], strict=True):
            part.load_state_dict(state)


async def made(coll: Communicator, job: type["Job"], **options: Any) -> Engine:
    net = await DataParallel.create(job.build(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Engine(net, opt, mse_loss, checkpoint="runs/7", keep=3, **options, **job.QUIET)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("every", "steps"), [(None, [4, 8, 12]), (3, [3, 6, 9, 12]), (5, [5, 10])])
async def test_n14_checkpoints_and_going_on(
    coll: Communicator, job: type["Job"], monkeypatch: pytest.MonkeyPatch, every: int | None, steps: list[int]
) -> None:
    memory = Memory()
    monkeypatch.setattr(checkpoints, "save", memory.save, raising=False)
    monkeypatch.setattr(checkpoints, "load", memory.load, raising=False)
    engine = await made(coll, job, every=every)
    assert not await engine.resume()
    await engine.train(job.pairs(0, 4), epochs=3)
    assert [states[-1]["step"] for states in memory.kept[0]] == steps
    assert memory.written == len(steps)
    expected = copy.deepcopy(engine.state.net.state_dict())
    await engine.state.net.aclose()

    del memory.kept[0][2:]
    engine = await made(coll, job, every=every)
    assert await engine.resume()
    await engine.train(job.pairs(0, 4), epochs=3)
    assert all(torch.equal(t, expected[name]) for name, t in engine.state.net.state_dict().items())


@pytest.mark.ranks(2)
async def test_n14_uneven_epochs_are_saved_behind_them(
    coll: Communicator, job: type["Job"], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    monkeypatch.setattr(checkpoints, "save", memory.save, raising=False)
    engine = await made(coll, job)
    await engine.train(job.pairs(coll.rank, 2 + 3 * coll.rank), epochs=2)
    saved = {rank: [(s[-1]["epoch"], s[-1]["step"]) for s in states] for rank, states in memory.kept.items()}
    told = {rank: one for ranks in await coll.allgather_object(saved) for rank, one in ranks.items()}
    assert told == {0: [(1, 2), (2, 4)], 1: [(1, 5), (2, 10)]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("known", [True, False])
async def test_n14_checkpoints_within_uneven_epochs_are_refused(
    coll: Communicator, job: type["Job"], known: bool
) -> None:
    engine = await made(coll, job, every=2)
    pairs = job.pairs(coll.rank, 2 + coll.rank)
    with pytest.raises(ValueError, match="every=2, and ranks may have different numbers of batches"):
        await engine.train(pairs if known else iter(pairs), epochs=2)
    assert engine.state.step == 0


@pytest.mark.ranks(1)
async def test_n14_another_number_of_ranks_begins_the_epoch_anew(coll: Communicator, job: type["Job"]) -> None:
    net = await DataParallel.create(job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **job.QUIET)

    @engine.on("update")
    def stop(state: State) -> None:
        state.stop = state.step == 5

    await engine.train(job.pairs(0, 4), epochs=2)
    state = engine.state_dict()
    assert (state["epoch"], state["step"], state["batch"]) == (1, 6, 2)
    engine.load_state_dicts([state, state])
    state = engine.state_dict()
    assert (state["epoch"], state["step"], state["batch"]) == (1, 6, 0)


@pytest.mark.ranks(1)
async def test_n14_wrong_options_of_checkpoints(coll: Communicator, job: type["Job"]) -> None:
    net = await DataParallel.create(job.build(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="without checkpoint=, which says where"):
        Engine(net, opt, mse_loss, every=3)
    with pytest.raises(ValueError, match="every=0: expected a number of steps"):
        Engine(net, opt, mse_loss, checkpoint="runs", every=0)
    with pytest.raises(ValueError, match=r"engine\.resume without checkpoint="):
        await Engine(net, opt, mse_loss).resume()
