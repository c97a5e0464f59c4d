"""A codec that records the residuals of another codec."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aiodist import ParameterServer
from aiodist.codecs import Codec
from aiodist.ps.settings import place

__all__ = ["Remembering"]


@dataclass(frozen=True)
class Remembering:
    """`codec`, with a record of its arguments and of the residual of each code."""

    codec: Codec
    given: list[Tensor] = field(default_factory=list, repr=False, compare=False)
    left: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def encode(self, t: Tensor) -> Tensor:
        code = self.codec.encode(t)
        self.given.append(t)
        self.left.append(t - self.codec.decode(code, t.dtype, t.numel()))
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        return self.codec.decode(code, dtype, numel)

    def last_given(self, ps: ParameterServer, name: str, t: Tensor, split_bytes: int) -> Tensor:
        """Return what was encoded last of the tensor `name`, which is like `t`: zeros for blocks that are not coded."""
        return _last(self.given, ps, name, t, split_bytes)

    def residual(self, ps: ParameterServer, name: str, t: Tensor, split_bytes: int) -> Tensor:
        """Return what the last codes left out of it: no other tensor may have a block of the same length."""
        return _last(self.left, ps, name, t, split_bytes)


def _last(known: list[Tensor], ps: ParameterServer, name: str, t: Tensor, split_bytes: int) -> Tensor:
    later, blocks = list(known), []
    for rank, start, stop in reversed(place(name, t.numel(), t.element_size(), ps.servers, split_bytes)):
        while rank != ps.rank and later and later[-1].numel() != stop - start:
            later.pop()
        blocks.append(later.pop() if rank != ps.rank and later else torch.zeros(stop - start, dtype=t.dtype))
    return torch.cat(blocks[::-1])
