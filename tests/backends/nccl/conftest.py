"""Ranks in this process, each with a simulated CUDA device and a stream of its own, over a fake NCCL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from aiodist.backends.nccl import group
from aiodist.handles import Progress
from aiodist.testing.seams.nccl import LaunchSlot, Library, NcclGroup, NcclGroups, NcclNative
from aiodist.testing.seams.transport import Done
from tests.support.fake_nccl.communicator import FakeCommunicator
from tests.support.fake_nccl.core import FakeNccl
from tests.support.simulated_cuda.simulation import simulated_cuda

DEVICES = 5
Then = Callable[[bytes | None, BaseException | None], None]
Failure = BaseException | None


class Post:
    """Carries one message from rank 0 of a group to all its ranks, as the layer above does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.uses: list[int] = []
        self.lost = False
        self._message: bytes | None = None
        self._waiting: list[Then] = []

    def exchange(self, rank: int, mine: bytes | None, then: Then) -> None:
        self.uses.append(rank)
        self._waiting.append(then)
        if rank == 0:
            self._message = mine
        if self._message is not None and not self.lost:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one(self._message, None)


class World:
    """`size` ranks, rank r on device r; `nccl` is the fake that they share."""

    def __init__(self, size: int, **options: Any) -> None:
        self.size = size
        self.nccl = FakeNccl(**options)
        self.progress = Progress.current()
        self.owned = [NcclGroups(Library(self.nccl), self.progress) for _ in range(size)]
        self.streams = [torch.cuda.Stream(device=rank % DEVICES) for rank in range(size)]
        self.posts: dict[str, Any] = {}
        self.futures: list[asyncio.Future[Failure]] = []
        self.kept: list[torch.Tensor] = []

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % DEVICES)

    def put(self, t: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a copy on the rank's device that lives as long as we: `done` does not say that the device is done."""
        self.kept.append(t.to(self.device(rank)))
        return self.kept[-1]

    def group(self, rank: int, name: str = "world") -> NcclGroup:
        return self.owned[rank].of(name, range(self.size), rank, self.device(rank))

    def comm(self, rank: int) -> FakeCommunicator:
        """The rank's newest."""
        return [comm for comm in self.nccl.communicators if comm.rank == rank][-1]

    def open(self, rank: int, name: str = "world") -> NcclGroup:
        """Return it opened; with the transport lock held."""
        group = self.group(rank, name)
        if not group.opened:
            post = self.posts.setdefault(name, Post(self.size))
            group.open(partial(post.exchange, rank))
        return group

    def start(self, call: Callable[[Done], None]) -> asyncio.Future[Failure]:
        """Make `call` with the lock held and return what becomes of it: what it is done with."""
        future: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self.futures.append(future)

        def done(error: Failure) -> None:
            self.progress.post(partial(future.set_result, error))  # raises when it is done twice

        self.progress.start(partial(call, done))
        return future

    def call(
        self,
        rank: int,
        call: Callable[[NcclNative, Done], None],
        *,
        name: str = "world",
        group: NcclGroup | None = None,
        slot: LaunchSlot | None = None,
    ) -> asyncio.Future[Failure]:
        """Let `call(native, done)` enqueue work on the rank's stream, after the work of the default stream."""
        stream = self.streams[rank]
        stream.wait_stream(torch.cuda.default_stream(self.device(rank)))

        def enqueue(done: Done) -> None:
            with torch.cuda.stream(stream):
                call(NcclNative(self.open(rank, name) if group is None else group, slot), done)

        return self.start(enqueue)

    async def done(self, futures: Iterable[asyncio.Future[Failure]]) -> list[Failure]:
        async with asyncio.timeout(20):
            return await asyncio.gather(*futures)

    async def succeed(self, futures: Iterable[asyncio.Future[Failure]]) -> None:
        """Wait until all are enqueued, and then for the devices."""
        assert set(await self.done(futures)) == {None}
        for stream in self.streams:
            stream.synchronize()

    async def close(self, *, drained: bool) -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*(owned.aclose(drained=drained) for owned in self.owned))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., World]]:
    """`world(size, dawdle=…)`; nothing that NCCL would not have forgiven was done to it."""
    made: list[World] = []
    for name in ("SPIN_SECONDS", "SPIN_ALONE_SECONDS"):
        monkeypatch.setattr(group, name, 0.0)  # what is not launched at once is left to the poller

    def make(size: int, **options: Any) -> World:
        made.append(World(size, **options))
        return made[-1]

    with simulated_cuda(devices=DEVICES, seed=1) as devices:
        yield make
        for one in made:
            await one.close(drained=False)
            assert all(future.done() for future in one.futures)
            assert not one.nccl.violations
        assert not devices.hazards
