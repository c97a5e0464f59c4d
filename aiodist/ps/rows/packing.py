"""Rows on their way to a server: how many, their ids, then their values or a code of these; all little-endian.

The ids of a request rise, so that a server sees in one pass that each is there once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiodist.ps.rows.spec import TableSpec

COUNT_BYTES = ID_BYTES = 8


def packed_bytes(ids: Tensor, values: Tensor) -> int:
    """Return how many bytes `pack` fills."""
    return COUNT_BYTES + ids.nbytes + values.nbytes


def pack(ids: Tensor, values: Tensor, packed: Tensor) -> None:
    """Fill flat uint8 `packed`; `values` are the rows of `ids`, or a code of them, flat uint8."""
    start = COUNT_BYTES + ids.nbytes
    packed[:COUNT_BYTES].view(torch.int64)[0] = ids.numel()
    packed[COUNT_BYTES:start].view(torch.int64).copy_(ids)
    packed[start:].view(values.dtype).copy_(values.reshape(-1))


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
