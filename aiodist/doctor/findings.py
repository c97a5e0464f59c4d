"""Findings of checks, and reports of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class State(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"  # ranks can work, with a drawback
    FAIL = "fail"


_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` is the command or the action that fixes a problem."""

    state: State
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return the detail and the remedy in one line."""
        return f"{self.detail}, do: {self.remedy}" if self.remedy else self.detail


ok, warn, fail = (partial(Finding, state) for state in State)


@dataclass(frozen=True)
class Report:
    """All findings, by title and by the name of the check, and the verdict on them."""

    usable: bool
    verdict: str
    findings: Mapping[str, Mapping[str, Finding]]
    tables: Mapping[str, str] = field(default_factory=dict)
    """The implementations that two ranks can use, as text, by title."""

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def show(self, console: Console, *, verbose: bool = False) -> None:
        """Print the verdict, the problems, and the rest, without cutting a line; with `verbose` the tables too."""
        from rich.markup import escape

        echo = partial(console.print, soft_wrap=True, highlight=False, emoji=False)
        echo(escape(self.verdict), style="bold green" if self.usable else "bold red")
        problems: dict[str, Finding] = {}
        fine: dict[str, dict[str, Finding]] = {}
        for title, found in self.findings.items():
            where = f"{title}, " if len(self.findings) > 1 else ""
            problems |= {f"{where}{name}": one for name, one in found.items() if one.state is not State.OK}
            fine[title] = {name: one for name, one in found.items() if one.state is State.OK}
        for title, found in {"Problems and their fixes": problems, **fine}.items():
            if found:
                echo(f"[italic]{title}")
            for name, one in found.items():
                echo(f"  {name:<14} [{_STYLES[one.state]}]{one.state}[/] {escape(one.detail)}".rstrip())
                if one.remedy:
                    echo(f"{'':<22}do: {escape(one.remedy)}")
        for title, text in self.tables.items() if verbose else ():
            echo(f"[italic]{title}")
            echo(escape(text))
        if self.tables and not verbose:
            echo("[italic]-v also shows the implementation of each operation")
