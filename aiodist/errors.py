"""Every exception that aiodist raises on purpose.

AiodistError                         .rank .comm .op
├─ ConfigError (ValueError)          environment or command line
├─ BackendUnavailable (ImportError)  says what to install
├─ CommunicatorError
│  ├─ CommunicatorClosed             used after `aclose`
│  └─ CommunicatorAborted            given up: by `abort()`, a mismatch, or a failure elsewhere
├─ MismatchError (ValueError)        ranks disagree on kind, dtype, count, op, root or order
│  └─ MismatchAborted                given up for that; a CommunicatorAborted as well
├─ BufferInFlight (ValueError)       names the operation that still owns the buffer
├─ PeerError
│  ├─ PeerLost (ConnectionError)     a rank died or cannot be reached
│  └─ RemoteError                    a rank raised; carries its traceback
├─ DeadlockError                     .cycle: the ranks that wait for one another, and never will go on
├─ OperationTimeout (TimeoutError)   .late: the ranks that are late, and where each of them is
├─ BackendError                      .code and the native text, raised `from` the native error
├─ CheckpointDamaged (ValueError)    a file of a checkpoint is not as it was written
└─ LaunchError
   └─ WorkerFailed                   .rank .exitcode or .signal

Mistakes of the caller that a standard exception names well are `TypeError`, `ValueError` and, for a call
from the wrong thread or loop, `RuntimeError`.
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
    "WorkerFailed",
]


class AiodistError(Exception):
    """The base of all; `rank`, `comm` and `op` say where it happened, None where that has no meaning."""

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
        # An operation without its place says nothing that the message does not.
        told = where and (self.comm is not None or self.rank is not None)
        return f"{self.args[0]} [{', '.join(where)}]" if told else str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        # Subclasses take keywords, which the default would lose in a copy or a pickle.
        return _restored, (type(self), self.args, self.__dict__.copy())

    def located(self, *, rank: int, comm: str, op: str | None) -> AiodistError:
        """Return this error with what it does not know yet filled in: the innermost place wins."""
        self.rank = rank if self.rank is None else self.rank
        self.comm = comm if self.comm is None else self.comm
        self.op = op if self.op is None else self.op
        return self


def _restored(cls: type[AiodistError], args: tuple[object, ...], state: dict[str, object]) -> AiodistError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(AiodistError, ValueError):
    """The environment or the command line makes no sense."""


class BackendUnavailable(AiodistError, ImportError):
    """A library is missing or too old; the message says what to install."""


class CommunicatorError(AiodistError):
    """The communicator cannot be used."""


class CommunicatorClosed(CommunicatorError):
    """The communicator was closed before this call."""


class CommunicatorAborted(CommunicatorError):
    """The communicator was given up; what was in flight on it never completes."""


class MismatchError(AiodistError, ValueError):
    """Ranks issued different operations as the same step; the message shows both sides."""


class MismatchAborted(CommunicatorAborted, MismatchError):
    """The communicator was given up because ranks disagree: what calls raise from then on, in whichever task."""


class BufferInFlight(AiodistError, ValueError):
    """The buffer belongs to an earlier operation that is not over."""


class PeerError(AiodistError):
    """Another rank failed."""


class PeerLost(PeerError, ConnectionError):
    """Another rank died or cannot be reached; `lost` is its rank."""

    def __init__(self, message: str, *, lost: int, **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.lost = lost


class RemoteError(PeerError):
    """Another rank raised; `raised_by` is its rank, `traceback` the text of its traceback."""

    def __init__(self, message: str, *, raised_by: int, traceback: str = "", **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.raised_by = raised_by
        self.traceback = traceback


class DeadlockError(AiodistError):
    """Ranks wait for one another, or for themselves, and none can go on; `cycle` are those, each waiting for the next.

    The message shows what each of them waits in, and where its tasks are suspended.
    """

    def __init__(self, message: str, *, cycle: tuple[int, ...] = (), **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.cycle = cycle

    def __str__(self) -> str:
        return str(self.args[0])  # which names each rank with what it waits in


class OperationTimeout(AiodistError, TimeoutError):
    """A deadline passed; `late` maps each late rank that is known to where it is."""

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
    """A native library failed; `code` is its error code, the native text is in the message."""

    def __init__(self, message: str, *, code: int | None = None, **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.code = code


class CheckpointDamaged(AiodistError, ValueError):
    """A file of a checkpoint is missing, or not as it was written; the message names the file and the place in it."""


class LaunchError(AiodistError):
    """The job could not be started."""


class WorkerFailed(LaunchError):
    """One process of the job failed; exactly one of `exitcode` and `signal` is set."""

    def __init__(self, message: str, *, rank: int, exitcode: int | None = None, signal: str | None = None) -> None:
        super().__init__(message, rank=rank)
        self.exitcode = exitcode
        self.signal = signal
