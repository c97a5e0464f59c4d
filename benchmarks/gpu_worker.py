"""What each rank of `benchmarks gpu` runs: one case after the other, and writes down what became of each at once.

Started as `python -m benchmarks.gpu_worker TODO`, the todo as JSON, by `python -m benchmarks gpu` through the launcher.
What fails ends the job, for ranks and device may be in any state then: the command starts another one for the cases
that are left.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch

import aiodist
from aiodist.bench.plan import Plan
from aiodist.bench.session import Session
from aiodist.errors import PeerError
from benchmarks.gpu_cases import CASES, Case, Measured, Todo
from benchmarks.gpu_turns import Bench, NotPossible
from benchmarks.training import torch_threads

__all__ = ["measure", "measure_case"]


class _Notes:
    """What this rank has to say, a line of JSON for each event."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = Path(folder) / f"{rank}.jsonl"

    def write(self, event: Mapping[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(event) + "\n")


async def measure(todo: Todo) -> None:
    """Measure the cases of `todo` with all ranks of this job."""
    async with aiodist.init() as coll:
        notes = _Notes(todo.folder, coll.rank)
        if coll.device.type != "cuda":
            raise NotPossible(f"rank {coll.rank} has no CUDA device")
        torch.cuda.set_device(coll.device)

        async def fence() -> None:
            await coll.barrier()

        session = Session(Plan("gpu", coll.size, (), ()), coll, (), (), fence)
        bench = Bench(session, todo.sizes)
        notes.write({"machine": facts(bench)})
        with torch_threads(coll):
            for name in todo.cases:
                case = CASES[name]
                left = await coll.broadcast(todo.until - time())
                if left < case.seconds:
                    why = f"{left:.0f} s are left, and it may take {case.seconds:.0f}"
                    notes.write({"case": name, "late": why})
                else:
                    await _noted(bench, case, notes)


async def _noted(bench: Bench, case: Case, notes: _Notes) -> None:
    notes.write({"case": case.name, "began": time()})
    began = perf_counter()
    try:
        measured = await measure_case(bench, case)
    except NotPossible as why:
        notes.write({"case": case.name, "not_possible": str(why)})
    except Exception as error:
        text = "; ".join(str(error).splitlines()[:3])
        told = f"{type(error).__name__}: {text}"
        notes.write({"case": case.name, "error": told, "peers": isinstance(error, PeerError)})
        raise
    else:
        notes.write({"case": case.name, **measured.to_dict(), "seconds": perf_counter() - began})


async def measure_case(bench: Bench, case: Case) -> Measured:
    """Measure one case; every rank calls it, and rank 0's result counts."""
    found = case.load()
    async with asyncio.timeout(case.seconds):
        measured = await found(bench)
    torch.cuda.synchronize(bench.device)
    torch.cuda.empty_cache()
    return measured


def facts(bench: Bench) -> dict[str, object]:
    """Return what figures depend on."""
    return {
        "device": torch.cuda.get_device_name(bench.device),
        "devices": torch.cuda.device_count(),
        "ranks": bench.coll.size,
        "backend": bench.coll.backend,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    aiodist.run(measure, Todo.from_json(sys.argv[1]))
