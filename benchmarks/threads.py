"""CPU seconds of each thread of this process, from the kernel."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["OTHERS", "cpu_seconds", "mean", "since"]

OTHERS = "all but the computing"
"""Label of all threads except the computing one."""


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of the live threads, summed by name.

    Threads of Python have Python's name, without its number, others the kernel's: `pt_autograd_0` is torch's.
    """
    known = {thread.native_id: thread.name.partition(" ")[0] for thread in threading.enumerate()}
    spent: defaultdict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])
            name = known.get(int(task.name)) or (task / "comm").read_text().strip()
        except FileNotFoundError:  # it has just ended
            continue
        spent[name] += nanoseconds / 1e9
    return dict(spent)


def since(before: Mapping[str, float]) -> dict[str, float]:
    """Return the CPU seconds of each live thread since `before`, a result of `cpu_seconds`."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in cpu_seconds().items()}


def mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each thread over all steps.

    >>> mean([{"MainThread": 1.0}, {"MainThread": 2.0, "other": 1.0}])
    {'MainThread': 1.5, 'other': 0.5}
    """
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
