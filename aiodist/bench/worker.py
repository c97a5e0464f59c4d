"""A rank of a benchmark: opens communicators, measures, and on rank 0 reports.

Started as `python -m aiodist.bench.worker PLAN`, the plan as JSON, by `aiodist bench` through the launcher.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console

import aiodist
from aiodist.bench import peers, records
from aiodist.bench.plan import BACKENDS, Plan, carry_out
from aiodist.bench.records import Record
from aiodist.bench.session import Session, facts
from aiodist.bench.timing import Fence
from aiodist.communicator import Communicator
from aiodist.handles.progress import Progress


async def main(plan: Plan) -> None:
    """Measure the plan with the other ranks of this job."""
    measure = importlib.import_module(plan.module).measure
    found: list[Record] = []
    notes: list[str] = []
    impls_left = sorted(plan.impls, key=lambda impl: impl in BACKENDS)
    peers_left = list(plan.peers)
    first, rank = True, 0
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
                if first:
                    known, loop = facts(), type(asyncio.get_running_loop()).__module__.partition(".")[0]
                    over = f"{coll.size} ranks over {coll.backend} on {coll.nodes} host(s)"
                    cores = f"cores {','.join(map(str, known.affinity))}, with {known.torch_threads} torch threads"
                    notes.append(f"{plan.op}: {over}, {plan.dtype}, {loop}")
                    versions = f"aiodist {metadata.version('aiodist')}, torch {torch.__version__}"
                    notes.append(f"rank {rank} on {cores}; {versions}")
                notes += [peer.described for peer in opened]
                fence = _fence(coll, [*fences, *opened])
                found += await measure(Session(plan, coll, here, opened, fence, first=first, notes=notes))
                first = False
    if rank == 0:
        _report(plan, found, "\n".join(notes))


def _fence(coll: Communicator, opened: Sequence[peers.Peer]) -> Fence:
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


def _report(plan: Plan, found: list[Record], title: str) -> None:
    """Write the files, then print: an error while printing loses no records."""
    if plan.json is not None:
        Path(plan.json).write_text(records.dumps(found))
    if plan.plot is not None:
        records.plot(found, plan.op, plan.plot)
    console = Console(width=plan.width, highlight=False)
    console.print(records.table(found, title))
    if plan.targets is not None:
        console.print(*importlib.import_module(plan.targets).reached(found))


if __name__ == "__main__":
    carry_out(lambda text: aiodist.run(main, Plan.from_json(text)))
