"""A rank of `python -m benchmarks recovery`: rounds in which a rank is killed and another one replaces it.

Each line is the median and the largest of all rounds, of the slowest rank of each: from SIGKILL to the error, to the
new communicator, and to the end of the first step on it; and from the call of `grow` to the end of the first step
of all ranks, without the seconds in which the new process imported torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from statistics import median
from time import monotonic

_BEGAN = monotonic()
import torch  # noqa: E402  - what that takes is measured

_IMPORTED = monotonic() - _BEGAN

import aiodist  # noqa: E402
from aiodist import Communicator  # noqa: E402

_ROUNDS = int(sys.argv[1]) if __name__ == "__main__" and len(sys.argv) > 1 else 8  # pytest looks for doctests
_AHEAD = 0.2
"""Seconds between the announcement and the death of a rank."""
_STEPS = 5
"""Steps before each death."""
_NAMES = ("SIGKILL to PeerLost", "to the new communicator", "to the next step", "grow to the first step")
_ASKED = {1: (0.1, 0.3, 1.0, 1.0), 2: (1.0, 2.0, 5.0, 1.0)}
"""Limits in seconds, by the number of hosts."""


class Training:
    """Training of a small net, with gradients summed by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        self._x = torch.randn(32, 64)

    async def step(self, coll: Communicator) -> None:
        """Run one step with all ranks."""
        self._net.zero_grad()
        self._net(self._x).square().mean().backward()
        await coll.allreduce([p.grad for p in self._net.parameters() if p.grad is not None], op="mean")
        with torch.no_grad():
            for p in self._net.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=1e-3)

    async def synchronize(self, coll: Communicator) -> None:
        """Broadcast the parameters of rank 0."""
        await coll.broadcast([p.detach() for p in self._net.parameters()])


async def main() -> None:
    """Measure on the ranks of this job; rank 0 of the last world prints."""
    torch.set_num_threads(1)
    training = Training()
    async with aiodist.init(elastic=True) as coll:
        full = coll.size
        times: list[list[float]] = []
        if coll.generation:
            times = await _began(coll, training, 0.0, [])
        while len(times) < _ROUNDS:
            for _ in range(_STEPS):
                await training.step(coll)
            coll, took = await _lose_one(coll, training, len(times))
            called = monotonic()
            coll = await coll.grow(full - coll.size)
            times = await _began(coll, training, called, [*times, took])
        if coll.rank == 0:
            _show(coll, times)


async def _lose_one(coll: Communicator, training: Training, number: int) -> tuple[Communicator, list[float]]:
    """Kill one rank; return the world without it, and the seconds to each stage of the recovery."""
    victim = (number * 3 + 1) % coll.size
    killed = 0.0
    try:
        if coll.rank == victim:
            then = monotonic() + _AHEAD
            for rank in range(coll.size):
                if rank != victim:
                    await coll.send_object(then, rank)
            await asyncio.sleep(then - monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        killed = await coll.recv_object(src=victim)
        while True:
            await training.step(coll)
    except aiodist.PeerLost:
        lost = monotonic()
    coll = await coll.shrink()
    made = monotonic()
    await training.synchronize(coll)
    await training.step(coll)
    return coll, [lost - killed, made - killed, monotonic() - killed]


async def _began(coll: Communicator, training: Training, called: float, times: list[list[float]]) -> list[list[float]]:
    """Run the first step of a world that grew; return the times of all rounds, on the slowest rank of each."""
    await training.synchronize(coll)
    await training.step(coll)
    ended = monotonic()
    told = await coll.allgather_object((times, called, ended, _IMPORTED if not called else 0.0))
    others = [each for each, *_ in told if each]
    slowest = [[max(some) for some in zip(*of_ranks, strict=True)] for of_ranks in zip(*others, strict=True)]
    first, last = min(called for _, called, *_ in told if called), max(ended for _, _, ended, _ in told)
    slowest[-1].append(last - first - max(imported for *_, imported in told))
    return slowest


def _show(coll: Communicator, times: Sequence[Sequence[float]]) -> None:
    hosts = len(coll.topology.hosts)
    print(f"{coll.size} ranks on {hosts} host{'s' * (hosts > 1)}, {len(times)} rounds")  # noqa: T201
    for name, asked, values in zip(_NAMES, _ASKED[hosts], zip(*times, strict=True), strict=True):
        print(f"{name:26} {median(values):7.3f} s  most {max(values):7.3f} s  (at most {asked:g} s)")  # noqa: T201


if __name__ == "__main__":
    aiodist.run(main)
