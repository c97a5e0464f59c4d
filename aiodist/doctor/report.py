"""What was found, the verdict on it, and how both are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class State(StrEnum):
    """What a check found."""

    AVAILABLE = "available"
    LIMITED = "limited"  # it works, and may disappoint
    MISSING = "not installed"
    ABSENT = "none"  # there is none here, and nothing is to be done
    UNUSABLE = "unusable"  # it is installed, or cannot be on this host, and does not work


@dataclass(frozen=True)
class Finding:
    """What one check found; `remedy` is a command, or what to do, where something is to be done."""

    name: str
    state: State
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Answer:
    """What a process that was asked said: an object, or why there is none."""

    said: Mapping[str, Any] | None
    trouble: str = ""


@dataclass(frozen=True)
class Report:
    """All findings of one host."""

    host: str
    findings: Sequence[Finding]
    backends: Sequence[Finding]
    collectives: Answer = Answer(None, "they were not asked")
    """What two ranks have to run their collectives with, and their selector's table, as text."""

    library: str = "MPI"
    """The name of the MPI that carries the data where "mpi" does."""
    option: str = ""
    """What `aiodist run` is to be given for that."""

    @property
    def usable(self) -> bool:
        """Two ranks worked together here."""
        return self.collectives.said is not None

    @property
    def verdict(self) -> str:
        """What ranks on this host can do, in one line."""
        if self.collectives.said is not None:
            ready = f"ready with {self.option}" if self.option else "ready"
            return f"{ready}: 2 ranks over {self._ways(self.collectives.said)}; {self._gpus()}"
        local = self._of("local")
        if local is not None and local.state is not State.AVAILABLE:
            return f"not ready: {_why(local)}"
        tried = [finding for finding in map(self._of, ("mpi", "gloo")) if finding is not None]
        wrong = [_why(finding) for finding in tried if finding.state is not State.AVAILABLE]
        if len(wrong) < len(tried):  # what seemed to be there was tried in vain
            wrong.append(self.collectives.trouble)
        return f"not ready: one rank works, several do not: {'; '.join(wrong)}"

    def _ways(self, said: Mapping[str, Any]) -> str:
        carrier = self.library if said["backend"] == "mpi" else said["backend"]
        if said["apart"]:
            return f"{carrier} alone, for they share no memory: {said['apart']}"
        return "shared memory" if carrier == "shm" else f"shared memory and {carrier}"

    def _gpus(self) -> str:
        devices, nccl = self._of("GPUs"), self._of("nccl")
        if devices is None or devices.state is not State.AVAILABLE:
            return "no GPU"
        count = devices.detail.partition(":")[0]
        without = "" if nccl is None or nccl.state is State.AVAILABLE else f" without NCCL ({_why(nccl)})"
        return f"{count} GPU{'' if count == '1' else 's'}{without}"

    def _of(self, name: str) -> Finding | None:
        return next((finding for finding in (*self.findings, *self.backends) if finding.name == name), None)

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps({**asdict(self), "usable": self.usable, "verdict": self.verdict}, indent=2)


def _why(finding: Finding) -> str:
    """Return what is wrong and what to do, as words."""
    words = f"{finding.name}: {finding.detail or finding.state}"
    return f"{words}, do: {finding.remedy}" if finding.remedy else words


_WIDTH = 100
_INDENT = 32
_FINE = (State.AVAILABLE, State.ABSENT)
_COLOURS = {
    State.AVAILABLE: "green",
    State.LIMITED: "yellow",
    State.MISSING: "yellow",
    State.ABSENT: "default",
    State.UNUSABLE: "red",
}


def show(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print the report: its verdict, what is wrong, the rest; with `verbose` what runs which operation, too."""
    show_verdict(report.verdict, console, good=report.usable)
    told = report.collectives.said
    if told is None:
        trouble = f"Two ranks did not work together: {report.collectives.trouble}"
        console.print(trouble, style="yellow", soft_wrap=True, markup=False)
    wrong = [finding for finding in (*report.findings, *report.backends) if finding.state not in _FINE]
    if wrong:
        show_findings("To be mended, or done without", wrong, console)
    for title, findings in (f"Found on {report.host}", report.findings), ("Backends", report.backends):
        show_findings(title, [finding for finding in findings if finding.state in _FINE], console)
    if told is not None and verbose:
        console.print(f"[italic]Implementations for two ranks over {told['backend']}")
        _show_table(told["availability"], console)
        console.print(f"[italic]What runs them over {told['backend']}")
        console.print(told["selector"], markup=False, highlight=False, soft_wrap=True)
    elif told is not None:
        console.print("With -v: what runs which operation", style="italic", highlight=False)


def _show_table(text: str, console: Console) -> None:
    """Print rows, the first of which has the names of the columns, so that they fit."""
    from rich.table import Column, Table
    from rich.text import Text

    header, *rows = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    columns = [Column(name.removeprefix("# "), overflow="fold") for name in header]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, width=min(console.width, _WIDTH))


def show_findings(title: str, findings: Sequence[Finding], console: Console) -> None:
    """Print findings; a long one goes on in the next line, and no path or command is cut."""
    from rich.text import Text

    console.print(title, style="italic", highlight=False)
    for row in findings:
        first, *more = wrap(
            row.detail, min(console.width, _WIDTH) - _INDENT, break_long_words=False, break_on_hyphens=False
        ) or [""]
        line = Text.assemble(f"  {row.name:<14} ", Text(f"{row.state:<14}", style=_COLOURS[row.state]), " ", first)
        line.rstrip()
        console.print(line, soft_wrap=True)
        for text in (*more, *([f"do: {row.remedy}"] if row.remedy else [])):
            console.print(Text(" " * _INDENT + text), soft_wrap=True)


def show_verdict(text: str, console: Console, *, good: bool) -> None:
    """Print the verdict, in one line."""
    console.print(text, style="bold green" if good else "bold red", soft_wrap=True, highlight=False, markup=False)
