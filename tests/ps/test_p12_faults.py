"""P12: errors of rules and of blocks reach the right ranks; lost and doubled frames; dead links."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator, Handle
from aiodist.errors import CommunicatorAborted, RemoteError
from aiodist.ps import Asynchronous, ParameterServer, Synchronous
from aiodist.testing import Fault, Faults, run_ranks
from tests.ps.frames import Frames
from tests.support.until import until

NUMELS = [12, 120_000]


def careful(shard: Tensor, value: Tensor) -> None:
    if value[0] < 0:
        raise ValueError(f"no negative {value[0]:g} here")
    shard += value


@pytest.mark.ranks(3)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("layout", [{"servers": [0]}, {"split_bytes": 4}, {"servers": 1}], ids=str)
async def test_p12_what_a_rule_raises_reaches_the_pusher_alone(
    coll: Communicator, numel: int, layout: dict[str, Any]
) -> None:
    async with ParameterServer(coll, [torch.zeros(numel)], rule=careful, **layout) as ps:
        if not ps.is_worker:
            return
        bad = ps.push("0", torch.full((numel,), -1.0)) if ps.rank == ps.workers[0] else None
        await asyncio.gather(*[ps.push("0", torch.ones(numel)) for _ in range(4)])
        if bad is not None:
            with pytest.raises(RemoteError, match=r"server \d raised ValueError: no negative -1 here"):
                await bad
            await ps.push_pull("0", torch.ones(numel), torch.empty(numel))  # it goes on
        await ps.sync()
        await ps.barrier()
        pulled = ps.pull("0", torch.empty(numel))
        assert (await pulled).unique().tolist() == [4.0 * len(ps.workers) + 1]
        await ps.barrier()


async def failure(handle: Handle[None]) -> str | None:
    """Return what the rule said, if it raised."""
    try:
        await handle
    except RemoteError as error:
        return str(error).partition("ValueError: ")[2].partition(" [")[0]
    return None


accepted = threading.Event()


def careful_and_slow(shard: Tensor, value: Tensor) -> None:
    assert accepted.wait(20), "the push waits for the rule"
    careful(shard, value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rule", [careful, careful_and_slow])
@pytest.mark.parametrize("numel", NUMELS)
async def test_p12_the_next_barrier_raises_the_error_of_an_accepted_push(
    coll: Communicator, numel: int, rule: Callable[[Tensor, Tensor], None]
) -> None:
    async with ParameterServer(
        coll, [torch.zeros(numel)], rule=rule, consistency=Synchronous("sum"), split_bytes=4
    ) as ps:
        # Both pushes are of one step, which fails. One shard may have done so before another has accepted.
        accepted.clear()
        told = [await failure(ps.push("0", torch.full((numel,), -1.0 if coll.rank == 0 else 1.0)))]
        await coll.barrier()
        accepted.set()
        told += [await failure(ps.barrier()), await failure(ps.sync())]
        assert [text for text in told if text] == ["no negative -1 here"]
        assert told[2] is None
        await ps.barrier()
        await ps.push("0", torch.full((numel,), 2.0))
        await ps.sync()
        assert (await ps.pull())[0][0] >= 4


@pytest.mark.ranks(3)
@pytest.mark.parametrize("policy", [Asynchronous(), Synchronous("sum")], ids=repr)
async def test_p12_an_exception_of_one_body_aborts_all_ranks(coll: Communicator, policy: Any) -> None:
    """The communicator of the parameter server continues."""

    async def work() -> None:
        async with ParameterServer(coll, [torch.zeros(120_000)], consistency=policy) as ps:
            for i in range(100):
                await ps.push_pull("0", torch.ones(120_000), torch.empty(120_000))
                if i == 3 and coll.rank == 1:
                    raise KeyError("a slip of rank 1")
                await asyncio.sleep(0)

    async with asyncio.timeout(60):
        with pytest.raises(KeyError if coll.rank == 1 else CommunicatorAborted, match="a slip of rank 1"):
            await work()
        await until(lambda: not any(t.name.startswith("aiodist-ps-") for t in threading.enumerate()))
        assert await coll.allreduce(1) == 3


@pytest.mark.ranks(3)
async def test_p12_a_barrier_waits_for_no_worker_that_leaves_meanwhile(coll: Communicator) -> None:
    async with ParameterServer(coll, [torch.zeros(3)]) as ps:
        if coll.rank == 0:
            await asyncio.sleep(1)  # the others wait by now
        else:
            await ps.barrier(timeout=20)


# --- frames that are lost, or doubled --------------------------------------------------------------------------------


async def pushes_and_sums(ps: ParameterServer, keys: int, times: int) -> None:
    """Push `times` times to each key by each worker, and check that each push counts once."""
    values = [torch.full((3,), 1.0 + ps.rank) for _ in range(keys)]
    for _ in range(times):
        await ps.push(None, values)
    await ps.sync()
    await ps.barrier()
    total = times * sum(1.0 + rank for rank in ps.workers)
    assert all(t.tolist() == [total] * 3 for t in await ps.pull())


@pytest.mark.drawn(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("keys", [300, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("policy", [Asynchronous(), Synchronous("sum")], ids=repr)
def test_p12_pushes_stay_exact_where_frames_are_doubled(frames: Frames, keys: int, servers: int, policy: Any) -> None:
    """One of twenty frames arrives twice; each of 50 pushes to each key by two workers counts once."""
    dice = random.Random(servers)
    doubled = 0

    def copies() -> int:
        nonlocal doubled
        twice = dice.random() < 0.05
        doubled += twice
        return 1 + twice

    frames.copies = copies

    async def main() -> None:
        async with aiodist.init() as coll:
            w = {str(i): torch.zeros(3) for i in range(keys)}
            async with ParameterServer(coll, w, servers=list(range(2, 2 + servers)), consistency=policy) as ps:
                if ps.is_worker:
                    await pushes_and_sums(ps, keys, 25)
                    pull = ps.pull("0")
                    await pull
                    assert pull.version == (50 if isinstance(policy, Asynchronous) else 25)

    run_ranks(2 + servers, main)
    assert doubled > keys // 200


def names_the_rank(error: BaseException) -> bool:
    """Return True if an error names a late rank and the operation, or the rank whose frame is lost."""
    text = str(error)
    return re.search(r"late: rank \d|rank \d: its frame \d+ to rank \d is lost", text) is not None


@pytest.mark.parametrize("lost", range(0, 60, 4))
@pytest.mark.parametrize("policy", [Asynchronous(), Synchronous("sum")], ids=repr)
def test_p12_one_lost_frame_is_an_error_that_names_the_rank(frames: Frames, lost: int, policy: Any) -> None:
    """The next frame of the rank shows it, or else the deadline of a call."""
    count = 0

    def copies() -> int:
        nonlocal count
        count += 1
        return int(count - 1 != lost)

    frames.copies = copies

    async def main() -> BaseException | None:
        try:
            async with aiodist.init(timeout=40) as coll:
                w = {str(i): torch.zeros(3) for i in range(4)}
                async with ParameterServer(coll, w, servers=[1, 2], consistency=policy, split_bytes=8) as ps:
                    if ps.is_worker:
                        await pushes_and_sums(ps, 4, 5)
        except aiodist.AiodistError as error:
            return error
        return None

    ends = run_ranks(3, main, timeout=400)
    assert count > lost
    for end in ends:
        assert end is not None
        assert names_the_rank(end), end


# --- a link that is dead, though no connection broke -----------------------------------------------------------------

OPENED = 13
"""Messages of a rank until the block is entered: the collectives that make a communicator, first values, a barrier."""
LAST = 19
"""Messages of a rank until its last frame."""


def ends_with_a_dead_link(rank: int, at: int, timeout: float | None, *, awaits: bool = True) -> list[Any]:
    """Return the errors of two ranks, where from message `at` of `rank` on nothing comes from it."""

    async def main() -> BaseException | None:
        try:
            async with (
                aiodist.init(timeout=timeout) as coll,
                ParameterServer(coll, {"w": torch.zeros(7)}, split_bytes=4) as ps,
            ):
                pushed = ps.push("w", torch.ones(7))
                if not awaits:
                    pushed.detach()
                    return None
                await pushed
                await ps.sync()
                await ps.pull("w", torch.empty(7))
        except aiodist.AiodistError as error:
            return error
        return None

    return run_ranks(2, main, timeout=400, faults=Faults(Fault("drop", rank, at)))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", range(2, 24, 2))
def test_p12_a_call_over_a_dead_link_is_late_at_its_deadline(rank: int, at: int) -> None:
    """The error has the operation and the late ranks. A collective cannot name the rank of the dead link."""
    ends = ends_with_a_dead_link(rank, at, 30)
    assert all(isinstance(end, aiodist.OperationTimeout | CommunicatorAborted) for end in ends), ends
    if OPENED <= at < LAST:
        late = [end for end in ends if isinstance(end, aiodist.OperationTimeout)]
        assert late
        for end in late:
            assert end.late, end
            assert end.op in ("push", "pull", "leave"), end


def test_p12_an_error_at_a_deadline_has_the_state_of_the_server() -> None:
    async def main() -> None:
        async with (
            aiodist.init(timeout=30) as coll,
            ParameterServer(coll, {"w": torch.zeros(3)}, servers=[1], workers=[0]) as ps,
        ):
            if ps.is_worker:
                with pytest.raises(aiodist.OperationTimeout) as caught:
                    await ps.pull("w", torch.empty(3), at_least=1, timeout=6)
                request, _, state = caught.value.late.pop(1).partition("; ")
                assert request == "pull of float32[3] 'w'"
                assert re.fullmatch(r"after barrier at .*test_p12_faults.py:\d+ in .*; its loop answers", state), state
                assert not caught.value.late
                await ps.push("w", torch.ones(3))

    run_ranks(2, main)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", range(OPENED, LAST))
@pytest.mark.parametrize("awaits", [True, False])
def test_p12_no_rank_waits_for_ever_without_a_deadline(rank: int, at: int, awaits: bool) -> None:
    """A server without an answer for 60 s ends the parameter server on all ranks, also while a rank leaves."""
    for end in ends_with_a_dead_link(rank, at, None, awaits=awaits):
        assert isinstance(end, CommunicatorAborted), end
        assert names_the_rank(end), end
        assert "ping" in str(end)


def test_p12_a_watch_that_fails_ends_the_parameter_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the watch, a lost frame would be a wait without end, so an error of the watch aborts."""

    def broken(_: object) -> None:
        raise LookupError("no late ranks")

    async def main() -> None:
        with pytest.raises(CommunicatorAborted, match="no late ranks"):  # noqa: PT012  - the blocks raise it
            async with (
                aiodist.init(timeout=None) as coll,
                ParameterServer(coll, {"w": torch.zeros(3)}, servers=[1], workers=[0]) as ps,
            ):
                if ps.is_worker:
                    await ps.pull("w", torch.empty(3), at_least=1)  # no push makes that version

    monkeypatch.setattr("aiodist.ps.client.Client.late", broken)
    run_ranks(2, main, timeout=400)


@pytest.mark.ranks(2)
async def test_p12_a_busy_rank_counts_as_alive(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(7)}) as ps:
        if coll.rank == 1:
            await asyncio.sleep(1e4)
        await ps.push("w", torch.ones(7))


def test_p12_ranks_hear_of_one_that_cannot_open_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank lacks memory or descriptors."""

    async def main() -> Exception | None:
        async with aiodist.init(timeout=60) as coll:
            try:
                async with ParameterServer(coll):
                    pass
            except Exception as error:  # noqa: BLE001  - looked at below
                return error
        return None

    empty = torch.empty
    made: list[object] = []

    def lacking(*size: Any, **how: Any) -> Tensor:
        if size == (64 << 10,):  # where frames are received
            made.append(None)
            if len(made) == 1:
                raise OSError(12, "cannot allocate memory")
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", lacking)
    ends = run_ranks(2, main, timeout=30)
    assert sorted(type(end).__name__ for end in ends) == ["CommunicatorAborted", "OSError"]
    assert "cannot allocate memory" in str(ends[0]) + str(ends[1])
