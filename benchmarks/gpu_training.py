"""Training steps of a transformer on a CUDA device: ours beside none, beside a slow loader, beside DDP over gloo."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiodist.bench.peers import opened
from aiodist.data import prefetch
from aiodist.nn import DataParallel
from benchmarks.gpu_cases import Measured, Sizes
from benchmarks.gpu_turns import Bench, Way, check, in_turns, median, poison

__all__ = ["Language", "Loader", "beside_ddp", "beside_none", "prefetched"]

_RATE = 1e-3
CHECKED = Sizes(width=32, layers=2, words=50, window=8, samples=3)
_CHECKED_STEPS = 3
_HEAD_WIDTH = 64
_SHARED = 4  # ranks that share the device have so much less to do in a step each
Batch = tuple[Tensor, Tensor]
Step = Callable[[], Awaitable[object]]


class Language(nn.Module):
    """Says of each of `window` words which it is; 120 million parameters as it is measured."""

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
    answer = net(x)
    wide = answer if answer.dtype is torch.float64 else answer.float()
    return F.cross_entropy(wide.flatten(0, 1), y.flatten())


def _model(sizes: Sizes, seed: int = 0) -> nn.Module:
    """Return the model on the host, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Language(sizes)


def _batch(sizes: Sizes, samples: int, seed: int) -> Batch:
    """Return words and what they are, on the host."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(sizes.words, (samples, sizes.window), generator=generator)
    return x, torch.randint(sizes.words, (samples, sizes.window), generator=generator)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)


# --- contenders --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trained:
    """A model on the device; `step` trains it on one batch, and leaves work on the device behind."""

    model: nn.Module
    step: Callable[[Batch], Awaitable[object]]


@asynccontextmanager
async def _ours(bench: Bench, model: nn.Module) -> AsyncIterator[_Trained]:
    net = await DataParallel.create(model, bench.coll)
    optimizer = _optimizer(model)

    async def step(batch: Batch) -> None:
        await net.step(loss, optimizer, net, *batch)

    try:
        yield _Trained(model, step)
    finally:
        await net.aclose()


def plain_loop(model: nn.Module, net: nn.Module | None = None) -> _Trained:
    """Return a plain torch loop, on the thread that calls it; `net` is what wraps the model."""
    optimizer = _optimizer(model)

    async def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss(net or model, *batch).backward()
        optimizer.step()

    return _Trained(model, step)


def by_ddp(bench: Bench, model: nn.Module) -> _Trained:
    """Return DDP over the default process group, which is gloo's."""
    net = nn.parallel.DistributedDataParallel(model, device_ids=[bench.device.index], gradient_as_bucket_view=True)
    return plain_loop(model, net)


# --- cases -------------------------------------------------------------------------------------------------------


async def beside_none(bench: Bench) -> Measured:
    """Measure steps of one rank of DataParallel beside those of a plain loop, on models of their own."""
    await _check(bench)
    sizes, device = bench.sizes, bench.device
    x, y = (t.to(device) for t in _batch(sizes, sizes.samples, bench.coll.rank))
    plain = plain_loop(_model(sizes).to(device, torch.bfloat16))
    async with _ours(bench, _model(sizes).to(device, torch.bfloat16)) as ours:
        ways = [Way("datapar", partial(ours.step, (x, y)), sizes.batch)]
        ways.append(Way("none", partial(plain.step, (x, y)), sizes.batch))
        samples = await _undisturbed(bench, ways)
    found = median(samples)
    records = await bench.session.timed("gpu_train", None, samples)
    return Measured({"datapar": found["datapar"] / found["none"]}, records=records)


