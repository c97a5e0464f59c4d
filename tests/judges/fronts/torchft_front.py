"""A plugin of pytest for torchft's own tests: its groups of gloo are aiodist's."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from aiodist.c10d import AiodistProcessGroup, Home

theirs: Any = importlib.import_module("torchft.process_group")

opened: list[int] = []
"""Ranks of the groups that this process has opened."""


class ProcessGroupAiodist(theirs.ProcessGroupGloo):  # type: ignore[misc]
    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        home = Home.open(store, rank, world_size, self._timeout.total_seconds())
        opened.append(rank)
        return AiodistProcessGroup(home.world, home, store, self._timeout)


theirs.ProcessGroupGloo = ProcessGroupAiodist


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"aiodist opened {len(opened)} groups here")
