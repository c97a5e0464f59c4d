"""H1: a pending operation is driven, no matter which thread began its last step and how soundly the thread slept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from aiodist import _core
from aiodist.handles import Handle, Operation, Progress
from aiodist.testing.seams.progress import alarm, own_thread, transport_lock
from tests.support.blocking import blocked_until

pytestmark = pytest.mark.timeout(30)


class TwoSteps:
    """An operation of two steps: the loop's thread ends the first, and takes long to begin the second."""

    rings = False

    def __init__(self, between: Callable[[], object]) -> None:
        self.progress = Progress.current()
        self.handle: Handle[str] = Handle(self.progress, "gather")
        self._loop_thread = threading.get_ident()
        self._between = between
        self._requests: list[int] = []
        self.progress.add_poller(self)
        self.progress.start_in_thread(lambda: self._requests.append(1))

    def __len__(self) -> int:
        return len(self._requests)

    def poll(self, until: float = 0.0) -> bool:
        on_loop = threading.get_ident() == self._loop_thread
        if self._requests == [1] and on_loop:
            self._requests.clear()
            self._between()
            self.progress.add_large(1)
            self._requests.append(2)
        elif self._requests == [2] and not on_loop:
            self._requests.clear()
            self.progress.add_large(-1)
            Operation.of(self.handle).resolve("both")
        return True


@pytest.fixture
def sleepy() -> Iterator[None]:
    """A thread that goes to sleep as soon as it finds nothing to do."""
    with own_thread(linger_seconds=0.0):
        yield


async def test_h1_a_step_that_begins_while_the_thread_goes_to_sleep_is_driven(sleepy: None) -> None:
    for _ in range(20):
        # It may be waiting for the lock instead.
        operation = TwoSteps(lambda: blocked_until(lambda: alarm.asleep, 0.05))
        progress = operation.progress
        assert blocked_until(lambda: not progress.large)  # noqa: B023  - called at once
        async with asyncio.timeout(25):
            assert await operation.handle == "both"
        operation.progress.remove_poller(operation)


async def test_h1_what_a_holder_of_the_lock_makes_pending_is_driven(sleepy: None, transport: Any, until: Any) -> None:
    """A receive that is posted while a communicator is opened or closed is polled, although no `start` adds it."""
    handle: Handle[int] = Handle(transport.progress, "recv")
    await until(lambda: alarm.asleep and transport.progress.pace.name != "POLLING")
    with transport_lock:
        transport.requests.append(_Ended(handle))
    async with asyncio.timeout(25):
        await asyncio.to_thread(handle.wait, 25)


class Wanting:
    """A poller that nothing is pending of, and that wants to be polled all the same."""

    rings = True
    polled = 0

    def __len__(self) -> int:
        return 0

    def poll(self, until: float = 0.0) -> bool:
        self.polled += 1
        return False


async def test_h1_what_ends_while_another_thread_has_the_lock_is_looked_at(sleepy: None, until: Any) -> None:
    progress, wanting, held, let_go = Progress.current(), Wanting(), threading.Event(), threading.Event()
    progress.add_poller(wanting)

    def hold() -> None:
        with transport_lock:
            held.set()
            let_go.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    progress.resume()
    assert wanting.polled == 0
    let_go.set()
    thread.join(10)
    await until(lambda: wanting.polled)
    progress.remove_poller(wanting)


class _Ended:
    def __init__(self, handle: Handle[int]) -> None:
        self.handle = handle
        self.outcome = 1

    def over(self) -> bool:
        return True


async def test_h1_a_ring_at_the_doorbell_before_is_heard_at_the_next() -> None:
    """A ringer looks which doorbell it is, and may be held up there while the thread goes to sleep at another."""
    fresh = type(alarm)()
    before, after = _core.Doorbell(), _core.Doorbell()
    fresh.sleep_at(before)
    before.wait(1)
    fresh.sleep_at(after)
    before.ring()  # by one who saw it a while ago
    sleeper = threading.Thread(target=partial(fresh.sleep, 1000.0, for_all=True), daemon=True)
    sleeper.start()
    sleeper.join(10)
    assert not sleeper.is_alive()
