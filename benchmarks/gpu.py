"""`python -m benchmarks gpu`: the cases on a CUDA device and their targets; each case is a job of its own."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from aiodist.bench.plan import parse_names, writable
from aiodist.env import Environment, Starter
from aiodist.errors import AiodistError, ConfigError
from benchmarks.suite import Study
from benchmarks.verdicts import Verdict, terminal, verdict_table

__all__ = ["CASES", "Case", "app", "measured", "verdicts"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_STOPPED = (130, 143)  # exit codes after a signal to this process
_NOT_POSSIBLE = 2
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """A job on a CUDA device, and the figures that it measures, by the name of their record."""

    ranks: int
    """0: one rank for each device, if there are several."""
    module: str
    seconds: float
    """Time limit after the start."""
    figures: Mapping[str, Verdict]
    gloo: bool = False
    shares: bool = False
    """True allows NCCL several ranks on one device."""


def _allreduce(ranks: int, seconds: float) -> Case:
    what = f"{ranks} ranks on one GPU, allreduce by cuda_ipc"
    figures = {
        "copy": Verdict(f"{what}: bandwidth / that of copies", nan, "x", 0.6, at_least=True),
        "gloo": Verdict(f"{what}: speed / dist.all_reduce over gloo", nan, "x", 5.0, at_least=True),
        "staged": Verdict(f"{what}: speed / our staged", nan, "x", 5.0, at_least=True),
        "serial": Verdict(f"{what}: awaited one after the other", nan, "ms"),
    }
    return Case(ranks, "benchmarks.gpu_reductions", seconds, figures, gloo=True)


def _nccl(ranks: int) -> Case:
    what = f"{ranks} ranks on one GPU, allreduce by cuda_ipc: speed / NCCL"
    figures = {"nccl": Verdict(what, nan, "x", 1.0, at_least=True)}
    return Case(ranks, "benchmarks.gpu_reductions", 60.0, figures, shares=True)


CASES: Mapping[str, Case] = {
    "await": Case(
        1,
        "benchmarks.gpu_waits",
        30.0,
        {
            "await": Verdict(
                "await of an event after a 20 us kernel, from launch to result, - kernel", nan, "us", 30.0
            ),
            "blocking": Verdict("the same with event.synchronize()", nan, "us"),
        },
    ),
    "parked": Case(
        1,
        "benchmarks.gpu_waits",
        30.0,
        {"cpu": Verdict("CPU while a 1 s kernel is awaited", nan, "CPU s/s", 0.05)},
    ),
    "wait_stream": Case(
        1,
        "benchmarks.gpu_waits",
        30.0,
        {
            "wait_stream": Verdict("gap between two kernels, the second after h.wait_stream", nan, "us", 10.0),
            "wait_event": Verdict("the same with stream.wait_event", nan, "us"),
            "await": Verdict("the same with await h", nan, "us"),
        },
    ),
    "nccl_overhead": Case(
        1,
        "benchmarks.gpu_waits",
        45.0,
        {
            "await": Verdict("await of one rank's allreduce by NCCL - nccl4py's and a synchronise", nan, "us", 15.0),
            "issue": Verdict("the call alone - nccl4py's", nan, "us"),
            "flight": Verdict("many in flight, one wait: each - nccl4py's", nan, "us"),
        },
    ),
    "train": Case(
        1,
        "benchmarks.gpu_training",
        90.0,
        {"datapar": Verdict("transformer, bf16, one rank: step of DataParallel / a plain one", nan, "x", 1.03)},
    ),
    "prefetch": Case(
        1,
        "benchmarks.gpu_training",
        90.0,
        {"prefetch": Verdict("epoch with prefetch(device) / the slower of loader and steps", nan, "x", 1.1)},
    ),
    "allreduce_2": _allreduce(2, 90.0),
    "allreduce_4": _allreduce(4, 120.0),
    "train_4": Case(
        4,
        "benchmarks.gpu_training",
        120.0,
        {"ddp": Verdict("4 ranks on one GPU: speed of a step / DDP over gloo", nan, "x", 1.5, at_least=True)},
        gloo=True,
    ),
    "nccl_2": _nccl(2),
    "nccl_4": _nccl(4),
    "allreduce_devices": Case(
        0,
        "benchmarks.gpu_reductions",
        60.0,
        {
            "nccl": Verdict("one rank on each GPU: speed of cuda_ipc / NCCL", nan, "x"),
            "staged": Verdict("one rank on each GPU: speed of cuda_ipc / our staged", nan, "x"),
        },
    ),
}


@app.command()
def gpu(
    only: Annotated[str | None, typer.Option(metavar="NAMES", help=f"Some of {', '.join(CASES)} (all).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, to try the cases.")] = False,
    seconds: Annotated[float, typer.Option(metavar="S", min=1.0, help="Start no case that could end later.")] = 1200.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the records to FILE.")] = None,
    mpi: Annotated[str, typer.Option(metavar="auto|none|…", help="The mpirun to use, as in aiodist run.")] = "auto",
) -> None:
    """Measure on one CUDA device, with up to 4 ranks on it; if there are several devices, with a rank on each too.

    The exit code is 1 if a case failed, and 2 without a CUDA device.
    """
    file = writable("--json", json)
    environment = Environment.read()
    if environment.starter is not Starter.ALONE:
        raise ConfigError(f"benchmarks gpu starts ranks, and {environment.starter} has started this process")
    devices = _devices()
    first = environment.visible_devices[0] if environment.visible_devices else "0"
    names = [name for name, case in CASES.items() if case.ranks or devices > 1]
    if only is not None:
        names = list(parse_names("--only", only, tuple(CASES)))
        if devices == 1 and (several := [name for name in names if not CASES[name].ranks]):
            raise ConfigError(f"--only {several[0]}: this case needs several CUDA devices, and there is one here")
    plans = [
        Study(name, case.ranks or devices, ("auto",), ("gloo",) * case.gloo, module=case.module, own={"quick": quick})
        for name, case in ((name, CASES[name]) for name in names)
    ]
    found, records = asyncio.run(measured(plans, monotonic() + seconds, mpi, first))
    if file is not None:
        Path(file).write_text(_json(records))
    width, colour = terminal()
    console = Console(width=width, force_terminal=colour, highlight=False, markup=False)
    console.print(verdict_table([verdict for verdicts in found.values() for verdict in verdicts]))
    raise typer.Exit(int(any(verdict.why.startswith("FAILED") for one in found.values() for verdict in one)))


def _devices() -> int:
    """Return the number of CUDA devices; raise `ConfigError` if there is none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = torch.version.cuda or "without CUDA"
        raise ConfigError(f"there is no CUDA device here: torch {torch.__version__} (built: {built}) sees none")
    return count


