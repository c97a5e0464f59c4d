"""P15: tables of rows on servers: arguments, results and errors of calls, their order, and the placement of rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.errors import BufferInFlight, MismatchError, RemoteError
from aiodist.handles import gather
from aiodist.ps import (
    SGD,
    Adam,
    Asynchronous,
    Bounded,
    Normal,
    ParameterServer,
    Policy,
    Quorum,
    RMSprop,
    Synchronous,
    Uniform,
)
from aiodist.ps.rows import packed_rows
from aiodist.ps.wire import IDS, PULL, PUSH, TABLE, Kind, PullHead, PushHead, Way
from tests.ps.frames import Entry, Frames

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's optimizers make sparse tensors
SECONDS = 20.0
HIGH = 2**63 - 1
POLICIES: dict[str, Policy] = {
    "asynchronous": Asynchronous(),
    "bounded": Bounded(1),
    "sum": Synchronous("sum"),
    "quorum": Quorum(1, "sum"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "all": {},
    "one": {"servers": [0], "workers": [0, 1, 2]},
    "two": {"servers": [2, 0], "workers": [0, 1, 2]},
    "apart": {"servers": [2], "workers": [0, 1]},
}


def scattered(count: int, seed: int) -> Tensor:
    """Return ids anywhere in int64, each once."""
    ids: Tensor = torch.randint(0, HIGH, (count,), generator=torch.Generator().manual_seed(seed)).unique()
    return ids


def used(ids: Tensor, step: int) -> Tensor:
    """Return the ids of a step: once all, else a few."""
    return ids if step == 1 else ids[step * 7 :: 41].contiguous()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("often", [False, True])
async def test_p15_ids_in_any_order_get_their_rows(coll: Communicator, layout: str, often: bool) -> None:
    """Read many ids, few or many of them repeated; some ids are unknown."""
    generator = torch.Generator().manual_seed(7 + coll.rank)
    async with ParameterServer(coll, timeout=SECONDS, **LAYOUTS[layout]) as ps:
        if not ps.is_worker:
            return
        table = await ps.embedding("t", 3, init=-1.0)
        known = scattered(4001, 4)
        if ps.rank == 0:
            await table.push(known, torch.arange(known.numel())[:, None].expand(-1, 3).float())
            await ps.sync()
        await ps.barrier()
        at = torch.randperm(known.numel(), generator=generator)[:3990].view(5, 798)
        if often:
            at.remainder_(301)
        ids = known[at]
        ids[1, :9] += 1
        expected = (at + 0.0) - 1.0  # added to the first values
        expected[1, :9] = -1.0
        for out in (None, torch.empty(*ids.shape, 3)):
            found = await table.pull(ids, out)
            assert out is None or found is out
            assert torch.equal(found, expected[..., None].expand(-1, -1, 3))
        await ps.barrier()


@pytest.mark.drawn(4)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_p15_what_all_workers_push_is_summed(coll: Communicator, policy: str, layout: str) -> None:
    """Small pushes and large ones, of rows that several workers use first at once, with ids that are there twice."""
    ids = scattered(3000, 4)
    async with ParameterServer(coll, consistency=POLICIES[policy], timeout=SECONDS, **LAYOUTS[layout]) as ps:
        if not ps.is_worker:
            return
        table = await ps.embedding("t", 30, dtype=torch.float64, seed=3)
        first = await table.pull(ids)
        await ps.barrier()  # a worker's read and another's push have no order
        for step in range(4):
            chosen = used(ids, step)
            twice = torch.cat([chosen, chosen[:5]])
            await table.push(twice, torch.ones(twice.numel(), 30, dtype=torch.float64))
        await ps.sync()
        await ps.barrier()
        expected = first.clone()
        for step in range(4):
            chosen = used(ids, step)
            at = torch.searchsorted(ids, chosen)
            expected[at] += len(ps.workers)
            expected[at[:5]] += len(ps.workers)
        torch.testing.assert_close(await table.pull(ids), expected, rtol=0, atol=1e-12)
        statistics = ps.statistics()
        made = await coll.allreduce(statistics.rows, name="rows") if layout != "apart" else 3000
        assert made == ids.numel()
        await ps.barrier()


@pytest.mark.ranks(1, 2, 3)
async def test_p15_first_rows_are_the_same_for_any_servers(coll: Communicator) -> None:
    ids = scattered(200, 9)
    found = []
    for servers in ([0], [coll.size - 1], list(range(coll.size))):
        async with ParameterServer(coll, servers=servers, workers=range(coll.size), timeout=SECONDS) as ps:
            for init in (Normal(), Uniform(-1, 1), 2.5):
                table = await ps.embedding(f"{init}", 33, init=init, seed=7)
                mine = ids.roll(coll.rank)
                found.append((await table.pull(mine)).roll(-coll.rank, 0))
                several = await table.pull(mine.repeat(4, 1))
                assert several.shape == (4, 200, 33)
                assert torch.equal(several[2].roll(-coll.rank, 0), found[-1])
            assert ps.statistics().rows == 0  # reading makes none
    for others in (found[3:6], found[6:]):
        for ours, theirs in zip(found[:3], others, strict=True):
            assert torch.equal(ours, theirs)
    for rank, theirs in enumerate(await coll.allgather(torch.stack(found))):
        assert torch.equal(theirs, torch.stack(found)), rank


@pytest.mark.ranks(3)
async def test_p15_a_synchronous_read_has_all_pushes_of_the_steps_before_and_no_other(coll: Communicator) -> None:
    async with ParameterServer(coll, consistency=Synchronous("mean"), timeout=SECONDS) as ps:
        table = await ps.embedding("t", 2, init=0.0)
        ids = scattered(20, 1)
        for step in range(6):
            mine = ids[coll.rank :: 4] if step % 2 else ids
            early = table.pull(ids, at_least=step + 1)  # requested before the push, answered after it
            pushed = table.push(mine, torch.full((mine.numel(), 2), float(step)))
            late = table.pull(ids)
            assert torch.equal(await early, await late)
            assert (early.version, late.version) == (step + 1, step + 1)
            await pushed
        expected = torch.zeros(20)
        for step in range(6):
            for rank in range(3):
                expected[rank::4] += step / 3 if step % 2 else 0
            expected += 0 if step % 2 else step
        torch.testing.assert_close(await table.pull(ids), expected[:, None].expand(20, 2))
        await ps.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("reads", ["snapshot", "lock-free"])
async def test_p15_a_snapshot_is_of_one_version_on_all_servers(coll: Communicator, reads: Any) -> None:
    """Every push adds one to every row; a reader sees equal rows in each snapshot."""
    async with ParameterServer(coll, workers=[0, 1], servers=[0, 1, 2], timeout=SECONDS) as ps:
        table = await ps.embedding("t", 3, init=0.0)
        ids = scattered(4000, 5)
        if coll.rank < 2:
            for _ in range(20):
                await table.push(ids, torch.ones(ids.numel(), 3))
        else:
            for _ in range(10):
                pulled = table.pull(ids, reads=reads)
                rows = await pulled
                assert all(0 <= value <= 40 and value == int(value) for value in rows.unique().tolist())
                if reads == "snapshot":
                    assert rows.unique().tolist() == [pulled.version]


@pytest.mark.ranks(2)
async def test_p15_pushes_are_steps_and_settings_change(coll: Communicator) -> None:
    async with ParameterServer(coll, consistency=Synchronous("mean"), timeout=SECONDS) as ps:
        table = await ps.embedding("t", 2, init=1.0, optimizer=SGD(lr=1.0))
        ids = torch.tensor([[4, 9], [4, 4]], dtype=torch.int32)
        values = torch.arange(8.0).view(2, 2, 2) + 10 * coll.rank
        await table.push(ids, values)  # of an id that is there three times the sum, of both workers the mean
        assert (await table.pull(torch.tensor([4, 9]))).tolist() == [[-24.0, -27.0], [-6.0, -7.0]]
        await table.push(torch.tensor([9]), torch.ones(1, 2))
        assert (await table.pull(torch.tensor(9))).tolist() == [-7.0, -8.0]
        if coll.rank == 0:
            await ps.configure("t", lr=0.5)
        await ps.barrier()
        await table.push(torch.tensor([9]), torch.ones(1, 2))
        assert (await table.pull(torch.tensor(9))).tolist() == [-7.5, -8.5]
        await table.push(torch.empty(0, dtype=torch.int64), torch.empty(0, 2))  # a step of its own
        await table.push(ids, values, rule="copy")  # the last value of the last worker
        assert (await table.pull(torch.tensor([4, 9]))).tolist() == [[16.0, 17.0], [12.0, 13.0]]
        if coll.rank == 0:  # in the same step as a copy: half of it counts, since it is one of two pushes
            await table.push(torch.tensor([4]), torch.ones(1, 2))
        else:
            await table.push(torch.tensor([4, 11]), torch.full((2, 2), 3.0), rule="copy")
        assert (await table.pull(torch.tensor([4, 11]))).tolist() == [[2.75, 2.75], [3.0, 3.0]]
        pulled = table.pull(torch.empty(3, 0, dtype=torch.int64))
        assert (await pulled).shape == (3, 0, 2)
        assert pulled.version == 6
        with pytest.raises(ValueError, match="Invalid learning rate"):
            ps.configure("t", lr=-1.0)
        await ps.barrier()


@pytest.mark.ranks(2)
async def test_p15_the_same_whatever_pushes_of_a_step_have_in_common(coll: Communicator) -> None:
    """Adam's step of a sum is not the sum of its steps: a step of several pushes is one."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 6, (4,), generator=generator) for _ in range(10)]
    values = [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(10)]
    weight = torch.nn.Parameter(torch.zeros(6, 3, dtype=torch.float64))
    alone = torch.optim.SparseAdam([weight], lr=0.1)
    for step in range(5):
        both = torch.cat([ids[2 * step], ids[2 * step + 1]])
        rows = torch.cat([values[2 * step], values[2 * step + 1]])
        weight.grad = torch.sparse_coo_tensor(both[None], rows, (6, 3), check_invariants=True)
        alone.step()
    async with ParameterServer(coll, consistency=Synchronous("sum"), timeout=SECONDS) as ps:
        table = await ps.embedding("t", 3, rows=6, init=0.0, optimizer=Adam(lr=0.1), dtype=torch.float64)
        for step in range(5):
            await table.push(ids[2 * step + coll.rank], values[2 * step + coll.rank])
        await ps.sync()
        await ps.barrier()
        torch.testing.assert_close(await table.pull(torch.arange(6)), weight.detach(), rtol=0, atol=1e-12)
        await ps.barrier()


