"""The exchange of encoded tensors between ranks, within one process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from aiodist.codecs import Exchange, Gather, GradientCodec, Gradients, NarrowSum, Sum
from aiodist.nn.compression import Swap, narrow_sum


def exchanged(
    codec: GradientCodec, ranks: Sequence[Gradients], kept: Sequence[dict[str, Tensor]]
) -> tuple[list[Tensor], int]:
    """Let the ranks exchange; return what each has in the end, and how many bytes rank 0 has sent."""
    sent: list[list[int]] = [[] for _ in ranks]
    programs = [
        _program(codec.exchange(gradients, mine), rank, len(ranks), sent[rank])
        for rank, (gradients, mine) in enumerate(zip(ranks, kept, strict=True))
    ]
    answers: list[Any] = [None] * len(ranks)
    while True:
        asked: list[Any] = []
        for program, answer in zip(programs, answers, strict=True):
            with suppress(StopIteration):
                asked.append(program.send(answer))
        if not asked:
            return [gradients.out for gradients in ranks], sum(sent[0])
        assert len(asked) == len(ranks)
        assert len({type(request) for request in asked}) == 1
        if isinstance(asked[0], Gather):
            answers = [[request.code for request in asked]] * len(ranks)
        elif isinstance(asked[0], Swap):
            parts = [request.tensor.chunk(len(ranks)) for request in asked]
            answers = [torch.cat([mine[rank] for mine in parts]) for rank in range(len(ranks))]
        else:
            _reduce([cast(Sum, request) for request in asked])
            answers = [None] * len(ranks)


def _program(exchange: Exchange, rank: int, ranks: int, sent: list[int]) -> Generator[Any, Any, None]:
    answer = None
    with suppress(StopIteration):
        while True:
            request = exchange.send(answer)
            sent.append(request[0].nbytes)
            if isinstance(request, NarrowSum):
                answer = yield from narrow_sum(request, rank, ranks)
            else:
                answer = yield request


def _reduce(sums: Sequence[Sum]) -> None:
    assert {each.op for each in sums} == {sums[0].op}
    stacked = torch.stack([each.tensor for each in sums])
    total = stacked.sum(0) if sums[0].op == "sum" else stacked.amax(0)
    for each in sums:
        each.tensor.copy_(total)
