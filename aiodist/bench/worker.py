"""A rank of a benchmark: opens communicators, measures, and on rank 0 reports.

Started as `python -m aiodist.bench.worker PLAN`, the plan as JSON, by `aiodist bench` through the launcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console

import aiodist
from aiodist.bench import collectives, peers, plots, records
from aiodist.bench.plan import BACKENDS, Plan, carry_out
from aiodist.bench.records import Record
from aiodist.bench.session import Session, facts
from aiodist.bench.timing import Fence
from aiodist.communicator import Communicator
from aiodist.handles.progress import Progress

Measure = Callable[[Session], Awaitable[Sequence[Record]]]


async def main(plan: Plan) -> None:
    """Measure the plan with the other ranks of this job; rank 0 writes the files and prints."""
    if done := await measured(plan, collectives.measure):
        found, title = done
        write(plan, found)
        Console(width=plan.width, highlight=False).print(records.table(found, title))


async def measured(plan: Plan, measure: Measure) -> tuple[list[Record], str] | None:
    """Measure in a session for each backend; return on rank 0 the records, and a title with versions and cores."""
    found: list[Record] = []
    notes: list[str] = []
    rank = 0
    impls_left = sorted(plan.impls, key=lambda impl: impl in BACKENDS)
    peers_left = list(plan.peers)
    while impls_left:
        async with aiodist.init(backend=impls_left[0] if impls_left[0] in BACKENDS else None) as coll:
            rank = coll.rank
            here = tuple([impl for impl in impls_left if impl not in BACKENDS or impl == coll.backend])
            impls_left = [impl for impl in impls_left if impl not in here]
            # gloo is measured in the session of aiodist over gloo, if there is one
            beside = [peer for peer in peers_left if peer not in impls_left]
            peers_left = [peer for peer in peers_left if peer not in beside]
            only_fence = ["mpi4py"] if coll.backend == "mpi" and not {"mpi4py", "mpi"} & set(beside) else []
            async with peers.opened(beside, coll) as opened, peers.opened(only_fence, coll) as fences:
                first = not notes
                if first:
                    affinity, threads = facts()
                    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
                    over = f"{coll.size} ranks over {coll.backend} on {coll.nodes} host(s)"
                    cores = f"cores {','.join(map(str, affinity))}, with {threads} torch threads"
                    notes.append(f"{plan.op}: {over}, {plan.dtype}, {loop}")
                    versions = f"aiodist {metadata.version('aiodist')}, torch {torch.__version__}"
                    notes.append(f"rank {rank} on {cores}; {versions}")
                notes += [peer.version for peer in opened]
                session = Session(plan, coll, here, opened, _fence(coll, [*fences, *opened]), first=first, notes=notes)
                found += await measure(session)
    return None if rank else (found, "\n".join(notes))


def _fence(coll: Communicator, opened: Sequence[peers.OtherLibrary]) -> Fence:
    """Return a barrier, of a peer if there is one, since that leaves no operation of aiodist pending.

    MPI's is the best, as it releases all ranks at the same time; gloo's threads run longer. The loop runs once before
    the barrier, as in a program that awaits: after a peer blocked the loop for a millisecond, the next await yields.
    """
    progress = Progress.current()

    async def fence() -> None:
        progress.post(lambda: None)
        await asyncio.sleep(0)
        if opened:
            opened[0].barrier()
        else:
            await coll.barrier()

    return fence


def write(plan: Plan, found: Sequence[Record]) -> None:
    """Write the files of the plan, before anything is printed: an error while printing loses no records."""
    if plan.json is not None:
        Path(plan.json).write_text(records.dumps(found))
    if plan.plot is not None:
        plots.plot(found, plan.op, plan.plot)


if __name__ == "__main__":
    carry_out(lambda text: aiodist.run(main, Plan.from_json(text)))
