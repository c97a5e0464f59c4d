"""The selector's table, which maps device, hosts, operation and size to the name of an implementation.

An edit is one line of text, the same in a file, on the wire and in printed tables:

    cpu one allreduce 256KiB - shm      from 256 KiB; `cpu one allreduce 0 256KiB mpi` is for less
    limit ring.chunks 4

so the output of `print(coll.selector)` is a valid file. Tables are immutable: an edit makes another one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, get_args
from zlib import crc32

from aiodist.collectives.endpoint import ROOM_BYTES
from aiodist.handles import LARGE_BYTES
from aiodist.schedules import SCHEDULES
from aiodist.schedules.plan import MAX_LANES
from aiodist.types import OPERATIONS, Impl

DEVICES = ("cpu", "cuda")
HOSTS = ("one", "several")

_IN_LEVELS = ("allreduce", "broadcast", "reduce")
_LIBRARIES = ("mpi", "gloo")
ON_CUDA = ("nccl", "cuda_ipc", "staged")
"""Implementations only for tensors on CUDA devices."""


def _names_of(operation: str) -> tuple[str, ...]:
    levels = ("hierarchical", "leaders") if operation in _IN_LEVELS else ()
    return (*_LIBRARIES, "shm", *levels, *SCHEDULES[operation], *ON_CUDA)


NAMES: Mapping[str, tuple[str, ...]] = {operation: _names_of(operation) for operation in OPERATIONS}
"""Names of the implementations of each operation, available or not."""

IMPLEMENTATIONS: tuple[Impl, ...] = get_args(Impl)[1:]
"""All names of implementations, without "auto"."""

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SHORT_BYTES = 64 << 10
_LENT_BYTES = 1 << 20
"""Smallest tensor, in bytes, for which CUDA IPC precedes staging: its first use of a storage takes up to 0.1 s."""
COMPARED_BYTES = ROOM_BYTES
"""Smallest tensor, in bytes, whose data wait until the hosts have compared the operation."""


class Limit(NamedTuple):
    """A threshold or a count in addition to the table."""

    usual: int
    least: int
    most: int
    meaning: str
    in_bytes: bool = False


LIMITS: Mapping[str, Limit] = {
    "ring.chunks": Limit(4, 1, MAX_LANES, "chunks of a ring in flight, at most"),
    "direct.chunks": Limit(4, 1, MAX_LANES, "chunks of a direct reduction in flight, at most"),
    "tree.chunks": Limit(1, 1, MAX_LANES, "chunks of a tree in flight, at most"),
    "chain.chunks": Limit(1024, 1, 1 << 16, "chunks of a chain, at most"),
    "chunk_bytes": Limit(4 << 20, 1, 1 << 40, "size of a chunk of ring, direct, tree and chain", True),
    "hierarchical.pieces": Limit(8, 1, MAX_LANES, "chunks of a hierarchical allreduce in flight, at most"),
    "hierarchical.piece_bytes": Limit(4 << 20, 1, 1 << 40, "size of such a chunk", True),
    "hierarchical.ring_bytes": Limit(64 << 10, 0, 1 << 40, "smallest tensor for a ring of hosts, else doubling", True),
    "staged.pieces": Limit(4, 1, MAX_LANES, "chunks of a staged collective in flight, at most"),
    "staged.piece_bytes": Limit(2 << 20, 1, 1 << 30, "size of such a chunk", True),
    "cuda_ipc.piece_bytes": Limit(16 << 20, 1, 1 << 40, "size of a chunk that CUDA IPC reduces at a time", True),
    "large_bytes": Limit(LARGE_BYTES, 0, 1 << 40, "smallest operation that the progress thread drives", True),
}
"""Every limit by name."""
USUAL_LIMITS: Mapping[str, int] = MappingProxyType({name: limit.usual for name, limit in LIMITS.items()})
"""Default limits."""


# --- edits ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RangeEdit:
    """Operations of at least `above` and less than `below` bytes use `impl`."""

    device: str
    hosts: str
    operation: str
    above: int
    below: int | None
    impl: str

    def __post_init__(self) -> None:
        check_known("device", self.device, DEVICES)
        check_known("hosts", self.hosts, HOSTS)
        check_known("operation", self.operation, OPERATIONS)
        check_known(f"implementation of {self.operation}", self.impl, NAMES[self.operation])
        if self.above < 0 or (self.below is not None and self.below <= self.above):
            to = "" if self.below is None else f" to {self.below}"
            raise ValueError(f"sizes {self.above}{to}: expected bytes, at least 0, and an end above the start")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.device, self.hosts, self.operation

    def overlaps(self, other: RangeEdit) -> bool:
        """Return True if both edits contain a common size."""
        ends = [float("inf") if edit.below is None else edit.below for edit in (self, other)]
        return self.key == other.key and self.above < ends[1] and other.above < ends[0]

    def __str__(self) -> str:
        below = "-" if self.below is None else bytes_text(self.below)
        return f"{self.device} {self.hosts} {self.operation} {bytes_text(self.above)} {below} {self.impl}"


@dataclass(frozen=True)
class LimitEdit:
    """The limit called `name` becomes `value`."""

    name: str
    value: int

    def __post_init__(self) -> None:
        check_known("limit", self.name, LIMITS)
        limit = LIMITS[self.name]
        if not limit.least <= self.value <= limit.most:
            raise ValueError(f"limit {self.name} {self.value}: expected {limit.least} to {limit.most}")

    def __str__(self) -> str:
        value = bytes_text(self.value) if LIMITS[self.name].in_bytes else str(self.value)
        return f"limit {self.name} {value}"


Edit = RangeEdit | LimitEdit


def parse_edit(line: str) -> Edit:
    """Return the edit of one line, or raise ValueError, with the expected form, for an invalid line.

    >>> parse_edit("cpu one allreduce 256KiB - ring")
    RangeEdit(device='cpu', hosts='one', operation='allreduce', above=262144, below=None, impl='ring')
    >>> print(parse_edit("limit chunk_bytes 1048576"))
    limit chunk_bytes 1MiB
    """
    words = line.split()
    if words[:1] == ["limit"]:
        if len(words) != 3:
            raise ValueError(f"{line.strip()!r}: expected limit NAME VALUE")
        return LimitEdit(words[1], parse_bytes(words[2]))
    if len(words) != 6:
        raise ValueError(f"{line.strip()!r}: expected DEVICE HOSTS OPERATION FROM BELOW IMPLEMENTATION")
    device, hosts, operation, above, below, impl = words
    return RangeEdit(device, hosts, operation, parse_bytes(above), None if below == "-" else parse_bytes(below), impl)


def parse_bytes(text: str) -> int:
    """Return the number of bytes of `text`, such as 1000, 256KiB or 4MiB."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"size {text!r}: expected bytes such as 1000, 256KiB or 4MiB")
    return int(match[1]) * _UNITS[match[2]]


