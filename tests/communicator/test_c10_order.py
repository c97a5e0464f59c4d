"""C10: ranks that disagree all get an error with all sides, soon, and the communicator continues."""

import asyncio
import re
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of
from aiodist.communicator.oplog import Latest

pytestmark = pytest.mark.drawn(3)

processes = pytest.mark.ranks(2, 3, backend=("openmpi", "mpich", "gloo"))

DISAGREEMENTS: dict[str, tuple[Any, Any, str, str]] = {
    "kind": (lambda c: c.allreduce(torch.ones(4)), lambda c: c.broadcast(torch.ones(4)), "allreduce", "broadcast"),
    "count": (lambda c: c.allreduce(torch.ones(4)), lambda c: c.allreduce(torch.ones(5)), r"\[4\]", r"\[5\]"),
    "dtype": (
        lambda c: c.allreduce(torch.ones(4)),
        lambda c: c.allreduce(torch.ones(4, dtype=torch.int64)),
        "float32",
        "int64",
    ),
    "op": (lambda c: c.allreduce(torch.ones(4)), lambda c: c.allreduce(torch.ones(4), "max"), "sum", "max"),
    "root": (lambda c: c.broadcast(torch.ones(4), 0), lambda c: c.broadcast(torch.ones(4), 1), "root 0", "root 1"),
    "barrier": (lambda c: c.barrier(), lambda c: c.allreduce(torch.ones(4)), "barrier", "allreduce"),
    "object": (lambda c: c.broadcast_object(1, 0), lambda c: c.broadcast_object(1, 1), "root 0", "root 1"),
    "shape": (
        lambda c: c.allreduce(torch.ones(2, 3)),
        lambda c: c.allreduce(torch.ones(3, 2)),
        r"\[2, 3\]",
        r"\[3, 2\]",
    ),
    "gather": (lambda c: c.gather(torch.ones(3), 0), lambda c: c.gather(torch.ones(3), 1), "root 0", "root 1"),
    "list": (lambda c: c.allreduce(torch.ones(4)), lambda c: c.allreduce([torch.ones(4)]), "sum at", "list of 1"),
    "number": (lambda c: c.broadcast(1), lambda c: c.broadcast(torch.ones(1, dtype=torch.int64)), "number", "root 0"),
    "implementation": (
        lambda c: c.allreduce(torch.ones(4), impl="ring"),
        lambda c: c.allreduce(torch.ones(4), impl="doubling"),
        "by ring",
        "by doubling",
    ),
    "sizes": (
        lambda c: c.reduce_scatter(torch.ones(6), sizes=[6] + [0] * (c.size - 1)),
        lambda c: c.reduce_scatter(torch.ones(6), sizes=[0] * (c.size - 1) + [6]),
        r"sizes \[6, 0",
        r"sizes \[0",
    ),
    "long": (lambda c: c.allreduce(torch.ones(1 << 18)), lambda c: c.barrier(), "262144", "barrier"),
    "short": (lambda c: c.allreduce(torch.ones(4)), lambda c: c.scan(torch.ones(1 << 18)), r"\[4\]", "scan"),
    "moved": (
        lambda c: c.allgather(torch.ones(c.rank + 1)),
        lambda c: c.alltoall([torch.ones(3)] * c.size),
        "allgather",
        "alltoall",
    ),
    "scatter": (
        lambda c: c.scatter([torch.ones(3)] * c.size if c.rank == 0 else None),
        lambda c: c.scatter(None, out=torch.empty(3, dtype=torch.int32)),
        "scatter float32",
        "scatter int32",
    ),
    "lists of lists": (
        lambda c: c.alltoall([[torch.ones(2)] * c.size] * 2),
        lambda c: c.alltoall([torch.ones(2)] * c.size),
        "2 lists",
        "alltoall float32 at",
    ),
}


async def disagree(coll: Communicator, what: str, *, odd: int = 0) -> str:
    """Issue one operation on rank `odd` and another on the other ranks, and return the error of this rank."""
    first, second, ours, theirs = DISAGREEMENTS[what]
    with pytest.raises(aiodist.MismatchError) as caught:
        async with asyncio.timeout(10):  # no rank waits for the time-out
            await (first if coll.rank == odd else second)(coll)
    text = str(caught.value)
    assert re.search(ours, text), text
    assert re.search(theirs, text), text
    assert text.count(__file__) >= 2, text  # the lines of both sides
    return text


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("what", DISAGREEMENTS)
async def test_c10_every_rank_is_told_and_all_goes_on(coll: Communicator, what: str) -> None:
    for _ in range(2):
        text = await disagree(coll, what)
        assert "rank 0: " in text
        assert "rank 1: " in text or "ranks 1" in text
        assert await coll.allreduce(coll.rank + 1) == coll.size * (coll.size + 1) // 2
        assert [t.item() for t in await coll.allgather(torch.tensor(coll.rank))] == list(range(coll.size))


