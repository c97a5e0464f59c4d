"""What changed since the last message: for tensors that one side sends again and again, as a server sends parameters.

The sender remembers what each receiver has. Both sides add the decoded difference to what they hold, with the same
arithmetic, so they hold the same bits. What a code leaves out is in the next difference: no residual is needed.

A message has sixteen bytes of its own before the tensor or the code: WHOLE or DIFFERENCE, dtype and numel, the stream
(one begins with each whole tensor), and how many messages went before in it. So one that was lost or came twice is an
error.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.codecs.base import FLOATS, Codec, Head, Kind, check_input, create, is_kind, parse, wide
from aiodist.codecs.feedback import saturated

_TAKES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)
_STREAMS = 1 << 16  # numbers begin anew then
_MESSAGES = 1 << 32


class _Held(NamedTuple):
    """What a receiver has: 16-bit floats in float32, so that small differences add up."""

    value: Tensor
    dtype: torch.dtype
    stream: int
    messages: int = 0

    def after(self, value: Tensor) -> _Held:
        return self._replace(value=value, messages=(self.messages + 1) % _MESSAGES)


class Outgoing:
    """The sender's side: keeps what each receiver has of each key, and encodes the difference to it.

    ```python
    outgoing, incoming = Outgoing(QSGD(bits=8)), Incoming(QSGD(bits=8))    # at the server; at the worker
    code = outgoing.encode(worker, "layer.weight", weight)
    incoming.decode("layer.weight", code, weight.dtype, weight.numel())    # bit for bit what `held` says
    ```
    The first message of a (receiver, key) is the tensor itself; so is each one where NaN or infinities are about, or
    where the code would be no smaller. While the tensor stands still, what the receiver has converges to it, up to the
    rounding of one addition. Every message must reach the receiver, once and in order; after a loss, or
    when the receiver starts again, `forget` it, and the next message is whole.

    Takes integers too, if the codec does (differences wrap), and floats. Memory: for each receiver and key numel
    elements, in float32 for 16-bit floats. Keys may be encoded in different threads, one (receiver, key) in one at a
    time. Source: differences to what the other side has, Mishchenko et al. 2019, "DIANA", arXiv:1901.09269; compressing
    both ways, Tang et al. 2019, "DoubleSqueeze", arXiv:1905.05957.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._held: dict[tuple[Hashable, Hashable], _Held] = {}
        self._streams = itertools.count()

    def encode(self, receiver: Hashable, key: Hashable, t: Tensor) -> Tensor:
        """Return the message for `receiver`, flat uint8, that brings what it has of `key` towards `t`, flat.

        Raises `TypeError` for bool and complex, and what the codec raises; nothing has changed then. A tensor of other
        numel or dtype than before is sent whole. Cost: one encoding, one decoding and four passes.
        """
        t = check_input(t, type(self).__name__, _TAKES)
        held = self._held.get((receiver, key))
        if held is None or held.dtype is not t.dtype or held.value.shape != t.shape:
            return self._whole(receiver, key, t)
        # In float32 the difference of two 16-bit floats is right to rounding; what saturates comes with the next one.
        code = self.codec.encode(saturated(t - held.value, t.dtype))
        value = _moved(held.value, self.codec.decode(code, t.dtype, t.numel()))
        if code.nbytes >= t.nbytes or not _finite(value):
            return self._whole(receiver, key, t)
        held = held.after(value)
        head = Head(Kind.DIFFERENCE, t.dtype, t.numel(), extra=held.stream, param=held.messages)
        message, payload = create(head, code.nbytes)
        payload.copy_(code)
        self._held[receiver, key] = held
        return message

    def held(self, receiver: Hashable, key: Hashable) -> Tensor | None:
        """Return a copy of what `receiver` has of `key`, as it decoded it, flat; None when it has nothing."""
        found = self._held.get((receiver, key))
        return None if found is None else found.value.to(found.dtype, copy=True)

    def forget(self, receiver: Hashable, key: Hashable | None = None) -> None:
        """Drop what is known of `receiver`, or of one key of it: its next message is whole."""
        if key is not None:
            self._held.pop((receiver, key), None)
            return
        for known in list(self._held):  # a copy at once: other threads may encode
            if known[0] == receiver:
                self._held.pop(known, None)

    def _whole(self, receiver: Hashable, key: Hashable, t: Tensor) -> Tensor:
        stream = next(self._streams) % _STREAMS
        message, payload = create(Head(Kind.WHOLE, t.dtype, t.numel(), extra=stream), t.nbytes)
        payload.copy_(t.contiguous().view(torch.uint8))
        self._held[receiver, key] = _Held(t.to(wide(t.dtype), copy=True), t.dtype, stream)
        return message


class Incoming:
    """The receiver's side of `Outgoing`, with the same codec: keeps what it has of each key.

    Keys of two senders must differ. Memory: for each key numel elements, in float32 for 16-bit floats.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._held: dict[Hashable, _Held] = {}

    def decode(self, key: Hashable, message: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return what the sender's `held` says for `key`, flat, in new memory.

        Raises `ValueError` for a damaged message, for one of other dtype or numel, and for a difference that does not
        follow on what was decoded last: one before it was lost, it came twice, or this side began anew. Nothing has
        changed then. Cost: one decoding and two passes.
        """
        held = self._held.get(key)
        if is_kind(message, Kind.WHOLE):
            head, payload = parse(message, Kind.WHOLE, dtype, numel, numel * dtype.itemsize)
            value = torch.empty(numel, dtype=dtype, device="cpu")
            value.view(torch.uint8).copy_(payload)
            now = _Held(value.to(wide(dtype)), dtype, head.extra)
        elif held is None or held.dtype is not dtype or held.value.numel() != numel:
            had = "nothing" if held is None else f"{held.value.numel()} x {dtype_name(held.dtype)}"
            raise ValueError(f"no whole {numel} x {dtype_name(dtype)} for key {key!r}, of which there is {had} here")
        else:
            head, payload = parse(message, Kind.DIFFERENCE, dtype, numel)
            now = held.after(held.value)
            if (head.extra, head.param) != (now.stream, now.messages):
                expected = f"message {now.messages} of stream {now.stream}"
                raise ValueError(f"message {head.param} of stream {head.extra} for key {key!r}: expected {expected}")
            now = now._replace(value=_moved(held.value, self.codec.decode(payload, dtype, numel)))
        self._held[key] = now
        return now.value.to(dtype, copy=True)

    def forget(self, key: Hashable) -> None:
        """Drop what is held of `key`: the sender must `forget` this receiver too."""
        self._held.pop(key, None)


def _moved(held: Tensor, difference: Tensor) -> Tensor:
    """Return what both sides hold next; one rounding for each element, the same wherever it is computed."""
    return held + difference.to(held.dtype)


def _finite(value: Tensor) -> bool:
    # A sum that overflows says False for finite elements, which costs no more than a whole message.
    return not value.dtype.is_floating_point or bool(value.sum().isfinite())
