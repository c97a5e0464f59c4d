"""Residuals of lossy codes, and differences to the receiver's copy.

Differences are for tensors that one side sends again and again, as a server sends parameters. The sender keeps a copy
of each receiver's tensor. Both sides add the decoded difference to their copies, with the same arithmetic, so the
copies have the same bits. A message has sixteen bytes of its own before the tensor or the code, with a number, which is
one more for each difference. So a lost or repeated message is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.codecs.base import Codec, Kind, check_input, framed, parse, saturated, wide
from aiodist.streams.memory import bytes_of

_NUMBERS = 1 << 32


class ErrorFeedback:
    """Encodes with `codec`, and adds to each tensor the residual of the earlier codes of its key.

    ```python
    feedback = ErrorFeedback(TopK(0.01))
    code = feedback.encode("layer.weight", grad)    # the receiver decodes with TopK(0.01) alone
    ```
    At any time the sum of all decoded tensors plus the residual is the sum of all encoded ones, to rounding. The
    residual takes memory for each key: numel elements in the tensor's dtype, or in float32 for 16-bit floats. Elements
    that decode to NaN or an infinity get a residual of zero: one bad gradient is sent, and forgotten.

    Different keys may be encoded in different threads, one key in one at a time. Source: Seide et al. 2014, "1-bit
    stochastic gradient descent", doi:10.21437/Interspeech.2014-274; why it converges: Karimireddy et al. 2019,
    arXiv:1901.09847.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._residuals: dict[Hashable, Tensor] = {}

    def encode(self, key: Hashable, t: Tensor) -> Tensor:
        """Return the code of `t`, flat floats, plus the residual of `key`, and keep the new residual.

        Raises `ValueError` if `key` had another numel or dtype before, and the errors of the codec; the residual then
        stays. Cost: one encoding, one decoding and four passes.
        """
        t = check_input(t, type(self).__name__)
        total = self._with_residual(key, t)
        code = self.codec.encode(saturated(total, t.dtype))
        decoded = self.codec.decode(code, t.dtype, t.numel())
        self._residuals[key] = (total - decoded).nan_to_num_(0.0, 0.0, 0.0)
        return code

    def residual(self, key: Hashable) -> Tensor | None:
        """Return a copy of the residual of `key`, flat, or None before its first tensor."""
        found = self._residuals.get(key)
        return None if found is None else found.clone()

    def replace(self, key: Hashable, residual: Tensor | None) -> None:
        """Replace the residual of `key` by a copy of this one, or by nothing."""
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


# --- differences ------------------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """The copy of a receiver, in float32 for 16-bit floats, so that small differences add up."""

    value: Tensor
    dtype: torch.dtype
    number: int

    def fits(self, dtype: torch.dtype, numel: int) -> bool:
        return self.dtype is dtype and self.value.numel() == numel

    def after(self, difference: Tensor) -> _Held:
        value = self.value + difference.to(self.value.dtype)  # one rounding, the same wherever it is computed
        return _Held(value, self.dtype, (self.number + 1) % _NUMBERS)

    def message(self, kind: Kind, payload: Tensor) -> Tensor:
        return framed(payload, kind, self.dtype, self.value.numel(), self.number)


class Outgoing:
    """The sender's side: keeps a copy of each receiver's tensors, and encodes the difference to it.

    ```python
    outgoing, incoming = Outgoing(QSGD(bits=8)), Incoming(QSGD(bits=8))    # at the server; at the worker
    code = outgoing.encode(worker, "layer.weight", weight)
    incoming.decode("layer.weight", code, weight.dtype, weight.numel())    # the same bits as `held`
    ```
    The first message of a (receiver, key) is the tensor itself, as is each message with NaN or infinities, or without
    a smaller code. While the tensor stays the same, the receiver's copy converges to it, up to the rounding of one
    addition. Every message must reach the receiver, once and in order. `forget` a receiver that starts again, and the
    next message is whole.

    Memory: for each receiver and key numel elements, in float32 for 16-bit floats. Keys may be encoded in different
    threads, one (receiver, key) in one at a time. Source: differences to the other side's copy, Mishchenko et al. 2019,
    "DIANA", arXiv:1901.09269; compression in both directions, Tang et al. 2019, "DoubleSqueeze", arXiv:1905.05957.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._held: dict[tuple[Hashable, Hashable], _Held] = {}
        self._streams = itertools.count()

    def encode(self, receiver: Hashable, key: Hashable, t: Tensor) -> Tensor:
        """Return the message for `receiver`, flat uint8, that brings its copy of `key` towards `t`, flat floats.

        Raises the errors of the codec; the copies then stay. Cost: one encoding, one decoding and four passes.
        """
        t = check_input(t, type(self).__name__)
        held = self._held.get((receiver, key))
        if held is not None and held.fits(t.dtype, t.numel()):
            # In float32 the difference of two 16-bit floats is right to rounding. The next code has the saturated rest.
            code = self.codec.encode(saturated(t - held.value, t.dtype))
            now = held.after(self.codec.decode(code, t.dtype, t.numel()))
            if code.nbytes < t.nbytes and bool(now.value.sum().isfinite()):
                self._held[receiver, key] = now
                return now.message(Kind.DIFFERENCE, code)
        number = (next(self._streams) << 16) % _NUMBERS
        now = self._held[receiver, key] = _Held(t.to(wide(t.dtype), copy=True), t.dtype, number)
        return now.message(Kind.WHOLE, bytes_of(t.contiguous()))

    def held(self, receiver: Hashable, key: Hashable) -> Tensor | None:
        """Return `receiver`'s decoded tensor of `key`, flat, in new memory, or None before its first message."""
        found = self._held.get((receiver, key))
        return None if found is None else found.value.to(found.dtype, copy=True)

    def forget(self, receiver: Hashable, key: Hashable | None = None) -> None:
        """Drop the copies of `receiver`, or of one key of it: its next message is whole."""
        for known in list(self._held):  # a copy, since other threads may encode
            if known[0] == receiver and key in (None, known[1]):
                self._held.pop(known, None)


class Incoming:
    """The receiver's side of `Outgoing`, with the same codec: keeps a copy of each key.

    Keys of two senders must differ. Memory: for each key numel elements, in float32 for 16-bit floats.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._held: dict[Hashable, _Held] = {}

    def decode(self, key: Hashable, message: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the sender's `held` of `key`, flat, in new memory.

        Raises `ValueError` for a damaged message, for another dtype or numel, and for a difference to another message
        than the last one; the copy then stays. Cost: one decoding and two passes.
        """
        held = self._held.get(key)
        if message.numel() and message.dtype is torch.uint8 and int(message.view(-1)[0]) == Kind.WHOLE:
            number, payload = parse(message, Kind.WHOLE, dtype, numel, numel * dtype.itemsize)
            value = torch.empty(numel, dtype=dtype, device="cpu")
            value.view(torch.uint8).copy_(payload)
            now = _Held(value.to(wide(dtype)), dtype, number)
        else:
            number, payload = parse(message, Kind.DIFFERENCE, dtype, numel)
            expected = None if held is None or not held.fits(dtype, numel) else (held.number + 1) % _NUMBERS
            if held is None or number != expected:
                raise ValueError(f"message {number} for key {key!r}: expected a whole tensor, or message {expected}")
            now = held.after(self.codec.decode(payload, dtype, numel))
        self._held[key] = now
        return now.value.to(dtype, copy=True)

    def forget(self, key: Hashable) -> None:
        """Drop the copy of `key`: the sender must `forget` this receiver too."""
        self._held.pop(key, None)
