"""C14: `name=` frees a collective from the order: it meets that of the other ranks by its name."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import re
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator, Handle
from aiodist.backends.arithmetic import SUPPORTED
from aiodist.backends.base import MOST_NAMES, NAMED, number_of_use
from aiodist.communicator import names, parts_of
from aiodist.handles import internals
from aiodist.testing import run_ranks
from aiodist.testing.seams.transport import DTYPES, tag_of
from aiodist.types import Op
from tests.support.blocking import blocked_until, rounds
from tests.support.simulated_cuda.simulation import simulated_cuda

pytestmark = pytest.mark.drawn(4)

some = pytest.mark.ranks(2, 3, 5)
processes = pytest.mark.ranks(2, 3, 5, backend=("openmpi", "mpich", "gloo", "shm"))

KINDS = [kind for kind in DTYPES if kind in SUPPORTED]
SIZES = (0, 1, 7, 300, 5000, 70_000)


def full(numel: int, kind: torch.dtype, value: int) -> Tensor:
    return torch.full((numel,), value).to(kind)


def any_op(kind: torch.dtype) -> Op:
    """Return an operator that leaves ones as they are."""
    return "bor" if kind is torch.bool else "prod"


def _allreduce(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    most = kind is not torch.bool and not kind.is_complex
    op: Any = "max" if most else "sum" if kind.is_complex else "bor"
    total = sum(range(c.size)) if op == "sum" else c.size - 1 if most else c.size > 1
    return c.allreduce(full(numel, kind, c.rank), op, name=name), full(numel, kind, total)


def _broadcast(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    root = numel % c.size
    return c.broadcast(full(numel, kind, c.rank), root, name=name), full(numel, kind, root)


def _allgather(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    expected = [full(numel + rank, kind, rank) for rank in range(c.size)]
    return c.allgather(expected[c.rank].clone(), name=name), expected


def _alltoall(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    sent = [full(numel + dst, kind, c.rank) for dst in range(c.size)]
    return c.alltoall(sent, name=name), [full(numel + c.rank, kind, src) for src in range(c.size)]


def _reduce_scatter(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    sizes = [numel] * c.size
    handle = c.reduce_scatter(full(numel * c.size, kind, 1), any_op(kind), sizes, name=name)
    return handle, full(numel, kind, 1)


def _list(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    return c.allreduce([full(numel, kind, 1), full(3, kind, 1)], any_op(kind), name=name), [
        full(n, kind, 1) for n in (numel, 3)
    ]


def _object(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    return c.allgather_object((name, c.rank), name=name), [(name, rank) for rank in range(c.size)]


def _number(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    return c.allreduce(c.rank + numel, name=name), sum(range(c.size)) + numel * c.size


def _barrier(c: Communicator, name: str, numel: int, kind: torch.dtype) -> tuple[Handle[Any], object]:
    return c.barrier(name=name), None


CALLS = [_allreduce, _allreduce, _broadcast, _allgather, _alltoall, _reduce_scatter, _list, _object, _number, _barrier]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype is expected.dtype and bool(torch.equal(found, expected))
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


Asked = tuple[str, Callable[..., tuple[Handle[Any], object]], int, torch.dtype]


def drawn(count: int, seed: int) -> list[Asked]:
    """Return that number of operations, the same on every rank."""
    dice = random.Random(seed)
    return [(f"op {i}", dice.choice(CALLS), dice.choice(SIZES), dice.choice(KINDS)) for i in range(count)]


async def one(coll: Communicator, asked: Asked) -> None:
    name, call, numel, kind = asked
    handle, expected = call(coll, name, numel, kind)
    assert same(await handle, expected), asked


async def together(*awaitables: Awaitable[Any]) -> list[Any]:
    async with asyncio.timeout(50):
        return await asyncio.gather(*awaitables)


# --- in any order --------------------------------------------------------------------------------------------


async def in_any_order(coll: Communicator, count: int, rounds: int) -> None:
    asked = drawn(count, coll.size)
    dice = random.Random(coll.rank)
    for _ in range(rounds):
        dice.shuffle(asked)
        await together(*[one(coll, each) for each in asked])


async def by_tasks(coll: Communicator, tasks: int, each: int) -> None:
    """Every task awaits one operation after the other; the tasks begin and continue in another order on each rank."""
    dice = random.Random(coll.rank)

    async def task(number: int) -> None:
        for name, call, numel, kind in drawn(each, number):
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            await one(coll, (f"task {number} {name}", call, numel, kind))

    numbers = list(range(tasks))
    dice.shuffle(numbers)
    await together(*map(task, numbers))


@pytest.mark.thorough
@some
async def test_c14_hundreds_meet_by_name_in_any_order(coll: Communicator) -> None:
    await in_any_order(coll, 200, 2)
    await by_tasks(coll, 20, 10)


@pytest.mark.drawn(1)
@processes
async def test_c14_hundreds_meet_by_name_over_processes(coll: Communicator) -> None:
    await in_any_order(coll, 100, 2)
    await by_tasks(coll, 8, 6)


@pytest.mark.thorough
@pytest.mark.ranks(4, 5)
@pytest.mark.usefixtures("two_hosts")
async def test_c14_they_meet_across_hosts(coll: Communicator) -> None:
    await in_any_order(coll, 100, 2)


@pytest.mark.ranks(1)
async def test_c14_alone(coll: Communicator) -> None:
    await in_any_order(coll, 50, 2)


async def after_another_ended(coll: Communicator, numel: int) -> None:
    """The leader issues both operations; rank 1 issues the first only after the end of the second: neither waits."""
    first, second = torch.ones(numel), torch.ones(numel)
    if coll.rank == 1:
        assert (await coll.allreduce(second, name="second"))[0] == coll.size
        await aiodist.gather(*[coll.recv_object(src) for src in range(coll.size) if src != 1])
        assert (await coll.allreduce(first, name="first"))[0] == coll.size
    else:
        handle = coll.allreduce(first, name="first")
        assert (await coll.allreduce(second, name="second"))[0] == coll.size
        assert not handle.done()
        await coll.send_object("second is over", 1)
        assert (await handle)[0] == coll.size


@pytest.mark.drawn(5)
@some
@processes
@pytest.mark.parametrize("numel", [4, 10_000, 2_000_000])
async def test_c14_none_waits_behind_another(coll: Communicator, numel: int) -> None:
    await together(after_another_ended(coll, numel))


@pytest.mark.drawn(3)
@some
@processes
async def test_c14_a_name_is_used_again_and_again(coll: Communicator) -> None:
    """A name is used more often than it has tags, and one rank is late."""
    for i in range(50):
        if coll.rank == i % coll.size:
            await rounds(3)
        assert await coll.allreduce(i, name="again") == i * coll.size


@some
@processes
async def test_c14_they_have_no_place_in_the_order(coll: Communicator) -> None:
    before = coll.seq
    for i in range(5):
        if coll.rank == i:
            beside = coll.allreduce(i, name="beside")
        assert await coll.allreduce(i) == i * coll.size
        await coll.barrier()
    assert await beside == sum(range(coll.size))
    assert coll.seq == before + 10


@pytest.mark.ranks(2, 3)
async def test_c14_two_tasks_each_with_its_names(coll: Communicator) -> None:
    async def train() -> float:
        for step in range(20):
            loss = await coll.allreduce(float(step), name="loss")
            await asyncio.sleep(0.001 * coll.rank)
        return loss

    async def evaluate() -> list[Any]:
        found = []
        for _ in range(7):
            found = await coll.allgather_object(coll.rank, name="score")
            await asyncio.sleep(0.002)
        return found

    assert await together(train(), evaluate()) == [19.0 * coll.size, list(range(coll.size))]


# --- what a handle says --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_c14_a_handle_tells_its_name(coll: Communicator) -> None:
    for use in range(3):
        handle = coll.allreduce(torch.ones(2), name="grads")
        assert (handle.op, handle.seq) == ("allreduce", use)
        assert str(handle).startswith(f"allreduce 'grads' #{use} issued at {__file__}:")
        await handle
    assert coll.statistics().named == 3
    assert coll.statistics().collectives == coll.seq


async def test_c14_a_dropped_one_is_told_with_its_name(until: Any) -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            coll.barrier(name="forgotten")
            await until(lambda: len(caught))

    told = rf"barrier 'forgotten' issued at {__file__}:\d+ in .* was never awaited"
    with pytest.warns(RuntimeWarning, match=told) as caught:
        await main()


@pytest.mark.ranks(2)
async def test_c14_cancelling_a_wait_leaves_it_alone(coll: Communicator) -> None:
    t = torch.ones(3)
    handle = coll.allreduce(t, name="cancelled") if coll.rank == 0 else None
    if handle is not None:
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.5):
                await handle
        assert "while awaiting allreduce 'cancelled' #0" in str(getattr(caught.value.__cause__, "__notes__", ""))
        assert not handle.cancel()
        with pytest.raises(aiodist.BufferInFlight, match="allreduce 'cancelled' #0"):
            coll.allreduce(t, name="another")
    await coll.barrier()
    await (handle or coll.allreduce(t, name="cancelled"))
    assert t.tolist() == [2.0] * 3
    assert await coll.allreduce(1, name="another") == 2  # the call that raised was no use of it


# --- mistakes at the call --------------------------------------------------------------------------------------


@some
async def test_c14_a_name_in_flight_twice_is_an_error(coll: Communicator) -> None:
    handle = coll.allreduce(torch.ones(3), name="twice")
    for call in (lambda: coll.allreduce(1, name="twice"), lambda: coll.barrier(name="twice")):
        with pytest.raises(
            ValueError, match=rf"name='twice' is in flight: .*allreduce 'twice' #0 issued at {__file__}:"
        ):
            call()
    await handle
    assert await coll.allreduce(1, name="twice") == coll.size
    assert coll.statistics().named == 2


@pytest.mark.ranks(2)
async def test_c14_a_name_is_a_text(coll: Communicator) -> None:
    wrong: Any = 7
    with pytest.raises(TypeError, match="name is int: expected a str"):
        coll.allreduce(torch.ones(2), name=wrong)
    with pytest.raises(ValueError, match="expected at least one character"):
        coll.barrier(name="")
    strange = "na\nme \N{SNOWMAN}" * 100
    assert await coll.allreduce(1, name=strange) == 2


@pytest.mark.ranks(2, backend=("openmpi", "gloo"))
async def test_c14_what_a_library_does_is_refused(coll: Communicator) -> None:
    library: Any = coll.backend
    with pytest.raises(ValueError, match=rf"impl='{library}' with name=: a library .* expected auto, .*ring") as caught:
        coll.allreduce(torch.ones(3), impl=library, name="native")
    assert "shm" in str(caught.value)
    for impl in ("shm", "ring", "doubling"):
        assert (await coll.allreduce(torch.ones(3), impl=impl, name="native"))[0] == 2
    # The library is skipped if the table names it.
    coll.selector.set("allreduce", library)
    await coll.barrier()
    assert (await coll.allreduce(torch.ones(100), name="by table"))[0] == 2


def test_c14_tensors_on_a_device_are_refused() -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            t = torch.ones(3, device=coll.device)
            for call in (coll.allreduce, coll.allgather, coll.broadcast):
                with pytest.raises(ValueError, match="name= with a tensor on cuda:0: expected the CPU"):
                    call(t, name="there")
            with pytest.raises(ValueError, match="impl='staged' with name=: it is for devices"):
                coll.allreduce(torch.ones(3), impl="staged", name="there")
            assert await coll.allreduce(1, name="there") == coll.size

    with simulated_cuda(devices=1):
        run_ranks(2, main)


@pytest.mark.ranks(3)
async def test_c14_there_are_only_so_many_names(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MOST_NAMES", 2)
    other = await coll.dup()
    handles = [other.allreduce(1, name=f"of rank {coll.rank}")] if coll.rank else []
    await asyncio.sleep(1)  # the leader has given both numbers
    handles.append(other.allreduce(1, name="third"))
    if coll.rank == 0:
        with pytest.raises(aiodist.CommunicatorError, match=r"name='third': communicator .* has 2 names already"):
            await handles[0]
    else:
        with pytest.raises(
            ValueError, match=r"name='fourth': communicator .* has 2 names already: expected one of them"
        ):
            other.barrier(name="fourth")
    await coll.barrier()
    other.abort("had enough")
    for handle in handles:
        with pytest.raises(aiodist.CommunicatorError, match=r"had enough|2 names already"):
            await handle


def test_c14_each_use_of_a_name_has_a_tag_of_its_own() -> None:
    tags = [tag_of(number_of_use(name, use)) for name in (0, 1, 2, MOST_NAMES - 1) for use in range(16)]
    assert len(set(tags)) == len(tags)
    assert min(tags) > 1 << 20  # the mailbox's
    assert max(tags) < tag_of(0)
    assert tag_of(number_of_use(5, 3)) == tag_of(number_of_use(5, 19))
    numbers = [number_of_use(name, use) for name in (0, MOST_NAMES - 1) for use in (0, 16, 1 << 31)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= NAMED
    assert max(numbers) < 1 << 59  # room for the bits of a key


# --- ranks that differ ---------------------------------------------------------------------------------------

DISAGREEMENTS: dict[str, tuple[Any, Any, str, str]] = {
    "op": (lambda c, t: c.allreduce(t, name="x"), lambda c, t: c.allreduce(t, "max", name="x"), "sum", "max"),
    "dtype": (
        lambda c, t: c.allreduce(t, name="x"),
        lambda c, t: c.allreduce(t.int(), name="x"),
        "float32",
        "int32",
    ),
    "numel": (lambda c, t: c.allreduce(t, name="x"), lambda c, t: c.allreduce(t[:3], name="x"), r"\[5\]", r"\[3\]"),
    "kind": (lambda c, t: c.allreduce(t, name="x"), lambda c, t: c.barrier(name="x"), "allreduce", "barrier"),
    "root": (lambda c, t: c.broadcast(t, 0, name="x"), lambda c, t: c.broadcast(t, 1, name="x"), "root 0", "root 1"),
    "object": (
        lambda c, t: c.gather_object(1, name="x"),
        lambda c, t: c.allgather_object(1, name="x"),
        "gather_object",
        "allgather_object",
    ),
}


@some
@processes
async def test_c14_ranks_that_differ_are_told_and_the_name_goes_on(coll: Communicator) -> None:
    odd = coll.size - 1
    for use, (usual, other, ours, theirs) in enumerate(DISAGREEMENTS.values()):
        t = torch.full((5,), float(coll.rank))
        with pytest.raises(aiodist.MismatchError) as caught:
            async with asyncio.timeout(20):
                await (other if coll.rank == odd else usual)(coll, t)
        text = str(caught.value)
        assert f"operation 'x' #{2 * use}: rank" in text
        assert re.search(ours, text), text
        assert re.search(theirs, text), text
        assert text.count(f"{__file__}:") >= 2, text
        assert t.eq(coll.rank).all()  # nothing was written
        assert await coll.allreduce(1, name="x") == coll.size
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(3)
async def test_c14_a_difference_holds_nothing_else_up(coll: Communicator) -> None:
    """Neither what has other names nor the order."""
    others = [coll.allreduce(i, name=f"other {i}") for i in range(20)]
    with pytest.raises(aiodist.MismatchError):
        await coll.allreduce(torch.ones(3 + (coll.rank == 1)), name="x")
    assert await coll.allreduce(1) == 3
    assert await aiodist.gather(*others) == [3 * i for i in range(20)]
    await coll.barrier()


@some
@processes
async def test_c14_a_failure_on_one_rank_is_told(coll: Communicator) -> None:
    """The error of one rank's part reaches the other ranks, and the name can be used again."""
    blocks = torch.ones(2, 2 + (coll.rank == 1))  # shapes that cannot be concatenated
    with pytest.raises((ValueError, aiodist.RemoteError)):
        async with asyncio.timeout(20):
            await coll.allgather(blocks, out=torch.empty(0), name="shapes")
    for _ in range(3):
        assert await coll.allreduce(1, name="shapes") == coll.size


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2, 3, backend=("openmpi", "gloo"))
async def test_c14_what_fails_on_one_rank_alone(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot run its part: the other ranks do not wait for its messages."""
    if coll.rank == 1:
        monkeypatch.setattr("aiodist.collectives.operations.flat", _no_memory)
    for impl in ("ring", "auto"):
        with pytest.raises(aiodist.AiodistError, match="no room"):
            async with asyncio.timeout(20):
                await coll.allreduce(torch.ones(50_000), impl=impl, name="room")
    monkeypatch.undo()
    for i in range(40):  # its tags come back
        assert (await coll.allreduce(torch.full((50_000,), float(i)), name="room"))[0] == coll.size * i


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, backend=("openmpi", "gloo"))
async def test_c14_what_a_failure_leaves_on_the_wire_meets_no_later_use(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's message is in flight when another rank fails, and the statement comes late, after tags were reused."""
    t = torch.full((50,), -1.0)
    failing = coll.rank == coll.size - 1
    if failing:
        failures = parts_of(coll).dispatcher.failures
        send, loop = failures.send, asyncio.get_running_loop()
        monkeypatch.setattr(
            failures, "send", lambda *what: loop.call_soon_threadsafe(loop.call_later, 0.5, send, *what)
        )
    with monkeypatch.context() as broken:
        if failing:
            broken.setattr("aiodist.collectives.operations.numbers_of", _no_memory)
        with pytest.raises(aiodist.AiodistError, match="no room") if failing else suppress(aiodist.RemoteError):
            await coll.broadcast(t, impl="tree", name="left")
    async with asyncio.timeout(30):
        for i in range(40):
            t = torch.full((50,), float(i if coll.rank == 0 else -2))
            assert (await coll.broadcast(t, impl="tree", name="left")).eq(i).all(), i


def _no_memory(*_: object) -> Tensor:
    raise MemoryError("no room")


@pytest.mark.ranks(2)
async def test_c14_a_selector_that_ranks_edit_meanwhile_is_told(coll: Communicator) -> None:
    """An edit has a place in the order and a name has none: ranks that use other tables do not meet in silence."""
    other = await coll.dup()
    if coll.rank == 0:
        other.selector.set("allreduce", "ring")
    with pytest.raises(aiodist.MismatchError, match="with an edited selector"):
        await other.allreduce(torch.ones(3), name="edited")
    if coll.rank == 1:
        other.selector.set("allreduce", "ring")
    assert (await other.allreduce(torch.ones(3), name="edited"))[0] == 2


# --- who is late -----------------------------------------------------------------------------------------------


def test_c14_one_that_others_never_bring_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with aiodist.init(report_after=1.0) as coll:
            await coll.allreduce(1, name="other")
            if coll.rank == 2:
                await asyncio.sleep(2.5)
            await coll.allreduce(torch.ones(3), name="grads")

    run_ranks(3, main)
    (report,) = (record.getMessage() for record in caplog.records)
    assert re.search(
        rf"rank 0 waits for rank 2 in allreduce 'grads' #0 issued at {__file__}:\d+ in .* on 'world'", report
    )
    assert f"rank 1 waits for rank 2 in allreduce 'grads' #0 issued at {__file__}:" in report
    assert re.search(rf"rank 2: by name after 'other', allreduce .* at {__file__}:", report)


@pytest.mark.ranks(3)
async def test_c14_a_deadline_names_the_late_ranks(coll: Communicator) -> None:
    await coll.barrier()
    if coll.rank == 2:
        await asyncio.sleep(20)
        assert await coll.allreduce(coll.rank, name="late") == 3
        return
    handle = coll.allreduce(coll.rank, name="late", timeout=5)
    with pytest.raises(aiodist.OperationTimeout, match=r"allreduce 'late' #0 .*late: rank 2 \(after barrier") as caught:
        await handle
    assert list(caught.value.late) == [2]
    with pytest.raises(ValueError, match="in flight"):
        coll.barrier(name="late")
    assert await handle == 3  # it went on


@pytest.mark.ranks(3)
async def test_c14_many_that_are_late_name_those_that_have_not_come(coll: Communicator) -> None:
    """Each names the rank that has not brought this one, no matter what that has brought of others."""
    mine = [i for i in range(30) if i % 3 != coll.rank]
    handles = {i: coll.allreduce(i, name=f"{i}") for i in mine}
    await asyncio.sleep(3)
    for i, handle in handles.items():
        assert list(internals.late_ranks(handle)) == [i % 3]
    handles |= {i: coll.allreduce(i, name=f"{i}") for i in range(30) if i not in handles}
    assert await aiodist.gather(*[handles[i] for i in range(30)]) == [3 * i for i in range(30)]


# --- ends ------------------------------------------------------------------------------------------------------


@some
@processes
async def test_c14_abort_ends_what_is_in_flight(coll: Communicator) -> None:
    other = await coll.dup()
    t = torch.ones(4)
    first = coll.rank == 0
    handles = [other.allreduce(t[i : i + 1], name=f"{i}") for i in range(4)] if first else []
    if first:
        await rounds()
        other.abort("had enough")
    for handle in handles:
        with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
            await handle
    await coll.barrier()
    with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
        async with asyncio.timeout(20):
            await other.allreduce(1, name="0")
    assert (await coll.allreduce(t, name="0"))[0] == coll.size  # its memory is free, and the name is the other's


@pytest.mark.drawn(3)
@some
@processes
async def test_c14_close_waits_for_what_is_in_flight(coll: Communicator) -> None:
    other = await coll.dup()
    order = [f"{i}" for i in range(20)]
    random.Random(coll.rank).shuffle(order)
    handles = {name: other.allreduce(torch.ones(5000), name=name) for name in order}
    async with asyncio.timeout(50):
        await other.aclose()
    assert all(handle.done() and handle.result()[0] == coll.size for handle in handles.values())
    with pytest.raises(aiodist.CommunicatorClosed):
        other.barrier(name="after")


@pytest.mark.ranks(2)
async def test_c14_close_names_what_others_never_bring(coll: Communicator) -> None:
    other = await coll.dup()
    handle = other.allreduce(1, name="alone") if coll.rank == 0 else None
    with pytest.raises(aiodist.AiodistError) as caught:
        await other.aclose()
    if handle is not None:
        assert "still pending after 30 s: allreduce 'alone' #0" in str(caught.value)
        with pytest.raises(aiodist.AiodistError):
            await handle


def test_c14_a_rank_that_leaves_is_told() -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            if coll.rank == 2:
                await asyncio.sleep(1)
                raise RuntimeError("rank 2 has had enough")
            with pytest.raises(aiodist.PeerError, match="had enough"):
                await coll.allreduce(1, name="left alone")
            raise KeyError(coll.rank)

    with pytest.raises(RuntimeError, match="had enough"):
        run_ranks(3, main)


@some
@processes
async def test_c14_communicators_have_names_of_their_own(coll: Communicator) -> None:
    other, half = await aiodist.gather(coll.dup(), coll.split(coll.rank % 2))
    calls = [coll, other, half]
    random.Random(coll.rank).shuffle(calls)
    sums = await together(*[comm.allreduce(torch.ones(1000), name="same") for comm in calls])
    assert [t[0] for t in sums] == [comm.size for comm in calls]


@pytest.mark.ranks(2)
async def test_c14_a_dup_does_not_wait_for_them(coll: Communicator) -> None:
    """It is ordered behind what has a place in the order; the other rank brings this one only afterwards."""
    handle = coll.allreduce(1, name="before") if coll.rank == 0 else None
    async with asyncio.timeout(20):
        other = await coll.dup()
    assert await (handle or coll.allreduce(1, name="before")) == 2
    await other.aclose()


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3, backend=("openmpi", "mpich", "gloo", "shm"))
@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("numel", [5, 100_000])
async def test_c14_it_goes_on_while_a_loop_stands_still(coll: Communicator, busy: int, numel: int) -> None:
    """A new name continues too, although the leader or another rank does not know its number yet."""
    await coll.barrier()
    with tempfile.TemporaryDirectory() as folder:
        through = Path(await coll.broadcast_object(folder))
        handle = coll.allreduce(torch.ones(numel), name=f"computing {busy} {numel}")
        if coll.rank == busy:
            # The loop stands still until the others are through.
            assert blocked_until(lambda: handle.done() and len(os.listdir(through)) == coll.size - 1)
        else:
            assert (await handle)[0] == coll.size
            (through / str(coll.rank)).touch()
        await coll.barrier()
    assert (await handle)[0] == coll.size


