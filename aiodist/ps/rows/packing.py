"""Rows on their way to a server: how many, their ids, then their values or a code of these; all little-endian.

The ids of a request rise, so that a server sees in one pass that each is there once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiodist.ps.rows.spec import TableSpec

COUNT_BYTES = ID_BYTES = 8


def pack(ids: Tensor, values: Tensor) -> Tensor:
    """Return flat uint8 in new memory; `values` are the rows of `ids`, or a code of them, flat uint8."""
    start = COUNT_BYTES + ids.nbytes
    packed = torch.empty(start + values.nbytes, dtype=torch.uint8)
    packed[:COUNT_BYTES].view(torch.int64)[0] = ids.numel()
    packed[COUNT_BYTES:start].view(torch.int64).copy_(ids)
    packed[start:].view(values.dtype).copy_(values.reshape(-1))
    return packed


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
    spec.check_ids(ids)
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("ids that do not rise: expected each once, in order")
    return ids


def rows_in(values: Tensor, count: int, spec: TableSpec) -> Tensor:
    """Return flat uint8 as so many rows; raise ValueError for another length."""
    if values.numel() != count * spec.row_bytes:
        raise ValueError(f"{count} rows in {values.numel()} bytes: expected {count * spec.row_bytes}")
    return values.view(spec.dtype).view(count, spec.dim)
