"""The state that a rank receives when it joins a net, before the program makes the drivers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiodist.control import disagreement
from aiodist.errors import MismatchError
from aiodist.types import Stateful


class Expected:
    """Placeholder of a driver that the program makes after the net. It keeps the state of the other ranks."""

    load: Callable[[Any], None]
    """Function that loads the state into the driver."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.state: Any = None

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class JoinedState:
    """The state of the drivers, the scaler and the schedulers of a net, which an elastic world hands to new ranks.

    As a `Stateful` it is the state of the scaler and the schedulers.
    """

    def __init__(self, drivers: Sequence[Expected], settings: Sequence[Stateful]) -> None:
        self._drivers = list(drivers)
        self._settings = settings
        self._received: list[tuple[str, Any]] = []
        """Kind and state of each setting of the other ranks, until this rank has the same settings."""
        self._made: Expected | None = None
        """The newest driver, until the settings are loaded."""

    @property
    def kinds(self) -> list[str]:
        """Class names of the settings with a state."""
        return [type(each).__name__ for each in self._settings]

    @property
    def known_kinds(self) -> list[str] | None:
        """The same, or None while drivers, and so perhaps their schedulers, are still to be made."""
        return None if self._drivers else self.kinds

    def state_dict(self) -> list[tuple[str, Any]]:
        return list(zip(self.kinds, [each.state_dict() for each in self._settings], strict=True))

    def load_state_dict(self, state: list[tuple[str, Any]]) -> None:
        self._received = state
        self._load()

    def take(self, driver: object, load: Callable[[Any], None]) -> Any:
        """Return the state that the other ranks have for a new `driver`, or None; each state is returned once.

        A scheduler of the driver, made later, changes the driver's settings, so `load` is then called once more.
        """
        found = next((each for each in self._drivers if isinstance(driver, each.kind)), None)
        if found is None:
            return None
        self._drivers.remove(found)
        if found.state is not None:
            found.load = load
            self._made = found if self._received else None
        return found.state

    def change(self, settings: Sequence[Stateful]) -> None:
        """Replace the settings with a state."""
        self._settings = settings
        self._load()

    def _load(self) -> None:
        """Load the received state once the settings have the kinds of those of the other ranks."""
        if self._received and self.kinds == [kind for kind, _ in self._received]:
            for each, (_, state) in zip(self._settings, self._received, strict=True):
                each.load_state_dict(state)
            if self._made is not None:
                self._made.load(self._made.state)
            self._received, self._made = [], None

    def check(self) -> None:
        """Raise RuntimeError if the other ranks have settings that this rank still lacks."""
        if self._received:
            theirs = ", ".join(kind for kind, _ in self._received)
            raise RuntimeError(
                f"the settings of this net have {', '.join(self.kinds) or 'nothing'} with a state, those of the ranks "
                f"that it has joined {theirs}: expected `net.configure(…)` as they have, before the first step"
            )


def check_kinds(kinds_of_ranks: Sequence[list[str] | None]) -> None:
    """Raise MismatchError if ranks that know their settings differ in the kinds of settings with a state."""
    known = {rank: ", ".join(kinds) or "nothing" for rank, kinds in enumerate(kinds_of_ranks) if kinds is not None}
    if len(set(known.values())) > 1:
        raise MismatchError(disagreement("the settings of the net that have a state", known))
