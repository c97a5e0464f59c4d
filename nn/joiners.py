"""What a rank that joins a net has to wait for: drivers and schedulers, which it makes once the net is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiodist.control import disagreement
from aiodist.errors import MismatchError
from aiodist.types import Stateful


class Expected:
    """Stands for a driver that is made once the net is, and keeps the state that the other ranks have for it."""

    load: Callable[[Any], None]
    """Gives it to the driver, which is made now."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.state: Any = None

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class SettingsState:
    """The scaler and the schedulers of a net, which go on in an elastic world."""

    def __init__(self, owners: Sequence[Stateful]) -> None:
        self._owners = owners
        self._awaited: list[tuple[str, Any]] = []
        """What the other ranks have, where this one has not been told its settings yet."""
        self._driver: Expected | None = None

    @property
    def kinds(self) -> list[str]:
        return [type(each).__name__ for each in self._owners]

    def state_dict(self) -> list[tuple[str, Any]]:
        return list(zip(self.kinds, [each.state_dict() for each in self._owners], strict=True))

    def load_state_dict(self, state: list[tuple[str, Any]]) -> None:
        self._awaited = state
        self._take()

    def expect(self, driver: Expected) -> None:
        """Its schedulers may come later: to make them changes its settings, so these are to be loaded once more."""
        self._driver = driver if self._awaited else None

    def change(self, owners: Sequence[Stateful]) -> None:
        """The settings are others now."""
        self._owners = owners
        self._take()

    def _take(self) -> None:
        """Load what has come, once the settings are as the other ranks'."""
        if self._awaited and self.kinds == [kind for kind, _ in self._awaited]:
            for each, (_, state) in zip(self._owners, self._awaited, strict=True):
                each.load_state_dict(state)
            if self._driver is not None:
                self._driver.load(self._driver.state)
            self._awaited, self._driver = [], None

    def check(self) -> None:
        """Raise where the other ranks have settings that this one still lacks."""
        if self._awaited:
            theirs = ", ".join(kind for kind, _ in self._awaited)
            raise RuntimeError(
                f"the settings of this net have {', '.join(self.kinds) or 'nothing'} with a state, those of the ranks "
                f"that it has joined {theirs}: expected `net.configure(…)` as they have, before the first step"
            )


def check_kinds(told: Sequence[list[str] | None]) -> None:
    """Raise where the ranks that know their settings differ in what of these has a state."""
    known = {rank: ", ".join(kinds) or "nothing" for rank, kinds in enumerate(told) if kinds is not None}
    if len(set(known.values())) > 1:
        raise MismatchError(disagreement("the settings of the net that have a state", known))
