"""Training steps of a transformer on a CUDA device: a plain loop, a slow loader, and DDP over gloo."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiodist.data import prefetch
from aiodist.nn import DataParallel
from benchmarks.gpu_turns import Bench, Sizes, Way, in_turns, median

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["Language", "Loader", "measure"]

_RATE = 1e-3
_HEAD_WIDTH = 64
_SHARED = 4  # ranks that share a device have a quarter of the samples
_DDP_BATCH = 3
Batch = tuple[Tensor, Tensor]
_Step = Callable[[Batch], Awaitable[object]]


class Language(nn.Module):
    """Predict each of `window` words; 120 million parameters at the full size."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.words = nn.Embedding(sizes.words, width)
        self.places = nn.Parameter(torch.zeros(sizes.window, width))
        heads = max(1, width // _HEAD_WIDTH)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.answer = nn.Linear(width, sizes.words)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, window, words) for (B, window)."""
        answer: Tensor = self.answer(self.layers(self.words(x) + self.places))
        return answer


def loss(net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).float().flatten(0, 1), y.flatten())


def _model(bench: Bench) -> nn.Module:
    """Return the model in bf16, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Language(bench.sizes).to(bench.device, torch.bfloat16)


def _batch(sizes: Sizes, samples: int, seed: int) -> Batch:
    """Return words, and the words to predict, on the host."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(sizes.words, (samples, sizes.window), generator=generator)
    return x, torch.randint(sizes.words, (samples, sizes.window), generator=generator)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)


@asynccontextmanager
async def _ours(bench: Bench) -> AsyncIterator[_Step]:
    """Yield a step of DataParallel, which leaves work queued on the device."""
    model = _model(bench)
    net = await DataParallel.create(model, bench.coll)
    optimizer = _optimizer(model)

    async def step(batch: Batch) -> None:
        await net.step(loss, optimizer, net, *batch)

    try:
        yield step
    finally:
        await net.aclose()


def plain_loop(net: nn.Module) -> _Step:
    """Return a step of a plain torch loop."""
    optimizer = _optimizer(net)

    async def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss(net, *batch).backward()
        optimizer.step()

    return step


def by_ddp(bench: Bench) -> _Step:
    """Return a step of DDP over the default process group, which is gloo's."""
    ids = [bench.device.index]
    return plain_loop(nn.parallel.DistributedDataParallel(_model(bench), device_ids=ids, gradient_as_bucket_view=True))


async def measure(session: Session) -> list[Record]:
    """Measure the case of the session, without Python's collector, which would stop the computing thread."""
    bench = Bench.of(session)
    cases = {"train": _beside_plain, "train_4": _beside_ddp, "prefetch": _prefetched}
    gc.collect()
    gc.disable()
    try:
        return await cases[session.plan.op](bench)
    finally:
        gc.enable()


async def _beside_plain(bench: Bench) -> list[Record]:
    """Measure steps of one rank of DataParallel and of a plain loop, each with its own model."""
    sizes = bench.sizes
    x, y = (t.to(bench.device) for t in _batch(sizes, sizes.samples, bench.coll.rank))
    plain = plain_loop(_model(bench))
    async with _ours(bench) as step:
        ways = [Way("datapar", partial(step, (x, y)), sizes.batch), Way("none", partial(plain, (x, y)), sizes.batch)]
        samples = await in_turns(bench, ways)
    found = median(samples)
    records = await bench.session.timed("gpu_train", None, samples)
    return [*records, *bench.values(datapar=found["datapar"] / found["none"])]


async def _beside_ddp(bench: Bench) -> list[Record]:
    """Measure steps of ranks that share the device, of DataParallel and of DDP over gloo."""
    x, y = (t.to(bench.device) for t in _batch(bench.sizes, max(1, bench.sizes.samples // _SHARED), bench.coll.rank))
    batch = min(bench.sizes.batch, _DDP_BATCH)
    async with _ours(bench) as step:
        ways = [Way("datapar", partial(step, (x, y)), batch), Way("ddp", partial(by_ddp(bench), (x, y)), batch)]
        samples = await in_turns(bench, ways)
        del ways
    records = await bench.session.timed("gpu_train_shared", None, samples)
    seconds = {record.impl: record.seconds or float("nan") for record in records}
    return [*records, *bench.values(ddp=seconds["ddp"] / seconds["datapar"])] if records else []


# --- a slow loader -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loader:
    """An epoch of batches in ordinary memory, each after a sleep of `seconds`."""

    batches: list[Batch]
    seconds: float

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        for batch in self.batches:
            sleep(self.seconds)
            yield batch


async def _prefetched(bench: Bench) -> list[Record]:
    """Measure an epoch with a loader as slow as the steps, loading alone, and steps alone."""
    sizes, device = bench.sizes, bench.device
    batches = [_batch(sizes, sizes.samples, seed) for seed in range(sizes.batches)]
    async with _ours(bench) as step:
        here = [(x.to(device), y.to(device)) for x, y in batches[:2]]

        async def steps() -> None:
            for i in range(sizes.batches):
                await step(here[i % 2])
            torch.cuda.synchronize(device)

        await steps()  # the first epoch also loads kernels
        began = perf_counter()
        await steps()
        loader = Loader(batches, (perf_counter() - began) / sizes.batches)

        async def epoch() -> None:
            async with prefetch(loader, depth=2, device=device) as items:
                async for batch in items:
                    await step(batch)

        async def load() -> None:
            for _ in loader:
                pass

        samples = await in_turns(bench, [Way("prefetch", epoch), Way("steps", steps), Way("loader", load)])
    found = median(samples)
    records = await bench.session.timed("gpu_prefetch", None, samples)
    return [*records, *bench.values(prefetch=found["prefetch"] / max(found["loader"], found["steps"]))]
