"""The first implementation of a session, and records of figures that are no times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodist.bench.session import facts
from benchmarks.figures import Figure

if TYPE_CHECKING:
    from torch import Tensor

    from aiodist.bench.records import Record
    from aiodist.bench.session import Session
    from aiodist.handles import Handle


def name_of(session: Session) -> str:
    """Return the label of the first implementation of the plan, which `allreduce_of` uses."""
    return f"aiodist:{session.impls[0]}"


def allreduce_of(session: Session) -> Callable[[Tensor], Handle[Tensor]]:
    """Return a function that issues allreduces with that implementation."""
    keywords: Any = session.keywords(session.impls[0])
    return partial(session.coll.allreduce, **keywords)


async def valued(session: Session, op: str, impl: str, value: float | None, nbytes: int | None = None) -> list[Record]:
    """Return on rank 0 a record with the largest `value` of all ranks, on others an empty list."""
    everything = await session.coll.gather_object((value, facts()))
    if everything is None:
        return []
    largest, (cores, threads) = max(((v, f) for v, f in everything if v is not None), key=lambda pair: pair[0])
    return [Figure(op, impl, session.coll.size, nbytes, affinity=cores, torch_threads=threads, value=largest)]
