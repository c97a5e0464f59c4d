"""T2: N ranks of a program in one process, the same way every time."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import aiodist
from aiodist.handles import internals
from aiodist.streams import HostStream
from aiodist.testing import Deadlock, clock, gather_ranks, run_ranks
from aiodist.testing.seams.carriers import LocalTransport
from aiodist.testing.seams.progress import transport_lock
from aiodist.testing.seams.world import current_place


def test_t2_results_come_by_rank() -> None:
    async def main() -> Any:
        async with aiodist.init() as coll:
            t = torch.full((4,), float(coll.rank))
            await coll.allreduce(t)
            return coll.rank, coll.size, t.tolist()

    assert run_ranks(3, main) == [(rank, 3, [3.0] * 4) for rank in range(3)]


def test_t2_main_may_take_the_rank() -> None:
    async def main(rank: int) -> Any:
        async with aiodist.init() as coll:
            return rank == coll.rank

    async def defaulted(rank: int = -1) -> Any:
        return rank

    assert run_ranks(2, main) == [True, True]
    assert run_ranks(2, defaulted) == [-1, -1]


@pytest.mark.parametrize("elastic", [None, (1, 2)])
def test_t2_what_a_rank_raises_as_it_is_ended_is_told_once(
    elastic: tuple[int, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(rank: int) -> None:
        async with aiodist.init(elastic=elastic is not None) as coll:
            if rank == 0:
                raise ValueError("first")
            try:
                await coll.recv()
            finally:
                raise ExceptionGroup("on the way out", [KeyError(2)])

    with pytest.raises(ValueError, match="first") as caught:
        run_ranks(2, main, elastic=elastic)
    assert any("then by rank 1: ExceptionGroup: on the way out" in note for note in caught.value.__notes__)
    del caught
    gc.collect()
    assert "never retrieved" not in caplog.text


def _order(seed: int) -> Any:
    """Return in which order four ranks get on, and in which their messages come."""
    log = []

    async def main() -> None:
        async with aiodist.init() as coll:
            for _ in range(3):
                await coll.barrier()
                log.append(coll.rank)
            if coll.rank:
                await coll.send(torch.tensor([coll.rank]), 0)
                return
            log.extend([(await coll.recv()).item() for _ in range(coll.size - 1)])

    run_ranks(4, main, seed)
    return log


def test_t2_the_same_seed_gives_the_same_order() -> None:
    assert [_order(7) for _ in range(5)] == [_order(7)] * 5


def test_t2_different_seeds_give_different_orders() -> None:
    assert len({tuple(_order(seed)) for seed in range(10)}) > 5


def test_t2_the_progress_thread_may_be_the_first_to_send() -> None:
    async def main(rank: int) -> None:
        transport: Any = current_place.get()
        one, two = (LocalTransport(transport.job.hub, end, 2, "other") for end in range(2))
        if rank:
            return
        t, over = torch.zeros(1), asyncio.Event()
        await asyncio.to_thread(one.isend, torch.ones(1), 1, 0, lambda error: None)
        await asyncio.to_thread(two.irecv, t, 0, 0, lambda error: over.set())
        await asyncio.wait_for(over.wait(), 50)
        assert t == 1

    run_ranks(2, main, seed=1)


def test_t2_messages_are_matched_with_the_transport_lock_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of later steps, which follow a delivery, too: threads send and receive at the same time as the loop."""
    held = []

    def noting(call: Any) -> Any:
        def noted(*args: Any) -> None:
            held.append(transport_lock.locked())
            call(*args)

        return noted

    async def main() -> None:
        async with aiodist.init() as coll:
            await coll.allreduce(torch.ones(1))

    for name in ("isend", "irecv"):
        monkeypatch.setattr(LocalTransport, name, noting(getattr(LocalTransport, name)))
    run_ranks(3, main)
    assert len(held) >= 8  # each of two ranks sends to the third, and receives
    assert all(held)


def test_t2_a_race_is_found_by_some_seed_and_found_again() -> None:
    async def main() -> Any:
        async with aiodist.init() as coll:
            if coll.rank == 0:  # wrong: it takes for granted that rank 1 is faster than rank 2
                return [int(await coll.recv()) for _ in range(2)] == [1, 2]
            await coll.send(torch.tensor(coll.rank), 0)
            return True

    failing = {seed for seed in range(20) if not run_ranks(3, main, seed)[0]}
    assert 0 < len(failing) < 20
    assert failing == {seed for seed in range(20) if not run_ranks(3, main, seed)[0]}


