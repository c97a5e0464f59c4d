"""H7: each rank that learns of a failure aborts the communicator, at any place of the failure."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

import aiodist
from aiodist import (
    BackendError,
    Communicator,
    CommunicatorAborted,
    CommunicatorClosed,
    Handle,
    OperationTimeout,
    PeerLost,
    RemoteError,
    init,
)
from aiodist.communicator import parts_of
from aiodist.handles import from_source, internals
from aiodist.testing import kill_rank, run_ranks
from aiodist.testing.seams.progress import transport_lock
from aiodist.testing.seams.world import Limits, opened


class Ready:
    """Finishes at the second poll."""

    looks = 0

    def poll(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def result(self) -> int:
        return self.looks


class Stubborn:
    """Does not end in time, nor at its cancellation."""

    async def close(self) -> None:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError:
            await asyncio.sleep(9)
            raise

    def abort(self) -> None:
        pass


class Quitter:
    """Aborts at its first notification."""

    def __init__(self, coll: Communicator) -> None:
        self._coll = coll

    def wake(self, handle: Handle[int], late: Exception | None, /) -> None:
        self._coll.abort("it is told")


async def given_up() -> None:
    async with init() as coll:
        ready = from_source(Ready(), "ready")
        internals.add_waiter(ready, Quitter(coll))
        assert await asyncio.wait_for(ready, 10) >= 2
        await coll.allreduce(1)


@pytest.mark.timeout(30)
async def test_h7_giving_up_while_the_loop_polls() -> None:
    """Waiting tasks are notified with the transport lock held: an abort must not wait for that lock."""
    with pytest.raises(CommunicatorAborted, match="it is told"):
        await given_up()


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3, backend=("local", "openmpi", "gloo", "shm"))
async def test_h7_a_close_that_one_rank_gives_up_is_told_to_the_others(coll: Communicator) -> None:
    sub = await coll.dup()
    await sub.allreduce(1)
    if coll.rank == 1:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sub.aclose(), 0.1)
    else:
        await asyncio.sleep(0.3)
        async with asyncio.timeout(10):
            with suppress(CommunicatorAborted):  # unless the close comes after the notification
                await sub.aclose()
        waits_for_rank_1 = coll.size == 2 or coll.rank == 2  # the other has heard of all that it has to
        told = r"rank 1: closing communicator 'world/dup1\.0' failed: Canc" + ("" if waits_for_rank_1 else "|is closed")
        with pytest.raises((CommunicatorAborted, CommunicatorClosed), match=told):
            sub.allreduce(1)
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(2, backend=("local", "gloo"))
async def test_l2_a_second_close_waits_for_the_first(coll: Communicator) -> None:
    sub = await coll.dup()
    await asyncio.sleep(0.2 * coll.rank)
    first = asyncio.ensure_future(sub.aclose())
    await asyncio.sleep(0)
    second = asyncio.ensure_future(sub.aclose())
    if coll.rank == 0:
        impatient = asyncio.ensure_future(sub.aclose())
        await asyncio.sleep(0)
        assert impatient.cancel()
    await second
    assert first.done()
    await first
    await sub.aclose()


def test_l2_the_end_of_the_block_waits_for_what_is_being_closed() -> None:
    async def main(rank: int) -> bool:
        async with init() as coll:
            closing = asyncio.ensure_future((await coll.dup()).aclose())
            await asyncio.sleep(rank)
        return closing.done()

    assert run_ranks(3, main) == [True] * 3


def test_l2_what_another_task_does_not_close_in_time_is_named() -> None:
    async def main(rank: int) -> None:
        async with opened(Limits(drain=0.5)) as coll:
            sub = await coll.dup()
            parts_of(sub).registry.members.admit(sub, Stubborn())
            closing = asyncio.ensure_future(sub.aclose())
            await asyncio.sleep(0)
            with pytest.raises(OperationTimeout, match=r"'world/dup1\.0' is still being closed by another task"):
                await sub.aclose()
            with pytest.raises(OperationTimeout, match="did not end in time"):
                await closing

    run_ranks(2, main)


def test_l2_a_block_that_raises_ends_what_is_being_closed() -> None:
    async def main(rank: int) -> None:
        closing: list[asyncio.Task[None]] = []

        async def block() -> None:
            async with init() as coll:
                sub = await coll.dup()
                if rank == 0:
                    closing.append(asyncio.create_task(sub.aclose()))
                    await asyncio.sleep(0.1)
                    raise ValueError("boom")
                await coll.recv(src=0)

        with pytest.raises(ValueError if rank == 0 else RemoteError, match="boom"):
            await block()
        assert all(task.done() for task in closing)
        for task in closing:
            with pytest.raises(CommunicatorAborted, match="boom"):
                await task

    run_ranks(2, main)


@pytest.mark.parametrize("src", [0, aiodist.ANY])
def test_h3_memory_of_a_receive_that_nothing_matched_is_free_after_a_failure(
    src: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bytes that no transfer writes are free again: in a notebook the next attempt uses the same tensors."""
    t = torch.ones(4)

    async def attempt(*, fail: bool) -> None:
        async with init() as coll:
            if fail:
                handle = coll.recv(t, src)
                raise ValueError(f"while {handle.op} waits")
            await coll.allreduce(t)

    with pytest.raises(ValueError, match="while recv waits"):
        aiodist.run(attempt(fail=True))
    gc.collect()
    aiodist.run(attempt(fail=False))
    assert "nobody awaited" not in capfd.readouterr().err  # the failure itself was reported