@pytest.mark.drawn(2)
@processes
async def test_c10_every_rank_is_told_over_processes(coll: Communicator) -> None:
    for what in DISAGREEMENTS:
        await disagree(coll, what)
        assert await coll.allreduce(coll.rank + 1) == coll.size * (coll.size + 1) // 2
    pieces = await coll.allgather(torch.full((coll.rank + 1,), float(coll.rank)))
    assert [len(piece) for piece in pieces] == list(range(1, coll.size + 1))


@pytest.mark.ranks(2, 3)
async def test_c10_an_int_meets_a_float(coll: Communicator) -> None:
    with pytest.raises(aiodist.MismatchError, match=r"rank 0: allreduce float sum .*; ranks? 1.*: allreduce int"):
        await coll.allreduce(1 if coll.rank else 1.5)
    with pytest.raises(aiodist.MismatchError, match=r"allgather float number .*allgather int number"):
        await coll.allgather(1 if coll.rank else 1.5)
    assert await coll.allreduce(1 if coll.rank else 1.5, "mean") == (1.5 + coll.size - 1) / coll.size


@pytest.mark.ranks(2, 3)
async def test_c10_within_a_host_nothing_is_written(coll: Communicator) -> None:
    other = await coll.dup()
    t = torch.full((5,), float(coll.rank))
    with pytest.raises(aiodist.MismatchError) as caught:
        await other.allreduce(t, op="max" if coll.rank else "sum")
    assert ("unspecified" in str(caught.value)) == parts_of(other).dispatcher.agreement.several


@pytest.mark.ranks(2, 3, backend=("openmpi", "gloo", "shm"))
@pytest.mark.parametrize("numel", [5, 1 << 16, 1 << 21])
async def test_c10_processes_of_a_host_write_nothing(coll: Communicator, numel: int) -> None:
    for one in (torch.full((numel,), float(coll.rank)), coll.arena_empty(numel).fill_(coll.rank)):
        with pytest.raises(aiodist.MismatchError) as caught:
            await coll.allreduce(one, op="max" if coll.rank else "sum")
        assert "unspecified" not in str(caught.value)
        assert one.eq(coll.rank).all()
        assert (await coll.allreduce(one))[0] == sum(range(coll.size))


@pytest.mark.ranks(3)
async def test_c10_later_errors_name_the_first_and_three_in_a_row_are_the_end(coll: Communicator) -> None:
    other = await coll.dup()
    odd = coll.rank == 2
    with pytest.raises(aiodist.MismatchError, match="operation #0: "):
        await other.allreduce(torch.ones(3 + odd))
    assert await other.allreduce(1) == 3
    handles = [other.allreduce(torch.ones(3 + odd)) for _ in range(3)]
    last = other.allreduce(torch.ones(4))
    for i, handle in enumerate(handles):
        since = r" \(out of step since #2\)" if i else ""  # #1 agreed
        with pytest.raises(aiodist.MismatchError, match=f"operation #{i + 2}{since}:"):
            await handle
    with suppress(aiodist.MismatchError):  # pending at the abort, or finished before
        await last
    await asyncio.sleep(1)  # waiting tasks are notified first
    for either in (aiodist.CommunicatorAborted, aiodist.MismatchError):  # a task that had not waited may be the first
        with pytest.raises(either, match="out of step since #2"):
            other.allreduce(1)
    assert await coll.allreduce(1) == 3


@pytest.mark.ranks(3)
async def test_c10_a_rank_that_comes_later_hears_too(coll: Communicator) -> None:
    other = await coll.dup()
    if coll.rank == 2:
        await asyncio.sleep(5)
    with pytest.raises(aiodist.MismatchError, match=r"rank 0: .*max"):
        await other.allreduce(torch.ones(3), op="max" if coll.rank == 0 else "sum")
    assert await other.allreduce(1) == 3


@pytest.mark.ranks(2)
async def test_c10_what_is_caught_is_not_told_again(coll: Communicator) -> None:
    """No later barrier, nor the close, knows of it: a program that caught the error ends well."""
    other = await coll.dup()
    await disagree(other, "op")
    await other.barrier()
    await other.aclose()


