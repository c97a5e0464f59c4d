"""What `python -m benchmarks scale` says: tables, a plot, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from aiodist.bench.plots import lines, picture
from aiodist.bench.records import seconds_text, size_text
from benchmarks.loggp import LogGP, Machine
from benchmarks.scale_model import Case, Estimate

__all__ = ["BOUND", "Found", "describe", "plot", "tables", "write"]

BOUND = "bound"
"""The name of what no algorithm undercuts, beside those of the implementations."""

Found = tuple[Case, str, Estimate]
"""What was asked, of which implementation, and the answer."""


def describe(machine: Machine) -> str:
    """Return the machine in words."""
    text = (
        f"{machine.local} ranks and {machine.ports} port(s) per host; between hosts {_network(machine.between)}; "
        f"inside {_network(machine.inside)}; combining {machine.combine * 1e9:g} ns/B"
    )
    return text if machine.local > 1 else f"one rank per host, {_network(machine.between)}"


def _network(network: LogGP) -> str:
    micro = f"L {network.latency * 1e6:g}, o {network.overhead * 1e6:g}, g {network.gap * 1e6:g} us"
    return f"{micro}, G {network.byte_gap * 1e9:g} ns/B"


def tables(found: Sequence[Found]) -> Iterator[Table]:
    """Return for each size the times, then messages and bytes that the busiest rank sends; the quickest is marked."""
    for nbytes in dict.fromkeys(case.nbytes for case, _, _ in found):
        here = [one for one in found if one[0].nbytes == nbytes]
        heading = f"{here[0][0].op}, {size_text(nbytes)} per rank"
        yield _table(f"{heading}: seconds", here, _time)
        yield _table(f"{heading}: messages and bytes that the busiest rank sends", here, _traffic)


def _table(title: str, found: Sequence[Found], cell: Callable[[Estimate, float | None], str]) -> Table:
    table = Table(title=title, title_justify="left")
    names = sorted(dict.fromkeys(name for _, name, _ in found), key=lambda name: name == BOUND)
    for column in ("ranks", "hosts", *names):
        table.add_column(column, justify="right", no_wrap=True)
    for ranks in dict.fromkeys(case.ranks for case, _, _ in found):
        row = {name: (case, estimate) for case, name, estimate in found if case.ranks == ranks}
        times = [one.seconds for name, (_, one) in row.items() if name != BOUND and one.seconds is not None]
        best = min(times, default=None)
        hosts = str(next(iter(row.values()))[0].hosts)
        shown = [cell(row[name][1], best) if name in row else "" for name in names]
        table.add_row(str(ranks), hosts, *shown)
    return table


def _time(estimate: Estimate, best: float | None) -> str:
    text = "?" if estimate.seconds is None else seconds_text(estimate.seconds)
    return f"[bold]{text}[/bold]" if estimate.seconds == best else text


def _traffic(estimate: Estimate, best: float | None) -> str:
    return f"{estimate.messages} / {_rounded(estimate.nbytes)}"


def _rounded(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def write(path: str | Path, machine: Machine, found: Sequence[Found]) -> None:
    """Write the machine and one estimate to a line, as JSON."""
    lines = ",\n".join(json.dumps(_entry(*one)) for one in found)
    Path(path).write_text(f'{{"machine": {json.dumps(asdict(machine))},\n"estimates": [\n{lines}\n]}}\n')


def _entry(case: Case, name: str, estimate: Estimate) -> dict[str, object]:
    return {
        "op": case.op,
        "impl": name,
        "ranks": case.ranks,
        "hosts": case.hosts,
        "nbytes": case.nbytes,
        "seconds": estimate.seconds,
        "messages": estimate.messages,
        "bytes": estimate.nbytes,
        "stages": list(map(str, estimate.stages)),
    }


def plot(path: str, found: Sequence[Found]) -> None:
    """Draw time, messages and bytes by ranks, a row for each size, into `path`."""
    sizes = list(dict.fromkeys(case.nbytes for case, _, _ in found))
    with picture(path, len(sizes), 3, size=(5.0, 4.0)) as rows:
        for row, nbytes in zip(rows, sizes, strict=True):
            here = [one for one in found if one[0].nbytes == nbytes]
            for axes, what in zip(row, _DRAWN, strict=True):
                points = [(name, case.ranks, getattr(one, what)) for case, name, one in here]
                lines(axes, points, "ranks", _DRAWN[what], {BOUND: {"color": "black", "marker": ""}})
            row[0].set_title(f"{here[0][0].op}, {size_text(nbytes)} per rank")
        rows[0][0].legend()


_DRAWN = {"seconds": "seconds", "messages": "messages a rank sends", "nbytes": "bytes a rank sends"}
