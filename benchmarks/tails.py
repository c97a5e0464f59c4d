"""`python -m benchmarks tails`: the slow end of awaits, middle sizes, and the costs of a step, each over several runs.

Each run executes all commands once. A row is reached if eight of ten runs reach its target. The last column has the
time that the row is compared with, or the floor of this machine. It loads no torch.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from aiodist.bench.records import seconds_text
from aiodist.errors import ConfigError
from benchmarks.results import executed, labelled, machine

__all__ = ["COMMANDS", "ROWS", "Tail", "app", "histograms", "markdown", "of_rows"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TRAIN = "python -m benchmarks train --impl datapar,reduce,reduce-ordinary --against none,ddp"
COMMANDS = {
    "await": "python -m benchmarks await --impl auto --against mpi4py",
    "busy": "python -m benchmarks await --impl auto --against mpi4py --busy",
    "ordinary": "python -m benchmarks allreduce --impl auto --sizes 256KiB,1MiB,4MiB,16MiB",
    "ps-mpi": "python -m benchmarks ps --impl ps --against mpi --sizes 4KiB --mpi openmpi",
    "rows": "aiodist run -n 2 --mpi none benchmarks/ps_rows.py",
    "mlp": f"{_TRAIN} --model mlp --batch 32",
    "transformer": f"{_TRAIN} --model transformer --batch 4",
    "conv": f"{_TRAIN} --model conv --batch 32",
    "checkpoint": "python -m benchmarks checkpoint",
    "four": "python -m benchmarks allreduce --ranks 4 --impl arena --against mpi4py --sizes 64KiB",
    "eight": "python -m benchmarks allreduce --ranks 8 --impl arena --against mpi4py --sizes 64KiB",
}
"""Commands by a short name; `--json FILE` is added to those of `python -m benchmarks`."""


@dataclass(frozen=True)
class Tail:
    """A row: a figure of aiodist, or its ratio to the least of `others`, and a target."""

    command: str
    what: str
    ours: str
    """Label of a record."""
    target: float | None = None
    """None for a floor, which is only shown."""
    others: tuple[str, ...] = ()
    field: str = "seconds"
    """Field of the records: seconds (the median), mean, p99 or value."""
    at_least: bool = False
    """True compares the others with aiodist, with a lower bound."""
    beside: str | None = None
    """Label of a time that a row without others shows for comparison."""

    def value(self, records: Mapping[str, Mapping[str, Any]]) -> tuple[float, float | None]:
        """Return the value, in microseconds if it is a time, and the seconds that it is compared with."""
        mine = float(records[self.ours][self.field])
        if self.others:
            least = min(float(records[one][self.field]) for one in self.others if one in records)
            return (least / mine if self.at_least else mine / least), least
        shown = None if self.beside is None else records[self.beside]["seconds"]
        return (mine if self.field == "value" else mine * 1e6), shown

    def reaches(self, value: float) -> bool:
        """Return True if the value reaches the target."""
        assert self.target is not None
        return value >= self.target if self.at_least else value <= self.target

    @property
    def bound(self) -> str:
        """The target, as text."""
        if self.target is None:
            return ""
        unit = "" if self.others or self.field == "value" else " us"
        return f"{'at least' if self.at_least else 'at most'} {self.target:g}{unit}"


def _rows() -> tuple[Tail, ...]:
    each, busy, mpi = "await_each 4 B", "await_small:busy 4 B", "mpi4py:allreduce"
    auto = f"{each} aiodist:auto"
    awaits = (
        Tail("await", "4 B, median / `Allreduce`", auto, 1.0, (f"{each} {mpi}",)),
        Tail("await", "4 B, mean / `Allreduce`", auto, 2.0, (f"{each} {mpi}",), "mean"),
        Tail("await", "4 B, 99th percentile", auto, 60.0, field="p99"),
        Tail("await", "the same of `Allreduce`, us", f"{each} {mpi}", field="p99"),
        Tail(
            "busy",
            "4 B with spinning processes, mean / `Iallreduce`",
            f"{busy} aiodist:auto",
            0.5,
            (f"{busy} mpi4py:iallreduce",),
            "mean",
        ),
        Tail(
            "await",
            "wake-up of a parked rank / `add_reader` on a pipe",
            "wake_up 4 B aiodist:auto",
            1.2,
            ("wake_up 4 B pipe:add_reader",),
        ),
        Tail("await", "wake-up of a blocking read, us", "wake_up 4 B pipe:read"),
        Tail("await", "4 MiB with a thread of Python / idle", "await_busy 4 MiB aiodist:auto", 2.0, field="value"),
        Tail(
            "await",
            "the same with a spinning process on each core",
            "await_busy_processes 4 MiB aiodist:auto",
            field="value",
        ),
        Tail(
            "await",
            "1,000 handles, each call (compared with torch's part, two raises of a version)",
            "issue_1000 4 B aiodist:auto",
            1.0,
            beside="issue_1000 4 B torch:increment_version",
        ),
        Tail("await", "1,000 handles, each in `aiodist.gather`", "aiodist_gather_1000 4 B aiodist:auto", 1.0),
    )
    ordinary = tuple(
        Tail(
            "ordinary",
            f"ordinary tensors of {size}, best other / aiodist",
            f"allreduce {size} aiodist:auto",
            1.5,
            tuple(f"allreduce {size} {peer}" for peer in (mpi, "mpi4py:iallreduce", "gloo")),
            at_least=True,
        )
        for size in ("256 KiB", "1 MiB", "4 MiB", "16 MiB")
    )
    copies = tuple(
        Tail("ordinary", f"copy of {size} into new memory, us", f"allreduce {size} copy")
        for size in ("256 KiB", "1 MiB", "4 MiB", "16 MiB")
    )
    many = tuple(
        Tail(
            command,
            f"64 KiB in the arena, {command} ranks, MPI / aiodist",
            "allreduce 64 KiB aiodist:arena",
            2.0,
            (f"allreduce 64 KiB {mpi}",),
            at_least=True,
        )
        for command in ("four", "eight")
    )
    push = "push 4 KiB copy"
    served = (
        Tail("ps-mpi", "push of 4 KiB under Open MPI", f"{push} aiodist:ps", 25.0, beside=f"{push} mpi"),
        Tail("rows", "push of 4 KiB without MPI", "0.0 MB push", 25.0),
        *(
            Tail("rows", f"pull of rows, {size} / a plain tensor", f"{size} pull rows", 2.0, (f"{size} pull",))
            for size in ("1.0 MB", "16.8 MB")
        ),
    )
    steps = tuple(
        Tail(
            model, f"{what.format(f'{model} {batch}')} / {name}", f"{case} aiodist:{ours}", target, (f"{case} {other}",)
        )
        for model, batch, over_none in (("mlp", 32, 1.15), ("transformer", 4, 1.10), ("conv", 32, 1.05))
        for case in (f"train:{model} {batch}",)
        for what, ours, name, other, target in (
            ("step of {}", "datapar", "no communication", "none", over_none),
            ("one allreduce of the bytes of {}, in the arena", "reduce", "step without communication", "none", None),
            ("the same of ordinary tensors, {}", "reduce-ordinary", "step without communication", "none", None),
            ("step of {}", "datapar", "DDP", "ddp", 0.98),
        )
    )
    saved = (
        Tail("checkpoint", "step during a checkpoint", "checkpoint:beside aiodist:step", 1.05, field="value"),
        Tail(
            "checkpoint",
            "held up by `save` / by `async_save`",
            "checkpoint aiodist:call",
            0.02,
            ("checkpoint async_save:call",),
        ),
    )
    return (*awaits, *ordinary, *copies, *many, *served, *steps, *saved)


ROWS = _rows()


_LINE = re.compile(r"^(?:\[\d+\])? *([\d.]+ MB) (.{12}) +([\d.]+) ms", re.MULTILINE)


def of_rows(text: str) -> dict[str, dict[str, Any]]:
    """Return the medians that `benchmarks/ps_rows.py` prints, as records by label."""
    return {f"{size} {way.strip()}": {"seconds": float(ms) / 1e3} for size, way, ms in _LINE.findall(text)}


def markdown(rows: Sequence[Tail], runs: Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """Return the table of the rows over the runs, each a dict of the records by command and label."""
    lines = [
        "| what | target | median of the runs | least to most | reached | compared with | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = [row.value(run[row.command]) for run in runs if row.ours in run.get(row.command, {})]
        if not found:
            continue
        values = [value for value, _ in found]
        shown = [seconds for _, seconds in found if seconds is not None]
        reached = "" if row.target is None else f"{sum(map(row.reaches, values))} of {len(values)}"
        beside = seconds_text(statistics.median(shown)) if shown else ""
        lines.append(
            f"| {row.what} | {row.bound} | {statistics.median(values):.3g} | {min(values):.3g} to {max(values):.3g} "
            f"| {reached} | {beside} | {row.command} |"
        )
    return "\n".join(lines)


def histograms(runs: Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """Return a table of the shares of samples below 1, 2, 4, ... us, of each record with a histogram."""
    totals: dict[str, list[int]] = {}
    for run in runs:
        for records in run.values():
            for label, record in records.items():
                counts = record.get("histogram") or []
                total = totals.setdefault(label, []) if counts else []
                total += [0] * (len(counts) - len(total))
                for i, count in enumerate(counts):
                    total[i] += count
    widest = max(map(len, totals.values()), default=0)
    lines = [f"| samples below, us | {' | '.join(str(1 << i) for i in range(widest))} |", "|---" * (widest + 1) + "|"]
    for label, counts in totals.items():
        shares = [f"{count / sum(counts):.3%}" if count else "" for count in counts]
        lines.append(f"| {label} | {' | '.join(shares + [''] * (widest - len(counts)))} |")
    return "\n".join(lines) if totals else ""


@app.command()
def tails(
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of all commands.")] = 10,
    only: Annotated[str | None, typer.Option(metavar="NAMES", help=f"Some of {','.join(COMMANDS)} (all).")] = None,
    keep: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON of the records, after each run.")] = None,
) -> None:
    """Run the commands of all rows, and print a table with targets and spread, and histograms."""
    names = list(COMMANDS) if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in names if name not in COMMANDS]:
        raise ConfigError(f"--only {unknown[0]}: expected some of {', '.join(COMMANDS)}")
    found: list[dict[str, dict[str, dict[str, Any]]]] = []
    load = os.getloadavg()[0]
    for run in range(runs):
        began = perf_counter()
        found.append({})
        for name in names:
            records = executed(COMMANDS[name])
            found[-1][name] = of_rows(records) if isinstance(records, str) else labelled(records)
        if keep is not None:
            keep.write_text(json.dumps(found), encoding="utf-8")
        print(f"run {run + 1}: {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
    print(f"{machine()}; load before the runs {load:.1f}; {runs} runs\n")  # noqa: T201
    print(markdown(ROWS, found))  # noqa: T201
    print("\n| command | in full |\n|---|---|")  # noqa: T201
    print("\n".join(f"| {name} | `{COMMANDS[name]}` |" for name in names))  # noqa: T201
    print(f"\n{histograms(found)}")  # noqa: T201
