"""P12: servers die; the others continue from the last checkpoint, and each push counts once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.codecs import Int8, Json
from aiodist.errors import CommunicatorError, PeerLost
from aiodist.ps import EASGD, SGD, Asynchronous, Bounded, Downpour, ParameterServer, Policy, Quorum, Synchronous
from aiodist.testing import kill_rank, run_ranks

pytestmark = pytest.mark.timeout(120)
LOST = (PeerLost, CommunicatorError)


async def regrouped(coll: Communicator, ps: ParameterServer, **roles: Any) -> Communicator:
    """Return the communicator of the living ranks, on which the parameter server continues."""
    new = await coll.shrink()
    await ps.rebind(new, **roles)
    return new


async def lost(coll: Communicator) -> None:
    """Wait until a rank is lost."""
    with suppress(*LOST):
        while True:
            await coll.allreduce(1)


def tensors() -> dict[str, Tensor]:
    return {"small": torch.zeros(5, dtype=torch.float64), "cut": torch.zeros(3000, dtype=torch.float64)}


POLICIES: dict[str, Callable[[], Policy]] = {
    "asynchronous": Asynchronous,
    "bounded": lambda: Bounded(2),
    "sum": lambda: Synchronous("sum"),
    "quorum": lambda: Quorum(2, "sum"),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["apart", "symmetric"])
@pytest.mark.parametrize("policy", POLICIES)
def test_p12_each_push_counts_once_when_a_server_dies(  # noqa: C901
    tmp_path: Path, policy: str, layout: str, seed: int
) -> None:
    """A server dies at any time after a checkpoint, during pushes, some awaited. Pushes that raised count too."""
    apart = layout == "apart"
    dies = 4 if apart else 2
    counts: dict[int, int] = {}

    async def main(number: int) -> Any:
        dice = random.Random(100 * seed + number)
        async with aiodist.init(elastic=True) as coll:
            roles: dict[str, Any] = {"servers": [3, 4]} if apart else {}
            async with ParameterServer(
                coll, tensors(), consistency=POLICIES[policy](), split_bytes=64, checkpoints=True, **roles
            ) as ps:
                pushes = 0
                if number == 0:
                    await ps.save(tmp_path)
                saves = number == 1 and seed == 1
                try:
                    if number == dies and apart:
                        await asyncio.sleep(dice.random() * 4)
                        kill_rank()
                    while ps.is_worker:
                        for name, t in tensors().items():
                            push = ps.push(name, t + 1)
                            pushes += 1 if name == "small" else 0
                            if dice.random() < 0.3:
                                await push
                            else:
                                push.add_done_callback(lambda done: done.exception())
                        if saves and pushes == 4:
                            await ps.save(tmp_path, keep_last=1)
                        if number == dies and pushes == 6:
                            kill_rank()
                        await asyncio.sleep(dice.random())
                    await asyncio.sleep(1000)
                except LOST:
                    counts[number] = pushes
                # The two names were pushed alike but for the last, where the first may have raised
                new = await regrouped(coll, ps)
                if ps.is_worker:
                    await ps.push("small", torch.zeros(5, dtype=torch.float64))
                    await ps.sync()
                    await ps.barrier()
                    small, cut = await ps.pull(list(tensors()))
                    total = await new.allreduce(counts.get(number, 0)) if not apart else None
                    return small.unique().tolist(), cut.unique().tolist(), total
                return None

    found = run_ranks(5, main, seed, elastic=(1, 5))
    workers = [r for r in range(3 if apart else 5) if r != dies]
    small, cut, _ = found[workers[0]]
    expected = sum(counts[r] for r in workers)
    if apart:
        assert small == [expected]
    else:
        assert small[0] >= expected  # and of the pushes of the rank that died those that a checkpoint has
    assert len(cut) == 1
    assert all(found[r][:2] == (small, cut) for r in workers)
    assert expected - len(workers) <= cut[0] <= small[0] + len(workers)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("codec", [None, Int8()], ids=str)
def test_p12_rows_objects_and_codes_come_back_on_a_new_server(  # noqa: C901
    tmp_path: Path, codec: Any
) -> None:
    """The new rank takes the place of the one that died; what a code left out is not lost, and not there twice."""
    ids = torch.arange(0, 90, 3)

    async def work(ps: ParameterServer, table: aiodist.ps.Table) -> None:
        for step in range(4):
            await ps.push("w", torch.full((600,), 1.0 + step + ps.rank))
            await table.push(ids, torch.full((30, 2), 1.0 + step))
        if ps.rank == 0:
            await ps.push("notes", {"step": 3})

    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            settings: dict[str, Any] = {"codec": codec, "split_bytes": 40, "checkpoints": True}
            fresh = coll.generation > 0
            settings |= {"servers": [2, 3], "workers": [0, 1]}
            async with ParameterServer(coll, {"w": torch.zeros(600)}, **settings) as ps:
                if fresh:  # it serves from now on
                    await asyncio.sleep(1)
                    return None
                table = None
                if ps.is_worker:
                    table = await ps.embedding("rows", 2, init=0.0)
                    await ps.init("notes", {"step": 0}, codec=Json())
                    await ps.barrier()
                    if ps.rank == 0:
                        await ps.save(tmp_path)
                    await ps.barrier()
                    await work(ps, table)
                    await ps.barrier()
                if number == 2:
                    await asyncio.sleep(100)
                    kill_rank()
                await lost(coll)
                coll = await coll.shrink()
                coll = await coll.grow(1)
                await ps.rebind(coll, servers=[2, 3], workers=[0, 1])
                assert (ps.servers, ps.workers) == ((2, 3), (0, 1))
                if table is None:
                    return None
                rows, notes = await table.pull(ids), await ps.pull("notes")
                w = (await ps.pull("w")).clone()
                await ps.barrier()
                await ps.push("w", torch.ones(600))
                await table.push(ids, torch.ones(30, 2))
                await ps.barrier()
                assert torch.allclose(await ps.pull("w"), w + 2, atol=0.1)
                return w.unique().tolist(), rows.unique().tolist(), notes

    found = run_ranks(4, main, elastic=(1, 4))
    for w, rows, notes in found[:2]:
        assert torch.allclose(torch.tensor(w), torch.tensor(24.0), atol=0.1)
        assert torch.allclose(torch.tensor(rows), torch.tensor(20.0), atol=0.1)
        assert notes == {"step": 3}


def test_p12_a_quorum_continues_with_the_remaining_workers() -> None:
    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            policy = Quorum(2, "sum")
            async with ParameterServer(coll, {"w": torch.zeros(3)}, consistency=policy, servers=[0]) as ps:
                if number == 2:
                    await asyncio.sleep(1)
                    kill_rank()
                await lost(coll)
                await regrouped(coll, ps)
                if ps.is_worker:
                    await ps.push("w", torch.ones(3))
                    return (await ps.pull("w", at_least=1)).tolist()
                return None

    assert run_ranks(3, main, elastic=(1, 3))[1] == [1.0] * 3


def test_p12_servers_keep_what_they_have_where_a_worker_died() -> None:
    """No checkpoint is needed, and versions continue."""

    async def main(number: int) -> Any:
        async with (
            aiodist.init(elastic=True) as coll,
            ParameterServer(coll, {"w": torch.zeros(50)}, rule=SGD(0.1, 0.9), servers=[1, 3], split_bytes=40) as ps,
        ):
            if ps.is_worker:
                for _ in range(3):
                    await ps.push("w", torch.ones(50))
                await ps.barrier()
            if number == 0:
                await asyncio.sleep(1)  # the other has heard of the barrier
                kill_rank()
            await lost(coll)
            await regrouped(coll, ps)
            assert (ps.servers, ps.workers) == ((0, 2), (1,))
            if ps.is_worker:
                await ps.push("w", torch.ones(50))
                pull = ps.pull("w")
                return (await pull).unique().tolist(), pull.version
            return None

    value, version = run_ranks(4, main, elastic=(1, 4))[2]
    p = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    for _ in range(7):
        p.grad = torch.ones(1)
        opt.step()
    assert version == 7
    assert value == pytest.approx([p.item()])


@pytest.mark.parametrize("checkpoints", [False, True])
def test_p12_without_a_checkpoint_a_dead_server_is_an_error(checkpoints: bool) -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            with pytest.raises(PeerLost, match=r"a server is missing: expected .*a save"):  # noqa: PT012
                async with ParameterServer(coll, {"w": torch.zeros(5)}, checkpoints=checkpoints) as ps:
                    if number == 0:
                        kill_rank()
                    await lost(coll)
                    await regrouped(coll, ps)

    run_ranks(3, main, elastic=(1, 3))


def test_p13_a_new_rank_gets_state_and_version_while_the_others_continue(tmp_path: Path) -> None:
    """The new rank works immediately; no rank waits for its first pull."""
    seen: dict[str, Any] = {}

    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            w = {"w": torch.full((300,), float(number)), "v": torch.zeros(3)}
            joined = coll.generation > 0
            async with ParameterServer(coll, w, rule=SGD(0.1, 0.9), servers=[0], split_bytes=8, timeout=500) as ps:
                if joined:
                    seen["values"] = w["w"].unique().tolist()  # before any pull of its own
                    await ps.push("w", torch.ones(300))
                else:
                    if ps.is_worker:
                        for _ in range(4):
                            await ps.push("w", torch.ones(300))
                        await ps.barrier()
                    await ps.rebind(await coll.grow(1))
                    assert ps.workers == (1, 2, 3)
                    if number == 1:
                        await ps.push("w", torch.ones(300))
                if ps.is_worker:
                    await ps.sync()
                    await ps.barrier()
                    pull = ps.pull("w")
                    return (await pull).unique().tolist(), pull.version
                await ps.pull("w", torch.empty(300), at_least=10)
                seen["staleness"] = ps.statistics().staleness
                return None

    found = run_ranks(3, main, elastic=(1, 4))
    p = torch.nn.Parameter(torch.ones(1))  # that of the first worker
    opt = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    values = []
    for _ in range(10):
        p.grad = torch.ones(1)
        opt.step()
        values.append(p.item())
    assert found[1] == found[2]
    assert found[1][1] == 10
    assert found[1][0] == pytest.approx([values[9]])
    assert seen["values"] in (pytest.approx([values[7]]), pytest.approx([values[8]]))
    assert min(seen["staleness"]) < 2  # the push of the first pulled values


CLIENTS: dict[str, Any] = {
    "downpour": partial(Downpour, n_push=1, n_pull=2),
    "easgd": partial(EASGD, tau=2, alpha=0.3, prefetch=1),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", CLIENTS)
def test_p12_a_client_continues_from_the_centre(tmp_path: Path, kind: str) -> None:
    """A server dies during pushes and pulls, whose errors are not raised after the clients have begun again."""

    async def main(number: int) -> Any:
        torch.manual_seed(0)
        module, raised = nn.Linear(3, 1).double(), 0
        opt = torch.optim.SGD(module.parameters(), lr=0.05)
        async with (
            aiodist.init(elastic=True) as coll,
            ParameterServer(coll, module, checkpoints=True) as ps,
            CLIENTS[kind](ps, module, opt) as client,
        ):
            if number == 0:
                await ps.save(tmp_path)
            await ps.barrier()
            while True:
                try:
                    while client.steps < 40:
                        if number == 2 and client.steps == 7:
                            kill_rank()
                        opt.zero_grad()
                        (module(torch.ones(3, dtype=torch.float64)) - 1).square().sum().backward()
                        await client.step()
                    await ps.barrier()
                    break
                except LOST:
                    raised += 1
                    coll = await coll.shrink()
                    await ps.rebind(coll)
                    await client.start()
            centre = await ps.pull(list(dict(module.named_parameters())))
            return raised, [t.tolist() for t in centre], sum(float(t.detach().sum()) for t in centre)

    *found, dead = run_ranks(3, main, elastic=(1, 3))
    assert dead is None
    assert found[0] == found[1]
    assert (found[0][0], found[0][2]) == (1, pytest.approx(1.0, abs=0.1)), "it was lost once, and trained"
