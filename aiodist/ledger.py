"""The order of a communicator's collectives: recorded always, compared when something looks wrong.

Every rank must issue the same operations in the same order. A record costs a fraction of a microsecond and travels
only when an operation stalls: then it is published on the control channel, and a rank that recorded something else
under the same number answers, which makes both raise. A rolling digest of all records is compared at each barrier.
In checked mode every record is compared before the data moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from aiodist.control import Channel
from aiodist.errors import AiodistError, CommunicatorAborted, MismatchError
from aiodist.handles import Origin

__all__ = ["Fingerprint", "Ledger"]

_KEPT = 4096
_SHOWN = 256  # how many records ranks show each other when their digests differ
_DIGEST_BITS = (1 << 61) - 1


@dataclass(frozen=True)
class Fingerprint:
    """What all ranks must agree on; None where they need not."""

    kind: str
    dtype: str | None = None
    count: int | None = None
    op: str | None = None
    root: int | None = None
    digest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = repr((self.kind, self.dtype, self.count, self.op, self.root)).encode()
        # The built-in hash of text differs between processes, that of numbers does not.
        object.__setattr__(self, "digest", int.from_bytes(text[-512:], "big") % _DIGEST_BITS)

    def __str__(self) -> str:
        what = f"{self.dtype or ''}{'' if self.count is None else f'[{self.count}]'}"
        root = "" if self.root is None else f"root {self.root}"
        return " ".join(part for part in (self.kind, what, self.op, root) if part)


class _Record(NamedTuple):
    seq: int
    what: Fingerprint
    origin: tuple[CodeType, int]
    coroutine: str

    def text(self) -> str:
        task = f" (task {self.coroutine})" if self.coroutine else ""
        return f"{self.what} at {Origin(*self.origin)}{task}"


class Ledger:
    """One rank's record of one communicator. Messages arrive on the control channel's listener thread."""

    def __init__(
        self, name: str, channel: Channel, ranks: Sequence[int], on_error: Callable[[AiodistError], None]
    ) -> None:
        self.seq = 0
        self.digest = 0
        self.late: dict[int, str] = {}
        """The ranks that had not issued what this rank last published, each with where it was."""
        self._topic = f"ledger:{name}"
        self._channel = channel
        self._ranks = list(ranks)
        self._rank = self._ranks.index(channel.rank)
        self._on_error = on_error
        self._kept: list[tuple[Any, ...] | None] = [None] * _KEPT
        self._awaited: dict[int, tuple[int, list[Any]]] = {}
        self._verdicts: dict[int, Callable[[AiodistError | None], None]] = {}
        self._ballots: dict[int, dict[int, list[Any]]] = {}
        channel.subscribe(self._topic, self._heard)

    def close(self) -> None:
        """Listen no more."""
        self._channel.unsubscribe(self._topic)

    def record(self, what: Fingerprint, origin: tuple[CodeType, int], coroutine: str = "") -> None:
        """Take note of the next operation, whose number is `seq`."""
        seq = self.seq
        # A plain tuple: this is on the way of every operation, and hardly ever looked at.
        self._kept[seq % _KEPT] = (seq, what, origin, coroutine)
        self.digest = hash((self.digest, what.digest))
        self.seq = seq + 1
        if self._awaited and (claim := self._awaited.pop(seq, None)) is not None:
            self._compare(claim[0], _Record(seq, what, origin, coroutine), claim[1])

    # --- checked mode ------------------------------------------------------------------------------------

    def check(self, seq: int, verdict: Callable[[AiodistError | None], None]) -> None:
        """Compare operation `seq` on all ranks, then call `verdict(None or the error)` on the listener thread."""
        record = self._find(seq)
        self._verdicts[seq] = verdict
        self._send(0, "check", seq, _packed(record))

    def give_up(self, error: AiodistError) -> None:
        """No verdict comes any more: tell whoever waits for one."""
        while self._verdicts:
            with suppress(KeyError):  # the listener thread has taken the last
                self._verdicts.popitem()[1](error)

    def _vote(self, src: int, seq: int, claim: list[Any]) -> None:
        """On the communicator's rank 0: collect, compare, tell everybody."""
        ballots = self._ballots.setdefault(seq, {})
        ballots[src] = claim
        if len(ballots) < len(self._ranks):
            return
        del self._ballots[seq]
        differ = len({tuple(claim[:6]) for claim in ballots.values()}) > 1
        text = _both_sides(seq, {rank: claim[6] for rank, claim in ballots.items()}) if differ else ""
        for rank in range(len(self._ranks)):
            self._send(rank, "verdict", seq, [text])

    # --- stalls --------------------------------------------------------------------------------------------

    def publish(self, seq: int) -> None:
        """Operation `seq` takes long: ask every other rank for its side."""
        record = self._find(seq)
        if record is not None:
            self._send_others("stalled", seq, _packed(record))

    def publish_history(self) -> None:
        """The digests differ: show all that is kept, so that the first difference is found."""
        for seq in range(max(0, self.seq - _SHOWN), self.seq):
            self.publish(seq)

    def _stalled(self, src: int, seq: int, claim: list[Any]) -> None:
        record = self._find(seq)
        if record is not None:
            self._send(src, "reached", seq, _packed(record))
            self._compare(src, record, claim)
        elif seq >= self.seq:
            self._awaited[seq] = (src, claim)
            last = self._find(self.seq - 1)
            where = f"after {last.text()}" if last else "has issued nothing yet"
            self._send(src, "behind", seq, [where])

    def _compare(self, src: int, mine: _Record, claim: list[Any]) -> None:
        if _packed(mine)[:6] != claim[:6]:
            text = _both_sides(mine.seq, {self._rank: mine.text(), src: claim[6]})
            self._on_error(MismatchError(text))
            self._send_others("mismatch", mine.seq, [text])

    def tell_abort(self, text: str) -> None:
        """Tell every other rank that this one gave the communicator up."""
        self._send_others("abort", self.seq, [text])

    # --- messages ------------------------------------------------------------------------------------------

    def _heard(self, world_rank: int, message: list[Any]) -> None:
        what, seq, payload = message
        src = self._ranks.index(world_rank)
        if what == "check":
            self._vote(src, seq, payload)
        elif what == "verdict":
            if (verdict := self._verdicts.pop(seq, None)) is not None:
                verdict(MismatchError(payload[0]) if payload[0] else None)
        elif what == "stalled":
            self._stalled(src, seq, payload)
        elif what == "behind":
            self.late[src] = payload[0]
        elif what == "mismatch":
            self._on_error(MismatchError(payload[0]))
        elif what == "abort":
            self._on_error(CommunicatorAborted(payload[0]))
        else:
            self.late.pop(src, None)
            if (record := self._find(seq)) is not None:
                self._compare(src, record, payload)

    def _find(self, seq: int) -> _Record | None:
        kept = self._kept[seq % _KEPT] if seq >= 0 else None
        return _Record(*kept) if kept is not None and kept[0] == seq else None

    def _send(self, rank: int, what: str, seq: int, payload: list[Any]) -> None:
        self._channel.send(self._ranks[rank], self._topic, [what, seq, payload])

    def _send_others(self, what: str, seq: int, payload: list[Any]) -> None:
        for rank in range(len(self._ranks)):
            if rank != self._rank:
                self._send(rank, what, seq, payload)


def _packed(record: _Record | None) -> list[Any]:
    """Return a record as it travels: five fields and the coroutine that must agree, then words for people."""
    if record is None:
        raise LookupError("the operation is no longer kept")
    what = record.what
    return [what.kind, what.dtype, what.count, what.op, what.root, record.coroutine, record.text()]


def _both_sides(seq: int, texts: dict[int, str]) -> str:
    sides = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))
    return f"ranks disagree on operation #{seq}: {sides}"
