"""Finds tensors that the program changes while an operation uses them.

[Note: versions] Torch counts the writes of a tensor, in one counter for all views of a storage. A write to another
slice is no mistake, so a count is compared only for a tensor that has all of its storage. No other operation can write
there meanwhile, since the bytes are claimed. This operation writes by `t.data`, which has its own counter, and raises
the counter of the program's tensor before the first look and after the second one. The second look precedes the release
of the bytes, and so the end of the handle, after which the program may write. Any thread may look, since the counter is
atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from aiodist.backends.base import dtype_name
from aiodist.communicator.claims import Claim
from aiodist.errors import BufferInFlight
from aiodist.handles import Operation, in_flight, internals

_PLAIN = (Tensor, Parameter)
"""Types without Python code that would run when the version is read."""
_LEAST_BYTES = 9
"""Smallest tensor, in bytes, whose version is compared without `strict`. Smaller ones have one number."""


class Mark(NamedTuple):
    """State of a claimed tensor at the call."""

    claim: Claim
    tensor: Tensor
    version: int | None
    """Number of writes, or None if the tensor shares its storage, see the module."""
    shape: torch.Size
    checksum: int | None
    """Checksum of bytes that are only read, or None without `strict`."""


def marks_of(claims: Sequence[Claim], *, strict: bool) -> list[Mark]:
    """Return the state of the tensors of `claims` to compare at the end. `strict` adds checksums of bytes to read."""
    least = 1 if strict else _LEAST_BYTES
    return [mark for claim in claims if claim.nbytes >= least and (mark := _mark(claim, strict)) is not None]


def _mark(claim: Claim, strict: bool) -> Mark | None:
    tensor = claim.tensor
    if tensor is None or not tensor.is_cpu or type(tensor) not in _PLAIN:
        return None  # code of the program may write to a device as soon as a stream waits for the operation
    whole = claim.memory.nbytes() == claim.nbytes and not tensor.is_inference()
    checksum = in_flight.checksum(claim.start, claim.nbytes) if strict and not claim.writes else None
    if not whole and checksum is None:
        return None
    return Mark(claim, tensor, tensor._version if whole else None, tensor.shape, checksum)


def changed(marks: Sequence[Mark]) -> Tensor | None:
    """Return the first tensor that the program has changed since the call, or None."""
    return next((mark.tensor for mark in marks if _differs(mark)), None)


def _differs(mark: Mark) -> bool:
    claim, tensor = mark.claim, mark.tensor
    if mark.version is not None and tensor._version != mark.version:
        # Calls such as `t.set_(...)` and `t.unsqueeze_(0)` count as writes, but do not change the bytes.
        as_before = tensor.shape == mark.shape and tensor.is_contiguous() and tensor.data_ptr() == claim.start
        if as_before and claim.memory.nbytes() == claim.nbytes:
            return True
    first, size = claim.memory.data_ptr(), claim.memory.nbytes()
    if mark.checksum is None or not first <= claim.start <= claim.start + claim.nbytes <= first + size:
        return False  # the program may have shrunk the storage
    return in_flight.checksum(claim.start, claim.nbytes) != mark.checksum


def report(operation: Operation[Any], tensor: Tensor, then: Callable[[Any], Any] | None, result: object) -> object:
    """Warn that the program has changed `tensor`, then convert the result of `operation` by `then`.

    Raises BufferInFlight in place of the warning if the world is strict.
    """
    handle = operation.handle
    seen = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    said = f"used a tensor, {seen}, that the program changed before the end: await the handle first, or pass t.clone()"
    if internals.is_strict(handle):
        raise BufferInFlight(f"{handle} {said}")
    internals.warn(handle, said)
    return result if then is None else then(result)
