"""Checks, combination and placement of the operands of calls for buffers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aiodist.compat.data import IN_PLACE, Buffer, Op, buffer_of
from aiodist.compat.errors import CLASSES, MPIError
from aiodist.streams.writes import increment_version
from aiodist.types import ReduceOp


def check_blocks(count: int, whole: Buffer, ranks: int) -> None:
    """Raise `MPIError` unless `ranks` blocks of `count` elements fill `whole`."""
    if count * ranks != whole.length:
        said = f"a block of {count} elements, a buffer of {whole.length} for {ranks} ranks"
        kind = "ERR_TRUNCATE" if count * ranks > whole.length else "ERR_COUNT"
        raise MPIError(CLASSES[kind], f"{said}: expected blocks of one length")


def check_alike(mine: Buffer, into: Buffer) -> None:
    """Raise ValueError unless a call reads as many elements as it writes."""
    if mine.length != into.length:
        raise ValueError(f"sendbuf of {mine.length} elements, recvbuf of {into.length}: expected as many in both")


def check_counts(counts: Sequence[int], ranks: int, mine: Buffer, spare: int) -> None:
    """Raise unless each rank has a count, the counts add up to the elements of `mine`, and this rank's block fits."""
    if len(counts) != ranks:
        raise ValueError(f"{len(counts)} counts: expected {ranks}, one for each rank")
    if min(counts) < 0:
        raise MPIError(CLASSES["ERR_COUNT"], f"counts {list(counts)}: expected 0 or more")
    if sum(counts) != mine.length:
        raise ValueError(f"counts {list(counts)} of {mine.length} elements: expected counts that add up to them")
    if spare < 0:
        raise ValueError(f"counts {list(counts)}: expected a recvbuf that has room for this rank's, {-spare} more")


def in_place(spec: object) -> bool:
    """Return True if the input is in the other buffer: IN_PLACE, or None as in mpi4py."""
    return spec is None or spec is IN_PLACE


def operands(sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Buffer]:
    """Return the input and the output of a reduction. Raise TypeError if their elements differ in type."""
    into = buffer_of(recvbuf, written=True)
    mine = into if in_place(sendbuf) else buffer_of(sendbuf)
    if mine.kind != into.kind:
        raise TypeError(f"sendbuf of {mine.kind}, recvbuf of {into.kind}: expected elements of one type")
    return mine, into


def summable(buffer: Buffer, op: Op) -> Tensor | None:
    """Return the numbers for a reduction that communicators have, or None for another reduction."""
    t = buffer.numbers()
    if op.native is None or t is None:
        return None
    orders = op.native in (ReduceOp.MAX, ReduceOp.MIN)
    bits = op.native in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    fits = not (t.is_complex() and orders) and not (bits and (t.is_floating_point() or t.is_complex()))
    return t if fits and (t.dtype is not torch.bool or orders or bits) else None


def joined(parts: Sequence[Tensor], like: Buffer, op: Op) -> np.ndarray[Any, Any]:
    """Return all `parts`, bytes of arrays of the type of `like`, combined by `op` in order."""
    arrays = [part.numpy().view(like.dtype) for part in parts]
    return np.ascontiguousarray(functools.reduce(op.arrays, arrays)).astype(like.dtype, copy=False)


def write_array(into: Tensor, array: np.ndarray[Any, Any]) -> None:
    into[: array.nbytes].numpy()[:] = array.view(np.uint8)
    increment_version([into])


def fill_blocks(blocks: Sequence[Buffer], parts: Sequence[Tensor]) -> None:
    """Copy each rank's part into its block. Raise `MPIError` if a block is too short."""
    for rank, (block, part) in enumerate(zip(blocks, parts, strict=True)):
        if part.numel() > block.octets.numel():
            sent = part.numel() // block.dtype.itemsize
            said = f"rank {rank} sent {sent} elements: expected at most {block.length}"
            raise MPIError(CLASSES["ERR_TRUNCATE"], said)
        block.octets[: part.numel()].copy_(part)
