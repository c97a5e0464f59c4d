"""Which ranks are of one host: those whose memory can be mapped, no matter what they are called."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from aiodist.errors import OperationTimeout
from aiodist.testing.seams.channel import find_hosts, in_process
from aiodist.topology import named

pytestmark = pytest.mark.timeout(30)


async def found(size: int) -> tuple[int, ...]:
    """Return what all of `size` ranks of this process find."""
    every = await asyncio.gather(*[find_hosts(channel, 10) for channel in in_process(size)])
    assert len(set(every)) == 1, "they differ"
    return every[0]


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_ranks_that_map_one_anothers_memory_are_one_host(size: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert await found(size) == (0,) * size
    assert set(os.listdir("/proc/self/fd")) == before, "a descriptor is left"


async def test_of_two_kernels_or_networks_are_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = iter(["boot 1", "another 1", "boot 1", "boot 2", "another 1"])
    monkeypatch.setattr("aiodist.control.hosts.network", lambda: next(networks))
    assert await found(5) == (0, 1, 0, 3, 1)


async def test_a_name_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter("abc")
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    assert await found(3) == (0, 0, 0)
    assert named(["a", "b", "c"], (0, 0, 0)) == ("a", "a", "a")
    assert named(["a", "a", "a"], (0, 1, 0)) == ("a", "a#2", "a")


async def test_a_rank_without_segments_is_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert await found(3) == (0, 1, 2)


async def test_a_segment_that_cannot_be_mapped_makes_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr("aiodist.control.hosts.mmap.mmap", refuse)
    assert await found(3) == (0, 1, 2)


async def test_what_another_program_sends_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.control.hosts.os.write", lambda fd, data: os.pwrite(fd, b"x" * len(data), 0))
    assert await found(3) == (0, 1, 2)


async def test_more_ranks_come_at_once_than_the_kernel_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.control.hosts.BACKLOG", 1)
    assert await found(12) == (0,) * 12


async def test_a_rank_that_never_comes_is_an_error() -> None:
    channels = in_process(2)
    with pytest.raises(OperationTimeout, match=r"rank 1 did not come to 'hosts/contact' within 0\.05 s"):
        await find_hosts(channels[0], 0.05)