def test_h7_what_was_lost_is_given_up_behind_the_end_of_the_world_too() -> None:
    """A thread may have asked for it before; after the end of the world no task can be notified."""

    async def main(number: int) -> None:
        with suppress(PeerLost):
            async with aiodist.init(elastic=True) as coll:
                side = await coll.dup()
                if number == 1:
                    kill_rank()
                await coll.barrier()
        for lost in (side, coll):
            lost.abort("the gradients are lost")

    run_ranks(2, main, elastic=(1, 2))


@pytest.mark.parametrize("kind", ["dup", "split", "group"])
def test_h8_what_is_made_goes_on_behind_a_deadline(kind: str) -> None:
    """One await raises it and names the late rank; the next one has what was made."""

    async def main() -> None:
        async with aiodist.init(timeout=0.2) as coll:
            if coll.rank == 1:
                await asyncio.sleep(1)
            arguments: dict[str, tuple[Any, ...]] = {"dup": (), "split": (0,), "group": ([0, 1],)}
            made = getattr(coll, kind)(*arguments[kind])
            if coll.rank == 0:
                with pytest.raises(aiodist.OperationTimeout, match=rf"{kind} #0 .*continues; late: rank 1") as caught:
                    await made
                assert set(caught.value.late) == {1}
                await asyncio.sleep(1)
            mine = await made
            assert mine is not None
            assert await mine.allreduce(coll.rank + 1, timeout=30) == 3

    run_ranks(2, main)


def test_h7_an_error_of_python_names_the_operation_too() -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            if coll.rank == 0:
                await coll.send(torch.zeros(2, dtype=torch.int8), 1)
                return
            with pytest.raises(TypeError, match="dtypes must agree") as caught:
                await coll.recv(torch.zeros(2), 0)
            (note, *_) = caught.value.__notes__
            assert note.startswith("raised in recv #0 issued at ")
            assert note.endswith(", communicator world, rank 1")

    run_ranks(2, main)


def test_h7_what_is_given_up_while_it_is_made_is_told_to_who_awaits_it_alone() -> None:
    told: list[str] = []

    async def main(rank: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: told.append(said["message"]))
        async with init() as coll:
            parent = await coll.dup()
            if rank == 0:
                with suppress(CommunicatorAborted):
                    await parent.dup()
            else:
                await asyncio.sleep(0.1)
                parent.abort("because")

    run_ranks(2, main)
    gc.collect()
    assert told == []


class TakesNoNote(Exception):
    __notes__ = "no list"  # type: ignore[assignment]


class RaisesWhenUnpickled:
    def __reduce__(self) -> tuple[object, ...]:
        return _raise, ()


def _raise() -> None:
    raise TakesNoNote("boom")