@pytest.mark.ranks(2)
async def test_p15_mistakes_are_raised_by_the_call(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(2)}, workers=[0], timeout=SECONDS) as ps:
        table = await ps.embedding("t", 2, rows=10)
        ids = torch.tensor([1, 2])
        wrong: list[tuple[Any, type[Exception], str]] = [
            (torch.tensor([1, -1]), ValueError, "id -1: expected 0 to 9"),
            (torch.tensor([1, 10]), ValueError, "id 10: expected 0 to 9"),
            (torch.tensor([1.0]), TypeError, "ids are torch.float32 on cpu: expected a tensor of int64 or int32"),
            ([1, 2], TypeError, "ids are list: expected a tensor"),
        ]
        for bad, kind, told in wrong:
            with pytest.raises(kind, match=told):
                table.pull(bad)
        with pytest.raises(ValueError, match=r"out for 't' has shape \[2, 3\]: expected \[2, 2\]"):
            table.pull(ids, torch.empty(2, 3))
        with pytest.raises(TypeError, match="out for 't' holds float64: expected float32"):
            table.pull(ids, torch.empty(2, 2, dtype=torch.float64))
        with pytest.raises(TypeError, match="'t' is a table of rows: expected its own push"):
            ps.pull("t")
        with pytest.raises(KeyError, match=r"'t' is a name already"):
            ps.embedding("t", 2)
        if coll.rank == 1:
            with pytest.raises(ValueError, match="push on rank 1: expected a worker"):
                table.push(ids, torch.ones(2, 2))
            return
        with pytest.raises(TypeError, match="'t' is a table of rows"):
            ps.push("t", torch.ones(2, 2))
        with pytest.raises(ValueError, match=r"values for 't' has shape \[2\]: expected \[2, 2\]"):
            table.push(ids, torch.ones(2))
        with pytest.raises(ValueError, match=r"values for 't' has shape \[1, 2\]: expected \[2, 2\]"):
            table.push_grouped(table.group(ids), torch.ones(1, 2))
        with pytest.raises(ValueError, match="rule='mul': expected one of 'copy'"):
            table.push(ids, torch.ones(2, 2), rule="mul")
        with pytest.raises(ValueError, match="the table 't' has no optimizer: expected one for lr"):
            ps.configure("t", lr=0.1)
        refused: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"dim": 0}, ValueError, "dim=0: expected 1 to"),
            ({"dim": 2.0}, TypeError, "dim is float: expected an int"),
            ({"rows": 0}, ValueError, "rows=0: expected 1 to"),
            ({"seed": -1}, ValueError, "seed=-1"),
            ({"dtype": torch.int64}, TypeError, "expected float32 or float64"),
            ({"init": "zeros"}, TypeError, "init='zeros': expected Uniform"),
            ({"init": float("nan")}, ValueError, "expected finite numbers"),
            ({"optimizer": "add"}, TypeError, "optimizer='add': expected SGD, Adagrad or Adam"),
            ({"optimizer": RMSprop(lr=0.1)}, TypeError, "RMSprop of rows"),
            ({"optimizer": SGD(lr=0.1, momentum=0.5)}, ValueError, "SGD of rows: momentum"),
        ]
        for arguments, error, told in refused:
            with pytest.raises(error, match=told):
                ps.embedding("u", **{"dim": 2, **arguments})
        out = torch.empty(2, 2)
        pulled = table.pull(ids, out)
        with pytest.raises(BufferInFlight):
            table.pull(ids, out)
        assert await pulled is out


