"""What a code left out is sent with the next one."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.codecs.base import Codec, check_input, wide


class ErrorFeedback:
    """Encodes with `codec`, and adds to each tensor what the codes of its key before it left out.

    ```python
    feedback = ErrorFeedback(TopK(0.01))
    code = feedback.encode("layer.weight", grad)    # the receiver decodes with TopK(0.01) alone
    ```
    At any time the sum of what was decoded plus the residual is the sum of what was put in, to rounding. The residual
    has the tensor's numel, in its dtype but in float32 for 16-bit floats: that much memory for each key. Where the
    code decodes to NaN or an infinity the residual becomes zero: one bad gradient is sent, and forgotten.

    Different keys may be encoded in different threads, one key in one at a time. Source: Seide et al. 2014, "1-bit
    stochastic gradient descent", doi:10.21437/Interspeech.2014-274; why it converges: Karimireddy et al. 2019,
    arXiv:1901.09847.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._residuals: dict[Hashable, Tensor] = {}

    def encode(self, key: Hashable, t: Tensor) -> Tensor:
        """Return the code of `t`, flat floats, plus the residual of `key`, and keep the new residual.

        Raises `ValueError` when `key` had another numel or dtype before, and what the codec raises; nothing has
        changed then. Cost: one encoding, one decoding and four passes.
        """
        t = check_input(t, type(self).__name__)
        total = self._with_residual(key, t)
        code = self.codec.encode(saturated(total, t.dtype))
        decoded = self.codec.decode(code, t.dtype, t.numel())
        self._residuals[key] = (total - decoded).nan_to_num_(0.0, 0.0, 0.0)
        return code

    def residual(self, key: Hashable) -> Tensor | None:
        """Return a copy of what is still to be sent for `key`, flat; None before its first tensor."""
        found = self._residuals.get(key)
        return None if found is None else found.clone()

    def replace(self, key: Hashable, residual: Tensor | None) -> None:
        """Have a copy of this be what is still to be sent for `key`; None is nothing."""
        if residual is None:
            self._residuals.pop(key, None)
        else:
            self._residuals[key] = residual.detach().clone()

    def _with_residual(self, key: Hashable, t: Tensor) -> Tensor:
        kept = wide(t.dtype)
        residual = self._residuals.get(key)
        if residual is None:
            return t.to(kept)
        if residual.shape != t.shape or residual.dtype is not kept:
            seen = f"{t.numel()} x {dtype_name(t.dtype)}"
            raise ValueError(f"{seen} for key {key!r}: expected {residual.numel()} x {dtype_name(residual.dtype)}")
        return t + residual


def saturated(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `t` in `dtype`; what is finite stays finite."""
    if t.dtype is dtype:
        return t
    largest = torch.finfo(dtype).max
    return torch.where(t.isinf(), t, t.clamp(-largest, largest)).to(dtype)
