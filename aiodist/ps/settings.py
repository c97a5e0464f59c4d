"""What all ranks of a parameter server must choose alike: consistency, rules, roles, and where each tensor lies.

A tensor lies whole on one server, or is cut in contiguous blocks over all of them. Every rank works it out by itself
from the tensor's name and size, so nothing has to be asked or told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple
from zlib import crc32

from torch import Tensor

from aiodist import env
from aiodist.codecs import Codec
from aiodist.communicator import Communicator
from aiodist.communicator.arguments import check_rank
from aiodist.ps.machines import Asynchronously, Boundedly, FirstOf, Machine, Scale, Stepwise, weight_of
from aiodist.ps.rules import RULES, Rule, as_rule
from aiodist.ps.wire import Reads
from aiodist.schedules.plan import cut
from aiodist.types import settings_text

_SAMPLES = (0, 1, 2, 3, 5, 10, 100)


def inverse_age(staleness: int) -> float:
    """Return 1 / (1 + staleness).

    After Zhang, Gupta, Lian and Liu, "Staleness-aware async-SGD for distributed deep learning" (IJCAI 2016), who divide
    the learning rate by the staleness; they count it from 1.

    >>> inverse_age(0), inverse_age(3)
    (1.0, 0.25)
    """
    return 1.0 / (1 + staleness)


class Policy(ABC):
    """A consistency, as a frozen dataclass. Its `repr` is the same on all ranks, where it does the same."""

    accepts: ClassVar[bool] = False
    """Whether a push is done, for its worker, when the server has it; else when it is applied or dropped."""

    @property
    def scales(self) -> bool:
        """Whether weights other than 1 happen."""
        return getattr(self, "stale", None) == "scale" or getattr(self, "reduction", None) == "mean"

    @abstractmethod
    def machine(self, workers: Sequence[int]) -> Machine:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, repr=False)
class Asynchronous(Policy):
    """Each push makes a version as soon as it comes; nobody waits for anybody.

    What is more than `max_staleness` versions old is dropped; with None nothing is. With "scale" each push is
    multiplied by `scale(staleness)` instead, 1 / (1 + staleness) where none is given. A worker's own pushes make
    versions too: it grows stale when it pushes without reading. Raises ValueError or TypeError for anything else.
    """

    max_staleness: int | None = None
    stale: Literal["drop", "scale"] = "drop"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        one_of("stale", self.stale, ("drop", "scale"))
        if self.max_staleness is not None:
            check_int("max_staleness", self.max_staleness, 0)
            if self.stale == "scale":
                raise ValueError("max_staleness is given, but stale is 'scale': expected 'drop'")
        _check_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> Asynchronously:
        limit = inf if self.max_staleness is None else self.max_staleness
        return Asynchronously(workers, drop_above=limit, scale=_check_scale(self.stale, self.scale))


@dataclass(frozen=True, repr=False)
class Bounded(Policy):
    """Each push makes a version, but one that brings its worker more than `staleness` ahead of the slowest is held.

    A worker's clock is the number of its pushes that were applied. The slowest is sought among those that are still
    there. What is held is applied as soon as the clock allows. With a staleness of 0 all move at once: a step takes one
    push of each. After a barrier all clocks are equal. Raises ValueError or TypeError for anything else.

    After Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013).
    """

    staleness: int

    def __post_init__(self) -> None:
        check_int("staleness", self.staleness, 0)

    def machine(self, workers: Sequence[int]) -> Machine:
        return Boundedly(self.staleness, workers) if self.staleness else Stepwise(workers, full=len(workers))


@dataclass(frozen=True, repr=False)
class Synchronous(Policy):
    """Step k takes the k-th push of each worker that is still there, and of those that left what they had pushed.

    Who rests at a barrier is not there: a step lacks what it does not push. After the barrier all are in step again.
    "mean" divides by the number of pushes in the step, "sum" does not. A worker may push ahead of the others: that is
    held. Raises ValueError for another reduction.
    """

    accepts: ClassVar[bool] = True

    reduction: Literal["mean", "sum"]

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("mean", "sum"))

    def machine(self, workers: Sequence[int]) -> Stepwise:
        return Stepwise(workers, full=len(workers), mean=self.reduction == "mean")


@dataclass(frozen=True, repr=False)
class Quorum(Policy):
    """The first n pushes make a step, from any workers; when fewer than n workers are there, as many as those.

    Who has left is not there, nor who rests at a barrier.
    `stale` says what is done with a push whose base is not the current version. "accept": it counts like any other.
    "drop": it is thrown away; with more workers than n that is synchronous training with backup workers. "scale": it
    counts, multiplied by `scale(staleness)`, 1 / (1 + staleness) where none is given. "mean" divides by the number of
    pushes in the step, "sum" does not. Raises ValueError or TypeError for anything else; on opening ValueError where
    there are fewer than n workers.

    With "drop" a read waits for the step of its client's own push. Otherwise it does not: workers that each wait at
    another tensor for a step that lacks one push would wait for one another.

    After Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting distributed synchronous SGD" (arXiv:1604.00981, 2016).
    """

    accepts: ClassVar[bool] = True

    n: int
    reduction: Literal["mean", "sum"]
    stale: Literal["accept", "drop", "scale"] = "accept"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)
        one_of("reduction", self.reduction, ("mean", "sum"))
        one_of("stale", self.stale, ("accept", "drop", "scale"))
        _check_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> FirstOf:
        drops, scale = self.stale == "drop", _check_scale(self.stale, self.scale)
        mean = self.reduction == "mean"
        machine = FirstOf(workers, full=self.n, mean=mean, drop_above=0 if drops else inf, scale=scale)
        machine.sees_own = drops
        return machine


def _check_scale(stale: str, scale: Scale | None) -> Scale | None:
    """Return the function to scale with, if any. Raises ValueError for one that would not be used, or is of no use."""
    if stale != "scale":
        if scale is not None:
            raise ValueError(f"scale is given, but stale is {stale!r}: expected 'scale'")
        return None
    for staleness in _SAMPLES:
        weight_of(scale or inverse_age, staleness)
    return scale or inverse_age


def _shown(value: object) -> str:
    """Return the repr of a setting; of a function, which would show its address, its name and some of its values."""
    if isinstance(value, str):
        return repr(str(value))  # a ReduceOp is a string too
    if not callable(value):
        return repr(value)
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name}{[float(value(staleness)) for staleness in _SAMPLES]}"


class Span(NamedTuple):
    """Elements [start, stop) of the flat tensor, on the server with this rank."""

    rank: int
    start: int
    stop: int


def place(name: str, numel: int, itemsize: int, servers: Sequence[int], split_bytes: int) -> tuple[Span, ...]:
    """Return where the tensor `name`, of `numel` elements of `itemsize` bytes, lies: the first span is its leader's.

    One of at least `split_bytes` bytes is cut in one block for each server; they differ by one element at most, the
    longer ones first, and block i is on server number `(leader + i) % len(servers)`. With fewer elements than servers
    the last servers have none. A smaller or empty tensor lies whole on its leader, which is number `crc32(name) %
    len(servers)`: the same on every rank and host, and spread evenly.

    >>> place("embedding", 7, 4, servers=(0, 1, 2), split_bytes=16)
    (Span(rank=2, start=0, stop=3), Span(rank=0, start=3, stop=5), Span(rank=1, start=5, stop=7))
    """
    order = _leader_first(name, servers)
    if len(servers) == 1 or numel == 0 or numel * itemsize < split_bytes:
        return (Span(order[0], 0, numel),)
    parts = cut(numel, len(order))  # with few elements fewer than there are servers
    return tuple(Span(rank, start, stop) for rank, (start, stop) in zip(order, parts, strict=False))


def spread(name: str, servers: Sequence[int]) -> tuple[Span, ...]:
    """Return where the table `name` lies: on all servers, its leader first. Which has a row, the row's id says."""
    return tuple(Span(rank, 0, 0) for rank in _leader_first(name, servers))


