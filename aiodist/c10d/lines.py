"""Tensors in the flat form of communicators, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiodist.backends.arithmetic import SUPPORTED
from aiodist.communicator import Communicator
from aiodist.streams.writes import increment_version
from aiodist.types import Op

Tensors = list[Tensor]
Finish = Callable[[], object] | None

_Op = dist.ReduceOp.RedOpType
_OPS: Mapping[int, Op] = MappingProxyType(
    {
        _Op.SUM.value: "sum",
        _Op.AVG.value: "mean",
        _Op.PRODUCT.value: "prod",
        _Op.MIN.value: "min",
        _Op.MAX.value: "max",
        _Op.BAND.value: "band",
        _Op.BOR.value: "bor",
        _Op.BXOR.value: "bxor",
        _Op.PREMUL_SUM.value: "sum",
    }
)
"""Operators of communicators, by the numbers of torch's operators."""

_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_PREMULTIPLIED: int = _Op.PREMUL_SUM.value


def summand(line: Tensor, opts: Any, *, kept: bool = False) -> tuple[Tensor, Op]:
    """Return flat `line` and the operator for a communicator. True for `kept` leaves `line` unchanged."""
    op = opts.reduceOp
    number = op.op.value
    name = _OPS[number]
    if number == _PREMULTIPLIED:
        factor = op.__getstate__()[1]
        line = line * factor if kept else line.mul_(factor)
    return line, "sum" if name == "mean" and line.dtype in _WHOLE else name


def flat_all(ts: Tensors, opts: Any = None, coll: Communicator | None = None) -> tuple[Tensors, Finish]:
    """Return the written tensors flat, in the order of their dimensions, and a function that completes them, or None.

    The function copies elements to tensors with another order in memory. If `opts` asks for means of integers, it also
    divides the sums, and drops the remainder as NCCL does.
    """
    lines = list(map(flat, ts))
    apart = [(t, line) for t, line in zip(ts, lines, strict=True) if not t.is_contiguous()]
    ranks = 1 if coll is None else coll.size
    whole = [line for line in lines if line.dtype in _WHOLE] if opts is not None else []
    if whole and opts.reduceOp.op != _Op.AVG:
        whole = []
    if not apart and not whole:
        return lines, None

    def finish() -> None:
        for line in whole:
            line.div_(ranks, rounding_mode="trunc")
        for t, line in apart:
            t.detach().copy_(line.view(t.shape))

    return lines, finish


def rooms_of(outputs: list[Tensors]) -> tuple[list[Tensor], Callable[[], object] | None]:
    """Return a flat tensor for each list of outputs, and a function that copies the elements to the lists, or None."""
    whole = [together(ts) for ts in outputs]
    rooms = [
        ts[0].new_empty(sum(t.numel() for t in ts)) if line is None else line
        for ts, line in zip(outputs, whole, strict=True)
    ]
    apart = [(room, ts) for room, ts, line in zip(rooms, outputs, whole, strict=True) if line is None]
    dealt = [ts for ts, line in zip(outputs, whole, strict=True) if line is not None]
    written = [t for ts in dealt for t in ts[1:] if t._base is None or t._base is not ts[0]._base]
    increment_version(written)  # the communicator raises only the version of the first tensor of a list

    def deal() -> None:
        for room, ts in apart:
            for t, part in zip(ts, room.split([t.numel() for t in ts]), strict=True):
                t.detach().copy_(part.view(t.shape))
        increment_version(written)

    return list(map(movable, rooms)), deal if apart or written else None


def check_apart(outputs: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
    """Raise ValueError if two `outputs` of a call overlap, or if an output overlaps an input of another operation.

    The operations of a call run in any order. The communicator checks the output and the input of one operation.
    """
    if len(outputs) < 2:
        return
    every = [(t.data_ptr(), True, i, t) for i, t in enumerate(outputs)]
    every += [(t.data_ptr(), False, i, t) for i, t in enumerate(inputs)]
    kinds = ("input", "output")
    last: list[tuple[int, bool, int, Tensor]] = []  # earlier ones that may overlap later ones
    for one in sorted((each for each in every if each[3].nbytes), key=itemgetter(0, 1, 2)):
        start, writes, i, _ = one
        last = [each for each in last if each[0] + each[3].nbytes > start]
        for _, wrote, j, _ in last:
            if (writes and wrote) or ((writes or wrote) and i != j):
                raise ValueError(
                    f"{kinds[writes]} {i} overlaps {kinds[wrote]} {j}: expected tensors with memory of their own"
                )
        last.append(one)


# --- tensors for a communicator: flat, dense, of a known dtype --------------------------------------------------------


def flat(t: Tensor) -> Tensor:
    """Return the elements of `t` flat, in the order of its dimensions: a copy if memory has another order.

    Raises ValueError if memory has gaps.
    """
    t = t.detach() if t.requires_grad else t
    if t.is_contiguous():
        return t if t.dim() == 1 else t.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(t):
        return t.contiguous().view(-1)
    raise ValueError(f"a tensor of shape {list(t.shape)} has strides {t.stride()}: expected contiguous memory")


def movable(t: Tensor) -> Tensor:
    """Return `t` flat, for calls without arithmetic: as bytes if communicators do not know its dtype."""
    t = flat(t)
    return t if t.dtype in SUPPORTED else t.view(torch.uint8)


def together(ts: Sequence[Tensor]) -> Tensor | None:
    """Return one flat tensor of equal tensors that are in a row in one storage, or None for other tensors."""
    first = ts[0]
    start, nbytes, storage = first.data_ptr(), first.nbytes, first.untyped_storage().data_ptr()
    for i, t in enumerate(ts):
        if t.data_ptr() != start + i * nbytes or t.nbytes != nbytes or t.dtype is not first.dtype:
            return None
        if t.untyped_storage().data_ptr() != storage or not t.is_contiguous():
            return None
    return first.detach().as_strided((len(ts) * first.numel(),), (1,))


def joined(ts: Sequence[Tensor]) -> Tensor:
    """Return the elements of all `ts` in one flat tensor, a copy unless they are in a row in one storage."""
    whole = together(ts)
    return torch.cat([t.detach().reshape(-1) for t in ts]) if whole is None else whole


def blocks_of(t: Tensor, rows: int, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """Return the flat block of `t` for each rank: `sizes` of its `rows`, or even blocks for empty `sizes`."""
    line = movable(t)
    if not sizes:
        return list(line.split(line.numel() // ranks)) if line.numel() else [line] * ranks
    if sum(sizes) != rows:
        raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}: expected the {rows} rows of dim 0")
    row = line.numel() // max(1, rows)
    return list(line.split([size * row for size in sizes]))
