"""What can be reduced, here and by gloo, and combining it here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiodist.backends.inplace import FUNCTIONS, flat
from aiodist.types import ReduceOp

__all__ = ["combine", "gloo_reduces", "reducible"]

_GLOO_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_GLOO_FLOATS = frozenset({torch.float32, torch.float64})
_INTEGERS = _GLOO_INTEGERS | {torch.int16}
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_WIRE = _INTEGERS | _GLOO_FLOATS | _COMPLEX
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})


def reducible(kind: torch.dtype, op: ReduceOp | None) -> bool:
    """Return True where `combine` has the dtype and the operator."""
    if op not in FUNCTIONS or kind not in _WIRE:
        return False
    return not ((op in _BITWISE and kind not in _INTEGERS) or (op in _ORDERED and kind in _COMPLEX))


def gloo_reduces(kind: torch.dtype, op: ReduceOp | None) -> bool:
    """Return True where gloo too has what is `reducible`."""
    return kind in _GLOO_INTEGERS or kind in _GLOO_FLOATS or (op is ReduceOp.SUM and kind in _COMPLEX)


def combine(parts: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
    """Combine bytes `parts`, in order, into `out`, which may be one of them."""
    # Through NumPy, for a tensor without a history: `out` may need a gradient or be one of inference mode's.
    target = torch.from_numpy(flat(out).numpy())
    function = FUNCTIONS[op]
    typed = [part.view(out.dtype) for part in parts]
    total = typed[0]
    for i, part in enumerate(typed[1:], 2):
        total = function(total, part, out=target) if i == len(typed) else function(total, part)