@pytest.mark.ranks(3)
async def test_p15_ranks_that_disagree_on_a_table_raise(coll: Communicator) -> None:
    async with ParameterServer(coll, timeout=SECONDS) as ps:
        made = await ps.embedding("t", 2, seed=1) if coll.rank == 0 else None
        await coll.barrier()
        if made is None:
            with pytest.raises(MismatchError, match=r"init of 't': rank 0: table .*\"seed\": 1.* rank \d: table .*2"):
                await ps.embedding("t", 2, seed=2)
            with pytest.raises(MismatchError, match=r"init of 't'.*dtype"):
                await ps.init("t", torch.zeros(2, dtype=torch.float64))


@pytest.mark.ranks(2)
async def test_p15_a_table_is_freed_and_made_anew(coll: Communicator) -> None:
    async with ParameterServer(coll, timeout=SECONDS) as ps:
        for dim in (2, 3):
            table = await ps.embedding("t", dim, init=0.0)
            assert ps.names == ("t",)
            assert (table.name, table.dim, table.rows, table.dtype) == ("t", dim, None, torch.float32)
            await table.push(torch.arange(50), torch.ones(50, dim))
            await ps.barrier()
            assert (await table.pull(torch.arange(50))).unique().tolist() == [2.0]
            held = table.push(torch.arange(9), torch.ones(9, dim))
            await ps.free("t")
            await held
            with pytest.raises(KeyError, match="the table 't' was freed"):
                table.pull(torch.arange(3))
            await ps.barrier()
        assert ps.statistics().rows == 0


