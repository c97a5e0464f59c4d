"""What one step does to a shard: its pushes summed by weight and applied once, or applied one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.ps.rules import Rule

__all__ = ["Piece", "apply_step"]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Piece(NamedTuple):
    """One push of a step."""

    rule: Rule
    value: Tensor
    """Flat, of the shard's dtype; it is only read."""
    alpha: float
    weight: float


def apply_step(shard: Tensor, pieces: Sequence[Piece], state_of: Callable[[Rule], Any]) -> None:
    """Change `shard` in place by all `pieces`, which stand in the order of their workers.

    Pushes of one rule that combines are summed first, 16-bit floats in float32. A single push of weight 1 costs no
    memory.
    """
    first = pieces[0]
    if len(pieces) == 1 and first.weight == 1:
        first.rule.apply(shard, first.value, first.alpha, state_of(first.rule))
        return
    if first.rule.combines and all(piece.rule is first.rule for piece in pieces):
        alphas = {piece.alpha for piece in pieces}
        if len(alphas) == 1:
            total, alpha = _sum(pieces, scaled=False), first.alpha
        else:
            total, alpha = _sum(pieces, scaled=True), 1.0
        first.rule.apply(shard, total, alpha, state_of(first.rule))
        return
    for piece in pieces:
        value = piece.value
        if piece.rule.combines and piece.weight != 1:
            value = value * piece.weight
        piece.rule.apply(shard, value, piece.alpha, state_of(piece.rule))


def _sum(pieces: Sequence[Piece], *, scaled: bool) -> Tensor:
    """Return the weighted sum in new memory; `scaled`: each times its alpha too."""
    kind = pieces[0].value.dtype
    total = torch.zeros(pieces[0].value.numel(), dtype=_WIDE.get(kind, kind))
    for piece in pieces:
        factor = piece.weight * (piece.alpha if scaled else 1.0)
        total.add_(piece.value, alpha=int(factor) if factor == int(factor) else factor)
    return total.to(kind)
