"""Ranks in one process that take themselves to be on two hosts."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.testing.seams.world import current_place


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even ranks live on one host, odd ranks on another."""

    def name() -> str:
        place: Any = current_place.get()
        return f"host{place.started_as % 2}"

    def hosts(place: Any) -> tuple[int, ...]:
        return tuple(rank % 2 for rank in range(place.job.size))

    monkeypatch.setattr("socket.gethostname", name)
    monkeypatch.setattr("aiodist.testing.ranks.Seat.hosts", property(hosts))
