"""A client's side of the codecs: what it pushes is encoded, what it pulls is decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
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
from aiodist.ps.rows.packing import ID_BYTES
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
                    self.feedback.forget(part)
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
            blocks: dict[Hashable, Tensor] = {(key, rank): whole[start:stop] for rank, start, stop in spans}
            self.feedback.load_state_dict({**self.feedback.state_dict(), **blocks})

    # --- what comes down -----------------------------------------------------------------------------------------

    def expect(self, pull: PullPart, src: int, done: Done) -> Callable[[Tensor | BaseException], None]:
        """Have `pull` take the next code of `src`; return what to call with it, or with why it never comes.

        Codes are decoded in the order of these calls, whichever is there first; `done` is called when one is.
        """
        if pull.entry.table is not None:  # unlike rows each time: no change since the last ones can be told
            return partial(self._rows_arrived, pull, src, done)
        assert pull.place is not None
        part = (pull.entry.key, src)
        line = self._lines.setdefault(part, deque())
        code = _Code(pull.place(src), done)
        line.append(code)
        return partial(self._arrived, part, line, code)

    def _arrived(self, part: _Part, line: deque[_Code], code: _Code, raw: Tensor | BaseException) -> None:
        code.raw = raw
        # The service thread takes one after another too; what a tensor's size decides, it decides for all its codes.
        while line and (raw_of_first := line[0].raw) is not None:
            first = line.popleft()
            if isinstance(raw_of_first, BaseException):
                first.done(raw_of_first)
            else:
                decode = partial(self._decode, part, first.into, raw_of_first)
                self._context.service.do(first.into.nbytes, decode, first.done)

    def _decode(self, part: _Part, into: Tensor, raw: Tensor) -> None:
        assert self._incoming is not None
        with self._context.timed("decode_seconds"):
            copy(into, self._incoming.decode(part, raw, into.dtype, into.numel()))

    def _rows_arrived(self, pull: PullPart, src: int, done: Done, raw: Tensor | BaseException) -> None:
        if isinstance(raw, BaseException):
            done(raw)
            return
        table = pull.entry.table
        assert table is not None
        numel = pull.ids[src].numel() // ID_BYTES * table.dim

        def decode() -> None:
            assert self._context.pull_codec is not None
            with self._context.timed("decode_seconds"):
                pull.fill(src, self._context.pull_codec.decode(raw, table.dtype, numel))

        pull.copying.add(src)
        self._context.service.do(numel * table.dtype.itemsize, decode, done)

    # --- the end -------------------------------------------------------------------------------------------------

    def forget(self, entry: NameEntry) -> None:
        """Drop the residuals and the decoder's state of a name that was freed; none of its codes is on its way."""
        for span in entry.spans:
            part = (entry.key, span.rank)
            self._lines.pop(part, None)
            for kept in (self.feedback, self._incoming):
                if kept is not None:
                    kept.forget(part)
