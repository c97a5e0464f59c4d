"""The threads of simulated streams: each runs its jobs in order, later than they were queued."""

from __future__ import annotations

import collections
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch


class Marker:
    """A place in a lane, which the lane has reached or not."""

    __slots__ = ("_reached", "at")

    def __init__(self) -> None:
        self._reached: Final = threading.Event()
        self.at: float | None = None  # seconds of the monotonic clock, once reached

    @property
    def reached(self) -> bool:
        """Whether it was."""
        return self._reached.is_set()

    def reach(self) -> None:
        """Tell those who wait."""
        self.at = time.monotonic()
        self._reached.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is reached; return whether that was within `timeout` seconds."""
        return self._reached.wait(timeout)


class _Job(NamedTuple):
    run: Callable[[], object]
    first: Callable[[], object] | None  # what is seen of it before it runs
    works: bool  # no marker: it is delayed, and an error of the device skips it
    then: Callable[[], object] | None  # called when `idle` does not see it any more


class World:
    """The simulation, as its lanes and memory use it."""

    def __init__(self, seed: int, delay: float) -> None:
        self.seed: Final = seed
        self.delay = delay
        self.patience = 30.0  # seconds that the host waits for a stream before it raises
        self.synchronisations: Final[collections.Counter[str]] = collections.Counter()
        self.hazards: Final[list[str]] = []
        self.pinning_fails = False
        self.condition: Final = threading.Condition(threading.RLock())
        self.held = 0  # under the condition
        self.errors: Final[dict[int, BaseException]] = {}  # by device: it stays, as CUDA's
        self.closed = False

    def hold(self, lanes: list[Lane], by: int) -> None:
        """Add `by` to the holds of these lanes, or of all lanes if the list is empty."""
        with self.condition:
            if not lanes:
                self.held += by
            for lane in lanes:
                lane.held += by
            self.condition.notify_all()

    def fail(self, index: int, error: BaseException | str) -> None:
        """Let device `index` fail: what is queued is skipped, and every call that asks it raises, from now on."""
        self.errors.setdefault(index, RuntimeError(error) if isinstance(error, str) else error)

    def check(self, index: int) -> None:
        """Raise what the device failed with."""
        if (error := self.errors.get(index)) is not None:
            raise torch.AcceleratorError(f"CUDA error: {error}") from error

    def wait(self, marker: Marker, index: int, kind: str) -> None:
        """Let the host wait for a marker; raise RuntimeError after `patience` seconds, or the failure of the device."""
        self._count(kind)
        if not marker.wait(self.patience):
            raise RuntimeError(f"cuda:{index} did not get that far within {self.patience} s: is a stream held?")
        self.check(index)

    def _count(self, kind: str) -> None:
        with self.condition:
            self.synchronisations[kind] += 1


class Lane:
    """The queue of one stream, with the daemon thread that runs it, which starts with the first job.

    `put` may be called from any thread and at any moment, also from the destructor of a tensor in the midst of
    another `put`: it takes no lock that the same thread cannot take again.
    """

    def __init__(self, world: World, index: int, number: int) -> None:
        self.world: Final = world
        self.index: Final = index
        self.number: Final = number
        self.held = 0  # under the world's condition
        self._jobs: Final[collections.deque[_Job]] = collections.deque()  # the one that runs included
        self._tokens: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()  # one for each job; False ends the thread
        self._random: Final = random.Random(f"{world.seed}-{index}-{number}")
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"stream {self.number} of cuda:{self.index}"

    @property
    def idle(self) -> bool:
        """Whether all that was queued has been done."""
        return not self._jobs

    def put(
        self,
        run: Callable[[], object],
        first: Callable[[], object] | None = None,
        *,
        works: bool = True,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Queue `run`; `first` is called when all before it is done, and before what holds or delays `run`."""
        if self.world.closed:
            raise RuntimeError(f"{self}: the simulated device is closed")
        self._jobs.append(_Job(run, first, works, then))
        self._tokens.put(True)
        if self._thread is None:
            self._start()

    def mark(self) -> Marker:
        """Return a marker that is reached when all that is queued now has been done."""
        marker = Marker()
        self.put(lambda: None, works=False, then=marker.reach)
        return marker

    def wait_for(self, marker: Marker) -> None:
        """Do nothing that is queued from now on until the marker is reached."""
        if not marker.reached:
            self.put(marker.wait, works=False)

    def end(self, timeout: float) -> bool:
        """End the thread once all that is queued has been done; return whether that was within `timeout` seconds."""
        self._tokens.put(False)
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _start(self) -> None:
        with self.world.condition:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"simulated {self}", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        with torch.inference_mode():
            while self._tokens.get():
                job = self._jobs[0]
                self._do(job)
                self._jobs.popleft()  # not before: `idle` says that it is done
                if job.then is not None:
                    job.then()

    def _do(self, job: _Job) -> None:
        world = self.world
        if job.works and self.index in world.errors:
            return
        try:
            if job.first is not None:
                job.first()
            if self.held or world.held:
                with world.condition:
                    world.condition.wait_for(lambda: not (self.held or world.held))
            if job.works and world.delay:
                time.sleep(self._random.uniform(0, world.delay))
            job.run()
        except BaseException as error:  # noqa: BLE001 - as a kernel's fault: the next call that asks the device raises
            world.fail(self.index, error)