HEADS: dict[int, Any] = {Kind.PUSH: (PushHead, PUSH), Kind.PULL: (PullHead, PULL)}
CRAFTED: dict[str, list[int]] = {"order": [9, 3], "pull range": [-2, 3], "short": [1], "rule": [1]}
"""The ids of each malformed entry; in the other cases the ids of both servers together."""


def crafted(what: str, key: int, number: int) -> tuple[int, bytes]:
    """Return an entry with rows that no table sends."""
    ids = torch.tensor(CRAFTED.get(what, list(range(40))))
    rows = torch.ones(ids.numel(), 2)
    body = bytes(packed_rows(ids, rows).tolist())
    if what.startswith("pull"):
        ids_bytes = body[8 : 8 + ids.nbytes - (what == "pull length")]
        head = PULL.pack(key, 0, number, 0) + IDS.pack(Way.INLINE, len(ids_bytes), 0, 0)
        return Kind.PULL, head + ids_bytes
    body = body[:-1] if what == "short" else body
    rule = 1 << 15 if what == "rule" else TABLE
    return Kind.PUSH, PUSH.pack(key, rule, Way.INLINE, False, number, 0, 1.0, len(body), 0, 0) + body


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", ["order", "owner", "short", "rule", "pull range", "pull owner", "pull length"])
async def test_p16_crafted_rows_are_refused_and_the_table_continues(
    coll: Communicator, frames: Frames, what: str
) -> None:
    async with ParameterServer(coll, servers=[0, 1], workers=[0, 1, 2], timeout=SECONDS) as ps:
        table = await ps.embedding("t", 2, init=0.0, optimizer=SGD(lr=1.0))
        ids, replaced = torch.arange(50), set()
        if coll.rank == 2:

            def edit(src: int, dst: int, entries: list[Entry]) -> list[Entry]:
                for i, (kind, body) in enumerate(entries):
                    if src == 2 and kind in HEADS:
                        head_type, form = HEADS[kind]
                        head = head_type(*form.unpack_from(body))
                        entries[i] = crafted(what, head.key, head.number)
                        replaced.add(dst)
                return entries

            frames.edit = edit
            with pytest.raises(RemoteError, match=r"raised (ValueError|IndexError): "):
                await (table.pull(ids) if what.startswith("pull") else table.push(ids, torch.ones(50, 2)))
            frames.edit = None
            assert replaced == {0, 1}
            await table.pull(ids)
        await ps.barrier()
        assert (await table.pull(ids)).unique().tolist() == [0.0]
        await ps.barrier()
        await table.push(ids, torch.ones(50, 2))
        await ps.barrier()
        assert (await table.pull(ids)).unique().tolist() == [-3.0]


