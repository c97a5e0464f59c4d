"""Programs that wrap a program: work before its first step, or on its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist.backends.base import Primitive
from aiodist.backends.inplace import copy, flat
from aiodist.collectives.arithmetic import combine, from_wire, to_wire, wire_op
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.program import Program, lockstep
from aiodist.errors import MismatchError
from aiodist.types import ReduceOp

T = TypeVar("T")
U = TypeVar("U")


def mapped(program: Program[T], convert: Callable[[T], U]) -> Program[U]:
    """Convert the result."""
    result = yield from program
    return convert(result)


def returning(program: Program[Any], result: T) -> Program[T]:
    """Run `program` for its effect and return `result`."""
    yield from program
    return result


def nothing() -> Program[None]:
    """Do nothing."""
    yield []


def interleaved(by_tensor: list[list[Tensor]]) -> list[Tensor]:
    """Return a list by tensor of lists by rank as one list in the order rank * len + i."""
    return [t for by_rank in zip(*by_tensor, strict=True) for t in by_rank]


def side_by_side(programs: Sequence[Program[T]], ts: Sequence[Tensor]) -> Program[list[T]]:
    """Run the programs of `ts` in lockstep, those of tensors on the CPU before those of tensors on devices.

    They share a tag: messages of the host would overtake those that have to come from a device first.
    """
    results: dict[int, T] = {}
    for on_cpu in (True, False):
        chosen = [i for i, t in enumerate(ts) if t.is_cpu is on_cpu]
        found = yield from lockstep([programs[i] for i in chosen])
        results.update(zip(chosen, found, strict=True))
    return [results[i] for i in range(len(ts))]


def copied_to_all(program: Program[Any], ts: Sequence[Tensor]) -> Program[Sequence[Tensor]]:
    """Copy the first tensor, which `program` fills, into the others."""
    yield from program
    for t in ts[1:]:
        copy(flat(t), flat(ts[0]))
    return ts


def local_first(p: Primitives, ts: Sequence[Tensor], op: ReduceOp, root: int | None = None) -> Program[Tensor]:
    """Combine the list on this rank, then the ranks; the first tensor holds the total, on `root` alone or on all.

    Elsewhere the tensors are only read. What lies on other devices is copied to the first one's, tensor after tensor.
    """
    mine = root in (None, p.ep.rank)
    total = to_wire(ts[0])
    if not mine and total.data_ptr() == ts[0].data_ptr():
        total = total.clone()
    for t in ts[1:]:
        combine(total, to_wire(t.detach().to(total.device)), wire_op(op))
    kind = "allreduce" if root is None else "reduce"
    yield from p.run(Primitive(kind, total, op=wire_op(op), root=root or 0))
    if mine:
        from_wire(total, ts[0], op, p.ep.size * len(ts))
    return ts[0]


def alike_lists(p: Primitives, ts: Sequence[Tensor], then: Callable[[Primitives], Program[T]]) -> Program[T]:
    """Run what `then` makes once all ranks are known to give lists of one length, else raise MismatchError.

    Nothing else would tell: what the ranks send one another is of one size, however many tensors each adds up.
    """
    if p.ep.size == 1:
        return (yield from then(p))
    given = torch.tensor([len(ts), not ts[0].is_cpu], device="cpu")
    of_all = torch.empty(2 * p.ep.size, dtype=given.dtype, device="cpu")
    yield from p.run(Primitive("allgather", given, of_all, counts=[2] * p.ep.size))
    yield from p.ep.known()
    lists = [f"{count} on {'cuda' if on_cuda else 'cpu'}" for count, on_cuda in of_all.view(-1, 2).tolist()]
    if other := next((rank for rank, seen in enumerate(lists) if seen != lists[0]), 0):
        sides = f"rank 0: {lists[0]}, rank {other}: {lists[other]}"
        raise MismatchError(f"ranks give different numbers of tensors: {sides}")
    return (yield from then(p.afterwards()))
