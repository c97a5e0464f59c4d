"""One measured thing: `Record`, its bandwidths, its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

# nccl-tests' factors from algorithm to bus bandwidth, for n ranks; scan and exscan, which it lacks, as reduce.
_SHARED = frozenset({"allgather", "gather", "scatter", "reduce_scatter", "alltoall", "alltoall_single"})
# Where nccl-tests counts what all ranks give together, not one rank's input.
_TOGETHER = frozenset({"allgather", "gather"})
_OPTIONAL = frozenset({"value", "batch", "overlap", "loop_lag", "rule", "thread", "cpu"})
BUSY = ":busy"
"""What ends the names of operations that were measured beside a process that spins on every core."""


@dataclass(frozen=True)
class Record:
    """One measured thing. Times are in seconds, of the rank whose median is largest; what has no meaning is None."""

    op: str
    impl: str
    ranks: int
    nbytes: int | None = None
    """One rank's input."""
    seconds: float | None = None
    """The median over the repetitions."""
    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    affinity: tuple[int, ...] | None = None
    """The cores that the rank may run on."""
    torch_threads: int | None = None
    value: float | None = None
    """What is no time of an operation: in JSON only where there is one, as all that follows."""
    batch: int | None = None
    """Samples that one rank has in a step."""
    overlap: float | None = None
    """The share of the time of communication that was hidden behind computing, of the rank where it is least."""
    loop_lag: float | None = None
    """How late a 1 ms ticker on the loop was, in seconds: the 99th percentile, of the rank where it is largest."""
    rule: str | None = None
    """What a server does with what is pushed."""
    thread: str | None = None
    """A thread of a rank."""
    cpu: float | None = None
    """CPU seconds of `thread` in one operation, of the rank where it has most."""

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in _OPTIONAL}


@dataclass(frozen=True)
class Verdict:
    """One line of the table: `reached` is `value` against `target`, at most or at least."""

    what: str
    value: float
    unit: str
    target: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """The target is reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def bandwidths(op: str, nbytes: int, seconds: float, ranks: int) -> tuple[float | None, float | None]:
    """Return algorithm and bus bandwidth in 1e9 bytes a second, as nccl-tests defines them; None without bytes.

    >>> bandwidths("allreduce", 1_000_000_000, 0.5, 4)
    (2.0, 3.0)
    >>> bandwidths("allgather", 1_000_000_000, 1.0, 4)
    (4.0, 3.0)
    """
    if not nbytes or seconds <= 0:
        return None, None
    algorithm = nbytes * (ranks if op in _TOGETHER else 1) / seconds / 1e9
    factor = 1.0
    if op == "allreduce":
        factor = 2 * (ranks - 1) / ranks
    elif op in _SHARED:
        factor = (ranks - 1) / ranks
    return algorithm, algorithm * factor


def dumps(records: Iterable[Record]) -> str:
    """Return records as a JSON list, one to a line."""
    return "[\n" + ",\n".join(json.dumps(record.to_dict()) for record in records) + "\n]\n"
