"""The gloo backend: its capabilities are true, and no fault of a peer can hang or end the process.

Most tests have their ranks in this process, each with its own connections, which makes no difference for gloo. Tests
of dead ranks start processes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from aiodist.backends import gloo
from aiodist.backends.arithmetic import combine
from aiodist.backends.gloo import library, wire
from aiodist.errors import BackendError, OperationTimeout
from aiodist.handles import Handle, Operation, Progress
from aiodist.testing.seams.channel import in_process
from aiodist.testing.seams.progress import alarm, transport_lock
from aiodist.testing.seams.transport import Wanted
from aiodist.types import ANY, ReduceOp
from tests.support.blocking import blocked_until, noted_pauses
from tests.support.operations import operation

if TYPE_CHECKING:
    from aiodist.testing.seams.transport import Done, Transport

pytestmark = pytest.mark.timeout(60)
Until = Callable[[Callable[[], object]], Any]

LONG = 600_001  # elements: too long for a frame in any dtype
OPS = [op for op in ReduceOp if op is not ReduceOp.MEAN]
KINDS = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
]


open_world = partial(gloo.open_world, one_host=True)


@asynccontextmanager
async def worlds(size: int) -> AsyncIterator[list[gloo.GlooTransport]]:
    """The transports of `size` ranks."""
    channels = in_process(size)
    opened = await asyncio.gather(*map(open_world, channels))
    try:
        yield opened
    finally:
        await asyncio.gather(*(world.aclose(drained=True) for world in opened))
        for channel in channels:
            await channel.aclose()


def start(call: Callable[[Done], None]) -> Handle[None]:
    """Issue `call` as the layers above do."""
    progress = Progress.current()
    operation: Operation[None] = Operation(progress, "test")

    def done(error: BaseException | None) -> None:
        if error is None:
            operation.resolve(None)
        else:
            operation.reject(error)

    progress.start(lambda: call(done))
    return operation.handle


def send(transport: Transport, t: Tensor, dst: int, tag: int = 5) -> Handle[None]:
    return start(partial(transport.isend, t, dst, tag))


def receive(transport: Transport, t: Tensor, src: int = ANY, tag: int = 5) -> Handle[None]:
    return start(partial(transport.irecv, t, src, tag))


def natively(world: gloo.GlooTransport, kind: str, *arguments: Any) -> Handle[None]:
    assert world.native is not None
    return start(partial(world.native.start, operation(kind, *arguments), 0))


async def outcome(handles: Sequence[Handle[None]], seconds: float = 10) -> list[BaseException | None]:
    """How each ended, within a time limit."""
    async with asyncio.timeout(seconds):
        return [await _ended(handle) for handle in handles]


async def _ended(handle: Handle[None]) -> BaseException | None:
    try:
        await handle
    except BackendError as error:
        return error
    return None


async def over(*handles: Handle[None]) -> None:
    assert await outcome(handles) == [None] * len(handles)


def drawn(kind: torch.dtype, numel: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if kind.is_floating_point or kind.is_complex:
        return torch.randint(-3, 4, (numel,), generator=generator).to(kind)
    most = 2 if kind is torch.bool else min(torch.iinfo(kind).max, 2**62)
    return torch.randint(0, most, (numel,), generator=generator).to(kind)


# --- collectives --------------------------------------------------------------------------------------------


@pytest.mark.drawn(2)
@pytest.mark.parametrize("numel", [0, 1, 1000, LONG])
async def test_what_is_supported_equals_the_direct_result(numel: int) -> None:
    supported: set[tuple[str, torch.dtype, ReduceOp]] = set()
    async with worlds(2) as both:
        native = both[0].native
        assert native is not None
        for name in ("allreduce", "reduce"):
            for kind in KINDS:
                for op in OPS:
                    if native.supports(Wanted(name, kind, op, numel)):
                        supported.add((name, kind, op))
                        await _compare(both, name, drawn(kind, numel, 1), drawn(kind, numel, 2), op)
    assert not {kind for _, kind, _ in supported} & {torch.bool, torch.float16, torch.bfloat16}
    assert ("allreduce", torch.int16, ReduceOp.SUM) not in supported
    assert ("reduce", torch.float32, ReduceOp.SUM) in supported
    assert ("allreduce", torch.complex64, ReduceOp.SUM) in supported
    assert ("allreduce", torch.complex64, ReduceOp.MAX) not in supported
    assert ("allreduce", torch.float64, ReduceOp.BAND) not in supported
    assert ("allreduce", torch.uint8, ReduceOp.BXOR) in supported


async def _compare(both: list[gloo.GlooTransport], operation: str, a: Tensor, b: Tensor, op: ReduceOp) -> None:
    whole = a.clone()
    combine(whole, b, op)
    ts = [a.clone(), b.clone()]
    root = (1,) if operation == "reduce" else ()
    await over(*(natively(w, operation, t, op, *root) for w, t in zip(both, ts, strict=True)))
    for x, y in zip([a if root else whole, whole], ts, strict=True):
        assert torch.equal(x, y), (operation, a.dtype, op)


@pytest.mark.parametrize("numel", [7, LONG])
async def test_three_ranks_agree(numel: int) -> None:
    async with worlds(3) as all_three:
        ts = [torch.full((numel,), value) for value in (1e8, -1e8, 1.0)]
        await over(*(natively(w, "allreduce", t, ReduceOp.SUM) for w, t in zip(all_three, ts, strict=True)))
        assert torch.equal(ts[0], ts[1])
        assert torch.equal(ts[0], ts[2])


@pytest.mark.parametrize("numel", [7, LONG])
async def test_a_planned_allreduce_of_any_length(numel: int) -> None:
    async with worlds(2) as both:
        ts = [torch.ones(numel), torch.ones(numel)]
        natives = [world.native for world in both if world.native is not None]
        planned = [native.plan_allreduce(torch.float32, numel, ReduceOp.SUM) for native in natives]
        begin = [one for one in planned if one is not None]
        await over(*(start(partial(one, t, 0)) for one, t in zip(begin, ts, strict=True)))
        assert ts[0].tolist() == ts[1].tolist() == [2] * numel


async def test_many_in_flight_end_in_order_of_issue() -> None:
    async with worlds(2) as both:
        sizes = [3, LONG, 5, LONG + 1, 1, 7]
        ts = [[torch.full((size,), float(i)) for i, size in enumerate(sizes)] for _ in both]
        await over(*(natively(w, "allreduce", t, ReduceOp.SUM) for w, own in zip(both, ts, strict=True) for t in own))
        assert [t[-1].item() for t in ts[1]] == [0, 2, 4, 6, 8, 10]


async def test_parameters_and_inference_tensors_can_be_reduced() -> None:
    async with worlds(2) as both:
        with torch.inference_mode():
            ts = [torch.nn.Parameter(torch.ones(3)), torch.ones(3)]
        parameter = torch.nn.Parameter(torch.ones(3))
        await over(
            natively(both[0], "allreduce", parameter, ReduceOp.SUM), natively(both[1], "allreduce", ts[1], ReduceOp.SUM)
        )
        assert parameter.tolist() == ts[1].tolist() == [2, 2, 2]


async def test_a_parked_wait_costs_next_to_no_cpu(until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sleeps, and so does the progress thread, for milliseconds between two looks or until it is woken."""
    pauses = noted_pauses(monkeypatch)
    async with worlds(2) as both:
        for numel in (1, LONG):
            ts = [torch.ones(numel), torch.ones(numel)]
            early = natively(both[0], "allreduce", ts[0], ReduceOp.SUM)
            await until(lambda: Progress.current().pace.name != "POLLING")
            pauses.clear()
            assert await asyncio.to_thread(blocked_until, lambda: alarm.asleep or sum(p >= 1e-3 for p in pauses) >= 50)
            await over(early, natively(both[1], "allreduce", ts[1], ReduceOp.SUM))


