"""The codes of a client: residuals of its pushes, and the last values of its pulls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.arithmetic import copy
from aiodist.backends.base import Done
from aiodist.codecs import ErrorFeedback, Incoming
from aiodist.ps.context import Context
from aiodist.ps.names import NameEntry
from aiodist.ps.rules import RULES, Rule

_Part = tuple[int, int]  # key of the tensor, rank of the server


@dataclass(eq=False, slots=True)
class _Code:
    """A code that a pull waits for."""

    into: Tensor
    done: Done
    raw: Tensor | BaseException | None = None
    """The code, or the error of its transfer, or None before the arrival."""


class Codes:
    """The state of codecs, by tensor and server.

    Values for this rank itself are not encoded. Only pushes that are summed have residuals, since a later push can add
    them. Other rules encode each push by itself. A rule that replaces the tensor drops its residual.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.feedback = None if context.codec is None else ErrorFeedback(context.codec)
        self._incoming = None if context.pull_codec is None else Incoming(context.pull_codec)
        self._lines: dict[_Part, deque[_Code]] = {}

    def takes(self, entry: NameEntry) -> bool:
        """Return True if a push of the tensor is encoded."""
        if self.feedback is None or not entry.dtype.is_floating_point:
            return False
        return any(rank != self._context.rank for rank in entry.servers)

    def encode(
        self, entry: NameEntry, value: Tensor, rule: Rule, alpha: float
    ) -> tuple[list[tuple[Tensor, bool]], float]:
        """Return each server's block, with True for a code, and the alpha that is left for the server.

        One call for a tensor at a time, in any thread. Residuals are of `alpha` times the value.
        """
        assert self.feedback is not None
        adds = rule.combines and rule is not RULES["copy"]
        if adds and alpha != 1:
            value, alpha = value * alpha, 1.0
        found: list[tuple[Tensor, bool]] = []
        with self._context.timed("encode_seconds"):
            for rank, start, stop in entry.spans:
                part, block = (entry.key, rank), value[start:stop]
                coded = rank != self._context.rank and rule.takes_value
                if coded:
                    block = self.feedback.encode(part, block) if adds else self.feedback.codec.encode(block)
                found.append((block, coded))
                if rule in (RULES["copy"], RULES["zero"]):
                    self.feedback.replace(part, None)
        return found, alpha

    def residual(self, key: int, spans: Iterable[tuple[int, int, int]]) -> Tensor | None:
        """Return a copy of a tensor's residual, flat, or None without one (any thread)."""
        if self.feedback is None:
            return None
        blocks = [(self.feedback.residual((key, rank)), stop - start) for rank, start, stop in spans]
        kind = next((block.dtype for block, _ in blocks if block is not None), None)
        if kind is None:
            return None
        return torch.cat(
            [torch.zeros(numel, dtype=kind, device="cpu") if block is None else block for block, numel in blocks]
        )

    def take(self, key: int, spans: Iterable[tuple[int, int, int]], whole: Tensor) -> None:
        """Restore a residual, split by server."""
        if self.feedback is not None:
            for rank, start, stop in spans:
                self.feedback.replace((key, rank), whole[start:stop])

    def expect(self, entry: NameEntry, src: int, into: Tensor, done: Done) -> Callable[[Tensor | BaseException], None]:
        """Decode the next code of server `src` into a tensor. Return the callback for the code, or for its error.

        Codes are decoded in the order of these calls, not of their arrival, and then `done` is called.
        """
        part = (entry.key, src)
        code = _Code(into, done)
        line = self._lines.setdefault(part, deque())
        line.append(code)

        def arrived(raw: Tensor | BaseException) -> None:
            code.raw = raw
            # The service thread keeps the order too: all codes of a tensor have one size.
            while line and (first := line[0]).raw is not None:
                line.popleft()
                if isinstance(first.raw, BaseException):
                    first.done(first.raw)
                else:
                    decode = partial(self._decode, part, first.into, first.raw)
                    self._context.service.do(first.into.nbytes, decode, first.done)

        return arrived

    def _decode(self, part: _Part, into: Tensor, raw: Tensor) -> None:
        assert self._incoming is not None
        with self._context.timed("decode_seconds"):
            copy(into, self._incoming.decode(part, raw, into.dtype, into.numel()))

    def forget(self, entry: NameEntry) -> None:
        """Drop the state of a tensor."""
        for rank in entry.servers:
            part = (entry.key, rank)
            self._lines.pop(part, None)
            if self.feedback is not None:
                self.feedback.replace(part, None)
            if self._incoming is not None:
                self._incoming.forget(part)