def _leader_first(name: str, servers: Sequence[int]) -> list[int]:
    # Lone surrogates are legal in a str; no name may make this fail.
    leader = crc32(name.encode("utf-8", "surrogatepass")) % len(servers)
    return [*servers[leader:], *servers[:leader]]


Start = Literal["root", "first", "own"]
ReadMode = Literal["snapshot", "lock-free"]
RuleLike = str | Rule | Callable[[Tensor, Tensor], object]

READS = {"snapshot": Reads.SNAPSHOT, "lock-free": Reads.LOCK_FREE}
STARTS = ("root", "first", "own")


@dataclass(frozen=True)
class Settings:
    """What is compared when a parameter server is opened."""

    rules: dict[str, Rule]
    """By name, the default first: the order gives their numbers on the wire."""
    consistency: Policy
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    start: Start
    codec: Codec | None
    pull_codec: Codec | None
    split_bytes: int
    checkpoints: bool = False
    """Workers keep what they push until a checkpoint has it."""

    def __post_init__(self) -> None:
        for name, expected, value in (
            ("consistency", "machine", self.consistency),
            ("codec", "encode", self.codec),
            ("pull_codec", "encode", self.pull_codec),
        ):
            optional = value is None and name != "consistency"
            if not optional and (isinstance(value, type | str) or not hasattr(value, expected)):
                raise TypeError(f"{name}={value!r}: expected an object with {expected}(), such as those of aiodist")

    def described(self) -> dict[str, str]:
        """Return each as text, equal on ranks where it means the same."""
        return {field.name: settings_text(getattr(self, field.name)) for field in fields(self)}

    def rule(self, given: RuleLike | None) -> tuple[int, Rule]:
        for number, (name, known) in enumerate(self.rules.items()):
            if given is None or given is known or given == name or getattr(known, "fn", None) is given:
                return number, known
        told = ", ".join(self.rules)
        raise ValueError(f"unknown rule {given!r}: expected one that all ranks gave at the start, {told}")


