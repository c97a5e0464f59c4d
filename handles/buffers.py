"""Bytes in flight: one writer, or any number of readers, at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from aiodist import _core
from aiodist.errors import BufferInFlight

Claimed = tuple[int, int, bool, *tuple[object, ...]]  # first byte, number of bytes, True if written, and more


@runtime_checkable
class Lapsing(Protocol):
    """An owner that the program may have dropped."""

    def lapse(self) -> bool:
        """Release all bytes of an owner that the program has dropped. Return True if the owner was dropped."""


class InFlight(_core.Claims):
    """Byte ranges of all operations in flight, over all communicators of the process.

    A written range overlaps no other range, so a look at the two neighbours finds a conflict: O(log n). Read ranges may
    overlap one another, so a look covers all ranges that begin within the length of the longest one. Accesses of user
    code outside of operations are not detected.
    """

    def acquire(self, start: int, nbytes: int, writes: bool, owner: object) -> None:
        """Claim bytes for `owner`.

        Raise `BufferInFlight` with the name of the holder if another operation has the bytes.
        """
        self.acquire_all([(start, nbytes, writes, None)], owner)

    def acquire_all(self, claims: Sequence[Claimed], owner: object) -> None:
        """Claim all ranges. If one range is in use, claim none and raise `BufferInFlight`."""
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
        """Release the ranges that `acquire_all` has claimed."""
        for start, nbytes, writes, *_ in claims:
            self.release(start, nbytes, writes)


def _twice(claims: Sequence[Claimed], i: int) -> str:
    """Return a text that names the earlier claim which overlaps claim `i`, in the caller's terms."""
    start, nbytes, writes, *_ = claims[i]
    j = next(j for j, (at, size, *_) in enumerate(claims[:i]) if at < start + nbytes and start < at + size)
    if writes and claims[j][2]:
        return f"t[{i}] overlaps t[{j}], and both are written; expected tensors with memory of their own"
    return "what it reads overlaps what it writes; expected other memory for one of these"


in_flight = InFlight()
