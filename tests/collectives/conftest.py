"""Fixtures of the tests of collectives: one thread of torch, and ranks of one process that share memory of devices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist.collectives.choice.table import USUAL_LIMITS
from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.streams import Events
from aiodist.testing.seams.algorithms import Endpoint, Program
from aiodist.testing.seams.carriers import LocalHub, LocalTransport
from aiodist.testing.seams.cuda import CudaIpc, DeviceWork, Mappings, on_devices
from aiodist.testing.seams.progress import run, transport_lock
from aiodist.testing.seams.transport import Done, Primitive, tag_of
from tests.support.one_thread import one_thread as one_thread
from tests.support.simulated_mapper import SimulatedMapper

SMALL_PIECES = {**USUAL_LIMITS, "cuda_ipc.piece_bytes": 1024}
SECONDS = 20.0
Make = Callable[[CudaIpc, Endpoint], Program[Any]]


class MortalTransport(LocalTransport):
    """Tells who waits for a rank that it is gone, as those of real processes do."""

    def __init__(self, hub: LocalHub, rank: int, size: int) -> None:
        super().__init__(hub, rank, size)
        self._waiting: dict[int, list[Done]] = {}
        self._lost: set[int] = set()

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        if dst in self._lost:
            done(BackendError(f"rank {dst} has left"))
        else:
            super().isend(t, dst, tag, self._once(dst, done))

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        if src in self._lost:
            done(BackendError(f"rank {src} has left"))
        else:
            super().irecv(t, src, tag, self._once(src, done))

    def _once(self, rank: int, done: Done) -> Done:
        waiting = self._waiting.setdefault(rank, [])

        def over(error: BaseException | None) -> None:
            if over in waiting:
                waiting.remove(over)
                done(error)

        waiting.append(over)
        return over

    def lose(self, rank: int) -> None:
        self._lost.add(rank)
        with transport_lock:
            for over in list(self._waiting.get(rank, ())):
                over(BackendError(f"rank {rank} has left"))


class LateTransport(LocalTransport):
    """Messages wait, and those of different operations or to different ranks overtake one another."""

    def __init__(self, hub: LocalHub, rank: int, size: int, seed: int) -> None:
        super().__init__(hub, rank, size)
        self._random = random.Random(f"{seed}-{rank}")
        self._loop = asyncio.get_running_loop()
        self._late: dict[tuple[int, int], list[tuple[Tensor, Done]]] = {}

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        self._late.setdefault((dst, tag), []).append((t, done))
        self._loop.call_soon_threadsafe(self._loop.call_later, self._random.uniform(0, 2e-3), self._send_one)

    def _send_one(self) -> None:
        with transport_lock:
            dst, tag = self._random.choice(list(self._late))
            t, done = self._late[dst, tag].pop(0)
            if not self._late[dst, tag]:
                del self._late[dst, tag]
            super().isend(t, dst, tag, done)


class Ranks:
    """Ranks of one process, each with its stream and mappings."""

    def __init__(self, size: int, *, seed: int | None = None, devices: int = 1, shared: bool = False) -> None:
        """Make ranks on `devices` simulated devices; if `shared`, the ranks report that they share devices."""
        self.size = size
        self.progress = Progress.current()
        events = Events.of(self.progress)
        hub = LocalHub()
        self.transports = [
            MortalTransport(hub, rank, size) if seed is None else LateTransport(hub, rank, size, seed)
            for rank in range(size)
        ]
        self.mappers = [SimulatedMapper() for _ in range(size)]
        places = [f"GPU {rank % devices if shared else rank}" for rank in range(size)]
        self.mappings = [Mappings(mapper) for mapper in self.mappers]
        # Named as every third rank of a larger world.
        self.names = [3 * rank + 1 for rank in range(size)]
        self.impls = [CudaIpc(mappings, self.names, places, events, SMALL_PIECES) for mappings in self.mappings]
        self.streams = [torch.cuda.Stream(rank % devices) for rank in range(size)]
        self._seq = 0

    def begin(self, rank: int, seq: int, make: Make) -> asyncio.Future[Any]:
        """Begin operation `seq` on one rank."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(result: object, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        work = DeviceWork(self.progress, self.streams[rank])
        program = on_devices(make(self.impls[rank], Endpoint(self.transports[rank], tag_of(seq))), [work])

        def finish(result: object, error: BaseException | None) -> None:
            loop.call_soon_threadsafe(partial(tell, result, error))

        self.progress.start(partial(run, program, finish))
        return future

    def issue(self, make: Sequence[Make]) -> list[asyncio.Future[Any]]:
        """Begin one operation on all ranks."""
        self._seq += 1
        return [self.begin(rank, self._seq, make[rank]) for rank in range(self.size)]

    async def perform(self, make: Sequence[Make]) -> list[Any]:
        """Do one operation on all ranks."""
        return await asyncio.wait_for(asyncio.gather(*self.issue(make)), SECONDS)

    async def close(self) -> None:
        for mappings in self.mappings:
            await mappings.aclose()
        assert not any(mapper.opened for mapper in self.mappers)

    @staticmethod
    def brought(size: int, n: int, kind: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
        """Return what each rank brings: small whole numbers, all different, so that sums and products are exact."""
        made = torch.Generator().manual_seed(seed * 1000 + n)
        if kind is torch.bool:
            return [torch.randint(0, 2, (n,), generator=made).bool() for _ in range(size)]
        high = 3 if kind.itemsize == 1 else 4
        ts = [torch.randint(1, high, (n,), generator=made) for _ in range(size)]
        return [t.to(kind) for t in ts]

    @staticmethod
    def on_device(ts: Sequence[Tensor], devices: int = 1) -> list[Tensor]:
        return [t.to(f"cuda:{rank % devices}") for rank, t in enumerate(ts)]

    @staticmethod
    def summing(ts: Sequence[Tensor]) -> list[Make]:
        return [partial(lambda t, impl, ep: impl.run(ep, [Primitive("allreduce", t)]), t) for t in ts]


@pytest.fixture
def ranks_of() -> type[Ranks]:
    return Ranks
