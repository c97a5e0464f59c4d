"""N17: a save is loaded bit by bit, on any number of ranks; steps continue during the write."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import os
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import aiodist
from aiodist import CheckpointDamaged, Communicator, MismatchError, RemoteError
from aiodist.checkpoints import folders
from aiodist.checkpoints.format import Layout, WritePace
from aiodist.codecs import TopK
from aiodist.errors import CommunicatorAborted, CommunicatorClosed
from aiodist.handles import Scheduler
from aiodist.nn import DataParallel, PipelinedOptimizer
from aiodist.testing import run_ranks
from tests.checkpoints.conftest import assert_same

Until = Callable[[Callable[[], object]], Awaitable[None]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_n17_training_goes_on_bit_by_bit_on_any_number_of_ranks(training: Any, path: Path, saved_by: int) -> None:
    expected: dict[str, Any] = {}

    async def save() -> None:
        async with aiodist.init() as coll:
            run = await training.make(coll)
            await run.steps(0, 3)
            saving = aiodist.save(path, run.net, run.opt, metadata={"step": 3})
            saved = run.net.submit(run.state)  # after the copy
            after = await run.steps(3, 6)  # during the write, which must not see these steps
            assert await saving == path / "checkpoint-00000001"
            expected.update(state=await saved, losses=after, end=run.state())

    async def load() -> None:
        async with aiodist.init() as coll:
            run = await training.make(coll, seed=7)
            await run.steps(50, 51)
            found = await aiodist.load(path, run.net, run.opt)
            assert (found.metadata, found.ranks, found.number) == ({"step": 3}, saved_by, 1)
            assert found.path == path / "checkpoint-00000001"
            assert_same(run.state(), expected["state"])
            losses = await run.steps(found.metadata["step"], 6)
            if coll.size in (1, 2, 4) and saved_by in (1, 2, 4):  # where the mean of gradients rounds nothing
                assert losses == expected["losses"]
                assert_same(run.state(), expected["end"])

    run_ranks(saved_by, save)
    for loaded_by in (1, 2, 3, 5) if saved_by == 4 else (saved_by,):
        run_ranks(loaded_by, load)


@pytest.mark.ranks(1, 2, 3)
async def test_n17_each_element_is_written_once(coll: Communicator, training: Any, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    await run.steps(0, 1)
    folder = await aiodist.save(path, run.net, run.opt)
    state = run.state()
    files = [safetensors.torch.load_file(folder / f"rank-{rank:05}.safetensors") for rank in range(coll.size)]
    shared = [{name: t for name, t in file.items() if not name.startswith("rank")} for file in files]
    assert sum(t.nbytes for file in shared for t in file.values()) == sum(t.nbytes for t in state.values())
    largest = max(sum(t.nbytes for t in file.values()) for file in shared)
    assert largest <= sum(t.nbytes for t in state.values()) / coll.size + (64 << 10)
    pieces = torch.cat([file["net/0.weight"].flatten() for file in shared if "net/0.weight" in file])
    assert torch.equal(pieces.view(301, 110), state["net 0.weight"])
    assert sorted(p.name for p in path.iterdir()) == ["checkpoint-00000001"]


@pytest.mark.ranks(1, 2, backend="local")
@pytest.mark.ranks(2, backend="shm")
async def test_n17_plain_modules_and_what_else_has_state(coll: Communicator, tmp_path: Path) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path / "plain")))
    net, other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), nn.Linear(5, 1)
    await aiodist.nn.synchronize_parameters(nn.ModuleList([net, other]), coll)
    opt = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
    scaler = torch.amp.GradScaler("cpu")
    parts = (net, other, opt, schedule, scaler)
    if await coll.allreduce(0, "max") == 0:  # a step that all ranks make alike
        other(net(torch.ones(2, 3) * torch.arange(6).view(2, 3))).sum().backward()
        opt.step()
        schedule.step()
    before = [{k: v.clone() for k, v in part.state_dict().items()} for part in (net, other)]
    saving = aiodist.save(path, *parts, coll=coll, metadata=(1, torch.arange(3)))
    with torch.no_grad():  # the copy was taken at the call
        for p in [*net.parameters(), *other.parameters()]:
            p.zero_()
    opt.param_groups[0]["lr"] = 7.0
    await saving
    found = await aiodist.load(path, *parts, coll=coll)
    assert found.metadata[0] == 1
    assert found.metadata[1].tolist() == [0, 1, 2]
    for part, state in zip((net, other), before, strict=True):
        assert_same(part.state_dict(), state)
    assert opt.param_groups[0]["lr"] == 0.5
    assert opt.param_groups[0]["initial_lr"] == 0.5
    assert schedule.last_epoch == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.uint16, torch.float16, torch.bfloat16,
                                   torch.float8_e5m2, torch.complex64, torch.complex128])  # fmt: skip
@pytest.mark.ranks(2)
async def test_n17_every_dtype_and_layout(coll: Communicator, path: Path, dtype: torch.dtype) -> None:
    path = Path(await coll.broadcast_object(str(path)))

    class Holder(nn.Module):
        def __init__(self, fill: int) -> None:
            super().__init__()
            drawn = torch.randint(0, 2 + fill, (3, 40_001), generator=torch.Generator().manual_seed(fill))
            self.register_buffer("wide", drawn.to(dtype).t())
            self.register_buffer("one", drawn[0, 0].to(dtype))
            self.register_buffer("none", drawn[:0].to(dtype))

    holder, other = Holder(40), Holder(0)
    await aiodist.save(path, holder, coll=coll)
    await aiodist.load(path, other, coll=coll)
    for name, t in holder.named_buffers():
        got = other.get_buffer(name)
        assert (got.dtype, got.shape) == (dtype, t.shape)
        assert torch.equal(got.contiguous().flatten().view(torch.uint8), t.contiguous().flatten().view(torch.uint8))


class Loader:
    """A place in the data."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"].tolist() == list(range(state["at"]))
        self.at = state["at"]


