"""`MPI.Exception` and MPI's error classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, TypeVar

from aiodist.errors import (
    AiodistError,
    BackendError,
    BufferInFlight,
    CommunicatorAborted,
    CommunicatorClosed,
    MismatchError,
    PeerError,
)

C = TypeVar("C", bound=type)

_NAMES = (
    *("SUCCESS", "ERR_BUFFER", "ERR_COUNT", "ERR_TYPE", "ERR_TAG", "ERR_COMM", "ERR_RANK", "ERR_ROOT", "ERR_GROUP"),
    *("ERR_OP", "ERR_TOPOLOGY", "ERR_DIMS", "ERR_ARG", "ERR_UNKNOWN", "ERR_TRUNCATE", "ERR_OTHER", "ERR_INTERN"),
    *("ERR_IN_STATUS", "ERR_PENDING", "ERR_REQUEST", "ERR_PROC_FAILED", "ERR_REVOKED", "ERR_WIN"),
)
CLASSES = MappingProxyType({name: number for number, name in enumerate(_NAMES)})
"""Numbers of MPI's error classes by name."""

_CLASS_OF: tuple[tuple[type[AiodistError], str], ...] = (
    (BufferInFlight, "ERR_BUFFER"),
    (MismatchError, "ERR_ARG"),
    (CommunicatorClosed, "ERR_COMM"),
    (CommunicatorAborted, "ERR_REVOKED"),
    (PeerError, "ERR_PROC_FAILED"),
    (BackendError, "ERR_INTERN"),
    (AiodistError, "ERR_OTHER"),
)
_CLASS_OF_ARGUMENT = MappingProxyType({"root": "ERR_ROOT", "dst": "ERR_RANK", "src": "ERR_RANK", "tag": "ERR_TAG"})
"""Error class by the first word of a message about a wrong argument."""


class MPIError(AiodistError, RuntimeError):
    """An error with the number of its class, raised from an error of aiodist or a ValueError."""

    def __init__(self, ierr: int = CLASSES["SUCCESS"], said: str | None = None) -> None:
        super().__init__(error_string(ierr) if said is None else said)
        self.error_class = self.error_code = int(ierr)

    def Get_error_class(self) -> int:
        """Return the number of the error class, such as `MPI.ERR_TRUNCATE`."""
        return self.error_class

    Get_error_code = __int__ = Get_error_class

    def Get_error_string(self) -> str:
        """Return the message."""
        return str(self)

    error_string = property(Get_error_string)

    def __bool__(self) -> bool:
        return self.error_class != CLASSES["SUCCESS"]

    def __eq__(self, other: object) -> bool:
        return int(other) == int(self) if isinstance(other, int | MPIError) else NotImplemented

    def __hash__(self) -> int:
        return hash(int(self))


def error_class(errorcode: int) -> int:
    """Return the class of an error code, which is the code itself."""
    error_string(errorcode)
    return errorcode


def error_string(errorcode: int) -> str:
    """Return the name of an error class. Raise `MPIError` of ERR_ARG for another number."""
    for name, number in CLASSES.items():
        if number == errorcode:
            return f"MPI_{name}"
    raise MPIError(CLASSES["ERR_ARG"], f"error code {errorcode}: expected 0 to {len(CLASSES) - 1}")


class Null:
    """A null object of a kind that is not implemented. It is false, and each call raises an `MPI.Exception`."""

    def __init__(self, name: str, error_class: str) -> None:
        """`error_class` is the name of the class of its errors."""
        self._name = name
        self._class = error_class

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return self._name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MPIError(CLASSES[self._class], f"{name} of {self._name}: expected an object that is not null")


class Told:
    """A block that raises an error of aiodist as an `MPIError`."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, AiodistError) and not isinstance(error, MPIError):
            raise MPIError(CLASSES[_class_of(error)], str(error)) from error


class Outcome(Told):
    """As `Told`, for the end of an operation. A message of another datatype than its receive raises ERR_TYPE."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TypeError):
            raise MPIError(CLASSES["ERR_TYPE"], str(error)) from error
        super().__exit__(kind, error, traceback)


def _class_of(error: AiodistError) -> str:
    if isinstance(error, BackendError) and error.code is None and (error.op or "").startswith("recv "):
        return "ERR_TRUNCATE"  # the message is longer than its buffer, and no library failed
    return next(name for kind, name in _CLASS_OF if isinstance(error, kind))


def telling(cls: C) -> C:
    """Decorate a class so that its public calls raise `MPIError`, also for an invalid rank, root or tag."""
    for name, call in list(vars(cls).items()):
        if isfunction(call) and not name.startswith("_"):
            setattr(cls, name, _telling(call))
    return cls


def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with Told():
                return call(self, *args, **kwargs)
        except ValueError as error:
            if (what := _CLASS_OF_ARGUMENT.get(str(error).partition("=")[0])) is None:
                raise
            raise MPIError(CLASSES[what], str(error)) from error

    return tell
