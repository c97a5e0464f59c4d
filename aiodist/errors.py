"""Every exception that aiodist raises on purpose.

AiodistError                         .rank .comm .op
├─ ConfigError (ValueError)          environment, command line or options
├─ BackendUnavailable (ImportError)  names the package to install
├─ CommunicatorError
│  ├─ CommunicatorClosed             the communicator was closed before the call
│  └─ CommunicatorAborted            `abort()`, a mismatch, or the failure of another rank ended it
├─ MismatchError (ValueError)        ranks disagree on kind, dtype, count, op, root or order
│  └─ MismatchAborted                raised after a mismatch; a CommunicatorAborted as well
├─ BufferInFlight (ValueError)       names the operation that still owns the buffer
├─ PeerError
│  ├─ PeerLost (ConnectionError)     a rank died or cannot be reached
│  └─ RemoteError                    a rank raised; carries its traceback
├─ DeadlockError                     .cycle: the ranks that wait for one another
├─ OperationTimeout (TimeoutError)   .late: the late ranks, and where each of them is
├─ BackendError                      .code and the native text, raised `from` the native error
├─ CheckpointDamaged (ValueError)    a file of a checkpoint is missing or was changed
└─ LaunchError                       the job could not be started

If Python has an exception for a mistake of the caller, aiodist raises that one: `TypeError`, `ValueError` and, for a
call from the wrong thread or event loop, `RuntimeError`.

docs/debug.md has a section for each class. The last note of an error names the command that prints the section.
"""

from __future__ import annotations

__all__ = [
    "AiodistError",
    "BackendError",
    "BackendUnavailable",
    "BufferInFlight",
    "CheckpointDamaged",
    "CommunicatorAborted",
    "CommunicatorClosed",
    "CommunicatorError",
    "ConfigError",
    "DeadlockError",
    "LaunchError",
    "MismatchAborted",
    "MismatchError",
    "OperationTimeout",
    "PeerError",
    "PeerLost",
    "RemoteError",
]


class AiodistError(Exception):
    """Base of all errors; `rank`, `comm` and `op` name the place of the error, or are None."""

    def __init__(
        self, message: str, *, rank: int | None = None, comm: str | None = None, op: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.comm = comm
        self.op = op

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("operation", self.op), ("communicator", self.comm), ("rank", self.rank))
            if value is not None
        ]
        # The message names the operation already, so its name alone adds nothing.
        placed = where and (self.comm is not None or self.rank is not None)
        return f"{self.args[0]} [{', '.join(where)}]" if placed else str(self.args[0])

    def add_note(self, note: str, /) -> None:
        """Add a note to the traceback, before the pointer to the section of the class."""
        if not isinstance(note, str):
            raise TypeError(f"note must be a str, not {type(note).__name__!r}")
        self.__dict__.setdefault("_notes", []).append(note)

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # typeshed has a writable one
        # Computed, so that copies, pickles and texts that quote this error never repeat the pointer.
        shown = pointer(self)
        return [*self.__dict__.get("_notes", ()), *([shown] if shown else ())]

    def __reduce__(self) -> tuple[object, ...]:
        # The default loses the keywords of subclasses in a copy or a pickle.
        return _restored, (type(self), self.args, self.__dict__.copy())

    def located(self, *, rank: int, comm: str, op: str | None) -> AiodistError:
        """Fill in the place of this error, keep what is known already, and return the error."""
        self.rank = rank if self.rank is None else self.rank
        self.comm = comm if self.comm is None else self.comm
        self.op = op if self.op is None else self.op
        return self


def _restored(cls: type[AiodistError], args: tuple[object, ...], state: dict[str, object]) -> AiodistError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def pointer(error: BaseException) -> str:
    """Return the text that names the section for an error; empty if its class has none."""
    known = next((kind for kind in type(error).__mro__ if kind.__module__ == __name__), None)
    if known is None or (known is AiodistError and type(error) is not AiodistError):
        return ""  # a class of another module
    return f"see: aiodist explain {known.__name__.lower()}"


class ConfigError(AiodistError, ValueError):
    """A variable of the environment, an argument of the command line or an option is wrong."""


class BackendUnavailable(AiodistError, ImportError):
    """A library or an implementation is missing here; the message names the package to install, or the reason."""


class CommunicatorError(AiodistError):
    """The communicator cannot be used for this call."""


class CommunicatorClosed(CommunicatorError):
    """The communicator was closed before this call."""


class CommunicatorAborted(CommunicatorError):
    """The communicator was aborted; operations in flight on it never complete."""


class MismatchError(AiodistError, ValueError):
    """Ranks called different operations at the same point; the message shows both sides."""


class MismatchAborted(CommunicatorAborted, MismatchError):
    """The communicator was aborted after a mismatch; every later call on it raises this error, in all tasks."""


class BufferInFlight(AiodistError, ValueError):
    """An operation in flight uses the same memory, or with `init(strict=True)` the program has changed its tensor."""


class PeerError(AiodistError):
    """Another rank failed; base of the two classes below."""


class PeerLost(PeerError, ConnectionError):
    """Another rank died or cannot be reached; `lost` is its number."""

    def __init__(self, message: str, *, lost: int, **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.lost = lost


class RemoteError(PeerError):
    """Another rank raised; `raised_by` is its number, `traceback` the text of its traceback."""

    def __init__(self, message: str, *, raised_by: int, traceback: str = "", **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.raised_by = raised_by
        self.traceback = traceback


class DeadlockError(AiodistError):
    """Ranks wait for one another and none can continue; in `cycle` each rank waits for the next one.

    The message shows the operation that each rank waits for, and the stacks of its tasks.
    """

    def __init__(self, message: str, *, cycle: tuple[int, ...] = (), **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.cycle = cycle

    def __str__(self) -> str:
        return str(self.args[0])  # it names the ranks and their operations


class OperationTimeout(AiodistError, TimeoutError):
    """A deadline passed; `late` maps each late rank to the place where it is, if that is known."""

    def __init__(
        self,
        message: str,
        *,
        late: dict[int, str] | None = None,
        rank: int | None = None,
        comm: str | None = None,
        op: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, comm=comm, op=op)
        self.late = late or {}


class BackendError(AiodistError):
    """A native library failed; `code` is its error code, and the message has its text."""

    def __init__(self, message: str, *, code: int | None = None, **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.code = code


class CheckpointDamaged(AiodistError, ValueError):
    """A file of a checkpoint is missing or was changed; the message names the file and the bytes."""


class LaunchError(AiodistError):
    """The job could not be started."""
