"""The choices that must be equal on all ranks of a parameter server: consistency, rules, roles, and placement.

A tensor is whole on one server, or cut into contiguous blocks over all servers. Every rank computes the placement from
the tensor's name and size, without messages.
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
    """A consistency, as a frozen dataclass. Equal policies have the same `repr` on all ranks."""

    accepts: ClassVar[bool] = False
    """True ends a push when the servers have it. False ends it when they have applied or dropped it."""

    @property
    def scales(self) -> bool:
        """True if the policy may weight pushes by other factors than 1."""
        return getattr(self, "stale", None) == "scale" or getattr(self, "reduction", None) == "mean"

    @abstractmethod
    def machine(self, workers: Sequence[int]) -> Machine:
        """Return a machine at version 0. Raises ValueError without workers, and for a worker that is listed twice."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, repr=False)
class Asynchronous(Policy):
    """Each push makes a version when it arrives, and no worker waits for another.

    A push that is more than `max_staleness` versions old is dropped; None drops none. With "scale" each push is
    multiplied by `scale(staleness)` instead, by default by 1 / (1 + staleness). A worker's own pushes make versions
    too, so a worker that pushes without reading grows stale. Raises ValueError or TypeError for anything else.
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
    """Each push makes a version, but a push that brings its worker more than `staleness` ahead of the slowest is held.

    A worker's clock is the number of its applied pushes. The slowest worker is one that has not left. A held push is
    applied when the clocks allow. With a staleness of 0 a step takes one push of each worker. After a barrier all
    clocks are equal. Raises ValueError or TypeError for anything else.

    After Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013).
    """

    staleness: int

    def __post_init__(self) -> None:
        check_int("staleness", self.staleness, 0)

    def machine(self, workers: Sequence[int]) -> Machine:
        return Boundedly(self.staleness, workers) if self.staleness else Stepwise(workers, full=len(workers))


@dataclass(frozen=True, repr=False)
class Synchronous(Policy):
    """Step k takes the k-th push of each worker; pushes of a worker that has left still count.

    No step waits for a worker that has left or waits at a barrier. After the barrier all workers are at the same step.
    "mean" divides by the number of pushes in the step, "sum" does not. A worker may push ahead of the others; such
    pushes are held. Raises ValueError for another reduction.
    """

    accepts: ClassVar[bool] = True

    reduction: Literal["mean", "sum"]

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("mean", "sum"))

    def machine(self, workers: Sequence[int]) -> Stepwise:
        return Stepwise(workers, full=len(workers), mean=self.reduction == "mean")


@dataclass(frozen=True, repr=False)
class Quorum(Policy):
    """The first n pushes make a step, from any workers; or fewer, if fewer than n workers are present.

    A worker that has left or waits at a barrier is not present. `stale` defines the use of a push whose base is not the
    current version: "accept" counts it as any other; "drop" discards it, which with more workers than n is synchronous
    training with backup workers; "scale" multiplies it by `scale(staleness)`, by default by 1 / (1 + staleness). "mean"
    divides by the number of pushes in the step, "sum" does not. Raises ValueError or TypeError for anything else, and
    ValueError on opening with fewer than n workers.

    With "drop" a read waits for the step of its client's own push. Otherwise a read does not wait: two workers could
    wait for each other, each at a tensor whose step lacks the other's push.

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
    """Return the scale function, or None. Raises ValueError for an unused one, and for one without valid weights."""
    if stale != "scale":
        if scale is not None:
            raise ValueError(f"scale is given, but stale is {stale!r}: expected 'scale'")
        return None
    for staleness in _SAMPLES:
        weight_of(scale or inverse_age, staleness)
    return scale or inverse_age


