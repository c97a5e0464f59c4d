"""H14: a tensor that the program changes while an operation uses it is reported; right programs are not."""

from __future__ import annotations

import asyncio
import random
import re
import warnings
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.communicator.base import parts_of
from aiodist.handles import in_flight
from aiodist.testing import run_ranks
from tests.communicator.test_c3_versions import CALLS, ROOT

CHANGED = re.compile(
    r"^(\w+).* issued at .*/test_\w+\.py:\d+ in .*used a tensor, (\w+)\[([\d, ]*)\], that the program changed before "
    r"the end: await the handle first, or pass t\.clone\(\)"
)
Main = Callable[[Communicator], Awaitable[Any]]


def run(n: int, main: Main, *, strict: bool = False, seed: int = 0) -> list[Any]:
    """Run `main` on `n` ranks of a world and return the results."""

    async def ranked() -> Any:
        async with aiodist.init(strict=strict) as coll:
            return await main(coll)

    return run_ranks(n, ranked, seed)


async def in_turn(coll: Communicator, first: int, issue: Callable[[], Any], change: Callable[[], object]) -> Any:
    """Issue on rank `first`, change there before the others issue. Return the result."""
    gate = coll.recv_object(src=first, tag=77) if coll.rank != first else None
    if gate is not None:
        await gate
        return await issue()
    handle = issue()
    change()
    await aiodist.gather(*[coll.send_object(None, rank, tag=77) for rank in range(coll.size) if rank != first])
    return await handle


# --- what is wrong is reported ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(kind for kind in CALLS if not kind.startswith("send recv")))
def test_h14_a_change_of_any_tensor_of_any_call_is_reported(kind: str) -> None:
    seen: list[int] = []

    async def main(coll: Communicator) -> None:
        for i in range(6):
            call = CALLS[kind](coll, torch.ones, 6)
            tensors = [*call.written, *call.read]
            ignored = kind in ("gather out", "reduce out") and coll.rank != ROOT and i == 1
            handle = call.issue(tensors)
            if i >= len(tensors) or ignored or tensors[i].numel() == 0 or handle.done():
                await handle
                continue
            tensors[i].add_(1)
            with pytest.raises(RuntimeWarning, match=CHANGED):
                await handle
            seen.append(i)

    run(3 if "gather" in kind else 2, main)
    assert seen


def test_h14_the_warning_has_the_line_of_the_call_once() -> None:
    def issue(coll: Communicator, t: Tensor) -> Any:
        return coll.allreduce(t)

    async def main(coll: Communicator) -> Tensor:
        t = torch.zeros(5, 3)
        for _ in range(3):
            await in_turn(coll, 1, lambda: issue(coll, t), lambda: t.fill_(1))
        return t

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        run(2, main)
    (warning,) = seen
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    assert warning.lineno == issue.__code__.co_firstlineno + 1
    match = CHANGED.match(str(warning.message))
    assert match is not None
    assert match.groups() == ("allreduce", "float32", "5, 3")


@pytest.mark.parametrize("first", [0, 2])
def test_h14_strict_raises_on_that_rank_and_the_others_get_their_results(first: int) -> None:
    async def main(coll: Communicator) -> tuple[str, list[float]]:
        t = torch.full((4,), float(coll.rank))
        said = ""
        try:
            await in_turn(coll, first, lambda: coll.allreduce(t), lambda: t[1:2].zero_())
        except aiodist.BufferInFlight as error:
            said = str(error)
        later = await coll.allreduce(torch.full((4,), 1.0))  # the communicator works on
        assert later.tolist() == [3.0] * 4
        return said, t.tolist()

    results = run(3, main, strict=True)
    for rank, (said, values) in enumerate(results):
        if rank == first:
            assert "used a tensor, float32[4]" in said
            assert f"rank {first}" in said
        else:
            assert said == ""
            assert values[0] == 3.0


def _of_numpy(t: Tensor) -> object:
    t.numpy()[1] += 1  # torch counts no write
    return None


