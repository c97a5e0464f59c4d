"""The schedules that are simulated for a collective, and the ranks that stand for all.

A simulation of 65,536 ranks, message by message, takes seconds for a tree and days for a ring. Two shortcuts give the
same times; the tests compare both with a simulation of every rank.

*Alike*: in a ring, a recursive doubling and others, every host does the same at the same time, only with other peers.
One host is simulated, and receives the messages to all others. The buffer has equal parts, which can be fractions of
an element.

*Followed*: in a full ring or chain, each further host adds the same time (the recurrences are linear in max and plus,
so they become periodic: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and linearity", 1992, chapter 3); in a
tree, each doubling of the hosts does. So three lengths are simulated, with parts of the requested length. If their
times are on a line, the line is extended, else longer ones are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import isclose, isqrt, log2
from typing import NamedTuple

from aiodist.schedules import SCHEDULES, Blocks, Schedule
from benchmarks.loggp import Machine, Phase, Program, simulate
from benchmarks.schedule_costs import Cost, cost_of

__all__ = [
    "ALIKE",
    "HIERARCHICAL",
    "OPS",
    "Case",
    "Estimate",
    "Layout",
    "Stage",
    "chunks",
    "estimate",
    "estimate_stages",
    "flat",
    "follow",
    "forms",
    "hierarchical",
    "names",
]

HIERARCHICAL = "hierarchical"
OPS = ("allreduce", "broadcast", "reduce_scatter", "allgather")

# operation and name: every rank does the same, with other peers
ALIKE = {
    *product(("allreduce", "reduce_scatter", "allgather"), ("ring", "doubling", "halving")),
    *product(("reduce_scatter", "allgather"), ("direct", "bruck")),
}
_POWERS = ("doubling", "halving")  # alike only for a power of two of ranks
_FOLLOWED = {"ring", "chain", "direct", "tree"}
_FEW_MESSAGES = 20_000  # fewer messages are simulated without a shortcut
_MOST_MESSAGES = 1_000_000  # more messages are not simulated; these take about 8 s
_LENGTHS = (16, 32, 64, 128, 256)  # hosts at the start of a line
_APART = 16  # hosts between two lengths, the longest period of a schedule
_MOST_CHUNKS = 64


class Stage(NamedTuple):
    """One schedule of a collective."""

    where: str
    """The ranks: all ("flat"), one host's ("inside"), equal places on all hosts ("between"), first ones ("leaders")."""
    op: str
    name: str

    def __str__(self) -> str:
        return f"{self.where} {self.op} {self.name}"


@dataclass(frozen=True)
class Case:
    """A collective on a machine."""

    op: str
    ranks: int
    nbytes: int
    """One rank's input; allgather's result is `ranks` times as long."""
    machine: Machine
    itemsize: int = 4
    chunks: int = 1
    """Chunks of the buffer; a chain chooses its own number."""

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.machine.hosts(self.ranks)

    @property
    def local(self) -> int:
        """The ranks of a host."""
        return min(self.ranks, self.machine.local)

    @property
    def buffer(self) -> int:
        """The bytes of the longest buffer of a rank."""
        return self.nbytes * (self.ranks if self.op == "allgather" else 1)

    @property
    def numel(self) -> int:
        """The elements of that buffer."""
        return self.buffer // self.itemsize


class Estimate(NamedTuple):
    """The simulated time; messages and bytes of the busiest rank, at most the sum over stages."""

    seconds: float | None
    """None if there are too many messages to simulate."""
    messages: int
    nbytes: int
    stages: tuple[Stage, ...]


def names(op: str) -> tuple[str, ...]:
    """Return the implementations of an operation: its schedules and the hierarchical form."""
    return (*SCHEDULES[op], HIERARCHICAL)


def flat(op: str, name: str) -> tuple[Stage, ...]:
    """Return one schedule among all ranks."""
    return (Stage("flat", op, name),)


