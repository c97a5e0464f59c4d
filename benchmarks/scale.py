"""`python -m benchmarks scale`: simulated times of collectives on large machines; loads no torch."""

from __future__ import annotations

import json as jsons
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from aiodist.bench.plan import parse_names, parse_sizes, writable
from aiodist.bench.records import seconds_text, size_text
from aiodist.errors import ConfigError
from aiodist.schedules import MAX_LANES
from benchmarks.loggp import LogGP, Machine
from benchmarks.scale_model import HIERARCHICAL, OPS, Case, Estimate, estimate, names
from benchmarks.verdicts import terminal

__all__ = ["COMBINE", "PRESETS", "app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PRESETS = {
    "host": LogGP(latency=0.2e-6, overhead=0.1e-6, gap=0.1e-6, byte_gap=0.12e-9),
    "ethernet25": LogGP(latency=15e-6, overhead=4.5e-6, gap=1e-6, byte_gap=8 / 25e9),
    "infiniband400": LogGP(latency=0.7e-6, overhead=0.2e-6, gap=0.1e-6, byte_gap=8 / 400e9),
}
"""Networks, by name. The seconds per byte between hosts are line rates; the other figures are rounded.

host: shared memory, with 0.3 to 0.4 us for a short message (D. Buntinas, G. Mercier, W. Gropp, "Design and evaluation
of Nemesis, a scalable, low-latency, message-passing communication subsystem", CCGrid 2006,
https://doi.org/10.1109/CCGRID.2006.31), and cores that copy 17 GB/s.

ethernet25: 25 Gb/s Ethernet (IEEE 802.3by) with the kernel's TCP, about 24 us for a short message (A. Belay et al.,
"IX: a protected dataplane operating system for high throughput and low latency", OSDI 2014,
https://infoscience.epfl.ch/record/201671).

infiniband400: 400 Gb/s InfiniBand, NDR (https://docs.nvidia.com/networking/display/ConnectX7VPI/Introduction), about
1 us for a short message of MPI.
"""
COMBINE = 0.1e-9
"""Seconds per byte of a sum in place by one core, which moves three bytes for each at about 30 GB/s."""
_RANKS = "2,4,16,64,256,1024,4096,16384,65536"
_MOST_RANKS = 1 << 20
_SIZES = "1KiB,1MiB,64MiB"
_ITEMSIZE = 4  # float32
_NETWORKS = ", ".join(PRESETS)
_Found = tuple[Case, str, Estimate]