@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2, backend=("openmpi", "gloo"))
async def test_c10_a_close_that_meets_one_call_more_says_so_and_meets_again(coll: Communicator) -> None:
    other = await coll.dup()
    handle = other.allreduce(torch.ones(3)) if coll.rank == 0 else None
    with pytest.raises(aiodist.MismatchError, match=r"rank.* 0: allreduce.*close|rank 1.*: close"):
        await (other.aclose() if handle is None else handle)
    await other.aclose()  # of rank 0 for the first time
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(2)
async def test_c10_tasks_that_interleave_differently(coll: Communicator) -> None:
    async def training() -> None:
        await coll.allreduce(torch.ones(3))

    async def evaluation() -> None:
        await coll.allreduce(torch.ones(3), op="max")

    order = [training, evaluation] if coll.rank == 0 else [evaluation, training]
    tasks = [asyncio.create_task(one()) for one in order]
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, aiodist.MismatchError) for error in ended)
    assert "training" in str(ended[0])
    assert "evaluation" in str(ended[0])


@pytest.mark.ranks(2)
async def test_c10_tasks_that_run_in_turn_are_no_mismatch(coll: Communicator) -> None:
    async def step() -> Any:
        return await coll.allreduce(1)

    assert await asyncio.wait_for(step(), 50) == 2
    assert await asyncio.create_task(step()) == 2


@pytest.mark.ranks(3)
async def test_c10_a_late_rank_is_no_mismatch(coll: Communicator) -> None:
    if coll.rank == 1:
        await asyncio.sleep(30)
    assert await coll.allreduce(1) == 3
    await coll.barrier()


@pytest.mark.ranks(3)
async def test_h8_a_deadline_names_the_late_ranks_and_where_they_are(coll: Communicator) -> None:
    await coll.allreduce(1)
    if coll.rank == 2:
        await asyncio.sleep(20)
        assert await coll.allreduce(coll.rank) == 3
        return
    handle = coll.allreduce(coll.rank, timeout=5)
    with pytest.raises(aiodist.OperationTimeout, match=r"allreduce #1 .*late: rank 2 \(after allreduce") as caught:
        await handle
    assert list(caught.value.late) == [2]
    assert __file__ in caught.value.late[2]
    with pytest.raises(aiodist.OperationTimeout, match=r"pending: allreduce #1 .*late: rank 2") as caught:
        async with aiodist.timeout(5):
            await handle
    assert list(caught.value.late) == [2]
    assert await handle == 3  # it went on


@pytest.mark.ranks(2)
async def test_h8_a_late_receive_can_be_withdrawn(coll: Communicator) -> None:
    receive = coll.recv(timeout=0.5)
    with pytest.raises(aiodist.OperationTimeout, match="recv"):
        await receive
    assert receive.cancel()
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_h8_a_plain_timeout_gets_a_note(coll: Communicator) -> None:
    if coll.rank == 0:
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(3):
                await coll.barrier()
        cancelled: Any = caught.value.__cause__
        assert any("while awaiting barrier #0" in note for note in cancelled.__notes__)
    else:
        await asyncio.sleep(10)
        await coll.barrier()


@pytest.mark.ranks(3)
async def test_c10_abort_reaches_all(coll: Communicator) -> None:
    other = await coll.dup()
    if coll.rank == 0:
        other.abort("had enough")
    with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
        await other.barrier()
    with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
        other.allreduce(1)
    assert await coll.allreduce(1) == 3


@pytest.mark.ranks(2, backend=("openmpi", "gloo"))
async def test_c10_what_waits_at_the_gate_when_given_up_gives_its_buffers_back(coll: Communicator) -> None:
    other = await coll.dup()
    t = torch.ones(1000)
    if coll.rank == 0:
        handle = other.allreduce(t)
        other.abort("had enough")
        with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
            await handle
    else:
        with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
            await other.recv()
    await coll.barrier()
    assert (await coll.allreduce(t)).tolist() == [2.0] * 1000


@pytest.mark.ranks(2, 3)
async def test_c10_who_watches_for_ranks_that_are_late_keeps_no_tensors(coll: Communicator) -> None:
    """An operation that was pending when the watch looked frees its memory at its end, not at the next look."""
    if coll.rank == 0:
        await asyncio.sleep(0.25)  # the others are looked at twice
    t = torch.ones(4)
    freed = weakref.ref(t)
    await coll.allreduce(t)
    del t
    for _ in range(10):
        await asyncio.sleep(0)
    assert freed() is None


def test_c10_what_ranks_disagreed_on_is_not_kept_for_ever() -> None:
    latest: Latest[str] = Latest()
    for number in range(5000):
        latest[number] = "a failure"
    assert list(latest) == list(range(5000 - 4096, 5000))
