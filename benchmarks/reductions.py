"""Collectives by size, and a copy of the same bytes in one process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from aiodist.bench import collectives
from aiodist.bench.plan import default_sizes
from aiodist.bench.timing import Contender

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["measure"]


async def measure(session: Session) -> list[Record]:
    """Measure the operation at every size of the plan."""
    op = session.plan.op
    records = []
    for nbytes in session.plan.sizes or default_sizes(session.dtype.itemsize):
        others = []
        if "copy" in session.plan.peers:
            made = collectives.buffers(session.coll, op, nbytes, session.dtype)
            copied = partial(torch.empty_like(made.t).copy_, made.t)
            others.append(Contender("copy", copied, overwrite=collectives.overwriting(made)))
        records += await collectives.measure_size(session, op, nbytes, others=others)
    return records
