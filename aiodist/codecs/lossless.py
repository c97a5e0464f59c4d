"""Fewer bytes where they repeat, bit for bit: the zlib library."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from aiodist.codecs.base import HEAD, Kind, check_input, parse, write_head


@dataclass(frozen=True)
class Lossless:
    """What goes in comes out, bit for bit: the first bytes of all elements, then the second ones, and zlib.

    Takes floats; NaN keeps its payload, zero its sign. `level` is zlib's, 1 to 9. It gains little on dense floats, in
    which all but the exponent is noise: float32 of normal numbers keeps 87 % of its bytes. It is for what repeats, such
    as zeros. Cost: a core encodes some 50 MB/s, and decodes four times as much; the interpreter is free meanwhile.
    `decode` raises `ValueError` for a code of other dtype, numel or length, and for a damaged one: zlib has a checksum.
    """

    level: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 9:
            raise ValueError(f"level={self.level}: expected from 1 to 9")

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat."""
        t = check_input(t, "Lossless")
        planes = t.contiguous().view(torch.uint8).view(-1, t.dtype.itemsize).T.contiguous()
        packed = bytearray(zlib.compress(planes.numpy().data, self.level))
        code = torch.cat([torch.empty(HEAD, dtype=torch.uint8), torch.frombuffer(packed, dtype=torch.uint8)])
        write_head(code, Kind.LOSSLESS, t.dtype, t.numel(), 0)
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit or was damaged."""
        _, payload = parse(code, Kind.LOSSLESS, dtype, numel)
        nbytes, unpack = numel * dtype.itemsize, zlib.decompressobj()
        try:
            data = bytearray(unpack.decompress(payload.numpy().data, nbytes + 1))  # a code may claim to be more
        except zlib.error as error:
            raise ValueError("a code by Lossless that zlib cannot read") from error
        if len(data) != nbytes or not unpack.eof or unpack.unused_data:
            raise ValueError(f"a code by Lossless of {len(data)} bytes or more, or damaged: expected {nbytes}")
        planes = torch.frombuffer(data, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
        return planes.view(dtype.itemsize, numel).T.contiguous().view(-1).view(dtype)
