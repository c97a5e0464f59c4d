"""W4: each rank of a deadlock gets an error with all its waits, and no other rank gets one."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

import aiodist
from aiodist import Communicator, DeadlockError
from aiodist.c10d.work import HandleWork
from aiodist.communicator import parts_of
from aiodist.communicator.facts import CommFacts, Facts, PendingOp
from aiodist.compat.requests import block_on
from aiodist.handles import LARGE_BYTES
from aiodist.streams import HostStream
from aiodist.testing import run_ranks
from aiodist.threads import Waiting
from aiodist.watch.graph import locked
from tests.support.looks import MANY, Looks

pytestmark = pytest.mark.timeout(100)


def _told(n: int, main: Callable[[Communicator], Awaitable[object]]) -> dict[int, tuple[float, DeadlockError]]:
    """Run `main` and return the ranks that raised a DeadlockError, with the time of their clock."""
    told: dict[int, tuple[float, DeadlockError]] = {}

    async def rank(number: int) -> None:
        try:
            async with aiodist.init() as coll:
                await main(coll)
        except DeadlockError as error:
            told[number] = asyncio.get_running_loop().time(), error
            raise

    with pytest.raises(DeadlockError):
        run_ranks(n, rank)
    return told


def test_w4_crossed_order_on_two_communicators() -> None:
    async def main(coll: Communicator) -> None:
        one, two = await coll.dup(), await coll.dup()
        first, second = (one, two) if coll.rank == 0 else (two, one)
        await first.allreduce(torch.ones(3))
        await second.allreduce(torch.ones(3))

    told = _told(2, main)
    assert told.keys() == {0, 1}
    line = inspect.getsourcelines(main)[1] + 3
    for at, error in told.values():
        assert at < 1
        assert error.cycle == (0, 1)
        text = str(error)
        assert text.startswith("deadlock: rank 0 waits for rank 1, which waits for rank 0\n")
        for rank, comm in ((0, "world/dup1.0"), (1, "world/dup2.0")):
            known = f"rank {rank} waits for rank {1 - rank} in allreduce #0 issued at {__file__}:{line} in"
            (found,) = (each for each in text.splitlines() if each.startswith(known))
            assert found.endswith(f"on {comm!r}")
        assert text.count(f"└─ {__file__}:{line} in") == 2


def test_w4_a_ring_of_three_and_one_that_waits_for_it() -> None:
    async def main(coll: Communicator) -> None:
        if coll.rank == 3:
            await coll.recv(src=0)
        else:
            await coll.recv(src=(coll.rank + 1) % 3)

    told = _told(4, main)
    assert {error.cycle for _, error in told.values()} == {(0, 1, 2)}
    assert told.keys() == {0, 1, 2, 3}  # the last one cannot continue either
    assert "rank 3 waits for rank 0 in recv #0" in str(told[3][1])


def test_w4_a_receive_that_nobody_sends() -> None:
    async def main(coll: Communicator) -> None:
        if coll.rank == 0:
            await coll.recv(src=1)

    told = _told(2, main)
    assert told.keys() == {0, 1}
    assert "rank 1 waits for rank 0 in close #0" in str(told[0][1])


def test_w4_an_idle_thread_of_torchs_futures_hides_nothing() -> None:
    async def main(coll: Communicator) -> None:
        assert HandleWork([], [], None).get_future().wait() == []
        await coll.recv(src=coll.rank)

    assert _told(2, main).keys() == {0, 1}


@pytest.mark.parametrize("n", [1, 2])
def test_w4_a_rank_that_waits_for_its_own_later_send(n: int) -> None:
    async def main(coll: Communicator) -> None:
        await coll.recv(src=coll.rank)
        await coll.send(torch.ones(1), coll.rank)

    for rank, (_, error) in _told(n, main).items():
        assert error.cycle in ((0,), (rank,))
        assert "waits for itself" in str(error)


def test_w4_a_name_that_nobody_else_uses_and_a_synchronous_send() -> None:
    async def main(coll: Communicator) -> None:
        if coll.rank == 0:
            await coll.allreduce(1, name="x")
        else:
            await coll.send(torch.ones(5), 0, synchronous=True)

    told = _told(2, main)
    assert "rank 0 waits for rank 1 in allreduce 'x' #0" in str(told[0][1])
    assert "rank 1 waits for rank 0 in send #0" in str(told[1][1])


def test_w4_the_others_go_on_and_are_told_of_the_communicator_alone(tmp_path: Path) -> None:
    """A rank of the process, outside the cycle, that is at work delays that: its thread may be any rank's."""
    finished = threading.Event()

    async def main() -> int:
        async with aiodist.init() as coll:
            side = await coll.dup()
            with Looks(coll, tmp_path) as looks:
                if coll.rank == 2:
                    await asyncio.to_thread(looks.block)
                    finished.set()
                with pytest.raises(aiodist.AiodistError) as caught:
                    await side.recv(src=(1, 0, 1)[coll.rank])
            assert "deadlock" in str(caught.value)
            assert finished.is_set()
            return int(await coll.allreduce(1))

    assert run_ranks(3, main) == [3, 3, 3]


