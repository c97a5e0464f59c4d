"""The settings that must be equal on all ranks of a parameter server: rules, roles, and placement.

A tensor is whole on one server, or cut into contiguous blocks over all servers. Every rank computes the placement from
the tensor's name and size, without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple
from zlib import crc32

from torch import Tensor

from aiodist import env
from aiodist.codecs import Codec
from aiodist.communicator import Communicator
from aiodist.communicator.arguments import check_rank
from aiodist.ps.policies import Policy
from aiodist.ps.rules import RULES, Rule, as_rule
from aiodist.ps.wire import Reads
from aiodist.schedules.plan import cut
from aiodist.types import settings_text


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
