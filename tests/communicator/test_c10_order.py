"""C10: ranks that disagree get an error with both sides, all of them, soon, in both modes."""

import asyncio
import re
import time
import weakref
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator

both_modes = pytest.mark.ranks(2, 3)
unchecked = pytest.mark.ranks(2, 3, checked=False)
processes = pytest.mark.ranks(2, backend=("mpi", "mpich", "gloo"), checked=False)
processes_checked = pytest.mark.ranks(2, backend=("mpi", "mpich", "gloo"))

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
    "gather": (lambda c: c.gather(torch.ones(3), 0), lambda c: c.gather(torch.ones(3), 1), "root 0", "root 1"),
}


async def disagree(coll: Communicator, what: str) -> Any:
    """Have rank 0 issue one thing and the others another, and return the error that each gets."""
    first, second, ours, theirs = DISAGREEMENTS[what]
    began = asyncio.get_running_loop().time()

    async def both() -> None:
        await (first if coll.rank == 0 else second)(coll)
        await coll.barrier()  # what did not need the others is found out here

    with pytest.raises(aiodist.MismatchError) as caught:
        await both()
    assert asyncio.get_running_loop().time() - began < 1.5
    text = str(caught.value)
    assert re.search(ours, text)
    assert "rank 0" in text
    assert "rank 1" in text or "rank 2" in text
    assert __file__ in text  # the lines of both sides
    return theirs, text


@both_modes
@pytest.mark.parametrize("what", DISAGREEMENTS)
async def test_c10_checked_nothing_is_sent_and_all_goes_on(coll: Communicator, what: str) -> None:
    theirs, text = await disagree_checked(coll, what)
    assert theirs.replace("\\", "") in text
    assert await coll.allreduce(1) == coll.size


async def disagree_checked(coll: Communicator, what: str) -> Any:
    first, second, _, theirs = DISAGREEMENTS[what]
    t = asyncio.get_running_loop().time()
    with pytest.raises(aiodist.MismatchError) as caught:
        await (first if coll.rank == 0 else second)(coll)
    assert asyncio.get_running_loop().time() - t < 1
    return theirs, str(caught.value)


@unchecked
@pytest.mark.parametrize("what", DISAGREEMENTS)
async def test_c10_unchecked_it_is_found_within_a_second(coll: Communicator, what: str) -> None:
    other = await coll.dup()
    theirs, text = await disagree(other, what)
    assert theirs.replace("\\", "") in text
    with pytest.raises(aiodist.CommunicatorAborted, match="disagree"):
        other.allreduce(1)
    assert await coll.allreduce(1) == coll.size  # only the one is given up


@processes_checked
async def test_c10_checked_over_a_library(coll: Communicator) -> None:
    for what in DISAGREEMENTS:
        began = time.monotonic()
        theirs, text = await disagree_checked(coll, what)
        assert theirs.replace("\\", "") in text
        assert time.monotonic() - began < 1.5
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(2, backend="gloo", checked=False)
@pytest.mark.ranks(2, backend=("mpi", "mpich"), checked=False)
@pytest.mark.parametrize("what", ["kind", "op", "count"])
async def test_c10_unchecked_over_a_library(coll: Communicator, what: str) -> None:
    other = await coll.dup()
    theirs, text = await disagree(other, what)
    assert theirs.replace("\\", "") in text
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(2)
async def test_c10_tasks_that_interleave_differently(coll: Communicator) -> None:
    async def training() -> None:
        await coll.allreduce(torch.ones(3))

    async def evaluation() -> None:
        await coll.allreduce(torch.ones(3))

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

    assert await asyncio.wait_for(step(), 5) == 2
    assert await asyncio.create_task(step()) == 2


@unchecked
async def test_c10_what_passed_unseen_is_found_at_the_barrier(coll: Communicator) -> None:
    other = await coll.dup()
    # Each rank is its own root: nobody waits for anybody, and the wrong data would stay unnoticed.
    handles = [other.broadcast(torch.ones(0), root=min(coll.rank, 1)) for _ in range(3)]
    await aiodist.gather(*handles)
    with pytest.raises(aiodist.MismatchError, match=r"(?s)root 0.*root 1"):
        await other.barrier()
    assert await coll.allreduce(1) == coll.size


@unchecked
async def test_c10_what_passed_unseen_is_found_at_close(coll: Communicator) -> None:
    other = await coll.dup()
    await other.broadcast(torch.ones(0), root=min(coll.rank, 1))
    with pytest.raises(aiodist.MismatchError, match="root 1"):
        await other.aclose()


@pytest.mark.ranks(3, checked=False)
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


@pytest.mark.ranks(2)
async def test_c10_what_waits_for_a_verdict_when_given_up_gives_its_buffers_back(coll: Communicator) -> None:
    other = await coll.dup()
    t = torch.ones(1000)
    if coll.rank == 0:
        handle = other.allreduce(t)
        other.abort("had enough")
        with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
            await handle
    await coll.barrier()
    assert (await coll.allreduce(t)).tolist() == [2.0] * 1000


@both_modes
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