async def beside_ddp(bench: Bench) -> Measured:
    """Measure steps of ranks that share the device beside those of DDP over gloo."""
    await _check(bench)
    sizes, device = bench.sizes, bench.device
    samples_each = max(1, sizes.samples // _SHARED)
    x, y = (t.to(device) for t in _batch(sizes, samples_each, bench.coll.rank))
    async with opened(["gloo"], bench.coll), _ours(bench, _model(sizes).to(device, torch.bfloat16)) as ours:
        ddp = by_ddp(bench, _model(sizes).to(device, torch.bfloat16))
        steps = {"datapar": ours.step, "ddp": ddp.step}
        ways = [Way(name, partial(step, (x, y)), min(sizes.batch, 3)) for name, step in steps.items()]
        samples = await _undisturbed(bench, ways)
        del ddp, ways, steps
    records = await bench.session.timed("gpu_train_shared", None, samples)
    seconds = {record.impl: record.seconds or float("nan") for record in records}
    return Measured({"ddp": seconds["ddp"] / seconds["datapar"]} if seconds else {}, records=records)


async def _undisturbed(bench: Bench, ways: list[Way]) -> dict[str, list[float]]:
    """Let them take turns without Python's collector, which stops the thread that computes."""
    gc.collect()
    gc.disable()
    try:
        return await in_turns(bench, ways)
    finally:
        gc.enable()


async def _check(bench: Bench) -> None:
    """Train a small model in float32, from fresh weights, and on the CPU in float64 with all ranks' batches."""
    seed = await bench.seed()
    batches = [
        [_batch(CHECKED, CHECKED.samples, seed + _CHECKED_STEPS * rank + i) for i in range(_CHECKED_STEPS)]
        for rank in range(bench.coll.size)
    ]
    expected = _model(CHECKED, seed).double()
    optimizer = _optimizer(expected)
    for step in zip(*batches, strict=True):
        optimizer.zero_grad()
        for x, y in step:
            (loss(expected, x, y) / bench.coll.size).backward()
        optimizer.step()
    poison(bench.device, 4 * sum(p.nbytes for p in expected.parameters()))
    async with _ours(bench, _model(CHECKED, seed).to(bench.device)) as ours:
        for x, y in batches[bench.coll.rank]:
            await ours.step((x.to(bench.device), y.to(bench.device)))
        torch.cuda.synchronize(bench.device)
        for (name, found), wanted in zip(ours.model.named_parameters(), expected.parameters(), strict=True):
            check(f"{name} after {_CHECKED_STEPS} steps", found, wanted.detach(), rtol=1e-3, atol=1e-5)


# --- a slow loader -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loader:
    """An epoch of batches in ordinary memory, each of which is waited for."""

    batches: list[Batch]
    seconds: float

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch after a while."""
        for batch in self.batches:
            sleep(self.seconds)
            yield batch


async def prefetched(bench: Bench) -> Measured:
    """Measure an epoch with a loader that is as slow as the steps, beside loading alone and steps alone."""
    sizes, device = bench.sizes, bench.device
    batches = [_batch(sizes, sizes.samples, seed) for seed in range(sizes.batches)]
    await _check_items(bench)
    async with _ours(bench, _model(sizes).to(device, torch.bfloat16)) as ours:
        here = [(x.to(device), y.to(device)) for x, y in batches[:2]]

        async def steps() -> None:
            for i in range(sizes.batches):
                await ours.step(here[i % 2])

        alone = await _seconds(bench, steps)
        loader = Loader(batches, alone / sizes.batches)

        async def epoch() -> None:
            async with prefetch(loader, depth=2, device=device) as items:
                async for batch in items:
                    await ours.step(batch)

        async def load() -> None:
            for _ in loader:
                pass

        samples = await _undisturbed(bench, [Way("prefetch", epoch), Way("steps", steps), Way("loader", load)])
    found = median(samples)
    records = await bench.session.timed("gpu_prefetch", None, samples)
    return Measured({"prefetch": found["prefetch"] / max(found["loader"], found["steps"])}, records=records)


async def _seconds(bench: Bench, once: Step) -> float:
    """Return how long it takes at the second time."""
    for _ in range(2):
        torch.cuda.synchronize(bench.device)
        began = perf_counter()
        await once()
        torch.cuda.synchronize(bench.device)
    return perf_counter() - began


async def _check_items(bench: Bench) -> None:
    """Read prefetched items at once on another stream; in memory that held NaN."""
    generator = torch.Generator().manual_seed(await bench.seed())
    items = [torch.randn(1 << 16, generator=generator) for _ in range(10)]
    poison(bench.device, sum(item.nbytes for item in items))
    side = torch.cuda.Stream(bench.device)
    doubled = []
    async with prefetch(items, depth=3, device=bench.device) as there:
        async for t in there:
            with torch.cuda.stream(side):
                doubled.append(t * 2)
            t.record_stream(side)
    side.synchronize()
    for k, (found, item) in enumerate(zip(doubled, items, strict=True)):
        check(f"item {k} of a prefetch", found, item.double() * 2, rtol=0.0, atol=0.0)
