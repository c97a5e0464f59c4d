"""Findings of checks, reports of them, and how both are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class State(StrEnum):
    """The result of a check."""

    AVAILABLE = "available"
    LIMITED = "limited"  # works, with a drawback
    MISSING = "not installed"
    ABSENT = "none"  # there is none on this host, and none is needed
    UNUSABLE = "unusable"


_STYLES = {State.LIMITED: "yellow", State.MISSING: "yellow", State.ABSENT: "default", State.UNUSABLE: "red"}
FINE = (State.AVAILABLE, State.ABSENT)
"""States that need no action."""


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` is the command or the action that fixes a problem."""

    name: str
    state: State
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return the problem and its remedy in one line."""
        problem = f"{self.name}: {self.detail or self.state}"
        return f"{problem}, do: {self.remedy}" if self.remedy else problem


@dataclass(frozen=True)
class Report:
    """All findings, by title, and the verdict on them."""

    usable: bool
    verdict: str
    findings: Mapping[str, Sequence[Finding]]
    tables: Mapping[str, str] = field(default_factory=dict)
    """The implementations that two ranks can use, as text, by title."""

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def show(self, console: Console, *, verbose: bool = False) -> None:
        """Print the verdict, the problems, and the rest; with `verbose` the tables too."""
        console.print(self.verdict, style="bold green" if self.usable else "bold red", soft_wrap=True, markup=False)
        problems = [one for found in self.findings.values() for one in found if one.state not in FINE]
        _print("Problems and their fixes", problems, console)
        for title, found in self.findings.items():
            _print(title, [one for one in found if one.state in FINE], console)
        for title, text in self.tables.items() if verbose else ():
            console.print(f"[italic]{title}")
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if self.tables and not verbose:
            console.print("[italic]-v also shows the implementation of each operation")


def _print(title: str, findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding and one for its remedy, neither of them cut."""
    if findings:
        console.print(f"[italic]{title}")
    for one in findings:
        state = f"[{_STYLES.get(one.state, 'green')}]{one.state:<14}[/]"
        console.print(f"  {one.name:<14} {state}", end="", highlight=False)
        console.print(f" {one.detail}".rstrip(), markup=False, highlight=False, soft_wrap=True)
        if one.remedy:
            console.print(f"{'':<32}do: {one.remedy}", markup=False, highlight=False, soft_wrap=True)
