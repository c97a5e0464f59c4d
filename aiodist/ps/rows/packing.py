"""Rows on their way to a server: how many, their ids, then their values or a code of these; all little-endian.

The ids of a request rise, so that a server sees in one pass that each is there once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiodist.ps.rows.spec import TableSpec

COUNT_BYTES = ID_BYTES = 8


def pack_head(ids: Tensor, packed: Tensor) -> Tensor:
    """Write what stands before the rows of `ids` into flat uint8 `packed`; return the rest of it."""
    start = COUNT_BYTES + ids.nbytes
    packed[:COUNT_BYTES].view(torch.int64)[0] = ids.numel()
    packed[COUNT_BYTES:start].view(torch.int64).copy_(ids)
    return packed[start:]


def unpack_ids(packed: Tensor, spec: TableSpec) -> tuple[Tensor, Tensor]:
    """Return the ids, and the bytes behind them; raise ValueError unless the lengths and the ids can be."""
    if packed.numel() < COUNT_BYTES:
        raise ValueError(f"rows in {packed.numel()} bytes: expected {COUNT_BYTES} or more")
    count = int(packed[:COUNT_BYTES].view(torch.int64)[0])
    if not 0 <= count <= (packed.numel() - COUNT_BYTES) // ID_BYTES:
        raise ValueError(f"{count} rows in {packed.numel()} bytes: expected room for as many ids")
    start = COUNT_BYTES + count * ID_BYTES
    return ids_in(packed[COUNT_BYTES:start], spec), packed[start:]


def ids_in(packed: Tensor, spec: TableSpec) -> Tensor:
    """Return flat uint8 as ids; raise ValueError unless they rise, and all are of the table."""
    if packed.numel() % ID_BYTES:
        raise ValueError(f"ids in {packed.numel()} bytes: expected a multiple of {ID_BYTES}")
    ids = packed.view(torch.int64)
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("ids that do not rise: expected each once, in order")
    spec.check_ids(ids[:: max(1, ids.numel() - 1)])  # the least and the most
    return ids


def rows_in(values: Tensor, count: int, spec: TableSpec) -> Tensor:
    """Return flat uint8 as so many rows; raise ValueError for another length."""
    if values.numel() != count * spec.row_bytes:
        raise ValueError(f"{count} rows in {values.numel()} bytes: expected {count * spec.row_bytes}")
    return values.view(spec.dtype).view(count, spec.dim)


def write_rows(into: Tensor, at: Tensor, rows: Tensor) -> None:
    """Copy rows to `at`: 16 bytes at a time where they have as many, which takes torch half of the time."""
    if all(_is_wide(t) for t in (into, rows)):
        into, rows = into.view(torch.complex128), rows.view(torch.complex128)
    into.index_copy_(0, at, rows)


def _is_wide(t: Tensor) -> bool:
    starts = (t.data_ptr(), t.storage_offset() * t.itemsize, t.shape[1] * t.itemsize)
    return t.is_contiguous() and not any(nbytes % 16 for nbytes in starts)
