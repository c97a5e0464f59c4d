"""A rank of `python -m benchmarks`: measures, and on rank 0 reports, with targets.

Started as `python -m benchmarks.worker STUDY`, the study as JSON.
"""

from __future__ import annotations

from importlib import import_module

from rich.console import Console

import aiodist
from aiodist.bench import worker
from aiodist.bench.plan import carry_out
from aiodist.bench.records import table
from benchmarks.figures import COLUMNS, figures
from benchmarks.suite import Study

__all__ = ["main"]


async def main(study: Study) -> None:
    """Measure the study with the other ranks of this job; rank 0 writes the files and prints."""
    if done := await worker.measured(study, import_module(study.module).measure):
        found = figures(done[0])
        worker.write(study, found)
        console = Console(width=study.width, highlight=False)
        console.print(table([one for one in found if one.thread is None], done[1], COLUMNS))
        if threads := [one for one in found if one.thread is not None]:
            console.print(table(threads, "CPU of each thread", COLUMNS))
        if study.targets is not None:
            console.print(*import_module(study.targets).reached(found))


if __name__ == "__main__":
    carry_out(lambda text: aiodist.run(main, Study.from_json(text)))
