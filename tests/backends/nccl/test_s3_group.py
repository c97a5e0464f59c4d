"""A communicator's life: opened at its first use, aborted when it fails, released and made again (S3)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from aiodist.backends.nccl import group as module
from aiodist.errors import BackendError, CommunicatorAborted
from aiodist.streams import Staging
from aiodist.testing.seams.nccl import NcclGroup, NcclNative
from aiodist.testing.seams.progress import transport_lock
from aiodist.testing.seams.transport import Done, Primitive
from aiodist.types import ReduceOp

if TYPE_CHECKING:
    from tests.backends.nccl.conftest import Failure, World

    Make = Callable[..., World]
    Until = Callable[[Callable[[], object]], Awaitable[None]]
    Step = Callable[[NcclNative, Done], None]
    Then = Callable[[bytes | None, BaseException | None], None]


def full(w: World, rank: int, value: float = 1.0, numel: int = 16) -> Tensor:
    return w.put(torch.full((numel,), value), rank)


def summed(t: Tensor) -> Step:
    return lambda n, done: n.start(Primitive("allreduce", t, op=ReduceOp.SUM), done)


def _broadcast(t: Tensor, n: NcclNative, done: Done) -> None:
    n.start(Primitive("broadcast", t), done)


def code_of(error: Failure) -> int | None:
    assert isinstance(error, BackendError)
    return error.code


async def check(w: World, name: str = "world") -> None:
    """All ranks reduce, with results."""
    ts = [full(w, rank, rank + 1.0) for rank in range(w.size)]
    await w.succeed([w.call(rank, summed(ts[rank]), name=name) for rank in range(w.size)])
    assert all(t.cpu().eq(sum(range(1, w.size + 1))).all() for t in ts)


async def ended(w: World, group: NcclGroup, *, drained: bool) -> None:
    await asyncio.wait_for(w.owned[group.rank].release(group, drained=drained), 20)


# --- opening -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_s3_it_is_opened_once_by_the_first_call_and_calls_wait_for_it(world: Make, size: int) -> None:
    w = world(size)
    assert "init" not in w.nccl.calls
    ts = [[full(w, rank, 10.0 * k + rank) for rank in range(size)] for k in range(5)]
    await w.succeed([w.call(rank, summed(ts[k][rank])) for k in range(5) for rank in range(size)])
    assert w.nccl.calls.count("init") == size
    assert sorted(w.posts["world"].uses) == ([] if size == 1 else list(range(size)))  # the id was sent once
    for k in range(5):
        assert all(t.cpu().eq(sum(10.0 * k + rank for rank in range(size))).all() for t in ts[k])
    assert {comm.device_id for comm in w.nccl.communicators} == set(range(size))


async def test_s3_the_same_ranks_and_device_share_a_communicator(world: Make) -> None:
    w = world(2)
    device = w.device(0)
    first = w.owned[0].of("a", (0, 1), 0, device)
    assert w.owned[0].of("a", [0, 1], 0, device) is first
    others = [
        w.owned[0].of("b", (0, 1), 0, device),
        w.owned[0].of("a", (0, 1), 0, w.device(1)),
        w.owned[0].of("a", (0, 2), 0, device),
    ]
    assert len({id(group) for group in (first, *others)}) == 4
    assert set(w.owned[0]) == {first, *others}
    with pytest.raises(ValueError, match="index"):
        NcclGroup(first.library, "x", (0,), 0, torch.device("cuda"), Staging.of(w.progress))


async def test_s3_rank_0s_failure_to_begin_is_told_to_all(world: Make) -> None:
    w = world(3)
    w.nccl.unique_id_error = 2
    errors = await w.done([w.call(rank, summed(full(w, rank))) for rank in range(3)])
    assert all(isinstance(error, BackendError) for error in errors)
    assert all(
        "rank 0 could not create an id: NCCL: a unique id: unhandled system error" in str(error) for error in errors
    )
    assert len({id(error) for error in errors}) == 3  # each operation writes its own place into its error


async def test_s3_ranks_that_share_a_device_are_refused_with_nccls_text(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(2, multi_rank=False)
    monkeypatch.setattr(w, "device", lambda rank: torch.device("cuda", 0))
    w.streams = [torch.cuda.Stream(device=0) for _ in range(2)]
    calls = [w.call(rank, summed(full(w, rank))) for rank in (0, 1) for _ in range(2)]
    errors = await w.done(calls)
    assert all(code_of(error) == 5 for error in errors)
    assert len({id(error) for error in errors}) == 4
    assert all("connecting 2 ranks: invalid usage (the fake's last words)" in str(error) for error in errors)
    later = await w.done([w.call(0, summed(full(w, 0)))])
    assert str(later[0]) == str(errors[0])


async def test_s3_an_init_that_raises_fails_the_calls(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(1)

    def refuse(*args: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(w.nccl.Communicator, "init", refuse)
    errors = await w.done([w.call(0, summed(full(w, 0))) for _ in range(2)])
    assert all("connecting 1 ranks: no such device" in str(error) for error in errors)


async def test_s3_opening_can_be_given_up_while_a_rank_is_missing(world: Make, until: Until) -> None:
    w = world(3)
    calls = [w.call(rank, summed(full(w, rank))) for rank in (1, 2)]
    await until(lambda: len(w.posts["world"].uses) == 2)  # rank 0 never comes
    with transport_lock:
        for rank in (1, 2):
            w.group(rank).abort(CommunicatorAborted("rank 0 is lost"))
    errors = await w.done(calls)
    assert [str(error) for error in errors] == ["rank 0 is lost"] * 2
    assert "init" not in w.nccl.calls


async def test_s3_connecting_can_be_given_up_and_leaves_no_communicator(world: Make, until: Until) -> None:
    w = world(2)
    w.posts["world"] = post = _Post(2)
    call = w.call(0, summed(full(w, 0)))  # rank 1 got the id and hangs before it connects
    await until(lambda: "init" in w.nccl.calls)
    assert post.uses == [0]
    with transport_lock:
        w.group(0).abort(CommunicatorAborted("rank 1 is lost"))
    assert str((await w.done([call]))[0]) == "rank 1 is lost"
    await until(lambda: not w.comm(0).is_valid)


async def test_s3_what_is_connected_just_when_it_is_given_up_is_let_go_of(world: Make, until: Until) -> None:
    w = world(1)
    group = w.group(0)
    with transport_lock:  # no other thread polls
        group.open(lambda mine, then: None)
        deadline = time.monotonic() + 10
        while group.last is None and time.monotonic() < deadline:
            group.poll()
        assert group.last is not None
        comm = group.last.result(10)
        group.abort(CommunicatorAborted("given up"))
    assert "given up" in str((await w.done([w.call(0, summed(full(w, 0)))]))[0])
    await until(lambda: not comm.is_valid)


class _Post:
    """Returns rank 0 its own id and waits for no other rank."""

    def __init__(self, size: int) -> None:
        self.uses: list[int] = []

    def exchange(self, rank: int, mine: bytes | None, then: Then) -> None:
        self.uses.append(rank)
        then(mine, None)


# --- failures ----------------------------------------------------------------------------------------------


async def test_s3_a_call_that_fails_ends_the_group(world: Make) -> None:
    w = world(2)
    await check(w)
    w.nccl.refuse["allreduce"] = 3
    first, second = await w.done([w.call(0, summed(full(w, 0))) for _ in range(2)])
    assert isinstance(first, BackendError)
    assert (first.code, str(first)) == (3, "NCCL: allreduce: internal error (3)")
    assert str(second) == str(first)
    assert str(w.group(0).poll_error()) == str(first)
    # The other rank has launched and waits on the device, until its communicator is aborted too.
    await w.done([w.call(1, summed(full(w, 1)))])
    assert not w.streams[1].query()
    with transport_lock:
        assert w.group(1).poll_error() is None
        w.group(1).abort(BackendError("rank 0 failed"))
    w.streams[1].synchronize()


async def test_s3_an_error_that_comes_up_later_is_found_by_polling(world: Make, until: Until) -> None:
    w = world(2)
    await check(w)
    w.nccl.hang(1)
    for rank in range(2):
        await w.done([w.call(rank, summed(full(w, rank)))])
    with transport_lock:
        assert w.group(0).poll_error() is None
    w.comm(0).fail_later()
    with transport_lock:
        error = w.group(0).poll_error()
    assert isinstance(error, BackendError)
    assert error.code == 6
    assert str(error) == (
        "NCCL: an earlier call failed: remote process exited or there was a network error (the fake's last words)"
    )
    w.streams[0].synchronize()  # aborted: its kernel does not wait any more
    assert not w.comm(0).is_valid


async def test_s3_an_error_while_nccl_launches_belongs_to_the_call(
    world: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(1, dawdle=0)
    await check(w)
    monkeypatch.setattr(w.comm(0), "launch", lambda works, stream: setattr(w.comm(0), "pending", lambda: False))
    call = w.call(0, summed(full(w, 0)))
    behind = w.call(0, summed(full(w, 0)))
    await until(lambda: len(w.owned[0]) > 0)
    assert not call.done()
    w.comm(0).fail_later(2)
    first, second = await w.done([call, behind])
    assert (code_of(first), code_of(second)) == (2, 2)
    assert "allreduce: unhandled system error" in str(first)


async def test_s3_abort_ends_what_hangs_on_the_device_and_everything_after(world: Make) -> None:
    w = world(2)
    await check(w)
    w.nccl.hang(1)
    t = full(w, 0)
    slots = [w.group(0).launch_order.take() for _ in range(2)]
    enqueued = w.call(0, summed(t), slot=slots[0])
    waits = w.call(0, summed(full(w, 0)), slot=slots[1])
    assert (await w.done([enqueued])) == [None]
    assert not waits.done()
    assert not w.streams[0].query()
    with transport_lock:
        w.group(0).abort(CommunicatorAborted("given up"))
        w.group(0).abort(CommunicatorAborted("again"))
    assert str((await w.done([waits]))[0]) == "given up"  # whose slot was never the first
    w.streams[0].synchronize()
    assert str((await w.done([w.call(0, summed(t))]))[0]) == "given up"
    assert str(w.group(0).poll_error()) == "given up"


async def test_s3_what_a_call_that_failed_gave_is_in_use_until_the_abort_is_over(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(2)
    await check(w)
    w.nccl.hang(1)
    assert (await w.done([w.call(0, summed(full(w, 0)))])) == [None]  # the group's stream is stuck
    let_go = threading.Event()
    comm = w.comm(0)
    abort = comm.abort
    monkeypatch.setattr(comm, "abort", lambda: (let_go.wait(10), abort()))
    w.streams[0] = torch.cuda.Stream(device=0)
    w.nccl.refuse["allreduce"] = 3
    (error,) = await w.done([w.call(0, summed(full(w, 0)))])
    assert code_of(error) == 3
    assert not w.streams[0].query()
    let_go.set()
    w.streams[0].synchronize()


async def test_s3_an_abort_that_hangs_holds_up_nobody(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(1)
    await check(w)
    let_go = threading.Event()
    comm = w.comm(0)
    abort = comm.abort
    monkeypatch.setattr(comm, "abort", lambda: (let_go.wait(10), abort()))
    with transport_lock:
        w.group(0).abort(CommunicatorAborted("given up"))
    assert str((await w.done([w.call(0, summed(full(w, 0)))]))[0]) == "given up"
    let_go.set()


# --- its end -----------------------------------------------------------------------------------------------


async def test_s3_a_released_group_is_made_again(world: Make) -> None:
    w = world(2)
    for round in range(3):
        await check(w)
        old = [w.group(rank) for rank in range(2)]
        await asyncio.gather(*(ended(w, group, drained=True) for group in old))
        assert all(w.group(rank) is not old[rank] for rank in range(2))
        assert w.nccl.calls.count("destroy") == 2 * (round + 1)
        error = (await w.done([w.call(0, summed(full(w, 0)), group=old[0])]))[0]
        assert "destroyed" in str(error)
        w.posts.clear()
    assert "abort" not in w.nccl.calls


async def test_s3_a_rank_that_does_not_close_is_not_waited_for_long(
    world: Make, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    w = world(2)
    await check(w)
    await ended(w, w.group(0), drained=True)
    await until(lambda: w.nccl.calls[-2:] == ["finalize", "abort"])  # nor is its thread, on a busy machine
    # One whose abort does not come back either.
    let_go = threading.Event()
    comm = w.comm(1)
    abort = comm.abort
    monkeypatch.setattr(comm, "abort", lambda: (let_go.wait(10), abort()))
    await ended(w, w.group(1), drained=False)
    let_go.set()


async def test_s3_closing_all_releases_every_communicator(world: Make) -> None:
    w = world(2)
    await check(w, "a")
    await check(w, "b")
    w.group(0, "never opened")
    await w.close(drained=True)
    await w.close(drained=True)
    assert not any(comm.is_valid for comm in w.nccl.communicators)
    assert w.nccl.calls.count("destroy") == 4
    assert not any(len(owned) for owned in w.owned)
    assert not any(list(owned) for owned in w.owned)


async def test_s3_closing_while_it_is_opened_fails_what_waits(world: Make, until: Until) -> None:
    w = world(2)
    w.posts["world"] = _Post(2)
    call = w.call(0, summed(full(w, 0)))
    await until(lambda: "init" in w.nccl.calls)
    await w.close(drained=False)
    assert "destroyed" in str((await w.done([call]))[0])
    await until(lambda: not w.comm(0).is_valid)


# --- streams -----------------------------------------------------------------------------------------------


async def test_s3_kernels_are_on_a_stream_of_the_groups_own(world: Make) -> None:
    w = world(2)
    await check(w, "a")
    await check(w, "b")
    groups = [w.group(rank, name) for name in ("a", "b") for rank in range(2)]
    own = [group.stream for group in groups if group.stream is not None]
    assert [group.comm.streams for group in groups] == [{stream.cuda_stream} for stream in own]
    assert not set(own) & set(w.streams)
    assert len({(stream.device_index, stream.cuda_stream) for stream in own}) == 4


async def test_s3_an_operation_does_not_wait_for_the_producers_of_later_ones(world: Make) -> None:
    w = world(2)
    await check(w, "a")
    await check(w, "b")
    w.group(1, "b").comm.hangs = True
    first = w.streams[0]
    t = full(w, 0, 2.0)
    await w.done([w.call(0, summed(t), name="a"), w.call(1, summed(full(w, 1, 2.0)), name="a")])
    w.streams[0] = other = torch.cuda.Stream(device=0)
    await w.done([w.call(0, summed(full(w, 0)), name="b")])  # its kernel waits for rank 1
    w.streams[0] = later = torch.cuda.Stream(device=0)
    later.wait_stream(other)
    assert (await w.done([w.call(0, summed(full(w, 0)), name="a")])) == [None]
    with torch.cuda.stream(first):
        t.mul_(3)  # the next step of the first operation
    await asyncio.wait_for(asyncio.to_thread(first.synchronize), 10)
    assert t.cpu().eq(12.0).all()
    assert not later.query()
    with transport_lock:
        for name in ("a", "b"):
            w.group(0, name).abort(CommunicatorAborted("given up"))
    later.synchronize()


async def test_s3_what_an_operation_lets_go_of_is_reused_behind_the_kernel(world: Make) -> None:
    w = world(2, dawdle=5)
    outs = [[torch.empty(64, device=w.device(rank)) for rank in range(2)] for _ in range(10)]

    def widened(out: Tensor, rank: int) -> Step:
        def step(n: NcclNative, done: Done) -> None:
            made = [torch.full_like(out, rank + 1.0)]  # on the operation's stream

            def then(error: Failure) -> None:
                with torch.cuda.stream(w.streams[rank]):
                    out.copy_(made.pop())
                    torch.full_like(out, 100.0)
                done(error)

            n.start(Primitive("allreduce", made[0], op=ReduceOp.MEAN), then)

        return step

    await w.succeed([w.call(rank, widened(pair[rank], rank)) for pair in outs for rank in range(2)])
    assert all(out.cpu().eq(1.5).all() for pair in outs for out in pair)


# --- order -------------------------------------------------------------------------------------------------


async def test_s3_a_done_that_issues_more_keeps_the_order(world: Make) -> None:
    """Hundreds of calls wait for the opening; each makes another when it is enqueued: no recursion, none lost."""
    w = world(1)
    t = full(w, 0, 1.0, 1)
    order: list[int] = []
    count = 400

    def call(number: int) -> Step:
        def start(n: NcclNative, done: Done) -> None:
            def next_one(error: Failure) -> None:
                order.append(number)
                if number < count:
                    n.start(Primitive("broadcast", t), last)
                else:
                    done(error)

            def last(error: Failure) -> None:
                order.append(number + count)
                done(error)

            n.start(Primitive("broadcast", t), next_one)

        return start

    await w.succeed([w.call(0, call(number)) for number in range(count)])
    firsts, lasts = [n for n in order if n < count], [n - count for n in order if n >= count]
    assert firsts == lasts == list(range(count))  # where it opens in between, some lasts come before later firsts


@pytest.mark.parametrize(("size", "name"), [(1, "SPIN_ALONE_SECONDS"), (2, "SPIN_SECONDS")])
async def test_s3_what_nccl_launches_soon_is_waited_for_at_once(
    world: Make, monkeypatch: pytest.MonkeyPatch, size: int, name: str
) -> None:
    monkeypatch.setattr(module, name, 10.0)
    w = world(size, dawdle=5, seed=2)
    await check(w)
    enqueued: list[Failure] = []

    def call(rank: int) -> Step:
        def step(n: NcclNative, done: Done) -> None:
            n.start(Primitive("broadcast", w.kept[rank]), enqueued.append)
            assert enqueued.pop() is None  # so `wait_stream` has something to order a stream behind
            done(None)

        return step

    await w.succeed([w.call(rank, call(rank)) for _ in range(5) for rank in range(size)])
