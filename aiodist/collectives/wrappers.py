"""Programs that wrap a program: work before its first step, or on its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist.backends.base import Primitive
from aiodist.backends.inplace import copy, flat
from aiodist.collectives.arithmetic import combine, from_wire, to_wire, wire_op
from aiodist.collectives.primitives import Primitives
from aiodist.errors import MismatchError
from aiodist.handles.kernel import Program
from aiodist.types import ReduceOp

T = TypeVar("T")
_NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})


async def nothing(result: T) -> T:
    """Return `result`."""
    return result


async def each(
    p: Primitives,
    work: Callable[..., Program[Sequence[Any]]],
    ts: Sequence[T],
    convert: Callable[[Any], Any] | None,
    arguments: Mapping[str, object] = _NO_ARGUMENTS,
    *,
    listed: bool,
) -> Any:  # noqa: ANN401
    """Run `work` on `ts`; return its results, or the result of the only tensor unless `listed`, converted."""
    results = await work(p, ts, **arguments)
    result = results if listed else results[0]
    return result if convert is None else convert(result)


def copy_to_all(ts: Sequence[Tensor]) -> None:
    """Copy the first tensor into the others."""
    for t in ts[1:]:
        copy(flat(t), flat(ts[0]))


async def local_first(p: Primitives, ts: Sequence[Tensor], op: ReduceOp, root: int | None = None) -> Tensor:
    """Combine the list on this rank, then the ranks; the first tensor holds the total, on `root` alone or on all.

    Elsewhere the tensors are only read. Tensors on other devices are copied to the first one's, one after the other.
    """
    mine = root in (None, p.ep.rank)
    total = to_wire(ts[0])
    if not mine and total.data_ptr() == ts[0].data_ptr():
        total = total.clone()
    for t in ts[1:]:
        combine(total, to_wire(t.detach().to(total.device)), wire_op(op))
    kind = "allreduce" if root is None else "reduce"
    await p.run([Primitive(kind, total, op=wire_op(op), root=root or 0)])
    if mine:
        from_wire(total, ts[0], op, p.ep.size * len(ts))
    return ts[0]


async def alike_lists(p: Primitives, ts: Sequence[Tensor], then: Callable[[Primitives], Program[T]]) -> T:
    """Run the program of `then` if all ranks give lists of one length on one device type, else raise MismatchError.

    The messages of the operation cannot show the difference: each rank first adds its own tensors.
    """
    if p.ep.size == 1:
        return await then(p)
    given = torch.tensor([len(ts), not ts[0].is_cpu], device="cpu")
    of_all = torch.empty(2 * p.ep.size, dtype=given.dtype, device="cpu")
    await p.run([Primitive("allgather", given, of_all, counts=[2] * p.ep.size)])
    await p.ep.known()
    lists = [f"{count} on {'cuda' if on_cuda else 'cpu'}" for count, on_cuda in of_all.view(-1, 2).tolist()]
    if other := next((rank for rank, seen in enumerate(lists) if seen != lists[0]), 0):
        sides = f"rank 0: {lists[0]}, rank {other}: {lists[other]}"
        raise MismatchError(f"ranks give different numbers of tensors: {sides}")
    return await then(p.afterwards())