@pytest.mark.timeout(50)
def test_t2_sleeping_takes_no_time() -> None:
    async def main(rank: int) -> Any:
        loop = asyncio.get_running_loop()
        async with aiodist.init() as coll:
            await asyncio.sleep(3600 * (rank + 1))
            await coll.barrier()  # another rank waits for two hours
            return loop.time()

    assert run_ranks(3, main) == pytest.approx([3 * 3600] * 3, abs=1)


def test_t2_deadlines_are_of_the_same_clock() -> None:
    async def main(rank: int) -> Any:
        loop = asyncio.get_running_loop()
        async with aiodist.init() as coll:
            if rank == 1:
                await asyncio.sleep(1000)
                await coll.barrier()
                await coll.send(torch.ones(1), 0)
                return None
            seen = []
            with pytest.raises(aiodist.OperationTimeout, match=r"barrier #0.*late: rank 1"):
                await coll.barrier(timeout=10)
            seen.append(loop.time())
            receive = coll.recv(timeout=30)
            await asyncio.sleep(40)
            with pytest.raises(aiodist.OperationTimeout, match="recv"):
                await receive
            seen.append(loop.time())
            with pytest.raises(aiodist.OperationTimeout, match="recv"):
                async with aiodist.timeout(5):
                    await receive
            seen.append(loop.time())
            await receive
            return seen

    assert run_ranks(2, main)[0] == pytest.approx([10, 50, 55], abs=0.01)


def test_t2_work_in_an_executor_is_waited_for_in_real_time() -> None:
    go = threading.Event()

    async def main(rank: int) -> Any:
        async with aiodist.init() as coll:
            if rank == 0:
                threading.Timer(0.05, go.set).start()
                async with asyncio.timeout(3600):
                    assert await asyncio.to_thread(go.wait, 30)
            await coll.barrier()
            return asyncio.get_running_loop().time()

    assert max(run_ranks(2, main)) < 30


def test_t2_a_deadlock_names_what_every_rank_waits_for() -> None:
    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            if rank == 0:
                await coll.barrier()
            elif rank == 1:
                await coll.recv(src=2, tag=5)
            else:
                await asyncio.Event().wait()

    with pytest.raises(Deadlock) as caught:
        run_ranks(3, main, seed=3)
    text = str(caught.value)
    lines = [line for line in text.splitlines() if line.startswith("  rank")]
    first = main.__code__.co_firstlineno
    assert "seed 3" in text
    assert f"{__file__}:{first + 3} in " in lines[0]
    assert f"barrier #0 issued at {__file__}:{first + 3}" in lines[0]
    assert f"recv #0 issued at {__file__}:{first + 5}" in lines[1]
    assert f"waits at {__file__}:{first + 7}" in lines[2]
    assert "pending: nothing" in lines[2]


def test_t2_a_deadlock_beside_a_ticker_ends_with_the_limit() -> None:
    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            if rank == 0:
                await coll.recv(src=1)
            for _ in range(1000):
                await asyncio.sleep(1)

    with pytest.raises(TimeoutError, match=r"not over after 100 s(?s:.)*rank 0: .*pending: recv #0"):
        run_ranks(2, main, timeout=100)


def test_h8_a_limit_or_default_that_is_no_time_is_refused() -> None:
    async def main(rank: int) -> None:
        async with aiodist.init(timeout=float("nan")):
            pass

    with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
        run_ranks(2, main, timeout=float("nan"))
    with pytest.raises(ValueError, match=r"timeout=nan: expected seconds"):
        run_ranks(2, main)


def test_t2_an_exception_ends_the_other_ranks_and_names_its_own() -> None:
    ended = []

    async def main(rank: int) -> None:
        try:
            async with aiodist.init() as coll:
                if rank == 1:
                    raise LookupError("nothing there")
                await (coll.barrier() if rank else asyncio.sleep(3600))
        finally:
            ended.append(rank)

    with pytest.raises(LookupError, match="nothing there") as caught:
        run_ranks(3, main, seed=5)
    assert caught.value.__notes__ == ["raised by rank 1 of 3 (aiodist.testing, seed 5)"]
    assert sorted(ended) == [0, 1, 2]


