"""What all ranks of a parameter server must choose alike: rules, roles, and the rest of its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from aiodist import env
from aiodist.codecs import Codec
from aiodist.communicator import Communicator
from aiodist.communicator.arguments import check_rank
from aiodist.ps.consistency import Policy
from aiodist.ps.rules import RULES, Rule, as_rule
from aiodist.ps.wire import Reads

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
        return {field.name: repr(getattr(self, field.name)) for field in fields(self)}

    def rule(self, given: RuleLike | None) -> tuple[int, Rule]:
        """Return the number and the rule that a call means; None is the default. ValueError for an unknown one."""
        for number, (name, known) in enumerate(self.rules.items()):
            if given is None or given is known or given == name or getattr(known, "fn", None) is given:
                return number, known
        told = ", ".join(self.rules)
        raise ValueError(f"unknown rule {given!r}: expected one that all ranks gave at the start, {told}")


def one_of(name: str, value: Any, expected: Sequence[str]) -> Any:  # noqa: ANN401
    """Return `value`; raise ValueError unless it is one of `expected`."""
    if value not in expected:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, expected))}")
    return value


def rules_of(rule: RuleLike, more: Mapping[str, RuleLike]) -> dict[str, Rule]:
    """Return every rule by name, the default first."""
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