def bytes_text(nbytes: int) -> str:
    """Return the shortest text for `parse_bytes`.

    >>> bytes_text(0), bytes_text(1 << 18), bytes_text(1000)
    ('0', '256KiB', '1000')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def check_known(what: str, seen: str, known: Iterable[str]) -> None:
    """Raise ValueError, with the known names, if `seen` is unknown."""
    if seen not in known:
        raise ValueError(f"{what} {seen!r}: expected one of {', '.join(known)}")


# --- tables --------------------------------------------------------------------------------------------------

_Steps = tuple[tuple[int, str], ...]  # (smallest size in bytes, name)


@dataclass(frozen=True)
class Table:
    """The names of the implementations by device, hosts, operation and size."""

    rows: Mapping[tuple[str, str, str], _Steps]
    """(device, hosts, operation) -> (smallest size in bytes, name), the first from 0."""
    limits: Mapping[str, int] = field(default_factory=lambda: USUAL_LIMITS)

    @property
    def fingerprint(self) -> int:
        """A hash of 32 bits, the same in every process."""
        return crc32(repr((sorted(self.rows.items()), sorted(self.limits.items()))).encode())

    @classmethod
    def usual(cls, library: str | None, *, shares: bool = True) -> Table:
        """Return the default table of a communicator.

        `library` has the collectives of its transport, or is None. True for `shares` means that the ranks of a host
        share memory.
        """
        rows = {
            ("cpu", hosts, operation): _usual(library, hosts, operation, shares=shares)
            for hosts in HOSTS
            for operation in OPERATIONS
        }
        return cls(MappingProxyType(rows))

    def on_cuda(self) -> Table:
        """Return the table, with default rows for CUDA devices if it has none."""
        # `last_resorts` has the substitutes if NCCL is missing or cannot connect these ranks.
        usual = {("cuda", hosts, operation): ((0, "nccl"),) for hosts in HOSTS for operation in OPERATIONS}
        missing = {key: steps for key, steps in usual.items() if key not in self.rows}
        return replace(self, rows=MappingProxyType({**self.rows, **missing})) if missing else self

    def choice(self, device: str, hosts: str, operation: str, nbytes: int) -> str:
        """Return the name of the implementation of `operation` on `nbytes`."""
        steps = self.rows[device, hosts, operation]
        return steps[bisect_right(steps, nbytes, key=itemgetter(0)) - 1][1]

    def edited(self, edit: Edit) -> Table:
        if isinstance(edit, LimitEdit):
            return replace(self, limits=MappingProxyType({**self.limits, edit.name: edit.value}))
        steps = list(self.rows[edit.key])
        kept = [step for step in steps if step[0] < edit.above]
        kept.append((edit.above, edit.impl))
        if edit.below is not None:
            kept.append((edit.below, self.choice(*edit.key, edit.below)))
            kept += [step for step in steps if step[0] > edit.below]
        return replace(self, rows=MappingProxyType({**self.rows, edit.key: _joined(kept)}))

    def ranges(
        self, *, operation: str | None = None, device: str | None = None, hosts: str | None = None
    ) -> list[RangeEdit]:
        """Return the rows as edits. Each argument selects the rows of this operation, device or hosts."""
        found = []
        for (of_device, of_hosts, of_operation), steps in self.rows.items():
            if device in (None, of_device) and hosts in (None, of_hosts) and operation in (None, of_operation):
                ends: Sequence[int | None] = [*(start for start, _ in steps[1:]), None]
                for (start, impl), end in zip(steps, ends, strict=True):
                    found.append(RangeEdit(of_device, of_hosts, of_operation, start, end, impl))
        return found


def _joined(steps: Sequence[tuple[int, str]]) -> _Steps:
    """Return the steps without repetitions of a name."""
    return tuple(step for i, step in enumerate(steps) if i == 0 or steps[i - 1][1] != step[1])


def _usual(library: str | None, hosts: str, operation: str, *, shares: bool) -> _Steps:
    if hosts == "several" and operation in _IN_LEVELS:
        return ((0, "hierarchical"),)
    if hosts == "one" and (shares or library is not None):
        return ((0, "shm"),)  # for all sizes and tensors: the core chooses the algorithm
    if library is None:
        return ((0, "direct"),)
    # The ranks must agree before a library's collective, but can compare during a schedule, which saves time.
    short, long = _SCHEDULE[operation]
    return (0, short), (_SHORT_BYTES, long), (COMPARED_BYTES, library)


def last_resorts(operation: str, nbytes: int, device: str = "cpu", *, shares: bool = True) -> tuple[str, ...]:
    """Return substitutes for an implementation of `operation`, the best first.

    True for `shares` means that the ranks of a host share memory.
    """
    short, long = _SCHEDULE[operation]
    of_messages = short if nbytes < _SHORT_BYTES else long
    if device == "cuda":
        lent = "cuda_ipc", "hierarchical", "leaders"
        others = ("staged", *lent) if nbytes < _LENT_BYTES else (*lent, "staged")
        return "nccl", *others, of_messages, "direct"
    # Ireduce of 1 MiB and more needs many polls: 2 s for 16 MiB.
    first = (not shares and nbytes < COMPARED_BYTES) or (operation == "reduce" and nbytes >= _SHORT_BYTES)
    flat = (of_messages, *_LIBRARIES) if first else (*_LIBRARIES, of_messages)
    return "shm", "hierarchical", "leaders", *flat, "direct"


def ordered_resorts(operation: str, nbytes: int, resorts: Sequence[str]) -> tuple[str, ...]:
    """Return `resorts` with the best schedule in the fixed order for any number of ranks before the last one."""
    tree = ("tree",) if operation == "allreduce" and nbytes < _SHORT_BYTES else ()
    return *resorts[:-1], *tree, resorts[-1]


_SCHEDULE: Mapping[str, tuple[str, str]] = {
    "allreduce": ("doubling", "ring"),
    "broadcast": ("tree", "chain"),
    "reduce": ("tree", "chain"),
    "allgather": ("doubling", "ring"),
    "reduce_scatter": ("halving", "ring"),
    "scan": ("doubling", "chain"),
}
"""Schedules of each operation, for short tensors (fewest messages) and long tensors (fewest bytes)."""
