"""C3: where tensors of a call overlap the result is that of the call on copies, or the call raises; drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from aiodist import BackendUnavailable, Communicator, Handle
from tests.support.calls import drawn
from tests.support.overlapping import Layout, drawn_layout, places_of

Call = Callable[[Communicator, "Given"], Handle[Any]]


class Given(NamedTuple):
    """The arguments of a call: inputs and outputs, of `numel` elements or of `numel` for each rank."""

    ts: list[Tensor]
    outs: list[Tensor]
    impl: Any


# How many blocks of `numel` elements each input and each output has; a str is that of the number of ranks.
CALLS: dict[str, tuple[Call, tuple[Any, ...], tuple[Any, ...]]] = {
    "allreduce": (lambda c, g: c.allreduce(g.ts[0], out=g.outs[0], impl=g.impl), (1,), (1,)),
    "scan": (lambda c, g: c.scan(g.ts[0], out=g.outs[0], impl=g.impl), (1,), (1,)),
    "exscan": (lambda c, g: c.exscan(g.ts[0], out=g.outs[0], impl=g.impl), (1,), (1,)),
    "allreduce list": (lambda c, g: c.allreduce(g.ts, impl=g.impl), (1, 1), ()),
    "scan list": (lambda c, g: c.scan(g.ts, impl=g.impl), (1, 1), ()),
    "allreduce across": (lambda c, g: c.allreduce(g.ts, across=True, impl=g.impl), (1, 1), ()),
    "allreduce across out": (
        lambda c, g: c.allreduce(g.ts, across=True, out=g.outs[0], impl=g.impl),
        (1, 1),
        (1,),
    ),
    "broadcast list": (lambda c, g: c.broadcast(g.ts, impl=g.impl), (1, 1), ()),
    "broadcast across": (lambda c, g: c.broadcast(g.ts, across=True, impl=g.impl), (1, 1), ()),
    "allgather": (lambda c, g: c.allgather(g.ts[0], out=g.outs[0], impl=g.impl), (1,), ("p",)),
    "allgather list": (lambda c, g: c.allgather(g.ts, impl=g.impl), (1, 1), ()),
    "reduce_scatter": (lambda c, g: c.reduce_scatter(g.ts[0], out=g.outs[0], impl=g.impl), ("p",), (1,)),
    "reduce_scatter sizes": (
        lambda c, g: c.reduce_scatter(g.ts[0], sizes=[g.outs[0].numel()] * c.size, out=g.outs[0], impl=g.impl),
        ("p",),
        (1,),
    ),
    "alltoall": (lambda c, g: c.alltoall(g.ts, out=g.outs, impl=g.impl), ("each",), ("each",)),
    "alltoall_single": (lambda c, g: c.alltoall_single(g.ts[0], out=g.outs[0], impl=g.impl), ("p",), ("p",)),
    "alltoall_single sizes": (
        lambda c, g: c.alltoall_single(g.ts[0], sizes=[g.ts[0].numel() // c.size] * c.size, out=g.outs[0], impl=g.impl),
        ("p",),
        ("p",),
    ),
    "sendrecv": (
        lambda c, g: c.sendrecv(g.ts[0], (c.rank + 1) % c.size, (c.rank - 1) % c.size, out=g.outs[0]),
        (1,),
        (1,),
    ),
}
ROOTED: dict[str, tuple[Call, tuple[Any, ...], tuple[Any, ...]]] = {
    "reduce": (lambda c, g: c.reduce(g.ts[0], out=g.outs[0], impl=g.impl), (1,), (1,)),
    "reduce list": (lambda c, g: c.reduce(g.ts, impl=g.impl), (1, 1), ()),
    "reduce across": (lambda c, g: c.reduce(g.ts, across=True, impl=g.impl), (1, 1), ()),
    "gather": (lambda c, g: c.gather(g.ts[0], out=g.outs[0], impl=g.impl), (1,), ("p",)),
    "scatter": (lambda c, g: c.scatter(g.ts if c.rank == 0 else None, out=g.outs[0], impl=g.impl), ("each",), (1,)),
}
"""The kinds in which the tensors of rank 0 alone may be refused, and the other ranks learn of it."""

IMPLS = ["auto", "auto", "auto", "ring", "doubling", "tree", "direct", "bruck", "shm", "mpi", "chain", "halving"]


@dataclass(frozen=True)
class Example(Layout):
    """A layout with the implementation of the call; `arena` is True if the buffer is in the arena."""

    impl: str
    arena: bool


EXAMPLES = st.builds(Example, *drawn_layout(CALLS | ROOTED), st.sampled_from(IMPLS), st.booleans())


def _blocks(spec: Sequence[Any], size: int) -> list[int]:
    if spec == ("each",):
        return [1] * size
    return [size if blocks == "p" else blocks for blocks in spec]


async def _issued(coll: Communicator, call: Call, given: Given, rooted: bool, number: int) -> Handle[Any] | None:
    """Return the handle; None where the call was refused, on all ranks or on the root."""
    if rooted and coll.rank and not await coll.recv_object(0, number):
        return None
    handle = None
    with suppress(ValueError, BackendUnavailable):
        handle = call(coll, given)
    if rooted and coll.rank == 0:
        for rank in range(1, coll.size):
            await coll.send_object(handle is not None, rank, number)
    return handle


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a is b


async def _tried(coll: Communicator, number: int, layout: Example) -> bool:
    """Return whether the call was taken; fail where it came out otherwise than on copies."""
    rooted = layout.call in ROOTED
    call, ins, outs = (ROOTED if rooted else CALLS)[layout.call]
    given, filled = _blocks(ins, coll.size), _blocks(outs, coll.size)
    n_ins = len(given)
    places = places_of(layout, [*given, *filled], coll.rank, one_input=n_ins == 1 and bool(filled))
    total = max(sum(place) for place in places) + 3
    base = coll.arena_empty(total) if layout.arena else torch.empty(total)
    base.copy_(torch.arange(total).remainder(97) * (coll.rank + 1))
    views = [base[start : start + length] for start, length in places]
    apart = [view.clone() for view in views]
    ranged = Given(views[:n_ins], views[n_ins:], layout.impl)
    copied = Given(apart[:n_ins], apart[n_ins:], layout.impl)
    expected_handle = await _issued(coll, call, copied, rooted, 2 * number)
    handle = await _issued(coll, call, ranged, rooted, 2 * number + 1)
    if expected_handle is None:
        assert handle is None, layout  # such as an `impl` that there is not
        return False
    expected = await expected_handle
    if handle is None:
        return False
    result = await handle
    assert _same(result, expected), layout
    for into, want in zip(ranged.outs, copied.outs, strict=True):
        assert torch.equal(into, want), layout
    return True


@pytest.mark.thorough
@pytest.mark.drawn(3)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.ranks(2, backend=("openmpi", "shm"))
async def test_c3_tensors_of_a_call_that_overlap_give_what_copies_give_or_are_refused(coll: Communicator) -> None:
    taken: dict[str, int] = {}
    for number, layout in enumerate(drawn(EXAMPLES, 250)):
        if await _tried(coll, number, layout):
            taken[layout.call] = taken.get(layout.call, 0) + 1
    assert len(taken) > 15, taken  # not all are refused


@pytest.mark.ranks(2)
@pytest.mark.ranks(2, backend=("openmpi", "shm"))
async def test_c3_receives_of_a_list_that_overlap_are_refused(coll: Communicator) -> None:
    t = torch.zeros(10)
    for ts in ([t[:6], t[4:]], [t, t], [t, t[3:4]]):
        with pytest.raises(ValueError, match=r"overlap|recv of a list"):
            coll.recv(ts)
    await coll.allreduce(1)