class _Dawdling(ThreadPoolExecutor):
    """Executor with workers that return late to their queue: after they notify the loop, they stay in `block`."""

    def __init__(self, block: Callable[[], object]) -> None:
        super().__init__(thread_name_prefix="asyncio_")
        self._block = block

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        def work() -> Any:
            result = fn(*args, **named)
            future.add_done_callback(lambda _: self._block())
            return result

        future = super().submit(work)
        return future


@pytest.mark.thorough
def test_w4_a_worker_that_is_late_to_return_hides_no_deadlock(tmp_path: Path) -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            with Looks(coll, tmp_path) as looks:
                if coll.rank == 0:
                    await _dawdle(looks.block)
                with pytest.raises(aiodist.AiodistError, match="deadlock"):
                    await coll.recv(src=1 - coll.rank)

    run_ranks(2, main)


async def _dawdle(block: Callable[[], object]) -> int:
    """Let a worker notify the loop and then enter `block`; return the worker's number."""
    asyncio.get_running_loop().set_default_executor(_Dawdling(block))
    told = threading.Event()
    working = asyncio.create_task(asyncio.to_thread(lambda: told.wait(10) and threading.get_ident()))
    await asyncio.sleep(0)  # the loop is notified first
    told.set()
    return await working


def test_w4_a_thread_with_a_limited_wait_hides_no_deadlock() -> None:
    """The virtual clock gives it real time to end, since a rank is not stalled before."""
    looked = threading.Event()

    def wait() -> None:
        with Waiting(lambda: False, limited=True):
            assert looked.wait(10)
            threading.Event().wait(0.2)

    async def main(coll: Communicator) -> None:
        if coll.rank == 0:
            threading.Thread(target=wait).start()
            parts_of(coll).dispatcher.watch.observers.append(looked.set)
        await coll.recv(src=1 - coll.rank)

    assert _told(2, main).keys() == {0, 1}


def _begin(coll: Communicator) -> aiodist.Handle[Any]:
    """Receive from the other rank, which receives too; on the loop."""
    return coll.recv(src=1 - coll.rank)


async def _by_handle(coll: Communicator) -> None:
    side = await coll.dup(thread=True)
    await asyncio.to_thread(lambda: _begin(side).wait())


async def _by_compat(coll: Communicator) -> None:
    async def receive() -> None:
        await _begin(coll)

    await asyncio.to_thread(block_on, asyncio.get_running_loop(), receive)


async def _by_work(coll: Communicator) -> None:
    side = await coll.dup(thread=True)
    try:
        await asyncio.to_thread(lambda: HandleWork([_begin(side)], [], None).wait())
    except dist.DistBackendError as error:
        raise error.__cause__ or error from None


