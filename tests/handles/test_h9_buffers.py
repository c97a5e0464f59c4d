"""H9: one writer, or any number of readers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiodist.communicator.claims import reading
from aiodist.errors import BufferInFlight
from aiodist.handles.buffers import ClaimedBytes

pytestmark = pytest.mark.timeout(60)


def test_h9_nobody_is_given_memory_that_is_claimed() -> None:
    """A tensor may be dropped before its claim: that of a Python number is, while ranks compare."""
    t = torch.ones(1)
    claims, start = reading(t), t.data_ptr()
    del t
    others = [torch.ones(1) for _ in range(100)]
    assert start not in {other.data_ptr() for other in others}
    assert claims[0].memory.data_ptr() == start


@dataclass(frozen=True)
class Claim:
    start: int
    nbytes: int
    writes: bool

    def clashes(self, other: Claim) -> bool:
        overlap = max(self.start, other.start) < min(self.start + self.nbytes, other.start + other.nbytes)
        return overlap and (self.writes or other.writes)


claims = st.builds(Claim, st.integers(0, 40), st.integers(0, 12), st.booleans())
steps = st.lists(st.one_of(claims, st.integers(0, 100)), max_size=60)


@given(steps)
def test_h9_agrees_with_a_table_that_compares_all_pairs(program: list[Claim | int]) -> None:
    """A claim acquires; a number releases one of those that are held."""
    table = ClaimedBytes()
    held: list[tuple[Claim, str]] = []
    for number, step in enumerate(program):
        if isinstance(step, int):
            if held:
                claim, _ = held.pop(step % len(held))
                table.release(claim.start, claim.nbytes, claim.writes)
            continue
        name = f"operation {number}"
        clashing = [owner for claim, owner in held if claim.clashes(step)]
        try:
            table.acquire(step.start, step.nbytes, step.writes, name)
        except BufferInFlight as error:
            assert clashing, f"{step} is free"
            _check(str(error), name, step)
        else:
            assert not clashing
            held.append((step, name))
        assert len(table) == sum(claim.nbytes > 0 for claim, _ in held)
    for claim, _ in held:
        table.release(claim.start, claim.nbytes, claim.writes)
    assert len(table) == 0
    table.acquire(0, 100, True, "after")


def _check(message: str, name: str, claim: Claim) -> None:
    assert message.startswith(f"{name} would {'write' if claim.writes else 'read'} memory that operation ")


def test_h9_the_error_names_the_earlier_operation() -> None:
    table = ClaimedBytes()
    table.acquire(100, 50, True, "broadcast #3")
    for start, nbytes in ((100, 50), (149, 1), (90, 11), (0, 1000)):
        for writes, word in ((True, "write"), (False, "read")):
            with pytest.raises(BufferInFlight, match=f"allreduce #4 would {word} memory that broadcast #3 still owns"):
                table.acquire(start, nbytes, writes, "allreduce #4")
    table.acquire(150, 50, True, "next to it")
    table.acquire(50, 50, False, "before it")


def test_h9_one_operation_with_the_same_memory_twice_is_told_so() -> None:
    table = ClaimedBytes()
    owner = "allreduce #4"
    with pytest.raises(BufferInFlight, match=r"the same memory twice: t\[2\] overlaps t\[0\], and both are written"):
        table.acquire_all([(0, 10, True, None), (10, 10, True, None), (5, 1, True, None)], owner)
    with pytest.raises(BufferInFlight, match="what it reads overlaps what it writes"):
        table.acquire_all([(0, 10, True, None), (5, 10, False, None)], owner)
    assert len(table) == 0


def test_h9_a_reader_that_is_over_is_not_named() -> None:
    table = ClaimedBytes()
    table.acquire(0, 10, False, "first")
    table.acquire(0, 10, False, "second")
    table.release(0, 10, False)
    with pytest.raises(BufferInFlight, match="second still owns"):
        table.acquire(5, 1, True, "third")


def test_h9_nothing_is_claimed_by_an_empty_tensor() -> None:
    table = ClaimedBytes()
    table.acquire(0, 10, True, "first")
    table.acquire(5, 0, True, "empty")
    table.release(5, 0, True)
    assert len(table) == 1


def test_h9_claims_of_many_threads() -> None:
    table = ClaimedBytes()
    errors: list[BaseException] = []

    def work(base: int) -> None:
        try:
            for i in range(500):
                table.acquire(base + i * 8, 8, i % 2 == 0, base)
            for i in range(500):
                table.release(base + i * 8, 8, i % 2 == 0)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n * 100_000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert len(table) == 0


def test_h9_one_claim_more_costs_as_much_among_ten_thousand() -> None:
    """Comparing it with all of them would take a hundred times as long."""

    def one_more(count: int) -> float:
        table = ClaimedBytes()
        for i in range(count):
            table.acquire(i * 64, 64, True, i)
        spent = []
        for _ in range(1000):
            began = time.perf_counter()
            table.acquire(count * 64, 64, True, "one more")
            table.release(count * 64, 64, True)
            spent.append(time.perf_counter() - began)
        return min(spent)

    assert one_more(10_000) < 10 * one_more(100)