@app.command()
def scale(  # noqa: PLR0913 - one for each option
    op: Annotated[str, typer.Option(metavar="OP", help=f"One of {', '.join(OPS)}.")] = "allreduce",
    ranks: Annotated[str, typer.Option(metavar="2,8,64", help="Numbers of ranks.")] = _RANKS,
    sizes: Annotated[str, typer.Option(metavar="1KiB,64MiB", help="Bytes of one rank's input, float32.")] = _SIZES,
    impl: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Schedules, flat, and {HIERARCHICAL} (all but direct).")
    ] = None,
    local: Annotated[int, typer.Option(metavar="R", min=1, help="Ranks of a host.")] = 8,
    ports: Annotated[int, typer.Option(metavar="N", min=1, help="Ports of a host on the network.")] = 1,
    network: Annotated[
        str, typer.Option(metavar="NAME", help=f"The network between hosts: {_NETWORKS}, or seconds L,o,g,G.")
    ] = "ethernet25",
    inside: Annotated[str, typer.Option(metavar="NAME", help="The network within a host.")] = "host",
    latency: Annotated[float | None, typer.Option(metavar="S", help="L of the network between hosts.")] = None,
    overhead: Annotated[float | None, typer.Option(metavar="S", help="o, for each message and end.")] = None,
    gap: Annotated[float | None, typer.Option(metavar="S", help="g, between two messages.")] = None,
    byte_gap: Annotated[float | None, typer.Option(metavar="S", help="G, for each byte.")] = None,
    combine: Annotated[float, typer.Option(metavar="S", help="Seconds per byte to combine.")] = COMBINE,
    chunks: Annotated[
        int, typer.Option(metavar="K", min=1, max=MAX_LANES, help="Chunks in flight, for rings and trees.")
    ] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the estimates to FILE.")] = None,
) -> None:
    """Simulate a collective on many ranks with a LogGP clock; show time, messages and bytes of the busiest rank.

    A flat schedule runs among all ranks, and uses the network inside a host within that host.
    """
    if op not in OPS:
        raise ConfigError(f"--op {op}: expected one of {', '.join(OPS)}")
    file = writable("--json", json)
    impls = parse_names("--impl", impl, names(op)) if impl else tuple(name for name in names(op) if name != "direct")
    given = {"latency": latency, "overhead": overhead, "gap": gap, "byte_gap": byte_gap}
    between = replace(_network("--network", network), **{name: s for name, s in given.items() if s is not None})
    machine = Machine(between, _network("--inside", inside), combine, local, ports)
    counts, nbytes = _counts(ranks, local), parse_sizes(sizes, _ITEMSIZE)
    found: list[_Found] = []
    for case in [Case(op, count, size, machine, _ITEMSIZE, chunks) for size in nbytes for count in counts]:
        is_flat = case.hosts == 1 or case.local == 1
        found += [(case, name, estimate(case, name)) for name in impls if not (is_flat and name == HIERARCHICAL)]
    if file is not None:
        Path(file).write_text("[\n" + ",\n".join(jsons.dumps(_entry(*one)) for one in found) + "\n]\n")
    width, colour = terminal()
    console = Console(width=width, force_terminal=colour, highlight=False)
    for size in nbytes:
        console.print(_table(f"{op}, {size_text(size)} per rank", [one for one in found if one[0].nbytes == size]))


def _counts(given: str, local: int) -> tuple[int, ...]:
    """Return numbers of ranks, each a multiple of `local`, or smaller."""
    counts = []
    for part in dict.fromkeys(part.strip() for part in given.split(",")):
        if not part.isdecimal() or not 2 <= int(part) <= _MOST_RANKS:
            raise ConfigError(f"--ranks {part or repr(part)}: expected 2 to {_MOST_RANKS}")
        if int(part) > local and int(part) % local:
            raise ConfigError(f"--ranks {part}: expected a multiple of --local {local}, or a smaller number")
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


def _table(title: str, found: Sequence[_Found]) -> Table:
    """Return the estimates of one size: a row for each number of ranks, the fastest schedule bold."""
    table = Table(title=f"{title}: seconds, messages / bytes of the busiest rank", title_justify="left")
    impls = list(dict.fromkeys(name for _, name, _ in found))
    for column in ("ranks", "hosts", *impls):
        table.add_column(column, justify="right")
    for ranks in dict.fromkeys(case.ranks for case, _, _ in found):
        row = {name: one for case, name, one in found if case.ranks == ranks}
        best = min((one.seconds for one in row.values() if one.seconds is not None), default=None)
        hosts = next(case.hosts for case, _, _ in found if case.ranks == ranks)
        table.add_row(str(ranks), str(hosts), *(_cell(row.get(name), best) for name in impls))
    return table


def _cell(one: Estimate | None, best: float | None) -> str:
    if one is None:
        return ""
    seconds = "?" if one.seconds is None else seconds_text(one.seconds)
    seconds = f"[bold]{seconds}[/bold]" if one.seconds == best else seconds
    return f"{seconds}\n{one.messages} / {one.nbytes / (1 << 20):.3g} MiB"


def _entry(case: Case, name: str, one: Estimate) -> dict[str, object]:
    shape = {"op": case.op, "impl": name, "ranks": case.ranks, "hosts": case.hosts, "nbytes": case.nbytes}
    stages = [str(stage) for stage in one.stages]
    return {**shape, "seconds": one.seconds, "messages": one.messages, "bytes": one.nbytes, "stages": stages}