@pytest.mark.drawn(1)
@pytest.mark.ranks(2)
@pytest.mark.ranks(2, backend=("gloo", "shm", "mpi"))
async def test_p15_many_handles_end_in_order(coll: Communicator) -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    async with ParameterServer(coll, consistency=Synchronous("sum"), timeout=SECONDS) as ps:
        table = await ps.embedding("t", 1, init=0.0, dtype=torch.float64)
        pulls = []
        for step in range(60):
            count = int(torch.randint(1, 20_000 if step % 13 == 0 else 30, (1,), generator=generator))
            ids = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(1, count + 1)])
            table.push(ids, torch.ones(count + 1, 1, dtype=torch.float64)).detach()
            pulls.append(table.pull(ids[:1]))
        assert [float(row) for row in await gather(*pulls)] == [2.0 * step for step in range(1, 61)]
        assert [pull.version for pull in pulls] == list(range(1, 61))
        await ps.sync()
        await ps.barrier()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.ranks(2, backend=("gloo", "shm", "mpi"))
async def test_p15_batches_too_long_for_an_entry_come_out_right(coll: Communicator) -> None:
    seed = await coll.allreduce(torch.tensor(random.randrange(1 << 30)))
    generator = torch.Generator().manual_seed(int(seed))
    async with ParameterServer(coll, consistency=Synchronous("sum"), timeout=SECONDS) as ps:
        table = await ps.embedding("t", 3, init=0.0, dtype=torch.float64)
        expected = torch.zeros(40_001, 3, dtype=torch.float64)
        for count in (20_001, 9_999, 20_001):  # of other sizes, and then in buffers that were used before
            ids = torch.randint(0, 40_001, (count,), generator=generator)  # some twice
            values = torch.randn(count, 3, dtype=torch.float64, generator=generator)
            await table.push(ids, (ps.rank + 1) * values)
            expected.index_add_(0, ids, values, alpha=sum(range(1, coll.size + 1)))
            out = torch.empty(count, 3, dtype=torch.float64)
            assert await table.pull(ids, out) is out
            torch.testing.assert_close(out, expected[ids])
            torch.testing.assert_close(await table.pull(ids.flip(0)), expected[ids.flip(0)])
        await ps.barrier()