def test_c14_no_collective_is_without_it() -> None:
    """Each takes `name=`: calls between two ranks and those that make communicators do not."""
    taking = {
        name
        for name, call in inspect.getmembers(Communicator, inspect.isfunction)
        if "name" in inspect.signature(call).parameters and not name.startswith("_")
    }
    tensors = "allreduce reduce scan exscan reduce_scatter broadcast allgather gather scatter alltoall alltoall_single"
    objects = "broadcast_object allgather_object gather_object scatter_object alltoall_object"
    assert taking == {*tensors.split(), *objects.split(), "barrier"}


@pytest.mark.ranks(3)
async def test_c14_every_call_takes_it(coll: Communicator) -> None:
    rank, size = coll.rank, coll.size
    t = torch.full((size, 2), float(rank))
    calls: Sequence[tuple[Callable[[], Handle[Any]], object]] = [
        (lambda: coll.scan(t.clone(), name="scan"), t.new_full((3, 2), sum(range(rank + 1)))),
        (lambda: coll.exscan(t.clone(), name="exscan"), t.new_full((3, 2), sum(range(rank)))),
        (lambda: coll.reduce(t.clone(), name="reduce"), t.new_full((3, 2), 3.0) if rank == 0 else None),
        (lambda: coll.gather(t, name="gather"), [t.new_full((3, 2), r) for r in range(3)] if rank == 0 else None),
        (
            lambda: coll.scatter([torch.full((2,), float(r)) for r in range(3)] if rank == 0 else None, name="scatter"),
            torch.full((2,), float(rank)),
        ),
        (lambda: coll.alltoall_single(t, name="single"), torch.tensor([[r, r] for r in range(3)]).float()),
        (lambda: coll.allreduce([t.clone(), t.clone()], across=True, name="across"), [t.new_full((3, 2), 6.0)] * 2),
        (lambda: coll.broadcast([t.clone(), t.clone()], 1, across=True, name="spread"), [t.new_full((3, 2), 1.0)] * 2),
        (
            lambda: coll.allgather([t, t], across=True, name="flat"),
            [t.new_full((3, 2), r) for r in range(3) for _ in "12"],
        ),
        (lambda: coll.allreduce(t, out=torch.empty(3, 2), name="out"), t.new_full((3, 2), 3.0)),
        (lambda: coll.alltoall([[t, t, t]] * 2, name="lists"), [[t.new_full((3, 2), r) for r in range(3)]] * 2),
        (lambda: coll.broadcast_object({rank}, 2, name="bo"), {2}),
        (lambda: coll.gather_object(rank, 1, name="go"), [0, 1, 2] if rank == 1 else None),
        (lambda: coll.scatter_object([7, 8, 9] if rank == 0 else None, name="so"), 7 + rank),
        (lambda: coll.alltoall_object([(rank, r) for r in range(3)], name="ao"), [(r, rank) for r in range(3)]),
        (lambda: coll.allreduce([], across=True, name="none"), []),
    ]
    order = list(range(len(calls)))
    random.Random(rank).shuffle(order)

    async def call(number: int) -> None:
        make, expected = calls[number]
        found = await make()
        assert same(found, expected), (number, found, expected)

    await together(*map(call, order))
