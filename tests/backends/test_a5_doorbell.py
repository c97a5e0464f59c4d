"""A5: the doorbell in shared memory: rings are heard, by threads and by other processes."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context

import pytest

from aiodist import _core
from tests.support.blocking import blocked_until

ROUNDS = 3000


SLEEP_AT = 64  # where a doorbell says how its owner sleeps


def doorbell_in(page: mmap.mmap) -> _core.Doorbell:
    return _core.Doorbell(memoryview(page))


def word_in(page: mmap.mmap, at: int) -> memoryview:
    return memoryview(page)[at : at + 4].cast("I")


@pytest.fixture
def page() -> mmap.mmap:
    return mmap.mmap(-1, mmap.PAGESIZE)


def test_a5_a_ring_that_nobody_waits_for_is_heard_by_the_next_wait(page: mmap.mmap) -> None:
    mine, other = doorbell_in(page), doorbell_in(page)
    for _ in range(100):
        other.ring()
        _within(10, mine, None)
    with _sleeping(mine, page):  # it was rung once, and is not heard twice
        other.ring()


def _within(seconds: float, doorbell: _core.Doorbell, wait: float | None) -> None:
    thread = threading.Thread(target=doorbell.wait, args=(wait,), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it was not heard"


def test_a5_waits_end_in_time(page: mmap.mmap) -> None:
    for doorbell in (doorbell_in(page), _core.Doorbell()):
        for seconds in (0.0, 1e-6, 0.02, 1e-9):
            began = time.monotonic()
            _within(50, doorbell, seconds)
            assert time.monotonic() - began >= seconds * 0.9  # a promise of seconds: A5


@contextmanager
def _sleeping(doorbell: _core.Doorbell, page: mmap.mmap, *, for_all: bool = True) -> Iterator[threading.Thread]:
    """A thread that sleeps for a ring, which the block gives it."""
    thread = threading.Thread(target=doorbell.wait, args=(None, for_all), daemon=True)
    thread.start()
    word = word_in(page, SLEEP_AT)
    assert blocked_until(lambda: word[0], 10), "nobody went to sleep"
    yield thread
    thread.join(10)
    assert not thread.is_alive(), "it was not woken"
    assert word[0] == 0


def test_a5_ringing_one_who_is_awake_is_free_and_one_who_sleeps_wakes_it(page: mmap.mmap) -> None:
    mine, other = doorbell_in(page), doorbell_in(page)
    other.call()
    with _sleeping(mine, page):  # no rank slept, so no ring was needed
        other.call()


def test_a5_another_process_does_not_wake_one_who_sleeps_for_its_own(page: mmap.mmap) -> None:
    mine, other = doorbell_in(page), doorbell_in(page)
    with _sleeping(mine, page, for_all=False) as thread:
        heard = word_in(page, 0)[0]
        other.call()
        assert word_in(page, 0)[0] == heard, "it was rung"
        assert thread.is_alive()
        other.ring()


def test_a5_a_loop_that_waits_is_woken_once_in_place_of_the_thread(page: mmap.mmap) -> None:
    mine, other = doorbell_in(page), doorbell_in(page)
    event = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        with _sleeping(mine, page) as thread:
            mine.set_loop_waits(True)
            other.call(event)
            assert os.eventfd_read(event) > 1, "a message is told from the writes of lanes, of 1"
            assert thread.is_alive()
            other.call(event)  # the loop does not wait any more
            thread.join(10)
            with pytest.raises(BlockingIOError):
                os.eventfd_read(event)
        mine.set_loop_waits(True)
        with _sleeping(mine, page):
            other.call()  # the event has not come yet
    finally:
        os.close(event)


def test_a5_a_thread_rests_until_its_loop_was_woken_or_a_ring(page: mmap.mmap) -> None:
    mine, other, event = doorbell_in(page), doorbell_in(page), os.eventfd(0, os.EFD_NONBLOCK)
    rests = 4  # CORE_RESTS

    def wake() -> None:
        other.call(event)
        assert os.eventfd_read(event) > 1

    try:
        for wakes in (wake, mine.ring, lambda: mine.set_loop_waits(False), other.call):
            mine.set_loop_waits(True)
            thread = threading.Thread(target=mine.wait, args=(1e-3, True, 1, 100.0), daemon=True)
            thread.start()
            assert blocked_until(lambda: word_in(page, SLEEP_AT)[0] == rests, 10), "it does not rest"
            wakes()
            thread.join(10)
            assert not thread.is_alive(), "it was not woken"
            assert word_in(page, SLEEP_AT)[0] == 0
    finally:
        os.close(event)


def test_a5_a_doorbell_of_one_process_needs_no_memory() -> None:
    doorbell = _core.Doorbell()
    doorbell.ring()
    _within(10, doorbell, None)


def test_a5_memory_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="memory of 8 bytes: expected at least "):
        _core.Doorbell(memoryview(bytearray(8)))


def _answer(page: mmap.mmap, theirs: int, mine: int) -> None:
    """Echo: wait for each number at `mine`, and ring back."""
    hear, tell = doorbell_in_half(page, mine), doorbell_in_half(page, theirs)
    get, put = word_in_half(page, mine), word_in_half(page, theirs)
    for number in range(1, ROUNDS + 1):
        while get[0] != number:
            hear.wait(None)
        put[0] = number
        tell.ring()


def doorbell_in_half(page: mmap.mmap, half: int) -> _core.Doorbell:
    return _core.Doorbell(memoryview(page)[half * 1024 :])


def word_in_half(page: mmap.mmap, half: int) -> memoryview:
    return word_in(page, half * 1024 + _core.DOORBELL_BYTES)


@pytest.fixture(params=["threads", "processes"])
def answering(request: pytest.FixtureRequest, page: mmap.mmap) -> Iterator[None]:
    if request.param == "threads":
        thread = threading.Thread(target=_answer, args=(page, 0, 1), daemon=True)
        thread.start()
        yield
        thread.join(10)
        assert not thread.is_alive()
        return
    child = get_context("fork").Process(target=_answer, args=(page, 0, 1), daemon=True)
    child.start()
    yield
    child.join(10)
    assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a5_no_ring_is_lost_between_two_that_answer_each_other(page: mmap.mmap, answering: None) -> None:
    """Both wait without a limit: after one lost ring, neither would continue."""
    hear, tell = doorbell_in_half(page, 0), doorbell_in_half(page, 1)
    get, put = word_in_half(page, 0), word_in_half(page, 1)
    last = 0

    def play() -> None:
        nonlocal last
        for number in range(1, ROUNDS + 1):
            put[0] = number
            tell.ring()
            while get[0] != number:
                hear.wait(None)
            last = number

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), f"a ring was lost after {last}"


def test_a5_many_ring_at_once(page: mmap.mmap) -> None:
    """Each ringer says its part before it rings: a waiter that has heard the last ring has seen all of them."""
    mine = doorbell_in(page)
    said = [0] * 4

    def ring(i: int) -> None:
        doorbell = doorbell_in(page)
        for _ in range(2000):
            said[i] += 1
            doorbell.ring()

    threads = [threading.Thread(target=ring, args=(i,), daemon=True) for i in range(4)]

    def listen() -> None:
        while sum(said) < 8000:
            mine.wait(None)

    listener = threading.Thread(target=listen, daemon=True)
    for thread in (listener, *threads):
        thread.start()
    for thread in (*threads, listener):
        thread.join(20)
        assert not thread.is_alive(), said