READS: dict[str, Callable[[Communicator, Tensor], Any]] = {
    "reduce": lambda c, t: c.reduce(t, root=1),
    "allgather": lambda c, t: c.allgather(t),
    "reduce_scatter": lambda c, t: c.reduce_scatter(t),
    "allreduce out": lambda c, t: c.allreduce(t, out=torch.empty_like(t)),
    "alltoall_single": lambda c, t: c.alltoall_single(t),
}


@pytest.mark.parametrize("kind", sorted(READS))
@pytest.mark.parametrize("whole", [True, False])
def test_h14_strict_finds_changes_that_torch_does_not_count(kind: str, whole: bool) -> None:
    async def main(coll: Communicator) -> bool:
        memory = torch.arange(12.0)
        t = memory if whole else memory[2:10]
        try:
            await in_turn(coll, 0, lambda: READS[kind](coll, t), lambda: _of_numpy(t))
        except aiodist.BufferInFlight:
            return True
        return False

    assert run(2, main, strict=True) == [True, False]
    assert run(2, main) == [False, False]  # not seen without strict, and no warning


def test_h14_strict_checks_sends_and_both_halves_of_sendrecv() -> None:
    async def main(coll: Communicator) -> list[str]:
        found = []
        other = 1 - coll.rank
        for n, synchronous in ((3, True), (5000, True)):
            t = torch.arange(2.0 * n)
            if coll.rank == 0:
                handle = coll.send(t[:n], 1, synchronous=synchronous)
                _of_numpy(t)
                await coll.send_object("go", 1, tag=5)
                try:
                    await handle
                except aiodist.BufferInFlight:
                    found.append(f"send {n}")
            else:
                await coll.recv_object(0, tag=5)
                await coll.recv(t[:n], 0)
        t, room = torch.arange(8.0), torch.empty(8)
        exchange = coll.sendrecv(t, other, other, room)
        if not exchange.done():
            room.zero_()
            try:
                await exchange
            except aiodist.BufferInFlight:
                found.append("sendrecv")
        else:
            await exchange
        return found

    first, second = run(2, main, strict=True)
    assert [one for one in first if one != "sendrecv"] == ["send 3", "send 5000"]
    assert "sendrecv" in [*first, *second]


def test_h14_a_receive_that_is_posted_again_is_watched_again() -> None:
    async def main(coll: Communicator) -> None:
        if coll.rank == 1:
            await coll.recv_object(0)
            await coll.send(torch.ones(4), 0)
            return
        t = torch.zeros(4)
        receiving = coll.recv(t, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiving, 0.01)
        t.fill_(7)  # right: after the end of the last wait the memory is the program's
        assert not receiving.done()  # posted again
        t.fill_(8)
        await coll.send_object(None, 1)
        with pytest.raises(RuntimeWarning, match=CHANGED):
            await receiving

    run(2, main)


