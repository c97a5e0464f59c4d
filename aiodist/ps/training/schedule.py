"""When a client talks to the server, and how hard it pulls: plain numbers, no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The steps at which a client pulls, and at which it takes in what it pulled. Steps count from 1.

    The first `warmup` steps are the client's own. From then on every `tau`-th step integrates; what it integrates is
    asked for `prefetch` steps earlier, so that it travels while the client computes.

    >>> schedule = Schedule(tau=50, warmup=20, prefetch=25)
    >>> [step for step in range(1, 171) if schedule.integrates(step)]
    [70, 120, 170]
    >>> [step for step in range(1, 171) if schedule.pulls(step)]
    [45, 95, 145]

    Raises ValueError unless `tau` is at least 1, `warmup` at least 0 and `prefetch` from 0 to below `tau`.
    """

    tau: int
    warmup: int = 0
    prefetch: int = 0

    def __post_init__(self) -> None:
        check_count("tau", self.tau)
        check_count("warmup", self.warmup, least=0)
        check_count("prefetch", self.prefetch, least=0)
        if self.prefetch >= self.tau:
            raise ValueError(
                f"prefetch={self.prefetch} with tau={self.tau}: expected less than tau, since a pull must come after "
                "the integration before"
            )

    def integrates(self, step: int) -> bool:
        """Return whether `step` takes in the centre."""
        past = step - self.warmup
        return past > 0 and past % self.tau == 0

    def pulls(self, step: int) -> bool:
        """Return whether `step` asks for the centre; with `prefetch` 0 that is the step which integrates."""
        return self.integrates(step + self.prefetch)


def elastic_alpha(beta: float, groups: int) -> float:
    """Return the `alpha` of each of `groups` clients that together pull at the centre with `beta`.

    A data-parallel group of ranks is one client, however many ranks it has. Zhang, Choromanska and LeCun (2015) use
    beta 0.9: `elastic_alpha(0.9, 8)` for 8 workers. Raises ValueError where the result is no `alpha` for `EASGD`.

    >>> elastic_alpha(0.9, 3)
    0.3
    """
    check_count("groups", groups)
    if not 0 < beta <= groups:
        raise ValueError(f"beta={beta} with groups={groups}: expected more than 0 and at most {groups}")
    return beta / groups


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return `value` if it is an int of at least `least`; raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {type(value).__name__}: expected an int")
    if value < least:
        raise ValueError(f"{name}={value}: expected at least {least}")
    return value
