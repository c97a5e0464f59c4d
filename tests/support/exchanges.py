"""What codecs exchange in a collective, done within one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from aiodist.codecs import Gather, GradientCodec, Gradients, Sum


def exchanged(
    codec: GradientCodec, ranks: Sequence[Gradients], kept: Sequence[dict[str, Tensor]]
) -> tuple[list[Tensor], int]:
    """Let the ranks exchange; return what each has in the end, and how many bytes rank 0 has sent."""
    programs = [codec.exchange(gradients, mine) for gradients, mine in zip(ranks, kept, strict=True)]
    codes: list[Tensor] | None = None
    nbytes = 0
    while True:
        asked: list[Sum | Gather] = []
        for program in programs:
            try:
                asked.append(program.send(codes))
            except StopIteration:
                continue
        if not asked:
            return [gradients.out for gradients in ranks], nbytes
        assert len(asked) == len(ranks)
        if isinstance(asked[0], Gather):
            codes = [cast(Gather, request).code for request in asked]
            nbytes += codes[0].nbytes
        else:
            codes = None
            nbytes += asked[0].tensor.nbytes
            _reduce([cast(Sum, request) for request in asked])


def _reduce(sums: Sequence[Sum]) -> None:
    """Reduce them as collectives do: 16-bit floats are summed in float32."""
    assert {each.op for each in sums} == {sums[0].op}
    stacked = torch.stack([each.tensor for each in sums])
    wide = stacked.float() if stacked.dtype in (torch.float16, torch.bfloat16) else stacked
    total = wide.sum(0) if sums[0].op == "sum" else wide.amax(0)
    for each in sums:
        each.tensor.copy_(total)
