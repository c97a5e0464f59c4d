"""Every async test runs under asyncio's own loop and under uvloop.

One that is slow, or about one of the two, says so: `@pytest.mark.asyncio(loop_factories=["asyncio"])`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from aiodist.testing import SimulatedCuda
    from aiodist.testing.fake_nccl import FakeNccl

settings.register_profile("aiodist", deadline=None)  # a busy machine takes its time
settings.load_profile("aiodist")

os.environ["AIODIST_SELECTOR"] = "none"  # what `aiodist tune` measured for this user is no part of the tests

try:
    import uvloop
except ImportError:  # Windows has none
    _FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
else:
    _FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return _FACTORIES


async def _until(true: Callable[[], object]) -> None:
    """Let the loop run until it is true, for ten seconds at most."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  - what is waited for sets no event
            await asyncio.sleep(0)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """`await until(lambda: condition)`."""
    return _until


@pytest.fixture
async def reports() -> list[dict[str, object]]:
    """What the loop's exception handler was told."""
    caught: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: caught.append(context))
    return caught


class NcclOnDevices(NamedTuple):
    """What stands in for NCCL, and the devices that it is on."""

    library: FakeNccl
    device: SimulatedCuda


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclOnDevices]:
    """NCCL, which devices wait for and the host does not, among five simulated ones; what it leaves unchecked is."""
    from aiodist.backends import nccl
    from aiodist.testing import simulated_cuda
    from aiodist.testing.fake_nccl import FakeNccl

    library = FakeNccl()
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "load", lambda: nccl.Library(library))
    with simulated_cuda(devices=5, delay=2e-4) as device:
        yield NcclOnDevices(library, device)
        assert not library.violations
        assert not device.hazards