def one_of(name: str, value: Any, expected: Sequence[str]) -> Any:  # noqa: ANN401
    if value not in expected:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, expected))}")
    return value


def check_int(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {type(value).__name__}: expected an int")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: expected {f'at least {least}' if most is None else f'{least} to {most}'}")
    return value


def rules_of(rule: RuleLike, more: Mapping[str, RuleLike]) -> dict[str, Rule]:
    default = as_rule(rule)
    found = {default.name: default}
    for name, given in more.items():
        if name in RULES or name in found:
            raise ValueError(f"rules: the name {name!r} is taken")
        found[name] = as_rule(given, name)
    for name, known in RULES.items():
        found.setdefault(name, known)
    return found


def roles_of(
    coll: Communicator, servers: int | Sequence[int] | None = None, workers: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that serve and those that work, as a `ParameterServer` with these arguments has them."""
    everybody = range(coll.size)
    for name, given in (("servers", servers), ("workers", workers)):
        if given is not None and not isinstance(given, Sequence | int if name == "servers" else Sequence):
            raise TypeError(f"{name} is {type(given).__name__}: expected a list of ranks, or None")
    if servers is None:
        servers = env.servers(coll.size) or everybody
    if isinstance(servers, int):
        if isinstance(servers, bool) or not 0 < servers < coll.size:
            raise ValueError(f"servers={servers}: expected 1 to {coll.size - 1}, so that a rank is left to work")
        servers = everybody[-servers:]
    serving = tuple(check_rank(rank, coll.size, "servers") for rank in servers)
    if workers is None:
        workers = [rank for rank in everybody if rank not in serving] or everybody
    working = tuple(sorted(check_rank(rank, coll.size, "workers") for rank in workers))
    for name, ranks in (("servers", serving), ("workers", working)):
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"{name}={list(ranks)}: expected at least one rank, each once")
    return serving, working


Roles = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that serve, and those that work."""


@dataclass(frozen=True)
class ServerMember:
    """One rank. What stands behind `uid` is of the communicator before; a rank that is new has nothing there."""

    uid: str
    """The name of its client for good."""
    size: int = 0
    """How many ranks there were."""
    servers: int = 0
    """How many of them served."""
    served: int | None = None
    """Its place among those."""
    worked: bool = True
    roles: Roles | None = None
    """What it was told now."""
    saved: tuple[int, str] | None = None
    """How many checkpoints it knows of, and the folder of the last."""


def roles_among(members: Sequence[ServerMember], own: Roles) -> Roles:
    """Return who serves and who works: `own`, as this rank was told, where all are new.

    Else as the ranks that were there were told. If not at all: where every rank served, all do; or those that served
    go on, in their order, and work those that did, and new ones. Raises ValueError where no server is left.
    """
    old = [member for member in members if member.size]
    if not old:
        return own
    if old[0].roles is not None:
        servers, workers = old[0].roles
        return tuple(servers), tuple(workers)
    everybody = tuple(range(len(members)))
    if old[0].servers == old[0].size:
        return everybody, everybody
    places = {member.served: rank for rank, member in enumerate(members) if member.served is not None}
    if not places:
        raise ValueError("no server of the parameter server is left: expected servers=, the ranks that serve now")
    servers = tuple(places[at] for at in sorted(places))
    return servers, tuple(rank for rank in everybody if rank not in servers and members[rank].worked)


def kept(members: Sequence[ServerMember], servers: Sequence[int]) -> bool:
    """Return whether every shard is on the server where it was."""
    old = next((member for member in members if member.size), None)
    return old is not None and [members[rank].served for rank in servers] == list(range(old.servers))