async def _in_idle_company(coll: Communicator) -> None:
    """With an idle worker of a stream."""
    async with HostStream() as stream:
        await stream.submit(int)
        await _begin(coll)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("wait", [_by_handle, _by_compat, _by_work, _in_idle_company])
@pytest.mark.ranks(2, backend=("shm", "gloo"))
async def test_w4_own_waits_of_threads_hide_no_deadlock(coll: Communicator, wait: Any) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(aiodist.AiodistError, match="deadlock: rank 0 waits for rank 1"):
        await wait(coll)
    assert asyncio.get_running_loop().time() < began + 5  # about a second on an idle machine


STARTED = """
import sys, threading, time
import torch, aiodist

with aiodist.start(report_after=1) as coll:
    if sys.argv[1] == "handle":
        wait = lambda: coll.recv(src=1 - coll.rank).wait()
    else:
        wait = lambda: coll.portal.call(coll.recv_object, 1 - coll.rank)
    if sys.argv[2] == "foreign":
        threading.Thread(target=threading.Event().wait, args=(4,), daemon=True).start()
    began = time.monotonic()
    try:
        wait()
    except aiodist.AiodistError as error:
        assert "deadlock: rank 0 waits for rank 1" in str(error), error
        print(f"rank {coll.rank} raised after", "3 s" if time.monotonic() > began + 3 else "less", flush=True)
"""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("company", ["alone", "foreign"])
@pytest.mark.parametrize("wait", ["handle", "portal"])
def test_w4_the_main_thread_of_start_waits_in_a_deadlock(wait: str, company: str, tmp_path: Path) -> None:
    """With a blocked thread of the program, there is the report with the cycle, and no error until the thread ends."""
    program = tmp_path / "program.py"
    program.write_text(STARTED)
    command = [sys.executable, "-m", "aiodist", "run", "-n", "2", "--mpi", "none", str(program), wait, company]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=80, check=True)
    after = "3 s" if company == "foreign" else "less"
    for rank in (0, 1):
        assert f"rank {rank} raised after {after}" in ended.stdout
    assert ("waits for rank 0: a deadlock, unless" in ended.stderr) == (company == "foreign")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("foreign", ["at work", "blocked"])
@pytest.mark.ranks(2, backend="shm")
async def test_w4_a_thread_of_the_program_keeps_a_deadlock_from_being_raised(
    coll: Communicator, foreign: str, tmp_path: Path
) -> None:
    """It may wake the program, and does here: the operations end without an error."""
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    one, two = await coll.dup(), await coll.dup()
    first, second = (one, two) if coll.rank == 0 else (two, one)
    loop, ended = asyncio.get_running_loop(), threading.Event()
    later: asyncio.Future[aiodist.Handle[Any]] = loop.create_future()
    with Looks(coll, folder) as looks:

        def work() -> None:
            if foreign == "at work":
                looks.block()
            else:
                ended.wait()
            loop.call_soon_threadsafe(lambda: later.set_result(second.allreduce(1)))

        thread = threading.Thread(target=work, name="of the program", daemon=True)
        thread.start()
        looks.at(MANY, ended.set)
        assert await first.allreduce(1) == 2
        assert await (await later) == 2
    thread.join()


# --- slow is no deadlock ---------------------------------------------------------------------------------------


async def _after_sleep(issue: Callable[[], object], looks: Looks) -> None:
    await asyncio.sleep(30)
    issue()


async def _by_timer(issue: Callable[[], object], looks: Looks) -> None:
    asyncio.get_running_loop().call_later(30, issue)


async def _from_executor(issue: Callable[[], object], looks: Looks) -> None:
    await asyncio.to_thread(looks.block)
    issue()


async def _from_thread(issue: Callable[[], object], looks: Looks) -> None:
    """With the name of one of aiodist's threads."""
    loop = asyncio.get_running_loop()

    def later() -> None:
        looks.block()
        loop.call_soon_threadsafe(issue)

    threading.Thread(target=later, name="aiodist-lag", daemon=True).start()


