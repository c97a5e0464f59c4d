"""N14: an engine goes on from checkpoints on disk, as `aiodist.save` writes them."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator, Engine
from aiodist.data import IndexShards, ShardQueue, prefetch
from aiodist.engine import State
from aiodist.errors import RemoteError
from aiodist.nn import DataParallel, LocalSGD, PipelinedOptimizer, SlowMo

if TYPE_CHECKING:
    from tests.engine.conftest import Job

STEPS = 5
"""Of an epoch."""
KINDS = ["plain", "pipelined", "local", "overlap"]


def build(ranks: int) -> nn.Module:
    """Return a net with dropout on one rank: those of a test share torch's generator."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4 if ranks == 1 else 0.0), nn.Tanh(), nn.Linear(8, 3)).double()


async def made(coll: Communicator, job: type["Job"], kind: str, **options: Any) -> tuple[DataParallel, Engine]:
    net = await DataParallel.create(build(coll.size), coll)
    opt: Any
    if kind == "pipelined":
        opt = PipelinedOptimizer(net, job.OPTIMIZERS["adam"])
    else:
        opt = job.OPTIMIZERS["adam"](net.parameters())
    if kind == "local":
        opt = LocalSGD(net, opt, every=3, outer=SlowMo(0.5))
    elif kind == "overlap":
        opt = LocalSGD(net, opt, every=3, overlap=True)
    mae = {"mae": lambda o, t: (o - t).abs().mean()}
    return net, Engine(net, opt, mse_loss, metrics=mae, **options, **job.QUIET)


async def shared(coll: Communicator, path: Path) -> Path:
    return Path(await coll.broadcast_object(str(path)))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("every", "raises_in"), [(None, 12), (3, 8), (4, 15)])
async def test_n14_goes_on_from_disk_to_the_bit(
    coll: Communicator, job: type["Job"], tmp_path: Path, kind: str, every: int | None, raises_in: int
) -> None:
    """A program that failed in a later step is begun again."""
    data = job.pairs(coll.rank, STEPS)
    ends = []
    for fails in (False, True):
        folder = await shared(coll, tmp_path / f"fails {fails}")
        torch.manual_seed(7 + coll.rank)
        net, engine = await made(coll, job, kind, checkpoint=folder, every=every, keep=2)
        torch.manual_seed(70 + coll.rank)
        assert not await engine.resume()
        if fails:

            @engine.on("update")
            def fail(state: State) -> None:
                if state.step == raises_in:
                    raise OSError("a program ends")

            with pytest.raises(OSError, match="a program ends"):
                await engine.train(data, epochs=3)
            await net.aclose()
            torch.manual_seed(99)
            net, engine = await made(coll, job, kind, checkpoint=folder, every=every, keep=2)
            torch.randn(13)
            assert await engine.resume()
        figures = await engine.train(data, epochs=3)
        assert engine.state.step == 3 * STEPS
        assert len(list(folder.iterdir())) == 2
        ends.append((figures, {name: t.clone() for name, t in net.module.state_dict().items()}))
        await net.aclose()
    (plain, expected), (resumed, seen) = ends
    assert plain == resumed
    for name, t in expected.items():
        assert torch.equal(seen[name], t), name


# --- a queue of shards ------------------------------------------------------------------------------------------------