class Queue(Loader):
    """A loader that can be divided for another number of ranks."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.at = sum(state["at"] for state in states)


def test_n17_each_rank_has_its_random_states_and_loaders_back(path: Path) -> None:
    drawn: dict[int, list[Any]] = {}

    def draw(generators: list[Any]) -> list[Any]:
        plain, numpy, old, torches = generators
        return [
            plain.random(),
            numpy.random(3).tolist(),
            old.rand(2).tolist(),
            torch.rand(3, generator=torches).tolist(),
        ]

    def own(rank: int) -> list[Any]:
        return [random.Random(rank), np.random.default_rng(rank), np.random.RandomState(rank),
                torch.Generator().manual_seed(rank), Loader(3 + rank), Queue(10 + rank)]  # fmt: skip

    async def save(rank: int) -> None:
        async with aiodist.init() as coll:
            mine = own(rank)
            draw(mine[:4])
            saving = aiodist.save(path, Loader(0), coll=coll, per_rank=mine)
            drawn[rank] = draw(mine[:4])
            mine[4].at = 99
            await saving

    async def load(rank: int) -> None:
        async with aiodist.init() as coll:
            mine = own(rank + 20)
            await aiodist.load(path, Loader(0), coll=coll, per_rank=mine)
            if coll.size == 3:
                assert draw(mine[:4]) == drawn[rank]
                assert (mine[4].at, mine[5].at) == (3 + rank, 10 + rank)
            else:  # a loader has no meaning for others, but what can be divided
                assert (mine[4].at, mine[5].at) == (23 + rank, 33)
                seen = draw(mine[:4])
                if rank < 3:
                    assert seen == drawn[rank]
                else:  # seeded from the saved state
                    assert seen == anew.setdefault(rank, seen)
                    assert seen not in [draw(own(rank + 20)[:4]), *drawn.values(), anew.get(7 - rank)]

    anew: dict[int, Any] = {}
    run_ranks(3, save)
    for ranks in (3, 2, 5, 5):
        run_ranks(ranks, load)


@pytest.mark.ranks(1)
async def test_n17_the_generators_of_the_process_go_on(coll: Communicator, training: Any, path: Path) -> None:
    run = await training.make(coll)
    saving = aiodist.save(path, run.net, run.opt)
    await run.net.submit(lambda: None)

    def draw() -> list[Any]:
        return [random.random(), np.random.rand(3).tolist(), torch.rand(5).tolist()]

    expected = draw()
    draw()
    await saving
    await aiodist.load(path, run.net, run.opt)
    assert draw() == expected


@pytest.mark.ranks(2)
async def test_n17_residuals_of_compressed_gradients(coll: Communicator, training: Any, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    nets = []
    for seed in (0, 1):
        net = await DataParallel.create(training.module(seed).float(), coll, compress=TopK(0.1))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(3, 110, generator=torch.Generator().manual_seed(coll.rank))
        nets.append((net, opt, lambda net=net, x=x: net(x).square().mean()))
    net, opt, loss = nets[0]
    for _ in range(3):
        await net.step(loss, opt)
    await aiodist.save(path, net, opt)
    expected = [float(await net.step(loss, opt)) for _ in range(3)]
    net, opt, loss = nets[1]
    await net.step(loss, opt)
    await aiodist.load(path, net, opt)
    assert [float(await net.step(loss, opt)) for _ in range(3)] == expected


@pytest.mark.ranks(2)
async def test_n17_pending_updates_are_made_first(coll: Communicator, training: Any, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    net = await DataParallel.create(training.module(), coll)
    opt = await PipelinedOptimizer.create(net, lambda params: torch.optim.Adam(params, lr=0.01))
    run = training(net, opt)
    await run.steps(0, 3)
    assert opt.pending
    saving = aiodist.save(path, net, opt)
    await run.steps(3, 4)
    await saving
    expected = await run.steps(4, 5)
    await aiodist.load(path, net, opt)
    await run.steps(3, 4)
    assert await run.steps(4, 5) == expected
    await opt.flush()


@pytest.mark.ranks(2)
async def test_n17_the_last_k_are_kept_and_the_newest_is_loaded(coll: Communicator, training: Any, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    for number in range(1, 6):
        await run.steps(number, number + 1)
        await aiodist.save(path, run.net, run.opt, metadata=number, keep_last=3)
    assert sorted(p.name for p in path.iterdir()) == [f"checkpoint-0000000{number}" for number in (3, 4, 5)]
    assert (await aiodist.load(path, run.net, run.opt)).metadata == 5
    assert (await aiodist.load(path / "checkpoint-00000004", run.net, run.opt)).metadata == 4


@pytest.mark.ranks(2)
async def test_n17_saves_under_way_are_written_in_turn(coll: Communicator, training: Any, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    saving = []
    states = []
    for number in range(4):
        saving.append(aiodist.save(path, run.net, run.opt, metadata=number))
        states.append(run.net.submit(run.state))
        await run.steps(number, number + 1)
    found = aiodist.load(path, run.net, run.opt)  # it waits for them
    assert (await found).metadata == 3
    assert_same(run.state(), await states[3])
    assert [(await handle).name for handle in saving] == [f"checkpoint-{number:08}" for number in (1, 2, 3, 4)]
    for number in range(4):
        await aiodist.load(await saving[number], run.net, run.opt)
        assert_same(run.state(), await states[number])


@pytest.mark.ranks(2)
async def test_n17_a_save_without_an_await_is_finished_at_the_end(
    coll: Communicator, training: Any, path: Path
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    saving = aiodist.save(path, run.net, run.opt)
    await run.net.aclose()
    assert saving.done()
    assert (path / "checkpoint-00000001" / "manifest.json").exists()
    await saving


@pytest.mark.parametrize("ranks", [1, 2])
def test_n17_nothing_of_a_training_that_failed_becomes_a_checkpoint(
    training: Any, path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    begun, go_on = list[int](), threading.Event()
    saves: list[Any] = []

    def slow(fd: int) -> None:
        begun.append(fd)
        assert go_on.wait(10)

    async def fail() -> None:
        async with aiodist.init() as coll:
            run = await training.make(coll)
            saves.append(aiodist.save(path, run.net, run.opt))
            # A rank that still agrees with the others would hear of one that failed.
            while len(begun) < ranks:  # noqa: ASYNC110  - a thread appends
                await asyncio.sleep(0)
            raise ValueError("enough")

    async def check() -> None:
        async with aiodist.init() as coll:
            run = await training.make(coll)
            assert (await aiodist.save(path, run.net, run.opt)).name == "checkpoint-00000001"

    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_past_cache", slow)
        with pytest.raises(ValueError, match="enough"):
            run_ranks(ranks, fail)
        assert all(isinstance(saving.exception(), CommunicatorAborted) for saving in saves)
        go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("aiodist-files"):
            thread.join(10)  # in a process of its own it would be gone; here it could still make its file, in `check`
    assert not (path / "checkpoint-00000001").exists()
    run_ranks(ranks, check)
    assert [p.name for p in path.iterdir()] == ["checkpoint-00000001"]


def test_n17_what_writes_rests_only_beside_what_computes() -> None:
    now, slept = [7.0], list[float]()
    computing = {1}  # the one that writes
    pace = WritePace(computing, lambda: now[0], slept.append)

    def work(seconds: float) -> float:
        slept.clear()
        now[0] += seconds
        pace.rest()
        return sum(slept)

    piece = pace.turn_bytes()  # others may have computed a moment ago
    assert work(0.01) == 0
    assert pace.turn_bytes() >= 8 * piece
    computing.add(2)
    assert pace.turn_bytes() == piece
    assert work(0.01) == pytest.approx(0.4)
    assert work(0.0001) == 0  # not worth it yet
    assert work(0.0001) == pytest.approx(0.008)
    computing.remove(2)
    assert pace.turn_bytes() == piece
    assert work(0.01) == pytest.approx(0.4)  # between two steps
    assert pace.turn_bytes() > piece
    assert work(0.01) == 0


@pytest.mark.ranks(2)
async def test_n17_a_save_beside_steps_ends_and_its_files_are_whole(coll: Communicator, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    net = await DataParallel.create(nn.Sequential(nn.Linear(700, 701), nn.Linear(701, 1)), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    batch = torch.ones(64, 700)
    async with aiodist.timeout(30):
        saving = aiodist.save(path, net, opt)
        expected = await net.submit(lambda: {name: t.clone() for name, t in net.state_dict().items()})
        steps = 0
        while not await coll.allreduce(int(saving.done()), "min"):
            await net.step(lambda: net(batch).square().mean(), opt)
            steps += 1
    assert steps > 0
    folder = await saving
    pieces = [safetensors.torch.load_file(folder / folders.file_name(rank)) for rank in range(2)]
    for name, t in expected.items():
        found = torch.cat([p[f"net/{name}"].flatten() for p in pieces if f"net/{name}" in p])
        assert torch.equal(found, t.flatten()), name
    await net.aclose()


class Raises:
    """Something whose state one rank cannot tell."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def state_dict(self) -> dict[str, int]:
        if self.raises:
            raise KeyError("where is it?")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.raises:
            raise KeyError("what is it?")


