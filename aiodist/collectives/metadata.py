"""Packs dtype and shape of a tensor, for ranks that do not know the shape."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES, dtype_code, dtype_name

_MAX_DIMS = 16
_ON_DEVICE = 0x80
_FORMAT = struct.Struct(f"<BB{_MAX_DIMS}q")
META_BYTES = _FORMAT.size


class Meta(NamedTuple):
    """Dtype, shape and place of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool = False
    """True if the tensor was on a CUDA device of the sender."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


def pack_meta(t: Tensor) -> bytes:
    """Return the metadata of `t` in `META_BYTES` bytes. A shape of more than 16 dimensions becomes flat."""
    shape = tuple(t.shape) if t.dim() <= _MAX_DIMS else (t.numel(),)
    dims = len(shape) if t.is_cpu else len(shape) | _ON_DEVICE
    return _FORMAT.pack(dtype_code(t.dtype), dims, *shape, *(0,) * (_MAX_DIMS - len(shape)))


def unpack_meta(data: bytes | bytearray | memoryview, offset: int = 0) -> Meta:
    """Return the header that `pack_meta` packed."""
    code, dims, *shape = _FORMAT.unpack_from(data, offset)
    return Meta(DTYPES[code], tuple(shape[: dims & ~_ON_DEVICE]), bool(dims & _ON_DEVICE))


def as_tensor(data: bytes) -> Tensor:
    """Return a tensor with a copy of the bytes."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def as_bytes(t: Tensor) -> bytes:
    """Return the bytes of a flat uint8 tensor."""
    return t.numpy().tobytes()


def owns_memory(t: Tensor) -> bool:
    """Return True if `t` can grow: `t` is no view and has no borrowed memory."""
    return not t._is_view() and t.untyped_storage().resizable()


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Return True if the bytes of two contiguous tensors overlap."""
    return bool(a.nbytes and b.nbytes) and (
        a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
    )
