"""A loader as slow as the step: aiodist's prefetch, a plain loop, torch's DataLoader, and each part alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from aiodist.data import prefetch
from aiodist.streams import HostStream
from benchmarks.figures import figure
from benchmarks.training import torch_threads

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["Loader", "Step", "measure"]

SECONDS = 5e-3
"""Seconds to load a batch, and of a step."""
BATCHES = 40
_SAMPLES, _WIDTH = 64, 256


@dataclass(frozen=True)
class Loader(Dataset[Tensor]):
    """An epoch of batches that take time, for waiting or for computing."""

    waits: float
    """Seconds of a batch."""
    sorts: int
    """Sorts of a matrix, as work for one core."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(BATCHES))

    def __getitem__(self, index: int) -> Tensor:
        batch = torch.randn(_SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(index))
        sleep(self.waits)
        for _ in range(self.sorts):
            batch.sort()
        return batch


class Step:
    """A training step as long as `repeats` small ones."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)

    def __call__(self, batch: Tensor) -> None:
        """Train on one batch."""
        for _ in range(self._repeats):
            self._optimizer.zero_grad()
            self._model(batch).square().mean().backward()
            self._optimizer.step()


async def measure(session: Session) -> list[Record]:
    """Measure epochs with a loader that waits, and with one that computes on another core."""
    records = []
    with torch_threads(session.coll):
        example = Loader(0.0, 0)[0]
        repeats = await _calibrated(session, Step(1), example)
        sorts = await _calibrated(session, lambda batch: batch.sort(), example)
        for op, loader in (("prefetch", Loader(SECONDS, 0)), ("prefetch:cpu", Loader(0.0, sorts))):
            records += await _measure(session, op, loader, Step(repeats))
    return records


async def _calibrated(session: Session, call: Callable[[Tensor], object], example: Tensor) -> int:
    """Return the number of calls that take as long as a step, the same on every rank."""
    await session.fence()
    count = 1
    for _ in range(4):  # the first calls are slow, and so is the machine at times: the best of a few, again and again
        best = min(_seconds(call, example, count) for _ in range(5))
        count = max(1, round(count * SECONDS / best))
    return await session.coll.broadcast(count)


def _seconds(call: Callable[[Tensor], object], example: Tensor, count: int) -> float:
    began = perf_counter()
    for _ in range(count):
        call(example)
    return perf_counter() - began


async def _measure(session: Session, op: str, loader: Loader, step: Step) -> list[Record]:
    with _dataloaders(session, loader) as theirs:
        async with HostStream("compute") as compute:
            epochs = _epochs(session, loader, step, compute) | {
                name: _plain(torch_loader, step) for name, torch_loader in theirs.items()
            }
            times: dict[str, list[float]] = {name: [] for name in epochs}
            for turn in range(1 + (session.plan.repeat or 5)):
                for name in epochs if turn % 2 else reversed(epochs):
                    await session.fence()
                    began = perf_counter()
                    await epochs[name]()
                    if turn:  # the first warms up
                        times[name].append(perf_counter() - began)
    return [figure(record, batch=_SAMPLES) for record in await session.timed(op, None, times)]


_Epoch = Callable[[], Awaitable[None]]


def _epochs(session: Session, loader: Loader, step: Step, compute: HostStream) -> dict[str, _Epoch]:
    """Return the contenders: aiodist, a plain loop, loading alone, and computing alone."""
    example = loader[0]

    async def ours() -> None:
        async with prefetch(loader, depth=2) as batches:
            async for batch in batches:
                await compute.submit(step, batch)

    async def alone() -> None:
        for _ in range(len(loader)):
            step(example)

    found: dict[str, _Epoch] = {}
    if "prefetch" in session.impls:
        found["aiodist:prefetch"] = ours
    if "plain" in session.plan.peers:
        found["plain"] = _plain(loader, step)
    return {**found, "loader": _plain(loader, lambda _: None), "step": alone}


def _plain(batches: Loader | DataLoader[Any], step: Callable[[Tensor], None]) -> _Epoch:
    async def epoch() -> None:
        for batch in batches:
            step(batch)

    return epoch


@contextmanager
def _dataloaders(session: Session, loader: Loader) -> Iterator[dict[str, DataLoader[Any]]]:
    """Yield torch's DataLoader with persistent workers."""
    found = {}
    if "dataloader" in session.plan.peers:
        for workers, name in ((1, "torch:dataloader"), (2, "torch:dataloader:2")):
            found[name] = DataLoader(loader, batch_size=None, num_workers=workers, persistent_workers=True)
    try:
        yield found
    finally:
        found.clear()  # what is collected ends its processes
