"""Classes whose objects all ranks make together, with `await X.create(...)`."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class _NoConstructor(type):
    """Metaclass that raises if the program calls the class."""

    _create: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{cls.__name__}(...): all ranks make it together, with `await {cls.__name__}.{cls._create}`")

    def _made(cls: type[T], *args: Any, **kwargs: Any) -> T:
        """Return a new object."""
        made: T = type.__call__(cls, *args, **kwargs)
        return made


class MadeTogether(metaclass=_NoConstructor):
    """Base of classes whose method `create` makes the objects, on all ranks together."""

    _create: str
    """The call of `create`, for the error."""
