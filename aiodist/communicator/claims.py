"""Claims of an operation on the user's memory until its end, with new versions of written tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from aiodist.handles import in_flight
from aiodist.streams.writes import check_writable, increment_version


class Claim(NamedTuple):
    """Bytes that an operation reads or writes until its end."""

    start: int
    nbytes: int
    writes: bool
    memory: UntypedStorage
    """The storage, which lives until the release even if an `out` grows into new memory."""
    tensor: Tensor | None = None
    """The tensor of the caller, whose version counts writes, or None for memory without a version."""

    @property
    def written(self) -> Tensor | None:
        """The tensor, or None for bytes that are read, and for no bytes of a storage with others."""
        return self.tensor if self.writes and (self.nbytes or not self.memory.nbytes()) else None


def reading(*tensors: Tensor) -> list[Claim]:
    """Return the claims of an operation that reads `tensors`."""
    return [Claim(t.data_ptr(), t.nbytes, False, t.untyped_storage(), t) for t in tensors]


def writing(*tensors: Tensor) -> list[Claim]:
    """Return the claims of an operation that writes `tensors`."""
    return [Claim(t.data_ptr(), t.nbytes, True, t.untyped_storage(), t) for t in tensors]


def claims_of(inputs: Sequence[Tensor], *outs: Tensor | None) -> list[Claim]:
    """Return the claims of an operation that reads `inputs` and writes `outs`. Inputs inside an out need no claim."""
    written = writing(*(out for out in outs if out is not None))
    inside = [(w.start, w.start + w.nbytes) for w in written]
    read = [c for c in reading(*inputs) if not any(a <= c.start and c.start + c.nbytes <= b for a, b in inside)]
    return written + read


def claim(claims: Sequence[Claim], owner: object) -> None:
    """Claim all for `owner`, or none.

    Raises RuntimeError if a tensor is not writable (`check_writable`), BufferInFlight for bytes in flight.
    """
    for one in claims:
        if one.writes and one.tensor is not None and one.tensor.requires_grad:
            check_writable(one.tensor, owner)
    in_flight.acquire_all(claims, owner)


def note_write(claims: Sequence[Claim]) -> None:
    """Give written tensors a new version."""
    increment_version([one.written for one in claims if one.written is not None])


def acquire(claims: Sequence[Claim], owner: object) -> None:
    """Claim as `claim` does. Written tensors get a new version."""
    claim(claims, owner)
    note_write(claims)


def release(claims: Sequence[Claim]) -> None:
    """Release the claims of `acquire`. Written tensors get a new version."""
    note_write(claims)
    in_flight.release_all(claims)
