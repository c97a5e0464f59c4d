"""A4: collectives in two levels, over hosts of equal and of different size, exactly as a loop over the ranks says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator, Handle, ReduceOp
from aiodist.collectives.choice.table import COMPARED_BYTES, LIMITS
from aiodist.collectives.endpoint import Traffic
from aiodist.collectives.hierarchical import Hierarchical
from aiodist.communicator import parts_of
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.operation import CommunicatorOperation
from aiodist.testing.seams.algorithms import Endpoint, Implementation, Program
from aiodist.testing.seams.transport import Primitive, Wanted

HOSTS = {
    2: [[[0], [1]]],
    3: [[[0, 2], [1]]],
    4: [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [1], [2]]],
    6: [[[0, 1], [2, 3], [4, 5]], [[0, 3, 5], [1, 2, 4]], [[0], [1, 2, 3, 4, 5]]],
}
every = pytest.mark.ranks(2, 3, 4, 6, backend="local")
SMALL_PIECES = {name: limit.usual for name, limit in LIMITS.items()} | {"hierarchical.piece_bytes": 64}


TOGETHER = SMALL_PIECES | {"hierarchical.pieces": 1}
"""As tensors of a list are reduced."""


def forms(coll: Communicator, limits: dict[str, int] = SMALL_PIECES) -> list[tuple[list[list[int]], Implementation]]:
    return [(hosts, form) for hosts in HOSTS[coll.size] for form in Hierarchical.forms(hosts, coll.rank, None, limits)]


def perform(
    coll: Communicator, make: Callable[[Endpoint], Program[object]], traffic: Traffic | None = None
) -> Handle[Any]:
    ep = Endpoint(parts_of(coll).transport, (1 << 21) + coll.seq, traffic=traffic)
    return parts_of(coll).dispatcher.issue(CommunicatorOperation(), Fingerprint("hierarchical"), lambda _: make(ep))


def brought(size: int, n: int) -> list[Tensor]:
    """Return what each rank brings: whole numbers, so that every order of summation gives the same."""
    made = torch.Generator().manual_seed(n)
    return [torch.randint(-9, 9, (n,), generator=made).double() for _ in range(size)]


@every
async def test_a4_allreduce_in_pieces_on_their_way_at_once(coll: Communicator) -> None:
    for (_, form), n, op in product(forms(coll), (0, 1, 3, 23, 101), (ReduceOp.SUM, ReduceOp.MAX)):
        parts = brought(coll.size, n)
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: form.run(ep, [Primitive("allreduce", t, op=op)]))  # noqa: B023
        stacked = torch.stack(parts)
        assert torch.equal(t, stacked.sum(0) if op is ReduceOp.SUM else stacked.amax(0)), (form.name, n, op)


@every
async def test_a4_broadcast_and_reduce_from_and_to_every_root(coll: Communicator) -> None:
    for (_, form), root, n in product(forms(coll), range(coll.size), (1, 17)):
        parts = brought(coll.size, n)
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: form.run(ep, [Primitive("reduce", t, root=root)]))  # noqa: B023
        expected = torch.stack(parts).sum(0) if coll.rank == root else parts[coll.rank]
        assert torch.equal(t, expected), (form.name, root)
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: form.run(ep, [Primitive("broadcast", t, root=root)]))  # noqa: B023
        assert torch.equal(t, parts[root]), (form.name, root)


@pytest.mark.drawn(3)
@every
@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "reduce"])
async def test_a4_lists_of_small_and_large_tensors(coll: Communicator, kind: str) -> None:
    """The large ones wait until all agree, on those ranks alone that send them to other hosts."""
    sizes = (COMPARED_BYTES // 8 + 1, 5, COMPARED_BYTES // 8, 17)
    for (_, form), root in product(forms(coll, TOGETHER), range(coll.size)):
        parts = [brought(coll.size, n) for n in sizes]
        ts = [each[coll.rank].clone() for each in parts]
        await perform(coll, lambda ep: form.run(ep, [Primitive(kind, t, root=root) for t in ts]), Traffic())  # noqa: B023
        for t, each in zip(ts, parts, strict=True):
            total = torch.stack(each).sum(0)
            expected = {"allreduce": total, "broadcast": each[root]}.get(kind, total if coll.rank == root else None)
            assert expected is None or torch.equal(t, expected), (form.name, root)


@every
async def test_a4_many_in_flight_do_not_mix(coll: Communicator) -> None:
    _, form = forms(coll)[0]
    ts = [torch.full((40,), float(coll.rank + i)) for i in range(20)]
    handles = [perform(coll, lambda ep, t=t: form.run(ep, [Primitive("allreduce", t)])) for t in ts]  # type: ignore[misc]
    for handle in handles:
        await handle
    for i, t in enumerate(ts):
        assert torch.equal(t, torch.full((40,), float(sum(rank + i for rank in range(coll.size)))))


def test_a4_the_form_follows_the_sizes_of_the_hosts() -> None:
    limits = {name: limit.usual for name, limit in LIMITS.items()}
    assert [f.name for f in Hierarchical.forms([[0, 1], [2, 3]], 0, None, limits)] == ["hierarchical", "leaders"]
    assert [f.name for f in Hierarchical.forms([[0, 1], [2]], 0, None, limits)] == ["leaders"]
    lacking = Hierarchical.forms([[0], [1]], 0, None, limits)[0].lacks(Wanted("scan", torch.float32, ReduceOp.SUM, 3))
    assert lacking is not None
    assert "scan" in lacking
