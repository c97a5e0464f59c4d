"""The receiver of trace spans; None unless this process records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from time import perf_counter
from typing import Any, Protocol

Ended = Callable[..., object]
"""Called with a handle when that is over, and, where a lane has done it, with the name of the implementation."""

rank_of_task: ContextVar[int | None] = ContextVar("aiodist_rank_of_task", default=None)
"""Which rank the running code belongs to, where several are tasks of one process."""


class Tracer(Protocol):
    """Takes what was going on."""

    def span(self, name: str, began: float, /, *, track: str = "", of_rank: int | None = None, **details: Any) -> None:  # noqa: ANN401
        """It went on from `began`, in seconds of `perf_counter`, until now.

        It belongs to a `track`, that of the calling thread where none is named, of a rank, that of the running code
        unless given. From any thread; takes a microsecond, and raises nothing.
        """


class Tracing:
    """Who is told of spans in this process."""

    __slots__ = ("to",)

    def __init__(self) -> None:
        self.to: Tracer | None = None


tracing = Tracing()


class _Span:
    __slots__ = ("_began", "_details", "_name")

    def __init__(self, name: str, details: dict[str, Any]) -> None:
        self._name = name
        self._details = details

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *raised: object) -> None:
        if (trace := tracing.to) is not None:
            trace.span(self._name, self._began, **self._details)


_NOT_RECORDED: AbstractContextManager[None] = nullcontext()


def span(name: str, /, **details: Any) -> AbstractContextManager[None]:  # noqa: ANN401
    """Return a block that a trace shows as `name`: `with aiodist.span("load", file=path):`.

    It lies on the track of the thread that runs it, with the `details`; `track=` names another one. Costs a tenth of a
    microsecond where nothing is recorded, else two: see `trace`.
    """
    return _NOT_RECORDED if tracing.to is None else _Span(name, details)