async def _from_thread_of_no_name(issue: Callable[[], object], looks: Looks) -> None:
    """As native libraries have them, which call back into the program."""
    loop, runs = asyncio.get_running_loop(), threading.Event()

    def later() -> None:
        runs.set()
        looks.block()
        loop.call_soon_threadsafe(issue)

    _thread.start_new_thread(later, ())
    runs.wait()  # until then it has no frame, and cannot be seen


async def _from_stream(issue: Callable[[], object], looks: Looks) -> None:
    async with HostStream("lag") as stream:
        await stream.submit(looks.block)
    issue()


WAYS = [_after_sleep, _by_timer, _from_executor, _from_thread, _from_thread_of_no_name, _from_stream]


async def _crossed_but_for(
    coll: Communicator, way: Callable[[Callable[[], object], Looks], Awaitable[None]], folder: Path
) -> None:
    """Each rank waits in its first operation, and issues the other one meanwhile."""
    one, two = await coll.dup(), await coll.dup()
    first, second = (one, two) if coll.rank == 0 else (two, one)
    folder = Path(await coll.broadcast_object(str(folder)))
    later: asyncio.Future[aiodist.Handle[Any]] = asyncio.get_running_loop().create_future()

    def issue() -> None:
        later.set_result(second.allreduce(1))

    with Looks(coll, folder) as looks:
        beside: asyncio.Task[None] = asyncio.create_task(way(issue, looks))  # type: ignore[arg-type]
        assert await first.allreduce(1) == coll.size
        await beside
        assert await (await later) == coll.size
    for comm in (one, two):
        await comm.aclose()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
async def test_w4_what_may_yet_be_issued_is_no_deadlock(coll: Communicator, way: Any, tmp_path: Path) -> None:
    await _crossed_but_for(coll, way, tmp_path)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("way", [_from_executor, _from_thread, _from_thread_of_no_name, _from_stream])
@pytest.mark.ranks(2, backend=("shm", "gloo", "mpi"))
async def test_w4_what_may_yet_be_issued_is_none_on_processes(coll: Communicator, way: Any, tmp_path: Path) -> None:
    await _crossed_but_for(coll, way, tmp_path)


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("waits", [asyncio.Event, threading.Event])
@pytest.mark.ranks(2, backend="shm")
async def test_w4_what_a_signal_handler_may_wake_is_no_deadlock(coll: Communicator, waits: Any, tmp_path: Path) -> None:
    """It wakes the loop, or a thread that nothing else can wake."""
    if coll.rank == 1:
        await coll.recv(src=0)
        await coll.send(torch.ones(2), dst=0)
        return
    reply = coll.recv(src=1)
    loop, told = asyncio.get_running_loop(), waits()
    wake = partial(loop.call_soon_threadsafe, told.set) if waits is asyncio.Event else told.set
    with Looks(coll, tmp_path) as looks, _handled(lambda *_: wake()):
        looks.at(MANY, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        await (told.wait() if waits is asyncio.Event else asyncio.to_thread(told.wait))
    await coll.send(torch.ones(2), dst=1)
    await reply


def test_w4_a_deadline_may_end_the_wait() -> None:
    """After that the program may do anything."""

    async def main() -> None:
        async with aiodist.init() as coll:
            with pytest.raises(aiodist.OperationTimeout):
                await coll.recv(src=1 - coll.rank, tag=1, timeout=20)
            async with asyncio.timeout(20):
                exchanged = await coll.sendrecv(torch.ones(1), 1 - coll.rank, 1 - coll.rank, tag=2)
            assert exchanged == 1
            assert await coll.sendrecv(torch.ones(1), 1 - coll.rank, 1 - coll.rank, tag=1) == 1

    run_ranks(2, main)


Until = Callable[[Callable[[], object]], Awaitable[None]]


# --- on real ranks ---------------------------------------------------------------------------------------------


async def _one_after_another(*comms: Communicator) -> None:
    for comm in comms:
        await comm.allreduce(torch.ones(3))


@pytest.mark.ranks(2, backend=("shm", "gloo", "mpi"))
async def test_w4_crossed_order_is_told_within_a_second(coll: Communicator, tmp_path: Path, until: Until) -> None:
    one, two = await coll.dup(), await coll.dup()
    first, second = (one, two) if coll.rank == 0 else (two, one)
    await coll.barrier()
    with Looks(coll, tmp_path) as looks, pytest.raises(DeadlockError) as caught:
        await _one_after_another(first, second)
    assert caught.value.cycle == (0, 1)
    assert f"rank {1 - coll.rank} waits for rank {coll.rank} in allreduce #0" in str(caught.value)
    assert min(await coll.allgather_object(looks.count())) < 10  # ten a second; and the world continues
    # Each rank aborts its own one and notifies the other.
    await until(
        lambda: None not in (parts_of(one).dispatcher.lifetime.refusal, parts_of(two).dispatcher.lifetime.refusal)
    )


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, backend=("shm", "gloo", "mpi"))
async def test_w4_messages_that_wait_for_one_another(coll: Communicator) -> None:
    side = await coll.dup()
    await side.send_object("before", (coll.rank + 1) % coll.size)
    assert await side.recv_object() == "before"
    with pytest.raises(DeadlockError):
        await side.recv(src=(coll.rank + 1) % coll.size, tag=3)
    assert await coll.allreduce(1) == coll.size


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("shm", "gloo", "mpi"))
async def test_w4_threads_that_wait_for_handles(coll: Communicator) -> None:
    one, two = await coll.dup(thread=True), await coll.dup(thread=True)
    first = one if coll.rank == 0 else two
    async with HostStream() as stream:
        with pytest.raises(DeadlockError):
            await stream.submit(lambda: first.allreduce(torch.ones(2)).wait())
    assert await coll.allreduce(1) == coll.size
    for given_up in (one, two):  # the other rank gave one of them up, which may be heard of while the world closes
        given_up.abort()


