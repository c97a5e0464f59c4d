"""Tests of CUDA devices are collected everywhere, and skipped with the reason if there is none (make test-gpu)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_turns import spin_rate

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    skip = pytest.mark.skip(reason=f"there is no CUDA device: torch {torch.__version__}, {built}, sees none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many were skipped, and why, where these tests were asked for."""
    if config.option.markexpr != "gpu":
        return
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"gpu: {count} skipped: {reason}")


@pytest.fixture(scope="session")
def spin() -> Callable[[float], None]:
    """`spin(seconds)` queues a kernel of about that length on the current stream."""
    rate = spin_rate()
    return lambda seconds: torch.cuda._sleep(max(1, round(rate * seconds)))
