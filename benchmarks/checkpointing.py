"""A checkpoint during training: the waits of steps and loop for its copy, and the slowdown of steps by its writing.

With `--against gloo`, `torch.distributed.checkpoint.async_save` saves the same state after each round, without steps.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from time import perf_counter
from typing import TYPE_CHECKING

import torch

import aiodist
from aiodist.bench.timing import percentile
from aiodist.nn import DataParallel
from benchmarks import models
from benchmarks.first import valued
from benchmarks.ticker import ticker
from benchmarks.training import Setting, torch_threads

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["measure"]

_BATCH = 32
_ROUNDS = 9
_BEFORE = 6
"""Steps between two checkpoints, for comparison with steps during the writing."""


async def measure(session: Session) -> list[Record]:
    """Save the mlp again and again while it trains, in a folder of the temporary files of this host."""
    path = Path(await session.coll.broadcast_object(mkdtemp(prefix="aiodist-") if session.coll.rank == 0 else ""))
    with torch_threads(session.coll):
        setting = Setting.make("mlp", _BATCH, session.coll)
        net = await DataParallel.create(models.build("mlp"), session.coll)
        try:
            rounds = _Rounds(setting, net, path, beside_torch=bool(session.peers))
            await rounds.run(session.plan.repeat or _ROUNDS)
        finally:
            await net.aclose()
    if session.coll.rank == 0:
        rmtree(path)
    nbytes = sum(p.nbytes for p in net.parameters())
    records = await session.timed(
        "checkpoint", nbytes, {name: found for name, found in rounds.seconds.items() if found}
    )
    beside = statistics.median(rounds.ratios)
    return [
        *records,
        *await valued(session, "checkpoint:beside", "aiodist:step", beside, nbytes),
        *await valued(session, "checkpoint:lag", "aiodist:loop", percentile(rounds.lags, 99), nbytes),
    ]


class _Rounds:
    """The figures of one rank: seconds by name, and in each round the ratio of steps during the writing to others."""

    def __init__(self, setting: Setting, net: DataParallel, path: Path, *, beside_torch: bool) -> None:
        self.seconds: dict[str, list[float]] = {
            **{f"aiodist:{name}": [] for name in ("copy", "call", "write", "step", "step-beside")},
            "async_save:call": [],
        }
        self.ratios: list[float] = []
        self.lags: list[float] = []
        self._setting = setting
        self._net = net
        self._path = path
        self._beside_torch = beside_torch
        self._optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

    async def _steps(self, count: int) -> list[float]:
        """Run steps with the same extra work as during a save: a ticker, and an allreduce after each step."""
        seconds = []
        async with ticker():
            for _ in range(count):
                seconds.append(await self._step())
                await self._setting.coll.allreduce(0, "min")
        return seconds

    async def _step(self) -> float:
        began = perf_counter()
        await self._net.step(lambda: self._setting.loss(self._net), self._optimizer)
        return perf_counter() - began

    async def run(self, rounds: int) -> None:
        """Run steps, after one that touches the memory for the first time."""
        for turn in range(1 + rounds):
            before = await self._steps(_BEFORE)
            async with ticker() as lateness:
                called = perf_counter()
                saving = aiodist.save(self._path, self._net, self._optimizer, keep_last=1)
                held = perf_counter()
                await self._net.submit(lambda: None)
                copied = perf_counter()
                beside = [await self._step()]
                while not await self._setting.coll.allreduce(int(saving.done()), "min"):
                    beside.append(await self._step())
                await saving
            written = perf_counter()
            after = await self._steps(_BEFORE)
            if turn:
                self._note([copied - called], "copy")
                self._note([held - called], "call")
                self._note([written - called], "write")
                self._note(before[1:] + after[1:], "step")
                self._note(beside, "step-beside")
                self.ratios.append(statistics.mean(beside) / statistics.mean(before[1:] + after[1:]))
                self.lags += lateness
            if self._beside_torch:
                seconds = await self._async_save()
                if turn:
                    self.seconds["async_save:call"].append(seconds)

    async def _async_save(self) -> float:
        """Return the seconds for which torch's `async_save` blocks its caller."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        state = {"model": self._net.state_dict(), "optimizer": self._optimizer.state_dict()}
        folder = self._path / "torch"
        began = perf_counter()
        saving = async_save(state, checkpoint_id=folder)
        held = perf_counter() - began
        await asyncio.to_thread(saving.result)  # type: ignore[union-attr]  # without options it is a future
        await self._setting.coll.barrier()
        rmtree(folder, ignore_errors=True)
        await self._setting.coll.barrier()
        return held

    def _note(self, seconds: Sequence[float], name: str) -> None:
        self.seconds[f"aiodist:{name}"] += seconds