def hierarchical(op: str, inside: str, between: str) -> tuple[Stage, ...]:
    """Return the stages of a form in levels, with the schedules of these names.

    allreduce: reduce_scatter within each host, allreduce between ranks of equal place on the hosts, allgather within.
    reduce_scatter has the first two of these stages, allgather the last two. broadcast: to a rank of each host, then
    within.
    """
    match op:
        case "allreduce":
            scatter = "halving" if inside == "doubling" else inside
            return (
                Stage("inside", "reduce_scatter", scatter),
                Stage("between", "allreduce", between),
                Stage("inside", "allgather", inside),
            )
        case "allgather":
            return Stage("between", op, between), Stage("inside", op, inside)
        case "reduce_scatter":
            return Stage("inside", op, inside), Stage("between", op, between)
        case _:
            return Stage("leaders", op, between), Stage("inside", op, inside)


def forms(op: str) -> list[tuple[Stage, ...]]:
    """Return the forms in levels that can be fast."""
    if op == "broadcast":
        return [hierarchical(op, "tree", between) for between in ("tree", "chain")]
    insides = [name for name in ("ring", *_POWERS) if name in SCHEDULES["allgather" if op == "allreduce" else op]]
    betweens = [name for name in ("ring", *_POWERS) if name in SCHEDULES[op]]
    return [hierarchical(op, inside, between) for inside, between in product(insides, betweens)]


def estimate(case: Case, name: str) -> Estimate:
    """Return the estimate for `name`; for the hierarchical forms, that of the fastest."""
    if name != HIERARCHICAL:
        return estimate_stages(case, flat(case.op, name))
    found = [estimate_stages(case, stages) for stages in forms(case.op)]
    return min(found, key=lambda one: float("inf") if one.seconds is None else one.seconds)


def estimate_stages(case: Case, stages: tuple[Stage, ...]) -> Estimate:
    """Return the estimate for these stages, one after the other."""
    costs = [_cost(case, stage, case.numel) for stage in stages]
    messages, elements = sum(cost.messages for cost in costs), sum(cost.elements for cost in costs)
    return Estimate(_seconds(case, stages), messages, elements * case.itemsize, stages)


# --- which ranks to simulate -----------------------------------------------------------------------------------------


def _seconds(case: Case, stages: tuple[Stage, ...]) -> float | None:
    layout = Layout.of(case, stages)
    each = sum(_mean_messages(case, stage, layout.numel) for stage in stages)
    messages = each * (case.local if layout.alike else case.ranks)
    if messages > _FEW_MESSAGES and (found := follow(layout)) is not None:
        return found
    return layout.seconds(case.hosts) if messages <= _MOST_MESSAGES else None


def _mean_messages(case: Case, stage: Stage, numel: int) -> int:
    """Return about how many messages a rank sends; with a root, few ranks send more than two."""
    if stage.name == "tree" or (stage.name == "direct" and (stage.op, stage.name) not in ALIKE):
        return 2 * chunks(case, stage).get("chunks", 1)
    return _cost(case, stage, numel).messages


def _is_alike(case: Case, stage: Stage) -> bool:
    """Return True if all hosts behave alike in this stage."""
    if stage.where == "inside":
        return True
    size = _size(case, stage)
    is_power = size & (size - 1) == 0
    return stage.where != "leaders" and (stage.op, stage.name) in ALIKE and (is_power or stage.name not in _POWERS)


def follow(layout: Layout) -> float | None:
    """Return the seconds on a line through three shorter lengths, or None if there is no line."""
    hosts = layout.case.hosts
    across = {stage.name for stage in layout.stages if stage.where != "inside"}
    for shortest in _LENGTHS:
        if across <= {"tree"}:
            start, lengths = shortest, [shortest, 2 * shortest, 4 * shortest]
            steps = log2(hosts / start)
        else:
            start = shortest + hosts % _APART
            lengths = [start, start + _APART, start + 2 * _APART]
            steps = (hosts - start) / _APART
        if lengths[-1] >= hosts or not steps.is_integer() or not across <= _FOLLOWED:
            return None
        first, second, third = map(layout.seconds, lengths)
        if isclose(third - second, second - first, rel_tol=1e-6):
            return first + (third - second) * steps
    return None