# --- the graph, against a simpler way to find the same ----------------------------------------------------------


def _can_end(rank: int, op: PendingOp, locked_ranks: frozenset[int], told: dict[int, Facts]) -> bool:
    """Say it in words of the definition: something outside the set, or something that is done, may end it."""
    comm = {r: next((c for c in facts.comms if c.name == op.comm), None) for r, facts in told.items()}

    def stuck(other: int) -> bool:
        return other in locked_ranks and comm.get(other) is not None

    if op.peers:
        return any(not stuck(peer) for peer in op.peers)
    members = next(c for c in told[rank].comms if c.name == op.comm).ranks
    return not any(stuck(r) and comm[r].issued <= op.number for r in members)  # type: ignore[union-attr]


@st.composite
def _stories(draw: st.DrawFn) -> dict[int, Facts]:
    """Facts of up to four ranks, whether or not a program could come to them."""
    told = {}
    for rank in draw(st.sets(st.integers(0, 3), min_size=1)):
        comms = [CommFacts(name, [0, 1, 2, 3], draw(st.integers(0, 2)), [], [], [], 0, [], []) for name in "ab"]
        op = st.builds(
            lambda comm, number, peers: PendingOp(comm, "op", number, "", sorted(peers)),
            st.sampled_from("ab"),
            st.integers(0, 2),
            st.sets(st.integers(0, 3), max_size=2),
        )
        told[rank] = Facts(draw(st.lists(op, max_size=2)), comms)
    return told


@pytest.mark.thorough
@given(_stories())
def test_w4_the_graph_finds_every_set_of_ranks_that_none_leaves(told: dict[int, Facts]) -> None:
    waiting = [rank for rank, facts in told.items() if facts.ops]
    sets = chain.from_iterable(combinations(waiting, size) for size in range(1, len(waiting) + 1))
    stuck = [
        each
        for each in map(frozenset, sets)
        if not any(_can_end(rank, op, each, told) for rank in each for op in told[rank].ops)
    ]
    found = locked(told)
    assert (set(found.waits) if found else set()) == set().union(*stuck)
    if found:
        following = [*found.cycle[1:], found.cycle[0]]
        for rank, other in zip(found.cycle, following, strict=True):
            assert other in found.waits[rank][0].ranks


