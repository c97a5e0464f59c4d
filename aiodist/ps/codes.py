"""A client's side of the codecs: what it pushes is encoded, what it pulls is decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.inplace import copy
from aiodist.codecs import ErrorFeedback, Incoming
from aiodist.ps.context import Context
from aiodist.ps.names import NameEntry
from aiodist.ps.operation import PullPart
from aiodist.ps.rules import RULES, Rule

_Part = tuple[int, int]  # key of the tensor, rank of the server


@dataclass(eq=False, slots=True)
class _Code:
    """One that is to come: `raw` once it is there, or why it never will be."""

    into: Tensor
    done: Done
    raw: Tensor | BaseException | None = None


class Codes:
    """What is kept between codes, by tensor and server: residuals of what went up, and what has come down.

    What is encoded for this very rank would gain nothing: it goes as it is. Residuals are for sums alone, which a
    later push completes; what other rules push is encoded by itself, and what replaces the tensor ends its residual.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.feedback = None if context.codec is None else ErrorFeedback(context.codec)
        self._incoming = None if context.pull_codec is None else Incoming(context.pull_codec)
        self._lines: dict[_Part, deque[_Code]] = {}

    # --- what goes up ------------------------------------------------------------------------------------------

    def takes(self, entry: NameEntry) -> bool:
        """Return whether pushes of `entry` are encoded."""
        if self.feedback is None or not entry.dtype.is_floating_point:
            return False
        return any(span.rank != self._context.rank for span in entry.spans)

    def encode(
        self, entry: NameEntry, value: Tensor, rule: Rule, alpha: float
    ) -> tuple[list[tuple[Tensor, bool]], float]:
        """Return for each shard what is pushed, and whether that is a code; and the alpha that is left to the server.

        One call for a tensor at a time, in any thread. Residuals are of `alpha` times the value.
        """
        assert self.feedback is not None
        adds = rule.combines and rule is not RULES["copy"]  # so that a later push can bring what one left out
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
        """Return a copy of all that is left out of a tensor, flat; None for nothing. In any thread."""
        if self.feedback is None:
            return None
        blocks = [(self.feedback.residual((key, rank)), stop - start) for rank, start, stop in spans]
        kind = next((block.dtype for block, _ in blocks if block is not None), None)
        if kind is None:
            return None
        return torch.cat([torch.zeros(numel, dtype=kind) if block is None else block for block, numel in blocks])

    def take(self, key: int, spans: Iterable[tuple[int, int, int]], whole: Tensor) -> None:
        """Have that be left out of a tensor, cut for its servers."""
        if self.feedback is not None:
            for rank, start, stop in spans:
                self.feedback.replace((key, rank), whole[start:stop])

    # --- what comes down -----------------------------------------------------------------------------------------

    def expect(self, pull: PullPart, src: int, done: Done) -> Callable[[Tensor | BaseException], None]:
        """Have `pull` take the next code of `src`; return what to call with it, or with why it never comes.

        Codes are decoded in the order of these calls, whichever is there first; `done` is called when one is.
        """
        assert pull.place is not None
        part = (pull.entry.key, src)
        code = _Code(pull.place(src), done)
        line = self._lines.setdefault(part, deque())
        line.append(code)

        def arrived(raw: Tensor | BaseException) -> None:
            code.raw = raw
            # The service thread takes one after another too; a tensor's size decides for all its codes.
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

    # --- the end -------------------------------------------------------------------------------------------------

    def forget(self, entry: NameEntry) -> None:
        """Drop what is kept of a name that was freed; none of its codes is on its way."""
        for span in entry.spans:
            part = (entry.key, span.rank)
            self._lines.pop(part, None)
            if self.feedback is not None:
                self.feedback.replace(part, None)
            if self._incoming is not None:
                self._incoming.forget(part)
