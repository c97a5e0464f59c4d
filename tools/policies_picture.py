"""Run three workers of unlike speed under each consistency and draw it: `python tools/policies_picture.py [PICTURE]`.

The clock jumps (`aiodist.testing.run_ranks`), so each run takes no time and gives the same picture. A worker computes
and calls `push_pull`, by turns.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import aiodist
from aiodist.bench.plots import picture as drawn
from aiodist.ps import Asynchronous, Bounded, ParameterServer, Policy, Quorum, Synchronous
from aiodist.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
SECONDS = (1.0, 1.5, 3.0)  # that a worker computes for
END = 12.0
POLICIES: dict[str, Policy] = {
    "Asynchronous()": Asynchronous(),
    "Bounded(1)": Bounded(1),
    'Quorum(2, "mean", stale="drop")': Quorum(2, "mean", stale="drop"),
    'Synchronous("mean")': Synchronous("mean"),
}
COLOURS = {"computes": "#9ecae1", "waits": "#fdae6b"}


class Spent(NamedTuple):
    """The activity of one worker between two times, in seconds."""

    worker: int
    kind: str
    begin: float
    end: float


def run(policy: Policy) -> list[Spent]:
    """Return what the workers did under `policy`."""
    spent: list[Spent] = []

    async def main(rank: int) -> None:
        now = asyncio.get_running_loop().time
        async with (
            aiodist.init() as coll,
            ParameterServer(coll, {"w": torch.zeros(1)}, consistency=policy) as ps,
        ):
            await coll.barrier()
            began = now()
            while now() < began + END:
                times = [now()]
                await asyncio.sleep(SECONDS[rank])
                times.append(now())
                await ps.push_pull("w", torch.ones(1))
                times.append(now())
                spent.append(Spent(rank, "computes", times[0] - began, times[1] - began))
                spent.append(Spent(rank, "waits", times[1] - began, times[2] - began))
            await ps.barrier()

    run_ranks(len(SECONDS), main)
    return spent


def done(spent: list[Spent]) -> list[int]:
    """Return how many `push_pull` each worker has done."""
    return [sum(one[:2] == (worker, "waits") and one.end <= END for one in spent) for worker in range(len(SECONDS))]


def draw(picture: Path) -> None:
    """Draw a panel for each policy."""
    with drawn(picture, len(POLICIES), size=(9.0, 1.5)) as rows:
        workers = range(len(SECONDS))
        for (axes,), (name, policy) in zip(rows, POLICIES.items(), strict=True):
            spent = run(policy)
            for worker, kind, begin, end in spent:
                axes.broken_barh([(begin, end - begin)], (-worker - 0.4, 0.8), color=COLOURS[kind], ec="w")
            pushes = done(spent)
            axes.set_yticks([-worker for worker in workers], [f"worker {one}: {pushes[one]}" for one in workers])
            axes.set_title(name, loc="left", fontsize=10, family="monospace")
            axes.set_xlim(0, END)
            axes.grid(visible=False)
        rows[-1][0].set_xlabel(
            "seconds; blue: computes, orange: waits in push_pull; beside each worker how many it has done"
        )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img" / "policies.svg")
