"""T9: states that one job publishes and the other reads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

import aiodist
from aiodist.checkpoints import Piece
from tests.bridges.conftest import Meet

SIZES = [(1, 1), (2, 3), (3, 1), (1, 2), (3, 3)]


def state_of(step: int) -> dict[str, Any]:
    """Return a state with tensors of all kinds, other ones in each step."""
    generator = torch.Generator().manual_seed(step)
    wide = torch.randn(50_021, 7, generator=generator)
    return {
        "weight": wide,
        "half": wide[:9_001, :3].bfloat16(),
        "transposed": wide[:1_003].T,
        "double": torch.randn(3, generator=generator, dtype=torch.float64),
        "flag": wide[0] > 0,
        "scalar": torch.tensor(step),
        "empty": torch.empty(0, 5),
        "complex": torch.randn(11, generator=generator, dtype=torch.complex64),
        "nested": {"lr": 0.1 * step, "names": ["a", None, (1, True)], 3: [wide[1].double()]},
    }


def assert_same(got: Any, expected: Any) -> None:
    """Compare two states bit by bit."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for mine, value in zip(got, expected, strict=True):
            assert_same(mine, value)
    else:
        assert got == expected


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("p", "q"), SIZES)
@pytest.mark.parametrize("publishes", ["listener", "caller"])
async def test_t9_all_ranks_read_the_state_that_all_ranks_of_the_other_job_publish(
    meet: Meet, wire: str, p: int, q: int, publishes: str
) -> None:
    async def writes(coll: aiodist.Communicator, bridge: Any) -> list[int]:
        versions = []
        for step in (1, 2, 3):
            versions.append(await bridge.publish(state_of(step), version=step * 10))
            for src in range(bridge.size):
                assert await bridge.recv_object(src) == step
        return versions

    async def reads(coll: aiodist.Communicator, bridge: Any) -> list[int]:
        versions = []
        async for version, state in bridge.subscribe():
            assert_same(state, state_of(version // 10))
            versions.append(version)
            for to in range(bridge.size):
                await bridge.send_object(version // 10, to)
        return versions

    async def accepts(coll: aiodist.Communicator, door: Any) -> list[int]:
        return await (writes if publishes == "listener" else reads)(coll, await door.accept())

    listened, called = await meet(p, q, accepts, reads if publishes == "listener" else writes)
    assert listened + called == [[10, 20, 30]] * (p + q)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("p", "q"), [(2, 3), (3, 2), (1, 1)])
async def test_t9_a_version_is_never_torn_and_all_ranks_read_the_same_ones(
    meet: Meet, wire: str, p: int, q: int
) -> None:
    count, steps = 300_001, 60

    async def trains(coll: aiodist.Communicator, door: Any) -> list[int]:
        await door.accept()
        versions = []
        for step in range(1, steps + 1):  # each part of each version has a value of its own
            versions.append(await door.publish({"a": torch.full((count,), step), "b": torch.full((7,), -step)}))
            await coll.barrier()
        return versions

    async def serves(coll: aiodist.Communicator, bridge: Any) -> list[tuple[int, int]]:
        read = []
        async for version, state in bridge.subscribe():
            step = int(state["a"][0])
            assert bool((state["a"] == step).all())
            assert bool((state["b"] == -step).all())
            read.append((version, step))
            if coll.rank == 0 and step % 3:
                await asyncio.sleep(0)  # one reader is slower than the others
        return read

    published, read = await meet(p, q, trains, serves)
    assert all(versions == published[0] for versions in published)
    assert all(of_rank == read[0] for of_rank in read)
    versions = [version for version, _ in read[0]]
    assert versions == sorted(set(versions))
    assert [published[0][step - 1] for _, step in read[0]] == versions
    assert read[0][-1][1] == steps, "the last version is read although the publisher has closed the bridge"


async def test_t9_the_newest_version_is_read_and_no_reader_holds_up_the_writer(meet: Meet, wire: str) -> None:
    published = asyncio.Event()

    async def trains(coll: aiodist.Communicator, door: Any) -> None:
        for step in range(1, 101):  # the reader reads none of them meanwhile
            await door.publish({"step": torch.full((50_000,), step)}, version=step)
        if coll.rank == 0:
            published.set()
        bridge = await door.accept()
        assert await bridge.recv_object(0) == 100
        assert await door.publish({"step": torch.tensor(7)}, version=1000) == 1000  # another layout

    async def serves(coll: aiodist.Communicator, bridge: Any) -> None:
        await published.wait()
        versions = bridge.subscribe()
        version, state = await anext(versions)
        assert (version, state["step"].unique().tolist()) == (100, [100])
        await versions.aclose()
        for to in range(bridge.size):
            await bridge.send_object(100, to)
        assert [(v, s["step"].tolist()) async for v, s in bridge.subscribe(after=version)] == [(1000, 7)]

    await meet(2, 1, trains, serves)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("p", "q"), [(3, 2), (2, 1)])
async def test_t9_pieces_of_ranks_are_cut_anew(meet: Meet, wire: str, p: int, q: int) -> None:
    whole = torch.randn(10_007, 3, dtype=torch.float64)

    async def trains(coll: aiodist.Communicator, door: Any) -> None:
        await door.accept()
        flat, size = whole.reshape(-1), whole.numel()
        start, stop = (size * r // coll.size for r in (coll.rank, coll.rank + 1))
        piece = Piece(flat[start:stop], start, tuple(whole.shape))
        columns = Piece(whole[:, coll.rank] if coll.rank < 3 else flat[:0], coll.rank * 10_007, (3, 10_007), (1, 0))
        state = {"rows": piece, "bias": whole[0]}
        if coll.size == 3:
            state["columns"] = columns
        await door.publish(state)

    async def serves(coll: aiodist.Communicator, bridge: Any) -> int:
        async for _, state in bridge.subscribe():
            for name, t in state.items():
                assert torch.equal(t, whole[0] if name == "bias" else whole), name
        return len(state)

    _, read = await meet(p, q, trains, serves)
    assert read == [p if p == 3 else 2] * q


async def test_t9_wrong_states_and_versions_are_errors(meet: Meet) -> None:
    async def trains(coll: aiodist.Communicator, door: Any) -> None:
        bridge = await door.accept()
        with pytest.raises(TypeError, match=r"state/model is set: expected"):
            await door.publish({"model": {1, 2}})
        await door.publish({"a": torch.ones(3)}, version=5)
        with pytest.raises(ValueError, match=r"version=5: expected more than 5"):
            await door.publish({"a": torch.ones(3)}, version=5)
        assert await door.publish({"a": torch.ones(3)}, version=6) == 6
        assert await bridge.recv_object() == "read"
        await door.publish({"a": torch.ones(3 + coll.rank)}, version=8)
        assert await bridge.recv_object() == "read"
        assert await door.publish({"a": torch.ones(3)}) > 1_700_000_000_000  # the time in milliseconds
        if coll.rank == 0:
            assert await door.publish({"a": torch.ones(3)}, version=10**15) == 10**15
        else:
            with pytest.raises(aiodist.MismatchError, match=rf"version={2 * 10**15} on rank 1, and {10**15} on rank 0"):
                await door.publish({"a": torch.ones(3)}, version=2 * 10**15)

    async def serves(coll: aiodist.Communicator, bridge: Any) -> None:
        versions = bridge.subscribe(after=5)
        assert (await anext(versions))[0] == 6
        for to in range(bridge.size):
            await bridge.send_object("read", to)
        with pytest.raises(aiodist.MismatchError, match="ranks 0 and 1 of the other job publish different tensors"):
            await anext(versions)
        for to in range(bridge.size):
            await bridge.send_object("read", to)
        with contextlib.suppress(aiodist.MismatchError):
            async for version, _ in bridge.subscribe(after=8):
                assert version > 1_700_000_000_000

    await meet(2, 1, trains, serves)


async def test_t9_readers_refuse_the_parts_of_different_versions(meet: Meet) -> None:
    async def trains(coll: aiodist.Communicator, door: Any) -> None:
        bridge = await door.accept()
        with contextlib.suppress(aiodist.MismatchError):  # on rank 1
            await door.publish({"a": torch.full((40_000,), coll.rank)}, version=1 + coll.rank)
        assert await bridge.recv_object() == "refused"

    async def serves(coll: aiodist.Communicator, bridge: Any) -> None:
        with pytest.raises(aiodist.MismatchError, match="rank 1 of the other job sends version 2: expected 1, as"):
            await anext(bridge.subscribe())
        for to in range(bridge.size):
            await bridge.send_object("refused", to)

    await meet(2, 1, trains, serves)


@pytest.mark.parametrize("wrong", [0, 1])
async def test_t9_a_version_that_one_rank_cannot_publish_is_no_mixture(meet: Meet, wrong: int) -> None:
    async def trains(coll: aiodist.Communicator, door: Any) -> None:
        bridge = await door.accept()
        for step in (1, 2, 3):
            state = {1} if step == 1 and coll.rank == wrong else {"a": torch.full((40_000,), step)}
            with contextlib.suppress(TypeError if coll.rank == wrong else aiodist.MismatchError):
                await door.publish(state)
            if step != 2:  # the reader gets each of the two, if it was published
                assert await bridge.recv_object() == step or wrong == 0

    async def serves(coll: aiodist.Communicator, bridge: Any) -> None:
        if wrong == 1:
            with pytest.raises(aiodist.MismatchError, match=r"rank 1 of the other job sends no state: expected \d+"):
                await anext(bridge.subscribe())
        for step in (1, 3):
            for to in range(bridge.size):
                await bridge.send_object(step, to)
        if wrong == 0:
            async for _, state in bridge.subscribe():
                assert len(state["a"].unique()) == 1

    await meet(2, 1, trains, serves)


async def test_t9_a_loop_that_was_left_may_be_followed_by_another_one(meet: Meet) -> None:
    async def trains(coll: aiodist.Communicator, door: Any) -> None:
        bridge = await door.accept()
        await door.publish({"a": torch.ones(3)}, version=5)
        await bridge.recv_object()
        await door.publish({"a": torch.ones(3)}, version=6)

    async def serves(coll: aiodist.Communicator, bridge: Any) -> None:
        async for version, _ in bridge.subscribe():
            assert version == 5
            break
        waiting = asyncio.ensure_future(anext(bridge.subscribe(after=5)))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another loop waits for a version of this bridge"):
            await anext(bridge.subscribe())
        await bridge.send_object("read", 0)
        assert (await waiting)[0] == 6

    await meet(1, 1, trains, serves)


async def test_t9_a_close_ends_a_publish_that_waits_for_rank_0(meet: Meet) -> None:
    async def trains(coll: aiodist.Communicator, door: Any) -> None:
        await door.accept()
        if coll.rank == 1:
            publishing = asyncio.ensure_future(door.publish({"a": torch.ones(3)}))
            await asyncio.sleep(0)
        await door.aclose()
        if coll.rank == 1:
            with pytest.raises(aiodist.CommunicatorClosed, match="was closed by this job"):
                await publishing

    async def serves(coll: aiodist.Communicator, bridge: Any) -> None:
        assert [version async for version, _ in bridge.subscribe()] == []

    await meet(2, 1, trains, serves)
