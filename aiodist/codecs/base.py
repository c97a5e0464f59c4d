"""The protocol of codecs, and the head of a code.

A code is flat uint8 on the CPU: a head with the codec, the dtype and the number of elements, then the codec's payload.
All numbers are little-endian. The receiver first compares the head with the expected values, and checks every length
and index in a code: damaged and forged codes raise `ValueError`.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name

_HEAD = struct.Struct("<BBxxIQ")
HEAD = _HEAD.size
"""Bytes of the head: 16, so that the payload is aligned for every dtype."""

CHUNK = 1 << 16
"""Elements of a chunk, which fits in the cache. In the formats with scales a chunk has one scale."""

STRETCH = 1 << 17
"""Elements of several passes that stay in the cache, if other threads want the interpreter.

It is larger than CHUNK, since each call releases the interpreter and waits for it.
"""

SAFE_POWER = 100
"""Largest exponent of two that is safe in float32."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that codecs of tensors take."""

_DTYPES = (*FLOATS, torch.uint8)


class Codec(Protocol):
    """Makes tensors smaller. Ranks compare its type and its settings: its repr, or without one its public attributes.

    `decode` returns the encoded values only for a lossless codec. `code.nbytes` is the number of sent bytes.
    """

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, one-dimensional: flat uint8 on the CPU, in new memory; `t` stays as it is.

        The receiver also needs dtype and numel. Raises `TypeError` for a dtype that the codec does not take.
        """

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the tensor, flat, on the CPU, in new memory; `code` stays as it is.

        Raises `ValueError` for a code that this codec did not make of `numel` elements of `dtype`.
        """


class ObjectCodec(Protocol):
    """Turns Python objects into bytes, for a parameter server that keeps objects."""

    def encode(self, obj: Any) -> Tensor:
        """Return `obj` as flat uint8 on the CPU, in new memory."""

    def decode(self, code: Tensor) -> Any:
        """Return the object; raise `ValueError` for a code that this codec did not make."""


class Kind(IntEnum):
    """The codec of a code. These numbers are part of the format, and never change."""

    HALF = 1
    TOP_K = 2
    QSGD = 3
    LOSSLESS = 4
    INT8 = 5
    SIGN = 6
    RANDOM_K = 7
    LOW_RANK = 8
    BFLOAT16 = 9
    WHOLE = 64
    DIFFERENCE = 65
    PICKLE = 128
    JSON = 129


def check_input(t: Tensor, who: str) -> Tensor:
    """Return `t` without its history, on the CPU; raise ValueError unless flat, TypeError unless it holds floats."""
    if t.dtype not in FLOATS:
        raise TypeError(f"{who} of {dtype_name(t.dtype)}: {who} takes {', '.join(map(dtype_name, FLOATS))}")
    if t.dim() != 1 or t.layout is not torch.strided:
        seen = f"{str(t.layout).removeprefix('torch.')} tensor of shape {tuple(t.shape)}"
        raise ValueError(f"{who} of a {seen}: expected a strided one with one dimension, as `t.view(-1)` has")
    return t.detach().cpu()


def write_head(code: Tensor, kind: Kind, dtype: torch.dtype, numel: int, param: int) -> None:
    """Write the head of a code; `param` is a number of the codec, of 32 bits."""
    _HEAD.pack_into(code.numpy().data, 0, kind, _DTYPES.index(dtype), param, numel)


def framed(payload: Tensor, kind: Kind, dtype: torch.dtype, numel: int, param: int) -> Tensor:
    """Return the code of a head and `payload`."""
    code = torch.cat([torch.empty(HEAD, dtype=torch.uint8, device="cpu"), payload])
    write_head(code, kind, dtype, numel, param)
    return code


def parse(
    code: Tensor, kind: Kind, dtype: torch.dtype, numel: int | None, nbytes: int | None = None
) -> tuple[int, Tensor]:
    """Return `param` of the head of `code`, and the payload; raise ValueError unless the code is as expected.

    `nbytes` is the length of the payload, or None if the caller checks it. With `numel` None the head has both.
    """
    if code.dtype is not torch.uint8 or code.dim() != 1 or code.device.type != "cpu":
        seen = f"{dtype_name(code.dtype)} of shape {tuple(code.shape)} on {code.device}"
        raise ValueError(f"a code of {kind.name} that is {seen}: expected flat uint8 on the CPU")
    if code.numel() < HEAD:
        raise ValueError(f"a code of {code.numel()} bytes: expected {kind.name}, at least {HEAD} bytes")
    code = code.detach().contiguous()
    made_by, number, param, count = _HEAD.unpack_from(code.numpy().data)
    if numel is None:
        numel = nbytes = count
    if (made_by, number, count) != (kind, _DTYPES.index(dtype) if dtype in _DTYPES else None, numel):
        by = Kind(made_by).name if made_by in set(Kind) else f"codec {made_by}"
        of = dtype_name(_DTYPES[number]) if number < len(_DTYPES) else f"dtype {number}"
        raise ValueError(f"a code by {by} of {count} x {of}: expected {kind.name} of {numel} x {dtype_name(dtype)}")
    if nbytes is not None and code.numel() != HEAD + nbytes:
        expected = f"{HEAD + nbytes} for {numel} x {dtype_name(dtype)}"
        raise ValueError(f"a code by {kind.name} of {code.numel()} bytes: expected {expected}")
    return param, code[HEAD:]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of many tensors of `dtype`: float32 for 16-bit floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def saturated(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `t` in `dtype`; finite elements stay finite."""
    if t.dtype is dtype:
        return t
    largest = torch.finfo(dtype).max
    return torch.where(t.isinf(), t, t.clamp(-largest, largest)).to(dtype)


def exponent_of(t: Tensor, top: int) -> int:
    """Return the e for which t * 2**e has its largest finite element in [2**(top-1), 2**top); 0 where there is none."""
    if not t.numel():
        return 0
    low, high = torch.aminmax(t)
    largest = max(-low.item(), high.item())
    if not math.isfinite(largest):
        largest = t.abs().nan_to_num_(0.0, 0.0, 0.0).amax().item()
    return top - math.frexp(largest)[1] if largest else 0


def times_power(t: Tensor, exponent: int, to: torch.dtype | None = None) -> Tensor:
    """Return t * 2**exponent, in `to`; exact where the result has its bits."""
    t = t.to(to or wide(t.dtype))
    while abs(exponent) > SAFE_POWER:  # subnormal or huge: no power of two of this dtype does it in one step
        step = math.copysign(SAFE_POWER, exponent)
        t = t * 2.0**step
        exponent -= int(step)
    return t * 2.0**exponent if exponent else t


def part(payload: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` elements of `dtype` that begin at byte `start`; a view, or a copy where they are not aligned."""
    found = payload[start : start + count * dtype.itemsize]
    # torch wants the offset in the storage to be a multiple as well, not the address alone.
    aligned = found.data_ptr() % dtype.itemsize == found.storage_offset() % dtype.itemsize == 0
    return (found if aligned else found.clone()).view(dtype)
