"""The table of `benchmarks gpu`, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_cases import Figure, State

__all__ = ["show", "table", "write"]

_STYLES = {State.MISSED: "red", State.FAILED: "red", State.NOT_POSSIBLE: "dim", State.NOT_MEASURED: "yellow"}


def table(machine: Mapping[str, object], figures: Sequence[Figure]) -> Table:
    """Return each figure beside its target."""
    about = ", ".join(f"{name} {machine[name]}" for name in ("device", "devices", "torch", "cuda") if name in machine)
    result = Table(title=f"speeds to reach: {about or 'no rank has come so far'}", title_justify="left")
    for name in ("case", "what", "here", "target", "reached"):
        result.add_column(name, justify="left" if name in ("case", "what") else "right", no_wrap=name != "what")
    before, told = "", ""
    for figure in figures:
        if new := figure.case != before:
            result.add_section()
            before, told = figure.case, ""
        here = "" if figure.value is None else f"{figure.value:.3g} {figure.unit}"
        what = f"{figure.what}\n{figure.why}" if figure.why != told else figure.what
        told = figure.why
        name = figure.case if new else ""
        result.add_row(name, what, here, _bound(figure), str(figure.state), style=_STYLES.get(figure.state))
    return result


def _bound(figure: Figure) -> str:
    return "" if figure.target is None else f"{'>=' if figure.at_least else '<='} {figure.target:g}"


def show(machine: Mapping[str, object], figures: Sequence[Figure], *, width: int, colour: bool) -> None:
    """Print the table, and how many lines ended how."""
    console = Console(width=width, force_terminal=colour, highlight=False, markup=False)
    console.print(table(machine, figures))
    counts = {state: sum(figure.state is state for figure in figures) for state in State}
    console.print(", ".join(f"{_WORDS[state]}: {count}" for state, count in counts.items() if count))


_WORDS = {
    State.REACHED: "targets reached",
    State.MISSED: "missed",
    State.SEEN: "without a target",
    State.NOT_POSSIBLE: "not possible here",
    State.NOT_MEASURED: "not measured",
    State.FAILED: "failed",
}


def write(
    path: str | Path,
    machine: Mapping[str, object],
    figures: Sequence[Figure],
    records: Sequence[Mapping[str, object]],
) -> None:
    """Write everything: what it was measured on, the lines of the table, and the times of all contenders."""
    lines = ",\n".join(json.dumps(figure.to_dict()) for figure in figures)
    times = ",\n".join(json.dumps(record) for record in records)
    about = json.dumps(dict(machine))
    Path(path).write_text(f'{{"machine": {about},\n"figures": [\n{lines}\n],\n"records": [\n{times}\n]}}\n')