class Records:
    """Batches of a queue as the engine takes them, and which records each rank has trained on."""

    def __init__(self, job: type["Job"], coll: Communicator) -> None:
        self.queue = ShardQueue(IndexShards(101, 7), coll, batch_size=4, shuffle=True, seed=3)
        pairs = job.pairs(0, 101, samples=1)
        self.x, self.y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        self.trained: list[tuple[int, list[int]]] = []

    def loader(self) -> Any:
        return prefetch(self.queue, transform=lambda batch: (self.x[batch], self.y[batch], batch))

    def watch(self, engine: Engine) -> None:
        @engine.on("update")
        def note(state: State) -> None:
            self.trained.append((state.epoch, list(state.sample[2])))

    @staticmethod
    def split(sample: Any) -> Any:
        return sample[:2]

    async def of_epoch(self, epoch: int, coll: Communicator) -> list[int]:
        told = await coll.allgather_object([records for e, records in self.trained if e == epoch])
        return sorted(chain.from_iterable(chain.from_iterable(told)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
async def test_n14_a_queue_of_shards_gives_each_record_once(coll: Communicator, job: type["Job"], kind: str) -> None:
    """Also where a rank stops all in the middle of an epoch, and they go on in the same program."""
    records = Records(job, coll)
    net, engine = await made(coll, job, kind, split=records.split)
    records.watch(engine)

    @engine.on("update")
    def stop(state: State) -> None:
        state.stop = state.stop or (coll.rank == 0 and state.step in (3, 5))

    for _ in range(3):
        await engine.train(records.loader(), epochs=2)
    assert engine.state.epoch == 2
    for epoch in (1, 2):
        assert await records.of_epoch(epoch, coll) == list(range(101))
    await net.aclose()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (2, 3), (3, 1)])
async def test_n14_the_place_of_a_queue_is_in_the_state(
    coll: Communicator, job: type["Job"], tmp_path: Path, before: int, after: int
) -> None:
    """Stopped in the middle of an epoch, saved, and begun again by other programs, as many or not."""
    folder = await shared(coll, tmp_path)
    trained = []
    for ranks, resumes in ((before, False), (after, True)):
        group = await coll.group(range(ranks))
        if coll.rank < ranks:
            records = Records(job, group)
            net, engine = await made(group, job, "plain", split=records.split)
            records.watch(engine)
            if resumes:
                await aiodist.load(folder, net, engine.state.optimizer, own=[engine])
                await engine.train(records.loader(), epochs=2)
            else:

                @engine.on("update")
                def stop(state: State) -> None:
                    state.stop = state.epoch == 2 and state.batch == 4

                await engine.train(records.loader(), epochs=2)
                await aiodist.save(folder, net, engine.state.optimizer, own=[engine])
            trained.append(records)
        await coll.barrier()
    last = [each for records in trained for epoch, each in records.trained if epoch == 2]
    told = await coll.allgather_object(last)
    assert sorted(chain.from_iterable(chain.from_iterable(told))) == list(range(101))


@pytest.mark.ranks(1)
async def test_n14_a_queue_goes_on_from_a_checkpoint_within_an_epoch(
    coll: Communicator, job: type["Job"], tmp_path: Path
) -> None:
    ends = []
    for fails in (False, True):
        folder = tmp_path / str(fails)
        torch.manual_seed(70)
        records = Records(job, coll)
        net, engine = await made(coll, job, "plain", split=records.split, checkpoint=folder, every=7)
        if fails:

            @engine.on("update")
            def fail(state: State) -> None:
                if state.step == 40:
                    raise OSError("a program ends")

            with pytest.raises(OSError, match="a program ends"):
                await engine.train(records.loader(), epochs=2)
            await net.aclose()
            records = Records(job, coll)
            net, engine = await made(coll, job, "plain", split=records.split, checkpoint=folder, every=7)
            assert await engine.resume()
            records.watch(engine)
        await engine.train(records.loader(), epochs=2)
        ends.append({name: t.clone() for name, t in net.state_dict().items()})
        await net.aclose()
    assert records.trained[0][0] == 2
    assert all(torch.equal(t, ends[1][name]) for name, t in ends[0].items())


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["local", "overlap"])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("at", ["forward", "update"])
async def test_n14_a_rank_that_fails_with_local_sgd_leaves_nobody_waiting(
    coll: Communicator, job: type["Job"], kind: str, queued: bool, at: Any
) -> None:
    records = Records(job, coll)
    net, engine = await made(coll, job, kind, **({"split": records.split} if queued else {}))

    @engine.on(at)
    def fail(state: State) -> None:
        if coll.rank == 1 and state.step == 2:
            raise ValueError("rank 1 fails in step 2")

    with pytest.raises(ValueError if coll.rank == 1 else RemoteError, match="rank 1 fails in step 2"):
        await engine.train(records.loader() if queued else job.pairs(coll.rank, 9), epochs=2)
    await net.aclose()
