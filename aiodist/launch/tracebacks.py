"""Tracebacks of ranks that only heard of another rank's failure: on the console each is one line. No I/O."""

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
"""How the lines end between the tracebacks of two errors, of which one came from the other."""
_MOST_LINES = 2000


@dataclass
class _Open:
    """A traceback that a rank is printing."""

    lines: list[bytes] = field(default_factory=list)
    error: bytes | None = None
    """The line that says what was raised, once it has come."""
    ended: bool = False


class Tracebacks:
    """Hears what ranks write to standard error; says what is to be shown of it.

    The first traceback is shown whole. Of a rank that ends with a `RemoteError`, `PeerLost` or `CommunicatorAborted`
    the launcher waits until another rank's has been shown, at most until that rank is done.
    """

    def __init__(self) -> None:
        self._shown = False
        self._open: dict[int, _Open] = {}

    def interrupted(self) -> None:
        """Show lines alone of ranks that hear of one that the launcher interrupts: the launcher's own line is first."""
        self._shown = True

    def feed(self, rank: int, text: bytes, prefix: bytes) -> bytes:
        """Return what to show of whole lines, each with `prefix`, which `rank` wrote."""
        return b"".join(self._line(rank, line, prefix) for line in text.splitlines(keepends=True))

    def finish(self, rank: int, prefix: bytes) -> bytes:
        """Return what is left to show of `rank`, which is done."""
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
