"""Finds ranks that can never continue, by a wait-for graph of the ranks' reports. Without I/O.

Each rank reports its facts when stalled (`stillness`). A stalled rank continues only after the end of one of its
pending operations. A set of such ranks is locked if each operation of each rank needs an action of a rank of the set,
since the first such action would need an earlier one. `locked` returns the largest such set. [Note: no false alarm] in
docs/design/watch.md has the argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from aiodist.communicator.facts import CommFacts, Facts, PendingOp
from aiodist.control import name_ranks

_SHOWN, _SHOWN_OF_A_RANK = 8, 3
_TRAINING = ("net.", "opt.", "local.")
"""Prefixes of the calls that train a net."""


class Blocked(NamedTuple):
    """An operation that cannot end, with the ranks whose part is missing."""

    op: PendingOp
    ranks: list[int]


class Lock(NamedTuple):
    """Ranks that can never continue."""

    waits: dict[int, list[Blocked]]  # pending operations of each rank
    cycle: list[int]  # the ranks wait for one another in a circle


def locked(reports: Mapping[int, Facts]) -> Lock | None:
    """Return the ranks that can never continue, among the stalled ranks."""
    waits = {rank: [Blocked(op, []) for op in facts.ops] for rank, facts in reports.items() if facts.ops}
    comms = {rank: {comm.name: comm for comm in reports[rank].comms} for rank in waits}
    changed = True
    while changed:
        changed = False
        for rank in list(waits):
            waits[rank] = [Blocked(op, _blocking(rank, op, comms)) for op, _ in waits[rank]]
            if not all(wait.ranks for wait in waits[rank]):  # an operation may end, and then the rank may continue
                del waits[rank], comms[rank]
                changed = True
    return Lock(waits, _cycle(waits)) if waits else None


def _blocking(rank: int, op: PendingOp, comms: Mapping[int, Mapping[str, CommFacts]]) -> list[int]:
    """Return the stalled ranks without which `op` of `rank` cannot end (empty if `op` may end)."""
    mine = comms[rank][op.comm]
    there = {other: comm for other in mine.ranks if (comm := comms.get(other, {}).get(op.comm)) is not None}
    if not op.peers:
        return [other for other, comm in there.items() if _issued(comm, op.name) <= op.number]
    if op.kept:  # such a send ends only after its match, and the matched sends have ended
        (peer,) = op.peers
        unmatched = peer in there and _found(mine.kept, peer) == _found(there[peer].matched, rank)
        return op.peers if unmatched else []
    # Any of these ranks could end the operation, and so could a message in flight.
    for other in op.peers:
        if other not in there or (other != rank and _found(there[other].sent, rank) != _found(mine.heard, other)):
            return []
    return op.peers


def _issued(comm: CommFacts, name: str) -> int:
    return comm.issued if not name else _found(comm.names, name)


def _found(pairs: Sequence[Sequence[Any]], key: object) -> int:
    return next((count for one, count in pairs if one == key), 0)


def _cycle(waits: Mapping[int, list[Blocked]]) -> list[int]:
    """Follow the first rank that each rank waits for, until a rank repeats."""
    path: list[int] = []
    rank = min(waits)
    while rank not in path:
        path.append(rank)
        rank = min(waits[rank][0].ranks, key=lambda other: (other not in path, other))
    return path[path.index(rank) :]


# --- drawn -----------------------------------------------------------------------------------------------------


def drawn(lock: Lock, stacks: Mapping[int, list[list[str]]]) -> Iterator[str]:
    """Yield lines: the cycle, then pending operations and stacks of the tasks of each rank."""
    first, *others = lock.cycle
    if others:
        chain = "".join(f" waits for rank {rank}, which" for rank in others)
        yield f"deadlock: rank {first}{chain} waits for rank {first}"
    else:
        yield f"deadlock: rank {first} waits for itself"
    rest = sorted(lock.waits.keys() - set(lock.cycle))
    for rank in (*lock.cycle, *rest)[:_SHOWN]:
        waits = lock.waits[rank]
        if len(waits) > _SHOWN_OF_A_RANK:
            yield f"rank {rank} waits in {len(waits)} operations, the first of them:"
        lines = [f"rank {rank} waits for {name_ranks(wait.ranks)} in {wait.op.text}" for wait in waits]
        yield from dict.fromkeys(lines[:_SHOWN_OF_A_RANK])
        for stack in stacks.get(rank, []):
            yield from (f"  {'   ' * depth}└─ {line}" for depth, line in enumerate(stack))
    if len(lock.waits) > _SHOWN:
        yield f"and {len(lock.waits) - _SHOWN} more ranks wait for these"
    ops = [wait.op for waits in lock.waits.values() for wait in waits]
    if any(op.call.startswith(_TRAINING) for op in ops):
        yield (
            "all ranks make the same steps and the same other calls, in one order: call on all ranks what only some "
            "call here; ranks whose data end earlier wait for the others at the end of `async with net.join():`"
        )
    elif not all(op.peers for op in ops):
        yield "all ranks of a communicator call its collectives, in one order: call on all what only some call here"