def test_w4_a_message_on_its_way_is_no_deadlock() -> None:
    def side(sent: int, heard: int, other: int) -> CommFacts:
        return CommFacts("a", [0, 1], 0, [], [[other, sent]], [[other, heard]], 1, [], [])

    ops = {rank: [PendingOp("a", "recv #0", 0, "", [1 - rank])] for rank in (0, 1)}
    assert locked({0: Facts(ops[0], [side(0, 1, 1)]), 1: Facts(ops[1], [side(1, 0, 0)])})
    assert not locked({0: Facts(ops[0], [side(0, 0, 1)]), 1: Facts(ops[1], [side(1, 0, 0)])})


def test_w4_large_sends_that_may_end_are_no_deadlock() -> None:
    """If a rank has matched more sends than have ended, an end is in flight."""

    def side(ended: int, matched: int, other: int) -> CommFacts:
        return CommFacts("a", [0, 1], 0, [], [], [], 1, [[other, ended]], [[other, matched]])

    ops = {rank: [PendingOp("a", "send #0", 0, "", [1 - rank], "", True)] for rank in (0, 1)}
    assert locked({0: Facts(ops[0], [side(2, 1, 1)]), 1: Facts(ops[1], [side(1, 2, 0)])})
    assert not locked({0: Facts(ops[0], [side(2, 1, 1)]), 1: Facts(ops[1], [side(1, 3, 0)])})
    assert not locked({0: Facts(ops[0], [side(2, 1, 1)])})


async def _wrong_large_sends(kind: str, t: torch.Tensor, side: Communicator, other: Communicator) -> None:
    rank = side.rank
    following, before = (rank + 1) % side.size, (rank - 1) % side.size
    if kind == "ring":
        await side.send(t, following)
        await side.recv(src=before)
    elif kind == "other tag":
        await side.send(t, following, tag=1)
        await side.recv(src=before, tag=2)
    elif kind == "receive of another tag":
        await (side.recv(src=1, tag=7) if rank == 0 else side.send(t, following if rank > 1 else 0))
    else:
        if rank == 0:
            await side.send(t, 1)
        await other.barrier()


LARGE = 1 << 19
"""How many elements no carrier takes before they are received."""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("numel", [LARGE, LARGE_BYTES], ids=["large", "driven by the thread"])
@pytest.mark.parametrize("kind", ["ring", "other tag", "receive of another tag", "barrier"])
@pytest.mark.ranks(2, 3, backend=("shm", "mpi"))
async def test_w4_large_sends_that_wait_for_one_another(
    coll: Communicator, kind: str, numel: int, tmp_path: Path
) -> None:
    side, other = await coll.dup(), await coll.dup()
    t, following, before = torch.ones(LARGE), (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    await asyncio.gather(side.send(t, following), side.recv(src=before))
    await coll.barrier()
    with (
        Looks(coll, tmp_path) as looks,
        pytest.raises(aiodist.AiodistError, match="deadlock: rank 0 waits for rank 1"),
    ):
        await _wrong_large_sends(kind, torch.ones(numel), side, other)
    assert min(await coll.allgather_object(looks.count())) < 15


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("shm", "gloo", "mpi"))
async def test_w4_large_sends_to_slow_ranks_are_no_deadlock(coll: Communicator, tmp_path: Path) -> None:
    """A late receive, in both directions, in any order, and during a barrier of another communicator."""
    other, t, peer = await coll.dup(), torch.ones(LARGE), 1 - coll.rank
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    with Looks(coll, folder) as looks:
        for late in (0, 1):
            sent = [coll.send(t, peer, tag=tag) for tag in range(3)]
            if coll.rank == late:
                await asyncio.to_thread(looks.block)
            for tag in (2, 0, 1):
                assert (await coll.recv(src=peer, tag=tag)).sum() == LARGE
            await asyncio.gather(*sent)
            if coll.rank == late:
                await coll.send(t, peer)
            else:
                await asyncio.to_thread(looks.block)
                await coll.recv(src=peer)
            await other.barrier()


