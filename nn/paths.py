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


class Arrival:
    """Waits for a handle on behalf of a pass."""

    __slots__ = ("_late", "_on_devices", "_progress", "_then")

    def __init__(
        self,
        paths: Paths,
        late: Callable[[OperationTimeout], None],
        then: Callable[[BaseException | None], None],
    ) -> None:
        self._progress = paths.progress
        self._on_devices = bool(paths.devices)
        self._late = late
        self._then = then

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        """See `Waiter`."""
        if late is not None and not handle.done():  # it goes on, and so do its buffers
            self._late(late)
            handle.add_waiter(self)
        elif asyncio.current_task() is None and not self._on_devices:
            self._then(handle.outcome_error())
        else:
            # Some task's await has polled it to its end. What is issued now is not that task's, which differs by rank.
            # The thread that polls devices holds the transport lock.
            self._progress.post(partial(self._then, handle.outcome_error()))
