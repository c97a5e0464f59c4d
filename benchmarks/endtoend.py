"""Whole jobs: loader, evaluation and checkpoints beside training, ours and the same written with DDP."""

from __future__ import annotations

import ast
import io
import tempfile
import tokenize
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING

from benchmarks import jobs_aiodist, jobs_ddp
from benchmarks.first import valued
from benchmarks.jobs import JOBS, Job, Outcome
from benchmarks.suite import models
from benchmarks.training import torch_threads

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["lines_of_code", "measure"]

_ROUNDS = 3


async def measure(session: Session) -> list[Record]:
    """Run every job of the plan, both programs in turn, and count their lines."""
    programs: dict[str, _Program] = {}
    modules: dict[str, ModuleType] = {}
    if "datapar" in session.impls:
        programs["aiodist:datapar"], modules["aiodist:datapar"] = _ours, jobs_aiodist
    if "ddp" in session.plan.peers:
        programs["ddp"], modules["ddp"] = partial(_ddp, 1), jobs_ddp
        programs["ddp:0"] = partial(_ddp, 0)
    records = []
    with torch_threads(session.coll):
        for name in models(session.plan):
            records += await _measure(session, name, JOBS[name](), programs)
    for name, module in modules.items():
        records += await valued(session, "end2end:lines", name, float(lines_of_code(Path(module.__file__ or ""))))
    return records


_Program = Callable[["Session", Job, Path], Awaitable[Outcome]]


async def _ours(session: Session, job: Job, folder: Path) -> Outcome:
    return await jobs_aiodist.train(job, session.coll, folder)


async def _ddp(workers: int, session: Session, job: Job, folder: Path) -> Outcome:
    """On the main thread, as its users run it; best without workers where no core is free."""
    return jobs_ddp.train(job, folder, workers)


async def _measure(session: Session, name: str, job: Job, programs: dict[str, _Program]) -> list[Record]:
    """Return for each program seconds and samples per second of the whole job, and the accuracy that it reached."""
    times: dict[str, list[float]] = {program: [] for program in programs}
    outcomes: dict[str, Outcome] = {}
    for turn in range(1 + (session.plan.repeat or _ROUNDS)):
        for program, run in programs.items() if turn % 2 else reversed(programs.items()):
            with tempfile.TemporaryDirectory() as folder:
                await session.fence()
                began = perf_counter()
                outcomes[program] = await run(session, job, Path(folder))
                if turn:  # the first warms up
                    times[program].append(perf_counter() - began)
    steps = len(job.data) // session.coll.size // job.batch * job.epochs
    samples = steps * job.batch * session.coll.size
    records = [
        replace(record, batch=job.batch, value=samples / (record.seconds or float("nan")))
        for record in await session.timed(f"end2end:{name}", None, times)
    ]
    for program, outcome in outcomes.items():
        records += await valued(session, f"end2end:{name}:accuracy", program, outcome.accuracies[-1])
    return records


def lines_of_code(file: Path) -> int:
    """Return how many lines of a Python file hold code: neither blank, nor comment, nor docstring."""
    text = file.read_text()
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
