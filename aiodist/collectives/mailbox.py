"""Point to point: tensors and objects between two ranks, matched by source and tag in issue order.

A message is a header of fixed size, with the data in it when that is short; longer data follows under a tag of
its own. One receive for headers, from any source, is posted while somebody waits; matching is done here. So a
receive that nothing matched can be withdrawn without losing a message, sizes need not be known, and every backend
behaves the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport
from aiodist.backends.inplace import copy
from aiodist.collectives.metadata import META_BYTES, Meta, pack_meta, unpack_meta
from aiodist.errors import BackendError
from aiodist.types import ANY

__all__ = ["Arrived", "Mailbox", "Wanted"]

_HEADER = struct.Struct("<B?iqI")  # kind, inline, source, tag, payload number
_META_AT = _HEADER.size
_DATA_AT = _META_AT + META_BYTES
_FRAME_BYTES = 1024
_INLINE_BYTES = _FRAME_BYTES - _DATA_AT
_HEADER_TAG = 0
_PAYLOAD_TAGS = 1 << 20


@dataclass(frozen=True)
class Arrived:
    """A message that was received."""

    data: Any
    """The tensor, or the object that it was unpacked to."""
    source: int
    tag: int
    nbytes: int


@dataclass(eq=False)
class Wanted:
    """A receive that waits for its message."""

    kind: int
    src: int
    tag: int
    into: Tensor | None
    finish: Callable[[Arrived | None, BaseException | None], None]


@dataclass(eq=False)
class _Unexpected:
    """A message that came before its receive; `data` is there already if it was short or from this rank."""

    kind: int
    source: int
    tag: int
    payload: int
    meta: Meta
    data: Tensor | None = field(repr=False)


class Mailbox:
    """All sends and receives of one communicator; every method runs with the transport lock held."""

    TENSOR, OBJECT = 0, 1

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._frame_bytes = _FRAME_BYTES if not transport.capabilities().short_receives else 0
        self._wanted: list[Wanted] = []
        self._unexpected: list[_Unexpected] = []
        self._listening = False
        self._sent = 0

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The receives that nothing has matched."""
        return tuple(self._wanted)

    def send(self, t: Tensor, dst: int, tag: int, kind: int, done: Done) -> None:
        """Send `t`; `done` when it may be reused, which for this rank itself is at once."""
        flat = t.detach().view(-1).view(torch.uint8)
        if dst == self._transport.rank:
            meta = unpack_meta(pack_meta(t))
            self._arrived(_Unexpected(kind, dst, tag, 0, meta, flat.clone()))
            done(None)
            return
        self._sent = self._sent % _PAYLOAD_TAGS + 1
        inline = flat.nbytes <= _INLINE_BYTES
        head = _HEADER.pack(kind, inline, self._transport.rank, tag, self._sent) + pack_meta(t)
        frame = torch.empty(self._frame_bytes or (_DATA_AT + (flat.nbytes if inline else 0)), dtype=torch.uint8)
        frame[:_DATA_AT] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if inline:
            frame[_DATA_AT : _DATA_AT + flat.nbytes] = flat
            self._transport.isend(frame, dst, _HEADER_TAG, _keeping(frame, done))
        else:
            both = _Both(_keeping(frame, done))
            self._transport.isend(frame, dst, _HEADER_TAG, both)
            self._transport.isend(flat, dst, self._sent, both)

    def receive(self, wanted: Wanted) -> None:
        """Give `wanted` the first message that matches, now or when it comes."""
        for message in self._unexpected:
            if _matches(wanted, message):
                self._unexpected.remove(message)
                self._deliver(message, wanted)
                return
        self._wanted.append(wanted)
        self._listen()

    def withdraw(self, wanted: Wanted) -> bool:
        """Return True when nothing has matched `wanted`, which is forgotten."""
        if wanted not in self._wanted:
            return False
        self._wanted.remove(wanted)
        return True

    def _listen(self) -> None:
        if self._listening or self._transport.size == 1:
            return
        self._listening = True
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._transport.irecv(frame, ANY, _HEADER_TAG, lambda error: self._heard(frame, error))

    def _heard(self, frame: Tensor, error: BaseException | None) -> None:
        self._listening = False
        if error is not None:
            wanted, self._wanted = self._wanted, []
            for receive in wanted:
                receive.finish(None, error)
            return
        data = frame.numpy().data
        kind, inline, source, tag, payload = _HEADER.unpack_from(data)
        meta = unpack_meta(data, _META_AT)
        inlined = frame[_DATA_AT : _DATA_AT + meta.nbytes] if inline else None
        self._arrived(_Unexpected(kind, source, tag, payload, meta, inlined))
        if self._wanted:
            self._listen()

    def _arrived(self, message: _Unexpected) -> None:
        for wanted in self._wanted:
            if _matches(wanted, message):
                self._wanted.remove(wanted)
                self._deliver(message, wanted)
                return
        self._unexpected.append(message)

    def _deliver(self, message: _Unexpected, wanted: Wanted) -> None:
        meta = message.meta
        refusal = _refusal(meta, wanted.into)
        into = wanted.into if refusal is None else None
        if into is None:
            into = torch.empty(meta.shape, dtype=meta.dtype)
        flat = into.detach().view(-1).view(torch.uint8)[: meta.nbytes]

        def finish(error: BaseException | None) -> None:
            if error is not None or refusal is not None:
                wanted.finish(None, error or refusal)
            else:
                wanted.finish(Arrived(into, message.source, message.tag, meta.nbytes), None)

        if message.data is not None:
            copy(flat, message.data)
            finish(None)
        else:
            self._transport.irecv(flat, message.source, message.payload, finish)


class _Both:
    """A completion that two transfers share."""

    def __init__(self, done: Done) -> None:
        self._done = done
        self._left = 2
        self._error: BaseException | None = None

    def __call__(self, error: BaseException | None) -> None:
        self._left -= 1
        self._error = self._error or error
        if self._left == 0:
            self._done(self._error)


def _keeping(frame: Tensor, done: Done) -> Done:
    """Return `done`, holding on to `frame` until it is called."""

    def over(error: BaseException | None, _frame: Tensor = frame) -> None:
        done(error)

    return over


def _matches(wanted: Wanted, message: _Unexpected) -> bool:
    return wanted.kind == message.kind and wanted.src in (ANY, message.source) and wanted.tag in (ANY, message.tag)


def _refusal(meta: Meta, into: Tensor | None) -> BaseException | None:
    """Return why the message does not fit `into`; it is received all the same, and thrown away."""
    if into is None:
        return None
    if into.dtype is not meta.dtype:
        return TypeError(f"a message of {meta} met a receive into {into.dtype}: dtypes must agree")
    if into.numel() < meta.numel:
        return BackendError(f"a message of {meta} ({meta.nbytes} bytes) is longer than {into.nbytes} bytes")
    return None