@dataclass(frozen=True)
class Layout:
    """The programs of a case on any number of hosts."""

    case: Case
    stages: tuple[Stage, ...]
    alike: bool
    """True simulates one host for all."""

    @classmethod
    def of(cls, case: Case, stages: tuple[Stage, ...]) -> Layout:
        """Return the layout that simulates the fewest ranks."""
        return cls(case, stages, case.hosts > 1 and all(_is_alike(case, stage) for stage in stages))

    @property
    def numel(self) -> int:
        """The elements of the buffer; if hosts are alike, a number that gives equal parts."""
        return self.case.ranks * self.case.chunks if self.alike else self.case.numel

    def seconds(self, hosts: int) -> float:
        """Simulate the case on `hosts`, with parts of the buffer as long as on its own hosts."""
        case = self.case
        local = case.local
        ranks = case.ranks if hosts == case.hosts else hosts * local
        itemsize = case.buffer / self.numel
        if not self.alike:
            programs = [self.program(rank, hosts, ranks) for rank in range(ranks)]
            return simulate(programs, case.machine, itemsize=itemsize).seconds
        # rank 0 can copy more than others, or less, so a host with it and one without are simulated
        runs = []
        for first in (0, local) if any(stage.name == "direct" for stage in self.stages) else (local,):
            programs = [self.program(rank, hosts, ranks) for rank in range(first, first + local)]
            runs.append(simulate(programs, case.machine, ranks=ranks, first=first, itemsize=itemsize).seconds)
        return max(runs)

    def program(self, rank: int, hosts: int, ranks: int) -> Program:
        """Return the program of `rank`."""
        host, place = divmod(rank, self.case.local)
        phases = []
        for stage in self.stages:
            if stage.where == "leaders" and place:
                phases.append(Phase(Schedule(0, ()), ()))
                continue
            among = {
                "flat": range(ranks),
                "inside": range(host * self.case.local, (host + 1) * self.case.local),
            }.get(stage.where, range(place, ranks, self.case.local))
            phases.append(Phase(self._schedule(stage, among, rank, place, hosts), among))
        return phases

    def _schedule(self, stage: Stage, among: range, rank: int, place: int, hosts: int) -> Schedule:
        numel = self.numel
        if stage.where == "between":
            numel = Blocks.even(numel, self.case.local).count(place)
        if self.alike and stage.where != "inside" and stage.name in _FOLLOWED:
            numel = numel // self.case.hosts * hosts
        found = SCHEDULES[stage.op][stage.name]
        if stage.op in ("reduce_scatter", "allgather"):
            return found.plan(among.index(rank), len(among), Blocks.even(numel, len(among)), **chunks(self.case, stage))
        root = (0,) if stage.op == "broadcast" else ()
        return found.plan(among.index(rank), len(among), numel, *root, **chunks(self.case, stage))


def _size(case: Case, stage: Stage) -> int:
    """Return the number of ranks of a stage."""
    return {"flat": case.ranks, "inside": case.local}.get(stage.where, case.hosts)


def _cost(case: Case, stage: Stage, numel: int) -> Cost:
    """Return the stated cost of a stage, for a buffer of `numel`."""
    if stage.where == "between":
        numel = Blocks.even(numel, case.local).largest
    size = _size(case, stage)
    blocks = Blocks.even(numel, size) if stage.op in ("reduce_scatter", "allgather") else numel
    return cost_of(stage.op, stage.name)(size, blocks, **chunks(case, stage))


def chunks(case: Case, stage: Stage) -> dict[str, int]:
    """Return the keyword of a schedule with chunks.

    The best chain fills as long as it drains: the square root of the buffer's time at a port over that of a short
    message, times the links but one.
    """
    if not SCHEDULES[stage.op][stage.name].chunked:
        return {}
    if stage.name != "chain":
        return {"chunks": case.chunks}
    network = case.machine.between if case.hosts > 1 else case.machine.inside
    links = max(_size(case, stage) - 2, 0)
    best = isqrt(int(links * network.stretch(case.buffer) / max(network.message(1), 1e-12)))
    return {"chunks": max(1, min(best, _MOST_CHUNKS))}