# --- random programs -------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A barrier on a communicator, a message between two ranks, or a pause of one; -1 is none."""

    comm: int = -1
    src: int = -1
    dst: int = -1
    pause: float = 0.0


def _ends(programs: list[list[Step]]) -> bool:
    """Return True if all programs end. A message ends when both of its ranks have reached it."""
    at = [0] * len(programs)

    def head(rank: int) -> Step | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        heads = [head(rank) for rank in range(len(programs))]
        for rank, step in enumerate(heads):
            if step is None or step != head(rank):
                continue
            ready = range(len(programs)) if step.comm >= 0 else {step.src, step.dst} - {-1} or {rank}
            if all(other is not None and other[:3] == step[:3] for other in map(head, ready)):
                for other in ready:
                    at[other] += 1
                moved = True
                break
    return all(place == len(program) for place, program in zip(at, programs, strict=True))


async def _do(step: Step, rank: int, world: Communicator, comms: list[Communicator]) -> None:
    if step.pause:
        await asyncio.sleep(step.pause)
    elif step.comm >= 0:
        await comms[step.comm].barrier()
    elif step.src == rank:
        await world.send(torch.ones(2), step.dst, synchronous=True)
    else:
        await world.recv(src=step.src)


@st.composite
def _programs(draw: st.DrawFn) -> list[list[Step]]:
    """The steps of each rank: equal, except for one rank with two steps exchanged or one missing, if drawn."""
    n = draw(st.integers(2, 4))
    pair = st.permutations(range(n)).map(lambda ranks: Step(src=ranks[0], dst=ranks[1]))
    pause = st.builds(
        lambda dst, seconds: Step(dst=dst, pause=seconds), st.integers(0, n - 1), st.sampled_from([0.2, 3])
    )
    story = draw(st.lists(st.one_of(st.integers(0, 2).map(Step), pair, pause), min_size=1, max_size=9))
    programs = [[s for s in story if s.comm >= 0 or rank in (s.src, s.dst)] for rank in range(n)]
    wrong = draw(st.sampled_from([p for p in programs if p] or [[]]))
    kind = draw(st.sampled_from(["none", "exchanged", "left out"]))
    if kind == "exchanged" and len(wrong) > 1:
        i = draw(st.integers(0, len(wrong) - 2))
        wrong[i], wrong[i + 1] = wrong[i + 1], wrong[i]
    messages = [i for i, s in enumerate(wrong) if s.src >= 0]
    if kind == "left out" and messages:
        del wrong[draw(st.sampled_from(messages))]
    return programs


@given(_programs(), st.integers(0, 99))
@example([[Step(0), Step(1)], [Step(1), Step(0)]], 0)
@example([[Step(src=0, dst=1)], []], 0)
@settings(max_examples=25, deadline=None)
def test_w4_random_programs_on_local_ranks(programs: list[list[Step]], seed: int) -> None:
    """A program that ends does so, and tells no rank anything; one that does not tells all of a cycle, within 1 s."""
    stalled: dict[int, float] = {}
    told: dict[int, float] = {}
    cycles: set[tuple[int, ...]] = set()

    async def main(rank: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with aiodist.init() as coll:
                comms = [await coll.dup() for _ in range(3)]
                for step in programs[rank]:
                    stalled[rank] = loop.time()
                    await _do(step, rank, coll, comms)
                stalled[rank] = loop.time()
        except DeadlockError as error:
            told[rank] = loop.time()
            cycles.add(error.cycle)
            raise

    if _ends(programs):
        run_ranks(len(programs), main, seed)
        assert not told
    else:
        with pytest.raises(DeadlockError):
            run_ranks(len(programs), main, seed)
        (cycle,) = cycles
        assert set(cycle) <= told.keys()  # others may know only of the abort
        assert max(told.values()) < max(stalled.values()) + 1