def test_t2_a_rank_that_exits_says_so() -> None:
    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            if rank == 1:
                raise SystemExit(3)
            await coll.barrier()

    with pytest.raises(SystemExit) as caught:
        run_ranks(2, main)
    assert caught.value.code == 3


def test_t2_a_rank_that_ends_early_is_an_error_for_the_others() -> None:
    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            if rank == 1:
                raise ValueError("rank 1 is gone")
            with pytest.raises(aiodist.RemoteError, match="rank 1"):
                await coll.barrier()
            raise KeyError("seen")

    with pytest.raises(ValueError, match="rank 1 is gone"):
        run_ranks(2, main)


def test_t2_the_world_can_be_opened_again() -> None:
    async def main() -> Any:
        seen = []
        for i in range(3):
            async with aiodist.init() as coll:
                seen.append(await coll.allreduce(i + coll.rank))
        return seen

    assert run_ranks(4, main) == [[6, 10, 14]] * 4


def test_t2_torch_modes_are_the_ranks_own() -> None:
    async def main(rank: int) -> Any:
        async with aiodist.init() as coll:
            with torch.set_grad_enabled(rank == 0):
                await coll.barrier()
                return torch.is_grad_enabled()

    assert run_ranks(2, main) == [True, False]


def test_t2_large_tensors_and_the_order_stay_the_loops() -> None:
    async def main() -> Any:
        async with aiodist.init() as coll:
            t = torch.full((1 << 19,), float(coll.rank + 1))
            await coll.allreduce(t)
            return sorted(set(t.tolist()))

    assert run_ranks(2, main) == [[3.0], [3.0]]


def test_t2_nothing_stays_behind() -> None:
    loops = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async with aiodist.init() as coll:
            await coll.barrier()

    run_ranks(2, main)
    gc.collect()
    assert [loop() for loop in loops] == [None, None]


def test_t2_sizes_and_loops_are_checked() -> None:
    async def main() -> None:
        return None

    async def inside() -> None:
        with pytest.raises(RuntimeError, match="gather_ranks"):
            run_ranks(2, main)

    with pytest.raises(ValueError, match="0 ranks: expected at least 1"):
        run_ranks(0, main)
    asyncio.run(inside())


async def test_t2_gather_ranks_uses_the_running_loop() -> None:
    loops = []

    async def main(rank: int) -> Any:
        loops.append(asyncio.get_running_loop())
        async with aiodist.init() as coll:
            return await coll.allreduce(rank)

    assert await gather_ranks(4, main) == [6] * 4
    assert set(loops) == {asyncio.get_running_loop()}


def test_t2_the_clock_waits_for_a_stream_of_the_host() -> None:
    async def main() -> float:
        async with aiodist.init(), HostStream("compute") as compute:
            await compute.submit(time.sleep, 0.2)
            return asyncio.get_running_loop().time()

    assert max(run_ranks(2, main, timeout=86400)) < 60


@pytest.mark.timeout(50)
def test_t2_threads_that_are_to_be_woken_do_not_hold_the_clock_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "GRACE_SECONDS", 100.0)  # what a thread that is at work would get

    async def main() -> float:
        async with aiodist.init() as coll, HostStream("idle") as idle:
            await idle.submit(int)
            t = torch.zeros(3)
            received = coll.recv(t, src=1 - coll.rank)
            waits = threading.Thread(target=internals.block, args=(received,))
            waits.start()
            await asyncio.sleep(3600)
            await coll.send(torch.ones(3), 1 - coll.rank)
            await received
            waits.join()
            return float(t.sum())

    assert run_ranks(2, main, timeout=86400) == [3.0, 3.0]


@pytest.mark.timeout(30)
def test_t2_a_thread_that_was_given_up_holds_no_time_up() -> None:
    """The executor knows that the thread has finished, and its worker returns only after its wait."""

    async def main() -> float:
        async with aiodist.init() as coll:
            loop, items = asyncio.get_running_loop(), SimpleQueue[int]()
            handle = None if coll.rank else coll.recv(src=1)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(items.get), 0.5)
            await asyncio.sleep(5)
            items.put(1)
            if handle is None:
                await coll.send(torch.ones(1), 0)
            else:
                await handle
            return loop.time()

    assert [5.4 < seconds < 6.5 for seconds in run_ranks(2, main)] == [True, True]
