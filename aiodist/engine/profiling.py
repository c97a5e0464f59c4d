"""Some steps under torch's profiler: a trace of each rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Profiling:
    """Profiles steps `first` to `last` of this rank, both included; `begin` and `end` belong to the compute thread.

    The trace has the operators of that thread and, with CUDA, the kernels. It is written in Chrome's format, for
    https://ui.perfetto.dev, to `folder/rank<rank>-steps<first>-<last>.json`.
    """

    def __init__(self, steps: tuple[int, int], folder: Path, rank: int) -> None:
        self.first, self.last = steps
        self.file = folder / f"rank{rank}-steps{self.first}-{self.last}.json"
        self._profile: profile | None = None

    @property
    def under_way(self) -> bool:
        """It has begun, and has not ended."""
        return self._profile is not None

    def begin(self) -> None:
        """The first of the steps begins."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        begun = profile(activities=activities)
        begun.start()
        self._profile = begun

    def end(self) -> None:
        """The last of the steps is over, or training is: write what there is."""
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(self.file))


def checked_steps(steps: tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last step that are to be profiled; raise TypeError or ValueError."""
    if not isinstance(steps, tuple) or [type(step) for step in steps] != [int, int]:
        raise TypeError(f"profile={steps!r}: expected the first and the last step, such as (3, 8)")
    first, last = steps
    if not 1 <= first <= last:
        raise ValueError(f"profile={steps!r}: expected steps from 1 on, the first not after the last")
    return steps
