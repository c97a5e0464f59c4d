"""Words that every layer shares, and checks of what more than one of them is given."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from numbers import Real
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

ANY: Final = -1
"""Any source, any tag: for receives only."""

OPERATIONS: Final = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "scan")
"""The kinds of collectives that have more than one implementation; all others are made of these, or of messages."""

REDUCTIONS: Final = ("allreduce", "reduce", "reduce_scatter", "scan")
"""Those of them that combine elements."""


class ReduceOp(StrEnum):
    """How a reduction combines elements."""

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


Op: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "band", "bor", "bxor"] | ReduceOp
"""What `op=` takes."""

Impl: TypeAlias = Literal[
    "auto",
    "mpi",
    "gloo",
    "shm",
    "hierarchical",
    "leaders",
    "ring",
    "doubling",
    "halving",
    "tree",
    "direct",
    "chain",
    "bruck",
    "nccl",
    "cuda_ipc",
    "staged",
]
"""What `impl=` takes: "auto", which lets the selector choose, or the name of an implementation."""


def check_timeout(timeout: object, *, least: float = 0.0) -> float | None:
    """Return `timeout` where it is seconds, not below `least`, or None; raise TypeError or ValueError."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout is {type(timeout).__name__}: expected seconds, or None")
    seconds = float(timeout)
    if not seconds >= least:  # nor is a NaN
        raise ValueError(f"timeout={timeout}: expected seconds, at least 0, or None")
    return seconds


def check_period(name: str, seconds: object) -> None:
    """Raise ValueError unless `seconds`, of the argument `name`, are a number above 0, or None."""
    if seconds is not None and not (isinstance(seconds, Real) and float(seconds) > 0):
        raise ValueError(f"{name}={seconds!r}: expected seconds, more than 0, or None")


def check_trains(optimizer: Any, parameters: Iterable[object], whose: str) -> None:  # noqa: ANN401
    """Raise ValueError unless some of the parameters of `optimizer` are among those that are `whose`.

    One whose step is not torch's may have copies of them, so nothing is said of that.
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in given for p in parameters) and type(optimizer).step.__module__.startswith("torch."):
        raise ValueError(
            f"{type(optimizer).__name__}: 0 of its {len(given)} parameters are among those of {whose}, so it would "
            "train nothing: expected one that is made of some of them"
        )


@runtime_checkable
class Stateful(Protocol):
    """A loader, an optimizer, a scheduler: what gives and takes its state."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Return all of its state."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Take that state."""
