"""Claims on bytes in flight.

At a time, one operation may write a byte, or any number of operations may read the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from aiodist import _core
from aiodist.errors import BufferInFlight

Claimed = tuple[int, int, bool, *tuple[object, ...]]  # address, bytes, True if written, fields of the caller


@runtime_checkable
class Lapsing(Protocol):
    """An owner that the program may have dropped."""

    def lapse(self) -> bool:
        """Release all bytes of the owner and return True if the program has dropped the owner, else return False."""


class ClaimedBytes(_core.Claims):
    """Byte ranges of all operations in flight, over all communicators of the process.

    A written range overlaps no other range, so a comparison with its two neighbours finds a conflict, in O(log n). Read
    ranges may overlap. So a written range is compared with all read ranges that begin at most the length of the longest
    read range earlier. Accesses of user code outside of operations are not detected.
    """

    def acquire(self, start: int, nbytes: int, writes: bool, owner: object) -> None:
        """Claim bytes for `owner`.

        Raise `BufferInFlight` with the name of the holder if another operation has the bytes.
        """
        self.acquire_all([(start, nbytes, writes, None)], owner)

    def _drop_holder(self, claims: Sequence[Claimed], i: int, holder: object, owner: object) -> None:
        """Withdraw the holder of bytes of claim `i` if the program has dropped the holder.

        Called by `acquire_all`. Raise `BufferInFlight` otherwise.
        """
        if isinstance(holder, Lapsing) and holder.lapse():
            return
        if holder is owner:
            raise BufferInFlight(f"{owner} would have the same memory twice: {_twice(claims, i)}")
        verb = "write" if claims[i][2] else "read"
        raise BufferInFlight(f"{owner} would {verb} memory that {holder} still owns: await that first")


def _twice(claims: Sequence[Claimed], i: int) -> str:
    """Return a text on the overlap of claim `i` with an earlier claim of the same call."""
    start, nbytes, writes, *_ = claims[i]
    j = next(j for j, (at, size, *_) in enumerate(claims[:i]) if at < start + nbytes and start < at + size)
    if writes and claims[j][2]:
        return f"t[{i}] overlaps t[{j}], and both are written; expected tensors with memory of their own"
    return "what it reads overlaps what it writes; expected other memory for one of these"


in_flight = ClaimedBytes()
