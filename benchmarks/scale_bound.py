"""What no algorithm undercuts on a simulated machine."""

from __future__ import annotations

import heapq
from functools import lru_cache

from benchmarks.loggp import LogGP, Machine
from benchmarks.scale_model import Case, Estimate
from benchmarks.schedule_costs import lower_bound

__all__ = ["bound", "spread"]

# How often what a rank has, but for a 1/size, has to be sent by some rank (allgather: of the result).
_TIMES = {"allreduce": 2, "reduce_scatter": 1, "allgather": 1}
_REDUCTIONS = ("allreduce", "reduce_scatter")


def bound(case: Case) -> Estimate:
    """Return the largest of three bounds in time, and what is sent at least.

    One element has to reach, or to come from, every host (`spread`). Some host has to send or receive what
    `lower_bound` says for a rank, over its ports, and some rank over all that it has. Somebody has to combine
    an equal share of all that is to be combined, after a first message.
    """
    least = lower_bound(case.op, case.ranks, case.numel)
    seconds = max(_latency(case), _volume(case), _combining(case))
    return Estimate(seconds, least.messages, least.elements * case.itemsize, ())


def _latency(case: Case) -> float:
    machine, nbytes = case.machine, _shortest(case)
    if case.hosts == 1:
        return spread(machine.inside, case.ranks, 1, True, nbytes)
    return spread(machine.between, case.hosts, machine.ports, machine.ports == machine.local, nbytes)


def _shortest(case: Case) -> float:
    """Return the bytes of the shortest message: an element, or a part of one where parts are equal."""
    return min(case.itemsize, case.buffer / case.ranks)


@lru_cache(maxsize=256)
def spread(network: LogGP, nodes: int, ports: int, own: bool, nbytes: float) -> float:
    """Return the seconds until a message of `nbytes` from one node can be known to `nodes`.

    A rank that knows it sends it on through all `ports`, as often as they can: R. M. Karp, A. Sahay, E. E. Santos,
    K. E. Schauser, "Optimal broadcast and summation in the LogP model", SPAA 1993,
    https://doi.org/10.1145/165231.165250. Nodes may have processors enough for their ports; with `own` there is one
    for each, which is busy for o.
    """
    takes = network.message(nbytes)
    again = network.gap + network.stretch(nbytes)
    if own:
        again = max(again, network.overhead)
    known = 1
    if nodes == 1:
        return 0.0
    arrivals = [(takes, 1)]  # when the next messages of how many nodes arrive
    while True:
        when, senders = heapq.heappop(arrivals)
        known += senders * ports
        if known >= nodes or again == 0:
            return when
        heapq.heappush(arrivals, (when + again, senders))
        heapq.heappush(arrivals, (when + takes, senders * ports))


def _sent(case: Case, size: int) -> float:
    """Return the bytes that one of `size` equal parts of the machine sends or receives at least."""
    if case.op == "broadcast":
        return case.buffer
    return _TIMES[case.op] * case.buffer * (size - 1) / size


def _volume(case: Case) -> float:
    machine: Machine = case.machine
    if case.hosts == 1:
        return machine.inside.message(_sent(case, case.ranks))
    through = machine.between.message(_sent(case, case.hosts) / machine.ports)
    # Both ways out of a rank at once; each may have sent one byte when the clock of G starts.
    gaps = machine.inside.byte_gap, machine.between.byte_gap
    if case.local == 1 or 0 in gaps:
        return through
    return max(through, (_sent(case, case.ranks) - 2) / sum(1 / gap for gap in gaps))


def _combining(case: Case) -> float:
    if case.op not in _REDUCTIONS:
        return 0.0
    machine = case.machine
    networks = [machine.inside] * (case.local > 1) + [machine.between] * (case.hosts > 1)
    first = min(network.message(_shortest(case)) for network in networks)
    return first + case.buffer * (case.ranks - 1) / case.ranks * machine.combine
