"""The progress bar, or a line for each epoch, and traces."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.profiler import ProfilerActivity, profile

from aiodist.engine.state import State

_EVERY_SECONDS = 0.2


class Display:
    """Shows one training. The loop calls the methods as hooks. Drawing takes a millisecond, five times a second."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._length: int | None = None
        self._began = perf_counter()
        self.drawn = self._began
        """Time of the last drawing of the bar, in seconds."""

    def start(self, length: int | None) -> None:
        """Begin an epoch of `length` batches, or of an unknown number."""
        self._began = perf_counter()
        self._length = length
        if self._console.is_terminal and self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            self._bar.start()

    def update(self, state: State) -> None:
        now = perf_counter()
        if self._bar is None or now - self.drawn < _EVERY_SECONDS:
            return
        self.drawn = now
        if self._task is None:
            self._task = self._bar.add_task("", total=None)
        loss = "" if state.loss is None else f" loss {float(state.loss):.4g}"
        said = f"epoch {state.epoch}/{state.epochs}{loss}"
        self._bar.update(self._task, description=said, total=self._length, completed=state.batch)
        self._bar.refresh()

    def epoch(self, state: State) -> None:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
        self._console.print(f"epoch {state.epoch}/{state.epochs}: {figures}, {perf_counter() - self._began:.1f} s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None


class Profiling:
    """Profiles steps `first` to `last` of this rank, both included; the compute thread calls `begin` and `end`.

    The trace has the operators of that thread and, with CUDA, the kernels. It is written in Chrome's format, for
    https://ui.perfetto.dev, to `folder/rank<rank>-steps<first>-<last>.json`.
    """

    def __init__(self, steps: tuple[int, int], folder: Path, rank: int) -> None:
        self.first, self.last = steps
        self.file = folder / f"rank{rank}-steps{self.first}-{self.last}.json"
        self._profile: profile | None = None

    def begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        begun = profile(activities=activities)
        begun.start()
        self._profile = begun

    def end(self) -> None:
        """Write the trace, at the end of the last step or of the training."""
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(self.file))


def check_steps(steps: tuple[int, int]) -> None:
    """Raise TypeError or ValueError unless these are the numbers of the first and the last profiled step."""
    if not isinstance(steps, tuple) or [type(step) for step in steps] != [int, int]:
        raise TypeError(f"profile={steps!r}: expected the first and the last step, such as (3, 8)")
    if not 1 <= steps[0] <= steps[1]:
        raise ValueError(f"profile={steps!r}: expected steps from 1 on, the first not after the last")
