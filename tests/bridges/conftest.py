"""Two jobs in one process: the ranks of each are tasks of the running loop, the bridge between them is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist.testing import gather_ranks

Job = Callable[[aiodist.Communicator, Any], Coroutine[Any, Any, Any]]
Meet = Callable[..., Coroutine[Any, Any, tuple[list[Any], list[Any]]]]

SECONDS = 60


@pytest.fixture(params=["shm", pytest.param("sockets", marks=pytest.mark.drawn(1))])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The bridge over shared memory, and over sockets as between hosts."""
    if request.param == "sockets":
        monkeypatch.setenv("AIODIST_SHM", "0")
    name: str = request.param
    return name


@pytest.fixture
def meet(tmp_path: Path) -> Meet:
    """Run `listener(coll, door)` on p ranks and `caller(coll, bridge)` on q ranks, and return their results."""

    async def run(p: int, q: int, listener: Job, caller: Job, **options: Any) -> tuple[list[Any], list[Any]]:
        async def listening() -> Any:
            async with aiodist.init() as coll, aiodist.listen("weights", coll, folder=tmp_path) as door:
                return await listener(coll, door)

        async def calling() -> Any:
            opened = aiodist.connect("weights", folder=tmp_path, timeout=SECONDS, **options)
            async with aiodist.init() as coll, opened as bridge:
                return await caller(coll, bridge)

        async with asyncio.timeout(SECONDS):
            both = await asyncio.gather(gather_ranks(p, listening), gather_ranks(q, calling))
        return both[0], both[1]

    return run
