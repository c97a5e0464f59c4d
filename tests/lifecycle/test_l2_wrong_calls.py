"""Calls from where none may come: another loop, another thread, after the end."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiodist
from aiodist.testing import run_ranks
from aiodist.testing.seams.world import Limits, opened

CALLS: dict[str, Callable[[aiodist.Communicator], object]] = {
    "allreduce": lambda coll: coll.allreduce(torch.ones(1)),
    "send": lambda coll: coll.send(torch.ones(1), 0),
    "recv": lambda coll: coll.recv(torch.ones(1)),
    "barrier": lambda coll: coll.barrier(),
    "allgather_object": lambda coll: coll.allgather_object("x"),
    "dup": lambda coll: coll.dup(),
}


def outcome(call: Callable[[aiodist.Communicator], object], coll: aiodist.Communicator) -> BaseException | None:
    try:
        call(coll)
    except Exception as error:  # noqa: BLE001  - the test checks its class
        return error
    return None


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_l2_calls_from_another_thread_or_loop_raise(call: Callable[[aiodist.Communicator], object]) -> None:
    async with aiodist.init() as coll:
        seen: list[BaseException | None] = []

        async def elsewhere() -> None:
            seen.append(outcome(call, coll))

        def thread() -> None:
            seen.append(outcome(call, coll))
            asyncio.run(elsewhere())

        other = threading.Thread(target=thread)
        other.start()
        await asyncio.to_thread(other.join)
        assert [type(error) for error in seen] == [RuntimeError, RuntimeError]
        assert all("belongs to another thread or event loop" in str(error) for error in seen)
        assert await coll.allreduce(1) == 1  # it still works
    assert isinstance(outcome(call, coll), aiodist.CommunicatorClosed)
    assert isinstance(await asyncio.to_thread(outcome, call, coll), aiodist.CommunicatorClosed)


async def test_l2_init_that_is_taken_for_the_communicator_says_that_it_is_a_block() -> None:
    world: Any = aiodist.init()
    told = r"`async with aiodist\.init\(\) as coll:`.*aiodist\.start\(\).*aiodist\.open\(\)"
    with pytest.raises(AttributeError, match=rf"no allreduce here: .*{told}"):
        world.allreduce(torch.ones(1))
    with pytest.raises(TypeError, match=told), world:
        pass
    with pytest.raises(TypeError, match=told):
        await world
    async with world as coll:  # it is still one
        assert await coll.allreduce(1) == 1


async def test_l2_run_where_a_loop_runs_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"as in a notebook: `await main\(\)`"):
        aiodist.run(asyncio.sleep, 0)


def test_l2_run_of_a_plain_function_says_what_it_takes() -> None:
    plain: Any = lambda: None  # noqa: E731
    with pytest.raises(TypeError, match=r"run\(<function .*: expected a coroutine function, `async def`"):
        aiodist.run(plain)


async def test_l2_a_forked_child_may_not_call() -> None:
    async with aiodist.init() as coll:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with other threads, from Python 3.12 on
            child = os.fork()
        if child == 0:
            errors = [outcome(call, coll) for call in CALLS.values()]
            os.write(writing, b"\n".join(f"{type(error).__name__}: {error}".encode() for error in errors))
            os._exit(0)
        os.close(writing)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        with open(reading) as pipe:  # noqa: ASYNC230  - it is there
            told = pipe.read().splitlines()
        assert status == 0
        refused = "RuntimeError: communicator 'world' was opened before os.fork: a child cannot use it"
        assert told == [refused] * len(CALLS)
        assert await coll.allreduce(1) == 1


def test_l2_unmatched_receive_is_withdrawn_and_reported_in_one_process() -> None:
    async def main() -> bool:
        async with aiodist.init() as coll:
            never = coll.recv(torch.zeros(1), src=(coll.rank + 1) % coll.size, tag=5)
            await coll.barrier()
        return never.cancelled()

    with pytest.warns(
        RuntimeWarning, match=r"recv #\d+ issued at .* was never matched nor awaited, and withdrawn at close"
    ):
        assert run_ranks(3, main) == [True] * 3


def test_l2_what_is_not_drained_in_time_is_named_in_one_process() -> None:
    async def main(rank: int) -> None:
        async with opened(Limits(drain=0.5)) as coll:
            if rank == 1:
                await coll.recv(torch.zeros(1), src=0)
            coll.allreduce(torch.ones(1))

    with pytest.raises(aiodist.OperationTimeout, match=r"still pending after 0.5 s: allreduce #0 issued at"):
        run_ranks(2, main)


def test_l2_a_rank_that_raises_is_told_to_the_others_in_one_process() -> None:
    seen: dict[int, BaseException] = {}

    async def main(rank: int) -> None:
        try:
            async with aiodist.init() as coll:
                await coll.barrier()
                if rank == 2:
                    raise ValueError("boom")
                try:
                    await coll.allreduce(torch.ones(1))
                finally:
                    with pytest.raises(aiodist.RemoteError):
                        coll.barrier()
        except (ValueError, aiodist.RemoteError) as error:
            seen[rank] = error

    run_ranks(3, main)
    assert isinstance(seen.pop(2), ValueError)
    assert sorted(seen) == [0, 1]
    assert all(isinstance(error, aiodist.RemoteError) and error.raised_by == 2 for error in seen.values())
    assert all("boom" in str(error) for error in seen.values())
