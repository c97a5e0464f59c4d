"""Shortens tracebacks that follow from the failure of another rank to one line. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEADER = b"Traceback (most recent call last):"
_END = b"(AIODIST_TRACEBACK=full shows these frames too)"
"""The last line of a traceback that a rank prints as it ends, if frames in it are folded."""
_FOLDED = "  … ".encode()
_HEARD = re.compile(rb"aiodist\.errors\.(RemoteError|PeerLost|CommunicatorAborted): ")
_FRAME = re.compile(rb'  File "(.*)", line (\d+), in (.*)')
_CHAINED = (b" exception occurred:", b" following exception:")
"""Ends of the lines between the tracebacks of chained errors."""
_MOST_LINES = 2000


@dataclass
class _Open:
    """A traceback that a rank is printing."""

    lines: list[bytes] = field(default_factory=list)
    error: bytes | None = None
    """Line of the exception, or None before it."""
    ended: bool = False


class Tracebacks:
    """Selects the lines to show from the error output of ranks.

    The first traceback is shown completely. A traceback that ends with a `RemoteError`, `PeerLost` or
    `CommunicatorAborted` waits for that of another rank, at most until its own rank has finished.
    """

    def __init__(self) -> None:
        self._shown = False
        self._open: dict[int, _Open] = {}

    def interrupted(self) -> None:
        """Shorten all such tracebacks, since the launcher prints the interrupt itself."""
        self._shown = True

    def feed(self, rank: int, text: bytes, prefix: bytes) -> bytes:
        """Return the lines to show from whole lines of `rank`, each with `prefix`."""
        return b"".join(self._line(rank, line, prefix) for line in text.splitlines(keepends=True))

    def finish(self, rank: int, prefix: bytes) -> bytes:
        """Return the remaining lines to show of a finished `rank`."""
        known = self._open.pop(rank, None)
        if known is None:
            return b""
        if known.ended and self._shown and not _raised_more(known, prefix):
            return _summary(known, prefix)
        self._shown = True
        return b"".join(known.lines)

    def _line(self, rank: int, line: bytes, prefix: bytes) -> bytes:
        said = line.removeprefix(prefix).rstrip(b"\n")
        known = self._open.get(rank)
        if known is None:
            if said != _HEADER:
                return line
            self._open[rank] = _Open([line])
            return b""
        if known.ended:
            return line
        known.lines.append(line)
        if known.error is None:
            if said.startswith(b"  "):
                return b""
            if not _HEARD.match(said) or not any(_FOLDED in each for each in known.lines):
                return self.finish(rank, prefix)  # of the rank's own
            known.error = said
        elif said == _END:
            known.ended = True
        if (known.ended and self._shown) or len(known.lines) > _MOST_LINES:
            return self.finish(rank, prefix)
        return b""


def _raised_more(known: _Open, prefix: bytes) -> bool:
    """Return whether the rank raised an error after the one that it heard of, whose own text may be a chain."""
    assert known.error is not None
    lines = [line.removeprefix(prefix).rstrip(b"\n") for line in known.lines]
    after = lines[lines.index(known.error) + 1 :]
    if not any(line.endswith(_CHAINED) for line in after):
        return False
    frames = [number for number, line in enumerate(after) if line.startswith(b"  ")]
    raised = after[frames[-1] + 1] if frames else b""
    return not raised or raised not in known.error


def _summary(known: _Open, prefix: bytes) -> bytes:
    """Return the error in a line, with the program's innermost line."""
    assert known.error is not None
    before = known.lines.index(prefix + known.error + b"\n")
    frames = [found for line in known.lines[:before] if (found := _FRAME.match(line.removeprefix(prefix)))]
    place = b" (at %s:%s in %s)" % frames[-1].groups() if frames else b""
    return prefix + known.error + place + b"\n"
