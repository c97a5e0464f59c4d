"""What all ranks make together is made by `await X.create(...)`; a call of the class says so."""

from __future__ import annotations


class MadeTogether:
    """Base of the classes whose objects `create` makes, on all ranks together."""

    _create: str
    """How `create` is called, for the error."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        name = type(self).__name__
        raise TypeError(f"{name}(...): all ranks make it together, with `await {name}.{self._create}`")