# --- what is right is not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_h14_writes_to_other_slices_are_right(strict: bool) -> None:
    async def main(coll: Communicator) -> None:
        draw = random.Random(5)
        for n in (3, 700, 30_000):
            t = torch.zeros(5 * n, dtype=draw.choice([torch.float32, torch.int64]))
            own, read = t[:n].fill_(coll.rank), t[n : 2 * n].fill_(2)
            summed = coll.allreduce(own)
            gathered = coll.allgather(read)
            sent = coll.send(t[4 * n :], (coll.rank + 1) % coll.size)
            for _ in range(3):  # between all of them
                t[2 * n : 3 * n].add_(1)
                t[3 * n : 4 * n].copy_(t[2 * n : 3 * n])
                await asyncio.sleep(0)
            await coll.recv(src=(coll.rank - 1) % coll.size)
            await aiodist.gather(summed, gathered, sent)
            assert own.unique().tolist() == [sum(range(coll.size))]
            assert t[2 * n].item() == 3

    for ranks in (1, 2, 3):
        run(ranks, main, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_h14_right_programs_are_not_reported(strict: bool) -> None:
    async def main(coll: Communicator) -> None:
        n = 300
        # Reads of one tensor by several operations, and of a parameter while autograd reads it.
        p = torch.nn.Parameter(torch.ones(n))
        copies = [coll.allgather(p) for _ in range(3)]
        (p * 2).sum().backward()
        await aiodist.gather(*copies)
        # Gradients that autograd accumulates during the reduction of a bucket, and a step of another parameter.
        grads = torch.zeros(2, n)
        p.grad = grads[1]
        bucket = coll.allreduce(grads[0])
        (p * 2).sum().backward()
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        await bucket
        # Writes as soon as the handle is done.
        t = torch.ones(n)
        handle = coll.allreduce(t)
        while not handle.done():  # noqa: ASYNC110  - as a program that polls
            await asyncio.sleep(0)
        t.zero_()
        await handle
        # Other memory or another shape for the same tensor, whose bytes in flight do not change.
        changes: list[Callable[[Tensor], object]] = [
            lambda t: setattr(t, "data", torch.zeros(n)),
            lambda t: t.set_(torch.zeros(n)),  # type: ignore[call-overload]
            lambda t: t.unsqueeze_(0),
            lambda t: t.resize_(2 * n),
            lambda t: t.requires_grad_(),
            lambda t: t.detach_(),
        ]
        for change in changes:
            t = torch.ones(n)
            await in_turn(coll, 0, partial(coll.allgather, t), partial(change, t))
        # Inference tensors have no version.
        with torch.inference_mode():
            t = torch.ones(n)
            handle = coll.allreduce(t)
            t.add_(0 if strict else 1)
            await handle
        # An await that ends early, and a second one.
        t = torch.ones(n)
        handle = coll.allreduce(t)
        waiting = asyncio.create_task(_wait(handle))
        await asyncio.sleep(0)
        waiting.cancel()
        await handle
        # Empty parts of a tensor in flight.
        t = torch.ones(n)
        whole = coll.allgather(t)
        await coll.allreduce(t[:0])
        await whole
        # An `out` that grows, and one that aliases the input.
        await coll.allgather(torch.ones(n), out=torch.empty(0))
        room = torch.ones(coll.size * n)
        await coll.allgather(room[coll.rank * n :][:n], out=room)
        await coll.reduce_scatter(room, out=room[:n])

    for seed in range(3):
        run(2, main, strict=strict, seed=seed)


async def _wait(handle: Any) -> None:
    await handle


@pytest.mark.ranks(2, backend="shm")
async def test_h14_lanes_report_and_spare_as_programs_do(coll: Communicator) -> None:
    await _all_backends_alike(coll, (1025, 50_000))


@pytest.mark.thorough
@pytest.mark.ranks(2, backend=("openmpi", "mpich", "gloo"))
async def test_h14_libraries_report_and_spare_as_programs_do(coll: Communicator) -> None:
    await _all_backends_alike(coll, (3, 50_000, 3_000_000))


@pytest.mark.thorough
@pytest.mark.ranks(2, backend=("shm", "gloo"))
async def test_h14_threads_may_write_as_soon_as_a_handle_is_done(coll: Communicator) -> None:
    warnings.simplefilter("error")
    other = await coll.dup(thread=True)
    await asyncio.to_thread(_write_when_done, other)
    await other.aclose()


def _write_when_done(coll: Communicator) -> None:
    for n in (3, 5_000, 2_000_000):
        t = torch.ones(n)
        for _ in range(40):
            handle = coll.allreduce(t)
            while not handle.done():
                pass
            t.fill_(1)
            assert handle.wait() is t


async def _all_backends_alike(coll: Communicator, sizes: Sequence[int]) -> None:
    warnings.simplefilter("error")
    for n in sizes:
        for kind in ("allreduce", "allgather", "allreduce out", "broadcast"):
            for first in range(coll.size):
                for right in (False, True):
                    await _in_turn_or_right(coll, kind, n, first, right)


async def _in_turn_or_right(coll: Communicator, kind: str, n: int, first: int, right: bool) -> None:
    t = torch.ones(n + right)[:n]  # a slice, with a write to the rest, is right
    rest = torch.as_strided(t, (1,), (1,), n) if right else t
    issue: Callable[[], Any] = {
        "allreduce": lambda: coll.allreduce(t),
        "allgather": lambda: coll.allgather(t),
        "allreduce out": lambda: coll.allreduce(t, out=torch.empty(n)),
        "broadcast": lambda: coll.broadcast(t, first),
    }[kind]
    if coll.rank == first and not right:
        with pytest.raises(RuntimeWarning, match=CHANGED):
            await in_turn(coll, first, issue, lambda: rest.mul_(1))
    else:
        await in_turn(coll, first, issue, lambda: rest.mul_(1))
    if kind == "allreduce":
        assert t.tolist() == [float(coll.size)] * n


@pytest.mark.ranks(2, backend="shm")
async def test_h14_lanes_watch_short_tensors_only_with_strict(coll: Communicator) -> None:
    strict = await _strict(coll)
    for n in (1, 3, 1024):
        t = torch.ones(n)
        double = partial(t.mul_, 2)
        await in_turn(coll, 0, partial(coll.allreduce, t), double)
        if coll.rank > 0:
            await strict.recv_object(0)
            await strict.allreduce(t)
            continue
        handle = strict.allreduce(t)
        double()
        await strict.send_object(None, 1)
        with pytest.raises(aiodist.BufferInFlight, match="the program changed"):
            await handle
    await strict.aclose()


@pytest.mark.ranks(2, backend="shm")
async def test_h14_strict_lanes_spare_right_programs_and_find_writes_by_numpy(coll: Communicator) -> None:
    strict = await _strict(coll)
    n = 300
    right: list[Callable[[Tensor], object]] = [
        lambda t: setattr(t, "data", torch.zeros(n)),
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(2 * n),  # other memory: the small message is already sent
        lambda t: t.untyped_storage().resize_(0),
        lambda t: t.requires_grad_(),
    ]
    for change in right:
        t = torch.ones(n)
        await in_turn(strict, 0, partial(strict.allgather, t), partial(change, t))
    memory = torch.zeros(3 * n)
    for t in (torch.ones(n), memory[n : 2 * n]):
        found = strict.rank > 0
        try:
            await in_turn(strict, 0, partial(strict.allgather, t), partial(_of_numpy, t))
        except aiodist.BufferInFlight:
            found = not found
        assert found
    await strict.aclose()


async def _strict(coll: Communicator) -> Communicator:
    """Return a copy of `coll` as in a world of `init(strict=True)`."""
    registry = parts_of(coll).registry
    registry.strict = True
    try:
        return await coll.dup()
    finally:
        registry.strict = False


# --- the checksum -------------------------------------------------------------------------------------------------


def _checksum(data: bytes) -> int:
    return (
        in_flight.checksum(np.frombuffer(data, np.uint8).ctypes.data, len(data)) if data else in_flight.checksum(0, 0)
    )


@given(data=st.binary(max_size=200), at=st.integers(0, 199), flip=st.integers(1, 255))
def test_h14_a_change_of_one_byte_changes_the_checksum(data: bytes, at: int, flip: int) -> None:
    before = _checksum(data)
    assert _checksum(bytes(data)) == before == _reference(data)
    assert _checksum(data + b"\0") != before
    if at < len(data):
        changed = bytearray(data)
        changed[at] ^= flip
        assert _checksum(bytes(changed)) != before


def _reference(data: bytes) -> int:
    """The hash of core/checksum.h, in Python."""
    odd, most = 0x9E3779B97F4A7C15, (1 << 64) - 1
    sums = [1, 2, 3, 4]
    words = np.frombuffer(data.ljust(-(-len(data) // 32) * 32, b"\0"), "<u8").tolist()
    for i, word in enumerate(words):
        s = (sums[i % 4] ^ word) * odd & most
        sums[i % 4] = s ^ s >> 32
    found = len(data)
    for s in sums:
        found = (found ^ s) * odd & most
        found ^= found >> 29
    return found
