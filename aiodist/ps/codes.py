"""A client's side of the codecs: what it pushes is encoded, what it pulls is decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from aiodist.backends.inplace import copy
from aiodist.codecs import ErrorFeedback, Incoming
from aiodist.ps.context import LIGHT_BYTES, Context
from aiodist.ps.names import NameEntry
from aiodist.ps.rules import RULES, Rule

__all__ = ["Codes"]

_Done = Callable[[BaseException | None], None]
_Part = tuple[int, int]  # key of the tensor, rank of the server


class _Code:
    """One that is to come: `raw` once it is there, or why it never will be."""

    __slots__ = ("done", "into", "raw")

    def __init__(self, into: Tensor, done: _Done) -> None:
        self.into = into
        self.done = done
        self.raw: Tensor | BaseException | None = None


class Codes:
    """What is kept between codes, by tensor and server: residuals of what went up, and what has come down.

    What is encoded for this very rank would gain nothing: it goes as it is. Residuals are for sums alone, which a
    later push completes; what other rules push is encoded by itself, and what replaces the tensor ends its residual.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._codec = context.codec
        self._feedback = None if context.codec is None else ErrorFeedback(context.codec)
        self._incoming = None if context.pull_codec is None else Incoming(context.pull_codec)
        self._lines: dict[_Part, deque[_Code]] = {}
        self.kept: set[_Part] = set()
        """What there may be something of."""

    # --- what goes up ------------------------------------------------------------------------------------------

    def takes(self, entry: NameEntry) -> bool:
        """Return whether pushes of `entry` are encoded."""
        if self._codec is None or not entry.dtype.is_floating_point:
            return False
        return any(span.rank != self._context.rank for span in entry.spans)

    def encode(
        self, entry: NameEntry, value: Tensor, rule: Rule, alpha: float
    ) -> tuple[list[tuple[Tensor, bool]], float]:
        """Return for each shard what is pushed, and whether that is a code; and the alpha that is left to the server.

        One call for a tensor at a time, in any thread. Residuals are of `alpha` times the value.
        """
        assert self._codec is not None
        began = perf_counter()
        adds = _adds(rule)
        if adds and alpha != 1:
            value, alpha = value * alpha, 1.0
        found: list[tuple[Tensor, bool]] = []
        for rank, start, stop in entry.spans:
            part, block = (entry.key, rank), value[start:stop]
            if rank == self._context.rank or not rule.takes_value:
                found.append((block, False))
            else:
                found.append((self._code(part, block, adds), True))
            if not adds and _replaces(rule):
                self._forget_residual(part)
        self._context.counts["encode_seconds"] += perf_counter() - began
        return found, alpha

    def _code(self, part: _Part, block: Tensor, adds: bool) -> Tensor:
        assert self._codec is not None
        assert self._feedback is not None
        if not adds:
            return self._codec.encode(block)
        self.kept.add(part)
        return self._feedback.encode(part, block)

    def _forget_residual(self, part: _Part) -> None:
        assert self._feedback is not None
        self._feedback.forget(part)

    def residual(self, entry: NameEntry) -> Tensor:
        """Return what was pushed of `entry` and is not sent yet, flat; 16-bit floats in float32."""
        parts = []
        for rank, start, stop in entry.spans:
            found = None if self._feedback is None else self._feedback.residual((entry.key, rank))
            parts.append(torch.zeros(stop - start, dtype=entry.dtype) if found is None else found)
        return torch.cat(parts)

    # --- what comes down -----------------------------------------------------------------------------------------

    def expect(self, entry: NameEntry, src: int, into: Tensor, done: _Done) -> Callable[[Tensor | BaseException], None]:
        """Have the next code of `src` go `into`; return what to call with it, or with why it never comes.

        Codes are decoded in the order of these calls, whichever is there first; `done` is called when one is.
        """
        part = (entry.key, src)
        line = self._lines.setdefault(part, deque())
        code = _Code(into, done)
        line.append(code)
        self.kept.add(part)
        return partial(self._arrived, part, line, code)

    def _arrived(self, part: _Part, line: deque[_Code], code: _Code, raw: Tensor | BaseException) -> None:
        code.raw = raw
        # The service thread takes one after another too; what a tensor's size decides, it decides for all its codes.
        while line and (raw_of_first := line[0].raw) is not None:
            first = line.popleft()
            if isinstance(raw_of_first, BaseException):
                first.done(raw_of_first)
            elif first.into.nbytes <= LIGHT_BYTES:
                first.done(self._decode(part, first.into, raw_of_first))
            else:
                self._context.service.run(partial(self._decode_there, part, first.into, raw_of_first), first.done)

    def _decode(self, part: _Part, into: Tensor, raw: Tensor) -> BaseException | None:
        try:
            self._decode_there(part, into, raw)
        except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the pull
            return error
        return None

    def _decode_there(self, part: _Part, into: Tensor, raw: Tensor) -> None:
        assert self._incoming is not None
        began = perf_counter()
        copy(into, self._incoming.decode(part, raw, into.dtype, into.numel()))
        self._context.counts["decode_seconds"] += perf_counter() - began

    # --- the end -------------------------------------------------------------------------------------------------

    def forget(self, entry: NameEntry) -> None:
        """Keep nothing more of `entry`, of which nothing is on its way."""
        for span in entry.spans:
            part = (entry.key, span.rank)
            self.kept.discard(part)
            self._lines.pop(part, None)
            if self._feedback is not None:
                self._feedback.forget(part)
            if self._incoming is not None:
                self._incoming.forget(part)


def _adds(rule: Rule) -> bool:
    """Return whether what pushes do is a sum of what is pushed, so that a later one can bring what one left out."""
    return rule.combines and rule is not RULES["copy"]


def _replaces(rule: Rule) -> bool:
    return rule in (RULES["copy"], RULES["zero"])
