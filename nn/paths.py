"""What the passes of one net share, and how they wait for what they send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from aiodist.communicator import Communicator
from aiodist.errors import OperationTimeout
from aiodist.handles import Handle, Lane, Progress
from aiodist.handles.combinators import Ending
from aiodist.nn.comm_hooks import CommHook
from aiodist.nn.devices import Devices

WINDOW_BYTES = 8 << 20
"""What may be in flight where the order may still change, on a slow network; two buckets may, however large."""


@dataclass(frozen=True)
class Paths:
    """What the passes of one net share: where they send, and who is asked for leave."""

    data: Communicator
    status: Communicator
    progress: Progress
    lane: Lane
    devices: Devices
    op: Literal["mean", "sum"]
    hook: CommHook
    """How a bucket is reduced."""
    urgent: bool
    """What is left when backward ends goes in the order of the next forward."""
    window: int = WINDOW_BYTES
    """Then, how many bytes may be in flight. A rank's own affair."""


def arrival(
    paths: Paths, late: Callable[[OperationTimeout], None], then: Callable[[BaseException | None], None]
) -> Ending:
    """Return what waits for a handle on behalf of a pass."""

    def over(handle: Handle[Any]) -> None:
        error = handle.outcome_error()
        if asyncio.current_task() is None and not paths.devices:
            then(error)
        else:
            # Some task's await has polled it to its end. What is issued now is not that task's, which differs by rank.
            # The thread that polls devices holds the transport lock.
            paths.progress.post(partial(then, error))

    return Ending(over, lambda _, error: late(error))
