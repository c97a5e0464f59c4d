"""`python -m benchmarks scale`: what collectives take on machines that are not here, by a simulator; loads no torch.

With `--check` it starts ranks here, and compares what the simulator predicts with what they take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from aiodist.bench.cli import writable
from aiodist.bench.plan import parse_names, parse_sizes
from aiodist.bench.plots import check_plot
from aiodist.env import Environment, Starter
from aiodist.errors import ConfigError
from aiodist.schedules import MAX_LANES
from benchmarks import scale_report as report
from benchmarks.loggp import LogGP, Machine
from benchmarks.scale_bound import bound
from benchmarks.scale_check_plan import CheckPlan
from benchmarks.scale_model import HIERARCHICAL, OPS, Case, estimate, names
from benchmarks.scale_presets import COMBINE, PRESETS
from benchmarks.verdicts import terminal

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_RANKS = "2,4,16,64,256,1024,4096,16384,65536"
_MOST_RANKS = 1 << 20
_SIZES = "1KiB,1MiB,64MiB"
_ITEMSIZE = 4  # float32
_MOST_CHECKED = 4
_CHECK_SIZES = "1KiB,64KiB,1MiB,8MiB"
_NETWORKS = ", ".join(PRESETS)
_NETWORK_HELP = f"Between hosts: {_NETWORKS}, or seconds L,o,g,G."


@app.command()
def scale(  # noqa: PLR0913 - one for each option
    op: Annotated[str, typer.Option(metavar="OP", help=f"One of {', '.join(OPS)}.")] = "allreduce",
    ranks: Annotated[str | None, typer.Option(metavar="2,8,64", help=f"How many ranks ({_RANKS}).")] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="1KiB,64MiB", help=f"Bytes of one rank's input, float32 ({_SIZES}).")
    ] = None,
    impl: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Schedules, flat, and {HIERARCHICAL} (all but direct).")
    ] = None,
    local: Annotated[int, typer.Option(metavar="R", min=1, help="Ranks of a host.")] = 8,
    ports: Annotated[int, typer.Option(metavar="N", min=1, help="Ports of a host on the network.")] = 1,
    network: Annotated[str, typer.Option(metavar="NAME", help=_NETWORK_HELP)] = "ethernet25",
    inside: Annotated[str, typer.Option(metavar="NAME", help="Within a host, likewise.")] = "host",
    latency: Annotated[float | None, typer.Option(metavar="S", help="L of the network between hosts.")] = None,
    overhead: Annotated[float | None, typer.Option(metavar="S", help="o of it, per message and end.")] = None,
    gap: Annotated[float | None, typer.Option(metavar="S", help="g of it, between two messages.")] = None,
    byte_gap: Annotated[float | None, typer.Option(metavar="S", help="G of it, per byte.")] = None,
    combine: Annotated[float, typer.Option(metavar="S", help="Seconds per byte to combine.")] = COMBINE,
    chunks: Annotated[
        int, typer.Option(metavar="K", min=1, max=MAX_LANES, help="Chunks in flight, for rings and trees.")
    ] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the estimates there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw them there.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fit the simulator to 2 ranks of this host; compare with real runs.")
    ] = False,
    mpi: Annotated[str, typer.Option(metavar="auto|none|…", help="With --check, as in aiodist run.")] = "auto",
) -> None:
    """Simulate a collective on many ranks with a LogGP clock; show time, messages and bytes beside the lower bound.

    Ranks lie host by host. A flat schedule runs among all of them, inside a host over the network inside.
    """
    if op not in OPS:
        raise ConfigError(f"--op {op}: expected one of {', '.join(OPS)}")
    files = writable("--json", json), writable("--plot", plot)
    if plot is not None:
        check_plot()
    chosen = _impls(op, impl)
    if check:
        if plot is not None:
            raise ConfigError("--plot: what --check compares is not drawn")
        raise typer.Exit(_check(op, chosen, ranks, sizes, files[0], mpi))
    given = {"latency": latency, "overhead": overhead, "gap": gap, "byte_gap": byte_gap}
    between = replace(
        _network("--network", network), **{name: value for name, value in given.items() if value is not None}
    )
    machine = Machine(between, _network("--inside", inside), combine, local, ports)
    counts = _counts(ranks or _RANKS, _MOST_RANKS, local)
    nbytes = parse_sizes(sizes or _SIZES, _ITEMSIZE)
    cases = [Case(op, count, size, machine, _ITEMSIZE, chunks) for size in nbytes for count in counts]
    _report(machine, _estimates(cases, chosen), *files)


def _impls(op: str, given: str | None) -> tuple[str, ...]:
    if given is None:
        return tuple(name for name in names(op) if name != "direct")
    return parse_names("--impl", given, names(op))


def _counts(given: str, most: int, local: int = 1) -> tuple[int, ...]:
    """Return numbers of ranks, of which each fills hosts of `local` or lies within one."""
    counts = []
    for part in dict.fromkeys(part.strip() for part in given.split(",")):
        if not part.isdecimal() or not 2 <= int(part) <= most:
            raise ConfigError(f"--ranks {part or repr(part)}: expected 2 to {most}")
        if int(part) > local and int(part) % local:
            raise ConfigError(f"--ranks {part}: expected a multiple of --local {local}, or less: hosts are alike")
        counts.append(int(part))
    return tuple(counts)


def _network(option: str, given: str) -> LogGP:
    if given in PRESETS:
        return PRESETS[given]
    try:
        latency, overhead, gap, byte_gap = map(float, given.split(","))
    except ValueError:
        raise ConfigError(f"{option} {given}: expected one of {_NETWORKS}, or four numbers L,o,g,G") from None
    return LogGP(latency, overhead, gap, byte_gap)


def _estimates(cases: Sequence[Case], impls: Sequence[str]) -> list[report.Found]:
    found: list[report.Found] = []
    for case in cases:
        # Without several hosts of several ranks there is no hierarchy.
        flat_only = case.hosts == 1 or case.local == 1
        found += [(case, name, estimate(case, name)) for name in impls if not (flat_only and name == HIERARCHICAL)]
        found.append((case, report.BOUND, bound(case)))
    return found


def _report(machine: Machine, found: Sequence[report.Found], json: str | None, plot: str | None) -> None:
    if json is not None:
        report.write(json, machine, found)
    if plot is not None:
        report.plot(plot, found)
    width, colour = terminal()
    console = Console(width=width, force_terminal=colour, highlight=False)
    console.print(report.describe(machine))
    for table in report.tables(found):
        console.print(table)


def _check(op: str, impls: tuple[str, ...], ranks: str | None, sizes: str | None, json: str | None, mpi: str) -> int:
    """Start ranks that compare; return their exit code."""
    if Environment.read().starter is not Starter.ALONE:
        raise ConfigError("--check: it starts its ranks itself, and this process is one of a job already")
    counts = _counts(ranks or "2", _MOST_CHECKED)
    width, colour = terminal()
    flat = tuple(name for name in impls if name != HIERARCHICAL)
    if not flat:
        raise ConfigError(f"--impl {HIERARCHICAL}: --check compares schedules on one host")
    plan = CheckPlan(op, counts, flat, parse_sizes(sizes or _CHECK_SIZES, _ITEMSIZE), json, width, colour)
    return asyncio.run(plan.start("benchmarks.scale_check", max(counts), mpi=mpi))