_Records = list[dict[str, Any]]


def _json(records: _Records) -> str:
    return "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n"


async def measured(
    plans: Sequence[Study], until: float, mpi: str, first: str
) -> tuple[dict[str, list[Verdict]], _Records]:
    """Run a job for each plan; ranks that share a device see only the device `first`."""
    found: dict[str, list[Verdict]] = {}
    everything: _Records = []
    for plan in plans:
        case = CASES[plan.op]
        exports = [f"NCCL_MULTI_RANK_GPU_ENABLE={int(case.shares)}"]
        exports += [f"CUDA_VISIBLE_DEVICES={first}"] if case.ranks else []
        limit = case.seconds + _START_SECONDS
        if monotonic() + limit > until:
            found[plan.op] = verdicts(case, [], f"not measured: it could take {limit:.0f} s")
            continue
        records, why, code = await _job(plan, mpi, tuple(exports), limit)
        found[plan.op] = verdicts(case, [one for one in records if one["op"] == plan.op], why)
        everything += records
        if code in _STOPPED:
            until = 0.0
    return found, everything


async def _job(plan: Study, mpi: str, exports: tuple[str, ...], limit: float) -> tuple[_Records, str, int]:
    """Return the records of a job, the reason for missing ones, and the exit code."""
    with tempfile.TemporaryDirectory(prefix="aiodist-bench-") as folder:
        file = Path(folder) / "records.json"
        todo = replace(plan, json=str(file))
        try:
            code = await todo.start("benchmarks.worker", plan.ranks, mpi=mpi, exports=exports, timeout=limit)
        except AiodistError as error:
            return [], f"FAILED: {error}", 1
        if code == _NOT_POSSIBLE:
            return [], "not possible here", code
        if code or not file.exists():
            return [], f"FAILED: the ranks ended with exit code {code}", code
        return json.loads(file.read_text()), "not possible here", code


def verdicts(case: Case, records: _Records, why: str) -> list[Verdict]:
    """Return the figures of a case, or the reason for missing ones."""
    values = {record["impl"]: record["value"] for record in records if "value" in record}
    return [
        replace(one, value=values.get(name, nan), why="" if name in values else why)
        for name, one in case.figures.items()
    ]
