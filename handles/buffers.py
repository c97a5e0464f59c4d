"""Bytes in flight: one writer, or any number of readers, at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from aiodist import _core
from aiodist.errors import BufferInFlight

Claimed = tuple[int, int, bool, *tuple[object, ...]]  # first byte, how many, True if they are written, and more


@runtime_checkable
class Lapsing(Protocol):
    """An owner that the program may have dropped."""

    def lapse(self) -> bool:
        """Give back all its bytes where that is so; return whether it did."""


class InFlight(_core.Claims):
    """The byte ranges of all operations in flight, of all communicators of the process.

    Ranges that are written overlap nothing, so a look at the two neighbours finds a clash: O(log n). Ranges that
    are read may overlap one another; only those that begin within the longest one's length can clash.
    User code that touches a tensor by itself cannot be seen.
    """

    def acquire(self, start: int, nbytes: int, writes: bool, owner: object) -> None:
        """Claim bytes for `owner`; raise `BufferInFlight`, naming who has them, when that cannot be."""
        self.acquire_all([(start, nbytes, writes, None)], owner)

    def acquire_all(self, claims: Sequence[Claimed], owner: object) -> None:
        """Claim all of them, or none where one cannot be had."""
        for i, (start, nbytes, writes, *_) in enumerate(claims):
            while (holder := self.claim(start, nbytes, writes, owner)) is not None:
                if isinstance(holder, Lapsing) and holder.lapse():
                    continue
                self.release_all(claims[:i])
                if holder is owner:
                    raise BufferInFlight(f"{owner} would have the same memory twice: {_twice(claims, i)}")
                verb = "write" if writes else "read"
                raise BufferInFlight(f"{owner} would {verb} memory that {holder} still owns: await that first")

    def release_all(self, claims: Sequence[Claimed]) -> None:
        """Give back what `acquire_all` claimed."""
        for start, nbytes, writes, *_ in claims:
            self.release(start, nbytes, writes)


def _twice(claims: Sequence[Claimed], i: int) -> str:
    """Return which claim overlaps claim `i`, which comes later, as words of the caller's."""
    start, nbytes, writes, *_ = claims[i]
    j = next(j for j, (at, size, *_) in enumerate(claims[:i]) if at < start + nbytes and start < at + size)
    if writes and claims[j][2]:
        return f"t[{i}] overlaps t[{j}], and both are written; expected tensors with memory of their own"
    return "what it reads overlaps what it writes; expected other memory for one of these"


in_flight = InFlight()
