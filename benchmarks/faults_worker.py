"""One of four ranks with a fault: `faults_worker.py FAULT SEED FOLDER`; writes notes to FOLDER."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

import aiodist
from aiodist import (
    AiodistError,
    Communicator,
    CommunicatorAborted,
    DeadlockError,
    MismatchError,
    OperationTimeout,
    PeerLost,
    RemoteError,
)
from aiodist.env import Environment
from aiodist.testing import Fault, FaultKind, Faults, InjectedFault
from aiodist.world.opening import Limits
from aiodist.world.runtime import opened

RANKS = 4
ROUNDS = 12
_CALLS = 4  # of a round
_LATE_SECONDS = 2.0  # time limit of the rendezvous for an absent rank


class Plan(NamedTuple):
    """The fault, its victim and its time, the same on every rank."""

    fault: str
    victim: int
    at: int

    @classmethod
    def drawn(cls, fault: str, seed: int) -> Plan:
        """Return the plan of a seed."""
        random = Random(seed)
        return cls(fault, random.randrange(RANKS), random.randrange(ROUNDS * _CALLS))


class Notes:
    """The notes of one rank, a file with a line for each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / str(Environment.read().rank)
        self.add(pid=os.getpid())

    def add(self, **what: object) -> None:
        """Write a note."""
        with self._file.open("a") as file:
            file.write(json.dumps({**what, "when": time.monotonic()}) + "\n")

    def failed(self, error: BaseException) -> None:
        """Write an error, and the ranks that it names."""
        self.add(end=type(error).__name__, named=named(error), text=str(error)[:2000])


def named(error: BaseException) -> list[int]:
    """Return the ranks that an error gives as its cause."""
    match error:
        case PeerLost():
            return [error.lost]
        case RemoteError():
            return [error.raised_by]
        case OperationTimeout():
            return sorted(error.late)
        case DeadlockError():
            return sorted(error.cycle)
    return sorted({int(rank) for rank in re.findall(r"\brank (\d+)(?:: | waits for rank)", str(error))})


async def one_round(coll: Communicator) -> None:
    """Run four calls, and check their results."""
    rank, size = coll.rank, coll.size
    assert (await coll.allreduce(torch.full((5,), float(rank))))[0] == size * (size - 1) / 2
    t = await coll.broadcast(torch.full((1 << 18,), float(rank)), root=1)
    assert t.unique().tolist() == [1.0]
    assert [t.tolist() for t in await coll.allgather(torch.tensor([rank]))] == [[i] for i in range(size)]
    t = await coll.sendrecv(torch.full((1 << 14,), rank), (rank + 1) % size, (rank - 1) % size)
    assert t.unique().tolist() == [(rank - 1) % size]


async def crossed(coll: Communicator, plan: Plan, notes: Notes) -> None:
    """Use two communicators, in another order on one rank."""
    one, two = await coll.dup(), await coll.dup()
    first = two if coll.rank == plan.victim else one
    try:
        await first.barrier()
    except (DeadlockError, CommunicatorAborted) as error:  # a rank outside the cycle hears from a rank in the cycle
        notes.failed(error)
        await asyncio.sleep(1.0)  # the others detect the deadlock
        raise


async def mismatched(coll: Communicator, plan: Plan, notes: Notes) -> None:
    """Run rounds; one rank calls another operation once."""
    for number in range(ROUNDS):
        if number == plan.at // _CALLS:
            try:
                await (coll.barrier() if coll.rank == plan.victim else coll.allreduce(torch.ones(3)))
            except MismatchError as error:
                notes.add(told=named(error), text=str(error))
        await one_round(coll)


async def main(plan: Plan, notes: Notes) -> None:
    """Run the rounds, and write how they ended."""
    if plan.fault == "absent" and Environment.read().rank == plan.victim:
        await asyncio.sleep(60)
    limits = Limits(rendezvous=_LATE_SECONDS) if plan.fault == "absent" else Limits()
    try:
        async with opened(limits, timeout=None if plan.fault == "crossed" else 20) as coll:
            notes.add(ready=True)
            if plan.fault == "crossed":
                await crossed(coll, plan, notes)
            elif plan.fault == "mismatch":
                await mismatched(coll, plan, notes)
            else:
                endless = plan.fault in ("interrupt", "launcher")
                for _ in range(1_000_000 if endless else ROUNDS):
                    await one_round(coll)
    except (AiodistError, InjectedFault, AssertionError, asyncio.CancelledError) as error:
        notes.failed(error)
        raise
    notes.add(end="right")


if __name__ == "__main__":
    PLAN = Plan.drawn(sys.argv[1], int(sys.argv[2]))
    STRIKES = [Fault(PLAN.fault, PLAN.victim, PLAN.at)] if PLAN.fault in list(FaultKind) else []
    torch.set_num_threads(1)
    with Faults(*STRIKES):
        aiodist.run(main, PLAN, Notes(Path(sys.argv[3])))
