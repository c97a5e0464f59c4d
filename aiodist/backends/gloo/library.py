"""What is used of torch's gloo, and its errors as ours.

[Note: gloo] What was found out about torch 2.13's gloo, and what follows from it:

- Of a send or receive only `Work.wait()` learns that it is over: `is_completed()` stays False, there is no future,
  and `abort()` ends no wait. A wait that times out closes every connection of its group, so that all other waits
  raise; this is how a group is given up here.
- A receive from any source sees neither dead peers nor closed connections.
- A message longer than its receive ends the *process* (`std::terminate` in gloo's thread). So do collectives whose
  ranks disagree on a size.
- A collective's future calls back from gloo's own thread, before `is_completed()` turns True.
- A thread that returns from gloo while the interpreter ends, ends the process too (SIGABRT): `atexit` closes what is
  open.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor

from aiodist.errors import BackendError, BackendUnavailable

try:
    from torch._C import _distributed_c10d as c10d
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, Work
except ImportError as error:
    raise BackendUnavailable(f"this torch was built without gloo: install one from pytorch.org ({error})") from error

__all__ = [
    "CLOSE_SECONDS",
    "FOREVER",
    "FRAMES",
    "LAST_PAYLOAD",
    "PAYLOADS",
    "PrefixStore",
    "ProcessGroup",
    "Store",
    "Work",
    "abort_group",
    "backend_error",
    "c10d",
    "empty",
    "pieces",
]

FOREVER: Final = timedelta(days=3000)
"""Deadlines are the handles' business."""
CLOSE_SECONDS: Final = 5.0

_PIECE_BYTES = 1 << 30

FRAMES, _NEVER, PAYLOADS, LAST_PAYLOAD = 0, 1, 2, 1 << 30  # gloo's tags


def abort_group(group: ProcessGroup, others: Iterable[int]) -> None:
    """Close the connections of `group`: a wait that times out does that. It blocks for milliseconds."""
    for rank in others:
        with suppress(RuntimeError):
            group.recv([empty(1)], rank, _NEVER).wait(timedelta(milliseconds=1))


def empty(nbytes: int) -> Tensor:
    """Return new memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def pieces(flat: Tensor) -> list[Tensor]:
    """Return `flat` in pieces whose counts every library can hold."""
    most = _PIECE_BYTES // flat.element_size()
    return [flat[start : start + most] for start in range(0, max(1, flat.numel()), most)]


def backend_error(error: Exception, what: str = "") -> BackendError:
    """Return our error with `what` and gloo's text, less torch's own stack, raised from torch's."""
    wrapped = BackendError(f"gloo: {what}{str(error).partition(chr(10) + 'Exception raised from')[0]}")
    wrapped.__cause__ = error.with_traceback(None)  # its frames hold tensors and connections
    return wrapped