def _shown(value: object) -> str:
    """Return the repr of a setting; a function's name and some of its values, since its repr has an address."""
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
    """Return the spans of the tensor `name`, of `numel` elements of `itemsize` bytes. The first is its leader's.

    A tensor of at least `split_bytes` bytes is cut into one block for each server. The blocks differ by one element at
    most, the longer ones first, and block i is on server number `(leader + i) % len(servers)`. With fewer elements than
    servers the last servers have none. A smaller or empty tensor is whole on its leader, number `crc32(name) %
    len(servers)`, which is the same on every rank and host, and spreads names evenly.

    >>> place("embedding", 7, 4, servers=(0, 1, 2), split_bytes=16)
    (Span(rank=2, start=0, stop=3), Span(rank=0, start=3, stop=5), Span(rank=1, start=5, stop=7))
    """
    order = _leader_first(name, servers)
    if len(servers) == 1 or numel == 0 or numel * itemsize < split_bytes:
        return (Span(order[0], 0, numel),)
    parts = cut(numel, len(order))  # fewer parts than servers, for few elements
    return tuple(Span(rank, start, stop) for rank, (start, stop) in zip(order, parts, strict=False))


def spread(name: str, servers: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of the table `name`, on all servers, its leader's first. The id of a row defines its server."""
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
    """The settings that ranks compare when they open a parameter server."""

    rules: dict[str, Rule]
    """Rules by name, the default first. The order defines their numbers on the wire."""
    consistency: Policy
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    start: Start
    codec: Codec | None
    pull_codec: Codec | None
    split_bytes: int
    checkpoints: bool = False
    """True lets workers keep their pushes until a checkpoint has them."""

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
        """Return the settings as text, which is the same on all ranks for equal settings."""
        return {field.name: settings_text(getattr(self, field.name)) for field in fields(self)}

    def rule(self, given: RuleLike | None) -> tuple[int, Rule]:
        """Return the number and the rule of `given`, or the default for None."""
        for number, (name, known) in enumerate(self.rules.items()):
            if given is None or given is known or given == name or getattr(known, "fn", None) is given:
                return number, known
        raise ValueError(f"unknown rule {given!r}: expected a rule of the server, {', '.join(self.rules)}")


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
    """Return the servers and the workers of a `ParameterServer` with these arguments."""
    everybody = range(coll.size)
    for name, given in (("servers", servers), ("workers", workers)):
        if given is not None and not isinstance(given, Sequence | int if name == "servers" else Sequence):
            raise TypeError(f"{name} is {type(given).__name__}: expected a list of ranks, or None")
    if servers is None:
        servers = env.servers(coll.size) or everybody
    if isinstance(servers, int):
        if isinstance(servers, bool) or not 0 < servers < coll.size:
            raise ValueError(f"servers={servers}: expected 1 to {coll.size - 1}, so that at least one rank works")
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
"""Servers and workers."""


@dataclass(frozen=True)
class ServerMember:
    """One rank in a rebind. All fields except `uid` concern the last communicator; a new rank has their defaults."""

    uid: str
    """Permanent name of the rank's client."""
    size: int = 0
    """Number of ranks, 0 for a new rank."""
    servers: int = 0
    """Number of servers."""
    served: int | None = None
    """Place among the servers, or None if the rank did not serve."""
    worked: bool = True
    """True if the rank was a worker."""
    roles: Roles | None = None
    """Roles that the program requests for the new communicator."""
    saved: tuple[int, str] | None = None
    """Number of checkpoints, and the folder of the last."""


def roles_among(members: Sequence[ServerMember], own: Roles) -> Roles:
    """Return the servers and workers: `own` if all ranks are new, otherwise the request of the former ranks.

    Without a request all ranks serve and work, if all served before. Otherwise the remaining servers serve, in their
    order, and the remaining workers and the new ranks work. Raises ValueError if no server remains.
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
        raise ValueError("no server of the parameter server is left: expected servers=, the new servers")
    servers = tuple(places[at] for at in sorted(places))
    return servers, tuple(rank for rank in everybody if rank not in servers and members[rank].worked)


def kept(members: Sequence[ServerMember], servers: Sequence[int]) -> bool:
    """Return True if every shard is still on its server."""
    old = next((member for member in members if member.size), None)
    return old is not None and [members[rank].served for rank in servers] == list(range(old.servers))