@pytest.mark.ranks(2, 3)
async def test_n17_an_error_of_one_rank_is_raised_on_all_and_the_one_before_is_kept(
    coll: Communicator, training: Any, path: Path
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    await aiodist.save(path, run.net, Raises(False), metadata="first")
    mine = coll.rank == coll.size - 1
    with pytest.raises(KeyError if mine else RemoteError, match="where is it") as raised:
        await aiodist.save(path, run.net, Raises(mine))
    if not mine:
        assert isinstance(raised.value, RemoteError)
        assert raised.value.raised_by == coll.size - 1
        assert "state_dict" in raised.value.traceback
    with pytest.raises(KeyError if mine else RemoteError, match="what is it"):
        await aiodist.load(path, run.net, Raises(mine))
    assert (await aiodist.load(path, run.net, Raises(False))).metadata == "first"
    assert [p.name for p in path.iterdir()] == ["checkpoint-00000001"]
    assert (await aiodist.save(path, run.net, Raises(False))).name == "checkpoint-00000002"
    saving = aiodist.save(path, run.net.module, Raises(mine), coll=coll)  # has no compute thread: copied by the call
    with pytest.raises(KeyError if mine else RemoteError, match="where is it"):
        await saving


@pytest.mark.ranks(1, 2)
async def test_n17_a_full_disk_leaves_the_one_before(
    coll: Communicator, training: Any, path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    await aiodist.save(path, run.net, run.opt)
    written = itertools.count()

    def full(fd: int, data: Any) -> int:
        if next(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data[: len(data) // 2 + 1])

    class Full:
        write = staticmethod(full)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    await coll.barrier()
    monkeypatch.setattr(folders, "os", Full())
    with pytest.raises((OSError, RemoteError), match="No space left"):
        await aiodist.save(path, run.net, run.opt)
    await coll.barrier()
    monkeypatch.undo()
    await until(lambda: not (path / "checkpoint-00000002.part").exists())
    assert (await aiodist.load(path, run.net, run.opt)).number == 1
    assert Scheduler.current().in_flight == 0
    assert (await aiodist.save(path, run.net, run.opt)).name == "checkpoint-00000002"


@pytest.mark.ranks(1, 2)
async def test_n17_an_error_after_the_renaming_leaves_the_checkpoint(
    coll: Communicator, training: Any, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)

    def fail(*_: object) -> None:
        raise ValueError("no room")

    await coll.barrier()
    monkeypatch.setattr(folders, "remove_old", fail)
    with pytest.raises((ValueError, RemoteError), match="no room"):
        await aiodist.save(path, run.net, run.opt, keep_last=1)
    await coll.barrier()
    monkeypatch.undo()
    assert (await aiodist.load(path, run.net, run.opt)).number == 1
    assert "could not be removed" not in caplog.text


@pytest.mark.ranks(2)
async def test_n17_a_copy_that_fails_leaves_its_memory_to_the_next(
    coll: Communicator, training: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    await coll.barrier()
    monkeypatch.setattr(Layout, "fill", fail)
    with pytest.raises(MemoryError, match="no room"):
        await aiodist.save(path, run.net, run.opt)
    await coll.barrier()
    monkeypatch.undo()
    assert (await aiodist.save(path, run.net, run.opt)).name == "checkpoint-00000001"


@pytest.mark.parametrize(
    ("differs", "where"),
    [
        ("metadata", "metadata/map/loss of the checkpoint"),
        ("lr", "parts/1/state/map/param_groups/0/map/lr of the checkpoint"),
        ("shape", "tensors/net/weight/shape/1 of the checkpoint"),
    ],
)
@pytest.mark.ranks(2)
async def test_n17_ranks_that_differ_where_they_must_not_are_told(
    coll: Communicator, path: Path, differs: str, where: str, until: Until
) -> None:
    """The unfinished folder is removed."""
    path = Path(await coll.broadcast_object(str(path)))
    mine = coll.rank == 1
    net = nn.Linear(3 + (mine and differs == "shape"), 2)
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    opt = torch.optim.SGD(net.parameters(), lr=0.5 if mine and differs == "lr" else 0.1)
    extra = {"loss": 2.5 if mine and differs == "metadata" else 1.5}
    with pytest.raises(MismatchError, match=f"ranks disagree on {where}") as raised:
        await aiodist.save(path, net, opt, coll=coll, metadata=extra)
    assert "; rank 1: " in str(raised.value)
    assert raised.value.__notes__[0] == "values that differ by rank belong in per_rank="
    await until(lambda: not list(path.iterdir()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.ranks(2, 3)
async def test_n17_values_that_differ_between_ranks_are_told(
    coll: Communicator, training: Any, path: Path, dtype: torch.dtype
) -> None:
    """One element of a shared tensor differs; the earlier checkpoint stays."""
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    other = nn.Module()
    odd = torch.ones(1_000_003, dtype=dtype)[2:]
    other.register_buffer("odd", odd)
    await aiodist.save(path, run.net, other)
    if coll.rank == 1:
        odd[-7] += 1
    with pytest.raises(
        MismatchError, match=r"on tensors/part1/odd/sum of bits of .*: ranks? 0.*: -?\d+; rank 1: -?\d+"
    ):
        await aiodist.save(path, run.net, other)
    assert (await aiodist.load(path, run.net, other)).number == 1
    assert odd[-7] == 1


@pytest.mark.ranks(2)
async def test_n17_a_folder_that_ranks_do_not_share_is_an_error(
    coll: Communicator, training: Any, tmp_path: Path
) -> None:
    run = await training.make(coll)
    mine = Path(await coll.broadcast_object(str(tmp_path))) / str(coll.rank)
    (mine / "checkpoint-00000001.part").mkdir(parents=True)
    with pytest.raises((FileNotFoundError, RemoteError), match="do all ranks share the folder"):
        await aiodist.save(mine, run.net, run.opt)


@pytest.mark.ranks(2)
async def test_n17_where_there_is_none_all_ranks_hear_of_it(coll: Communicator, training: Any, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    with pytest.raises(FileNotFoundError, match="there is none"):
        await aiodist.load(path, run.net, run.opt)
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        await aiodist.load(path / "checkpoint-00000001", run.net, run.opt)


@pytest.mark.ranks(2)
async def test_n17_a_checkpoint_of_something_else_changes_nothing(
    coll: Communicator, training: Any, path: Path
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    await run.steps(0, 1)
    await aiodist.save(path, run.net, run.opt, per_rank=[Loader(1)])
    await aiodist.save(path / "generators", run.net, run.opt, per_rank=[torch.Generator(), Loader(1), random.Random(1)])
    before = run.state()
    for own in ([Loader(1)] * 3, [random.Random(1), Loader(1), torch.Generator()], [*(torch.Generator(),) * 3]):
        order = r"per_rank\[1\] Loader, per_rank\[2\] random.Random"
        with pytest.raises(ValueError, match=rf"per_rank\[\d\] is .*: expected .*{order}"):
            await aiodist.load(path / "generators", run.net, run.opt, per_rank=own)
    for parts, own, seen in (
        ((run.net,), [Loader(1)], "it has 2 parts, and 1 are to be loaded"),
        ((run.net, run.opt), [], "it has 1 objects of a rank's own, and 0 are"),
    ):
        with pytest.raises(ValueError, match=seen) as raised:
            await aiodist.load(path, *parts, per_rank=own)
        assert not isinstance(raised.value, CheckpointDamaged)
    assert_same(run.state(), before)


@pytest.mark.ranks(1)
async def test_n17_mistakes_of_the_caller_are_raised_by_the_call(coll: Communicator, training: Any, path: Path) -> None:
    run = await training.make(coll)
    for keep in (0, True, 1.5):
        with pytest.raises(ValueError, match="keep_last="):
            aiodist.save(path, run.net, run.opt, keep_last=keep)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="coll is NoneType"):
        aiodist.save(path, run.net.module)
    with pytest.raises(TypeError, match="part1 is int"):
        aiodist.load(path, run.net, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"per_rank\[1\] is float"):
        aiodist.save(path, run.net, per_rank=[Loader(1), 0.5])
    with pytest.raises(TypeError, match="metadata/0 is set"):
        aiodist.save(path, run.net, metadata=[{1}])
    await run.net.aclose()
    with pytest.raises((RuntimeError, CommunicatorClosed), match="closed"):
        aiodist.save(path, run.net, run.opt)
    assert not await asyncio.to_thread(path.exists)


@pytest.mark.ranks(2)
async def test_n17_the_other_rank_count_is_said_in_the_log(
    coll: Communicator, training: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    run = await training.make(coll)
    half = await coll.split(coll.rank)
    if coll.rank == 0:
        await aiodist.save(path, run.net.module, coll=half)
    await coll.barrier()
    caplog.set_level(logging.INFO, logger="aiodist")
    await aiodist.load(path, run.net)
    assert "is of 1 ranks, loaded by 2" in caplog.text


@pytest.mark.ranks(1)
async def test_n17_the_manifest_is_json_that_others_read(coll: Communicator, training: Any, path: Path) -> None:
    run = await training.make(coll)
    await run.steps(0, 1)
    folder = await aiodist.save(path, run.net, run.opt, metadata={"best": float("inf")})
    first, second = (folder / "manifest.json").read_text().splitlines()
    assert json.loads(first)["nbytes"] == len(second)
    content = json.loads(second)
    assert content["metadata"] == {"map": {"best": {"float": "inf"}}}
    described = content["tensors"]["net/0.weight"]
    assert (described["dtype"], described["shape"]) == ("F64", [301, 110])
    ((file, offset, start, numel, _),) = described["pieces"]
    raw = (folder / f"rank-{file:05}.safetensors").read_bytes()[offset : offset + 8 * numel]
    assert start == 0
    assert torch.equal(
        torch.frombuffer(bytearray(raw), dtype=torch.float64).view(301, 110), run.net.state_dict()["0.weight"]
    )