def test_h7_an_error_that_takes_no_note_reaches_who_awaits_it() -> None:
    async def main(rank: int) -> None:
        async with init() as coll:
            if rank == 1:
                await coll.send_object(RaisesWhenUnpickled(), 0)
                return
            with pytest.raises(TakesNoNote, match="boom"):
                await coll.recv_object(timeout=20)

    run_ranks(2, main)


@pytest.mark.ranks(2)
async def test_h7_an_abort_ends_every_operation(coll: Communicator) -> None:
    other = await coll.dup()
    operations = parts_of(other).dispatcher.operations
    t = torch.ones(6)
    if coll.rank == 0:
        handles: list[Handle[Any]] = [
            other.allreduce(torch.ones(1)),
            other.allreduce(t[1], name="a"),
            other.send(torch.ones(70_000), 1),
            other.recv(t[2], 1),
            other.allreduce([t[3]], name="b"),
        ]
        named = operations.find(handles[1])
        assert named is not None
        use = named.meets
        other.abort("had enough")
        assert named.state.value == "done"
        assert use.operation is None
        assert not list(operations)
        assert not operations.in_flight()
        for handle in handles:
            with pytest.raises(CommunicatorAborted, match=f"had enough.*{handle.op}"):
                await handle
        await coll.barrier()
    else:
        await coll.barrier()
    assert (await coll.allreduce(t))[5] == coll.size  # the memory of operations without transfers is free


@pytest.mark.ranks(2)
async def test_h7_a_receive_of_an_aborted_communicator_takes_no_message(coll: Communicator) -> None:
    other = await coll.dup()
    t = torch.zeros(3)
    receiving = other.recv(t, coll.rank)
    other.abort("had enough")
    with pytest.raises(CommunicatorAborted, match="had enough"):
        await receiving
    assert not parts_of(other).dispatcher.operations.others
    assert (await coll.allreduce(t)).sum() == 0  # its memory is free


@pytest.mark.ranks(2, backend="shm")
async def test_h7_an_abort_precedes_the_errors_that_follow_from_it(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank leaves the shared memory before the rank that aborts has rejected its own operations."""
    ours = await coll.dup()
    await coll.barrier()
    if coll.rank == 0:
        failures = parts_of(ours).dispatcher.failures
        notify = failures.tell_abort

        def notify_early(text: str) -> None:
            notify(text)
            time.sleep(0.5)

        monkeypatch.setattr(failures, "tell_abort", notify_early)
        handle = ours.allgather_object("x")
        await asyncio.sleep(0.1)
        ours.abort("enough")
        with pytest.raises(CommunicatorAborted, match="enough"):
            await handle
    else:
        with pytest.raises(CommunicatorAborted, match="enough"):
            await ours.recv(src=0)
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_h7_a_receive_that_waits_for_the_lock_at_an_abort_frees_its_memory(coll: Communicator) -> None:
    ours = await coll.dup()
    await coll.barrier()
    t = torch.zeros(4)
    if coll.rank == 0:
        locked, issued = threading.Event(), threading.Event()

        def hold() -> None:
            with transport_lock:
                locked.set()
                issued.wait(9)

        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait()
        handle = ours.recv(t, src=1)  # another thread has the lock
        assert parts_of(ours).dispatcher.progress.inbox
        issued.set()
        ours.abort("enough")
        holder.join()
        with pytest.raises(CommunicatorAborted):
            await handle
    assert (await coll.allreduce(t)).tolist() == [0.0] * 4


@pytest.mark.ranks(2)
async def test_h7_a_close_ends_an_operation_whose_verdict_is_open(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer comes, and the close ends the wait for the liveness bound."""
    ours = await coll.dup()
    await coll.barrier()
    if coll.rank == 0:
        dispatcher = parts_of(ours).dispatcher
        monkeypatch.setattr(dispatcher.failures, "send", lambda *_: None)
        handle = ours.allgather_object("x")
        operation = dispatcher.operations.find(handle)
        assert operation is not None
        error = BackendError("the transport failed")
        dispatcher.progress.with_lock(dispatcher.settlement.settle, operation, None, error)
        dispatcher.lifetime.abort(PeerLost("rank 1 is lost", lost=1))
        assert not handle.done()
        dispatcher.lifetime.close()
        assert handle.done()
        with pytest.raises(PeerLost):
            await handle
    await coll.barrier()
    ours.abort("the end")
