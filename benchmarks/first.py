"""What these benchmarks measure of a session: its first implementation, and figures that are no times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodist.bench.records import Record
from aiodist.bench.session import facts

if TYPE_CHECKING:
    from torch import Tensor

    from aiodist.bench.session import Session
    from aiodist.handles import Handle


def name_of(session: Session) -> str:
    """Return what records call the first implementation of the plan, which is the one that `allreduce_of` uses."""
    return f"aiodist:{session.impls[0]}"


def allreduce_of(session: Session) -> Callable[[Tensor], Handle[Tensor]]:
    """Return what issues allreduces as that implementation."""
    keywords: Any = session.keywords(session.impls[0])
    return partial(session.coll.allreduce, **keywords)


async def valued(session: Session, op: str, impl: str, value: float | None, nbytes: int | None = None) -> list[Record]:
    """Return on rank 0 a record with the largest `value` of all ranks that have one, elsewhere nothing."""
    everything = await session.coll.gather_object((value, facts()))
    if everything is None:
        return []
    largest, (cores, threads) = max(((v, f) for v, f in everything if v is not None), key=lambda pair: pair[0])
    return [Record(op, impl, session.coll.size, nbytes, affinity=cores, torch_threads=threads, value=largest)]
