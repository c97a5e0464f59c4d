"""`import torch` by interpreters in turn: compares environments with and without aiodist.

python -m benchmarks.import_torch WITHOUT/bin/python WITH/bin/python
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median, quantiles

_RUNS = 20


def main() -> None:
    """Print a line for each interpreter: the median of the CPU seconds of its runs, and their quartiles."""
    interpreters = sys.argv[1:]
    seconds: dict[str, list[float]] = {name: [] for name in interpreters}
    for run in range(_RUNS + 1):
        for name in interpreters[:: 1 if run % 2 else -1]:
            process = subprocess.Popen([name, "-c", "import torch"])
            _, code, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(code)
            if process.returncode:
                sys.exit(f"{name} cannot import torch")
            if run:  # the first reads the files from disk
                seconds[name].append(used.ru_utime + used.ru_stime)
    for name, times in seconds.items():
        low, _, high = quantiles(times)
        print(f"{name}: {median(times):.3f} s ({low:.3f} to {high:.3f})")  # noqa: T201  - its output


if __name__ == "__main__":
    main()