# --- messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 1000, LONG])
async def test_messages_find_their_receives(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PIECE_BYTES", 1 << 18)
    async with worlds(3) as (zero, one, two):
        into = [torch.full((numel,), -1.0) for _ in range(5)]
        early = [receive(zero, into[0], ANY), receive(zero, into[1], 2), receive(zero, into[2], ANY, tag=9)]
        await over(send(one, torch.full((numel,), 1.0), 0), early[0])
        sent = [send(two, torch.full((numel,), 3.0), 0, tag=9), send(two, torch.full((numel,), 2.0), 0)]
        await over(*early[1:], *sent)
        late = send(one, torch.full((numel,), 4.0), 0), send(one, torch.full((numel,), 5.0), 0)
        await over(receive(zero, into[3], 1), receive(zero, into[4], ANY), *late)
        for t, value in zip(into, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True):
            assert t.tolist() == [value] * numel


@pytest.mark.parametrize("numel", [2, 10, LONG])
async def test_a_message_of_another_size_is_an_error_and_gone(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worlds(2) as (zero, one):
        into = torch.zeros(4)
        sent = send(one, torch.ones(numel), 0)
        (error,) = await outcome([receive(zero, into)])
        assert isinstance(error, BackendError)
        assert f"a message of {4 * numel} bytes met a receive of 16" in str(error)
        await over(sent, send(one, torch.ones(4), 0), receive(zero, into, 1))
        assert into.tolist() == [1, 1, 1, 1]


async def test_several_parts_of_one_operation_may_disagree(until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worlds(3) as (zero, one, two):
        errors: list[BaseException | None] = []
        done = errors.append  # one callback for both, as a program's step has
        for src in (1, 2):
            Progress.current().start(partial(zero.irecv, torch.zeros(4), src, 5, done))
        await over(send(one, torch.zeros(3), 0), send(two, torch.zeros(3), 0))
        await until(lambda: len(errors) == 2)
        assert all(isinstance(error, BackendError) for error in errors)


async def test_a_message_to_oneself() -> None:
    async with worlds(2) as (zero, _):
        into = torch.zeros(4)
        await over(send(zero, torch.ones(4), 0), receive(zero, into, 0))
        assert into.sum() == 4


async def test_thousands_of_frames_one_way_keep_no_memory() -> None:
    async with worlds(2) as (zero, one):
        into = torch.zeros(1)
        for i in range(1000):
            await over(send(one, torch.tensor([float(i)]), 0), receive(zero, into))
            assert into == i
        assert one.wire is not None
        assert len(one.wire.peers[0].sent) <= 2 * wire.CREDIT


async def test_splits_are_apart_and_hear_what_came_before_they_were_made() -> None:
    async with worlds(3) as (zero, one, two):
        first = await asyncio.gather(zero.split([2, 0], "a"), two.split([2, 0], "a"))
        assert [t.rank for t in first] == [1, 0]
        into = [torch.zeros(2), torch.zeros(2)]
        pending = receive(zero, into[0], 2)  # the world's, not the split's
        await over(send(first[1], torch.tensor([1.0, 2.0]), 1), receive(first[0], into[1]))
        assert not pending.done()
        await over(send(two, torch.tensor([3.0, 4.0]), 0), pending)
        assert [t.tolist() for t in into] == [[3, 4], [1, 2]]
        ts = [torch.ones(LONG), torch.ones(LONG)]
        await over(*(natively(w, "allreduce", t, ReduceOp.SUM) for w, t in zip(first, ts, strict=True)))
        assert ts[1][0] == 2
        alone = await one.split([1], "b")
        assert (alone.size, alone.native) == (1, None)

        # A frame may come to a rank that has not finished its half of the split.
        assert zero.wire is not None
        frames = zero.wire.members.pop(first[0].comm)
        sent = send(first[1], torch.tensor([5.0, 6.0]), 1)
        await over(sent, send(two, torch.zeros(1), 0), receive(zero, torch.zeros(1), 2))
        zero.wire.join(first[0].comm, frames)
        await over(receive(first[0], into[0]))
        assert into[0].tolist() == [5, 6]
        await asyncio.gather(*(t.aclose(drained=True) for t in (*first, alone)))


# --- opening and closing ------------------------------------------------------------------------------------


async def test_a_split_that_is_closed_is_kept_nowhere(until: Until) -> None:
    async with worlds(2) as both:
        splits = await asyncio.gather(*(world.split([0, 1], "a") for world in both))
        kept = [weakref.ref(split.native) for split in splits]
        await asyncio.gather(*(split.aclose(drained=True) for split in splits))
        del splits
        await until(lambda: gc.collect() >= 0 and [each() for each in kept] == [None, None])  # a thread lets go of them


async def test_h7_what_a_closed_split_of_gloo_sends_or_receives_fails() -> None:
    async with worlds(2) as both:
        half, other = await asyncio.gather(*(world.split([0, 1], "a") for world in both))
        await half.aclose(drained=False)
        handles = [step(half, torch.zeros(n), 1) for step in (send, receive) for n in (1, 1 << 20)]
        assert all(isinstance(error, BackendError) for error in await outcome(handles))
        await other.aclose(drained=False)


async def test_one_rank_needs_no_connection() -> None:
    async with worlds(1) as (world,):
        assert (world.rank, world.size, world.native) == (0, 1, None)
        into = torch.zeros(2)
        await over(send(world, torch.ones(2), 0), receive(world, into, 0))


async def test_closing_leaves_no_thread_and_no_socket(until: Until) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiodist-gloo")]

    before = open_files()
    for drained in (True, False):
        channels = in_process(3)
        opened = await asyncio.gather(*map(open_world, channels))
        split = await asyncio.gather(*(world.split([0, 1, 2], "s") for world in opened))
        pending = [receive(opened[0], torch.zeros(2)), receive(split[1], torch.zeros(LONG), 2)]
        if not drained:
            # Operations that can never end: gloo's own threads are stuck in one of them.
            pending.append(natively(opened[1], "allreduce", torch.zeros(LONG), ReduceOp.SUM))
            pending.append(send(opened[2], torch.zeros(LONG), 0, tag=6))
        async with asyncio.timeout(12):
            for transports in (split, opened):
                await asyncio.gather(*(transport.aclose(drained=drained) for transport in transports))
        assert [type(error) for error in await outcome(pending)] == [BackendError] * len(pending)
        assert isinstance((await outcome([send(opened[0], torch.zeros(1), 1)]))[0], BackendError)
        await until(lambda: not ours())
        await until(lambda: open_files() <= before)


async def test_opening_can_be_cancelled_and_leaves_the_loop_alone() -> None:
    channels = in_process(2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticker = asyncio.create_task(tick())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await open_world(channels[0])
    ticker.cancel()
    assert ticks >= 100, "more than it takes until the other rank is waited for"


async def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SETUP_SECONDS", 0.2)
    channels = in_process(2)
    with pytest.raises(OperationTimeout, match="was not set within"):
        await open_world(channels[0])


@pytest.mark.parametrize("claimed", [1 << 40, 1, -1])
async def test_a_rank_that_acknowledges_what_was_never_sent_is_given_up_by_name(claimed: int) -> None:
    async with worlds(2) as (zero, one):
        lie = wire.GlooFrame.write(wire.Header(wire.CREDITS, extra=claimed), None)
        assert one.wire is not None
        waiting = receive(zero, torch.empty(1), 1)
        with transport_lock:
            one.wire.peers[0].sent.append(one.wire.group.send([lie], 0, library.FRAMES))
        (error,) = await outcome([waiting])
        assert str(error) == f"gloo: rank 1 acknowledges {claimed} frames: 0 were sent to it, and 0 acknowledged"
        assert await outcome([send(zero, torch.ones(1), 1)]) != [None], "nothing goes there any more"


async def test_a_rank_that_took_what_was_never_offered_is_given_up_by_name() -> None:
    async with worlds(2) as (zero, one):
        assert one.wire is not None
        waiting = receive(zero, torch.empty(1), 1)
        with transport_lock:
            one.wire.peers[0].send(wire.TAKEN, number=7)
        (error,) = await outcome([waiting])
        assert str(error) == "gloo: rank 1 took data number 7: none was offered"


# --- the user's own works -----------------------------------------------------------------------------------


async def test_a_work_becomes_a_handle() -> None:
    store = c10d.HashStore()
    groups = await asyncio.gather(
        *(asyncio.to_thread(c10d.ProcessGroupGloo, store, rank, 2, timedelta(seconds=20)) for rank in range(2))
    )
    ts = [torch.ones(3), torch.ones(3)]
    async with asyncio.timeout(10):
        for group, t in zip(groups, ts, strict=True):
            handle = gloo.work_handle(group.allreduce([t]))  # type: ignore[attr-defined]
        await handle
        into = torch.zeros(3)
        received = gloo.work_handle(groups[0].recv([into], 1, 3))  # type: ignore[attr-defined]
        await gloo.work_handle(groups[1].send([ts[1]], 0, 3))  # type: ignore[attr-defined]
        await received
    assert into.tolist() == [2, 2, 2]


# --- processes ----------------------------------------------------------------------------------------------


def run_ranks(size: int, body: str, place: Path, expect: Sequence[int] | None = None) -> list[str]:
    """Run `body`, the inside of `async def main(world, channel)`, as `size` processes; return what each printed."""
    program = (
        textwrap.dedent("""
        import asyncio, os, signal, sys, time, torch
        from functools import partial
        from aiodist.backends import gloo
        from aiodist.control import connect
        from aiodist.errors import BackendError, OperationTimeout
        from aiodist.handles import Operation, Progress
        from aiodist.backends.base import Primitive
        from aiodist.types import ANY
        torch.set_num_threads(1)
        rank, size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

        def start(call):
            progress = Progress.current()
            made = Operation(progress, "test")
            progress.start(lambda: call(lambda e: made.resolve(None) if e is None else made.reject(e)))
            return made.handle

        async def main():
            channel = await connect(address, rank=rank, size=size, timeout=30)
            world = await gloo.open_world(channel, one_host=True)
            allreduce = lambda t: start(partial(world.native.start, Primitive("allreduce", t), 0))
            await allreduce(torch.zeros(1))
    """)
        + textwrap.indent(textwrap.dedent(body), " " * 4)
        + "\nasyncio.run(main())\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(size), f"file://{place}/meet"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=40) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    codes = [process.returncode for process in ranks]
    assert codes == list(expect or [0] * size), [err for _, err in said]
    return [out for out, _ in said]


@pytest.mark.thorough
def test_a_rank_that_is_killed_fails_what_waits_for_it(tmp_path: Path) -> None:
    said = run_ranks(
        3,
        """
        sub = await world.split([0, 1, 2], "s")
        big = torch.zeros(1 << 20)
        if rank == 1:
            asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGKILL)
        else:
            pending = {
                "short": start(partial(sub.native.start, Primitive("allreduce", torch.zeros(4)), 0)),
                "long": start(partial(sub.native.start, Primitive("allreduce", big.clone()), 0)),
                "recv": start(partial(world.irecv, torch.zeros(4), 1, 7)),
                "any": start(partial(world.irecv, torch.zeros(4), ANY, 7)),
                "same": start(partial(world.irecv, torch.zeros(4), 1, 7)),
                "send": start(partial(world.isend, big, 1, 8)),
            }
        try:  # it dies in the midst of these
            while True:
                two = [allreduce(torch.zeros(1 << 20)) for _ in range(2)]
                await asyncio.wait_for(asyncio.gather(*two), 5)
        except BackendError as error:
            began = time.perf_counter()
            print("midst", str(error).startswith("gloo: "))
        for name, handle in pending.items():
            try:
                await asyncio.wait_for(handle, 5)
                print(name, "went well")
            except BackendError as error:
                assert "gloo: " in str(error) and "pair.cc" in str(error), error
        try:
            await asyncio.wait_for(start(partial(world.isend, torch.zeros(1), 1, 9)), 5)
            print("later went well")
        except BackendError:
            pass
        # What does not need the dead rank goes on.
        t, into, other = torch.full((1 << 18,), float(rank)), torch.zeros(1 << 18), 2 - rank
        for handle in start(partial(world.isend, t, other, 3)), start(partial(world.irecv, into, other, 3)):
            await asyncio.wait_for(handle, 5)
        assert into[5] == other
        await channel.set(f"through/{rank}", b"")
        await channel.get(f"through/{other}", timeout=10)  # a closed connection takes the other's last frames with it
        await sub.aclose(drained=False)
        await world.aclose(drained=False)
        print("within", time.perf_counter() - began < 12)
        """,
        tmp_path,
        expect=[0, -9, 0],
    )
    assert said[0] == said[2] == "midst True\nwithin True\n"


async def test_a_join_that_runs_out_of_time_keeps_what_was_sent() -> None:
    """The thread of the join may still receive the first part."""
    async with worlds(2) as (zero, one):
        await over(send(zero, torch.ones(1), 1), receive(one, torch.zeros(1)))
        assert zero.wire is not None
        peer = zero.wire.peers[1]
        assert len(peer.sent) == 1
        assert not peer.join(time.monotonic())
        assert len(peer.sent) == 1
    assert not peer.sent
