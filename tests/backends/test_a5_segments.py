"""A5: a segment cannot be shortened, its pages are there when it is used, and one that lies is refused when mapped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aiodist.backends.shm.neighbours import Neighbour
from aiodist.errors import BackendError
from aiodist.testing.seams.carriers import meet
from aiodist.testing.seams.channel import in_process
from aiodist.testing.seams.memory import Arena, Place, segment_fd
from tests.support.moving import needs_moving

MIB = 1 << 20
PAGE = 4096
ROOT = Path(__file__).resolve().parents[2]

SHRINK = """
import os, sys
fd, size = int(sys.argv[1]), os.fstat(int(sys.argv[1])).st_size
for nbytes in (0, size - 4096, size + 4096):
    try:
        os.ftruncate(fd, nbytes)
    except PermissionError:
        print("refused", end=" ")
print(os.fstat(fd).st_size == size)
"""


def test_a5_the_process_of_a_peer_cannot_shrink_a_segment() -> None:
    arena = Arena()
    t = arena.empty((1000,), torch.float32).fill_(3)
    fd = arena.segments[0].fd
    peer = subprocess.run(
        [sys.executable, "-c", SHRINK, str(fd)], pass_fds=[fd], capture_output=True, text=True, timeout=60, check=True
    )
    assert peer.stdout.split() == ["refused"] * 3 + ["True"]
    assert t.sum() == 3000


def resident(arena: Arena) -> int:
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in arena.segments)


def test_a5_a_block_that_is_taken_again_has_its_pages_again() -> None:
    arena = Arena()
    first = arena.empty((MIB,), torch.uint8)
    kept = arena.empty((PAGE,), torch.uint8)
    at = first.data_ptr()
    del first
    assert resident(arena) == PAGE
    again = arena.empty((MIB // 2,), torch.uint8)
    assert (again.data_ptr(), resident(arena)) == (at, PAGE + MIB // 2)
    arena.close()
    after = arena.empty((MIB,), torch.uint8)
    assert resident(arena) == PAGE + MIB // 2 + MIB, "closed, it lends memory that is not there"
    del after
    assert resident(arena) == PAGE + MIB // 2 + MIB, "others may still look"
    assert (kept.numel(), again.numel()) == (PAGE, MIB // 2)


def test_a5_where_memory_runs_out_a_block_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    first = arena.empty((MIB,), torch.uint8)
    del first

    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(MemoryError, match=f"{MIB} bytes: No space left on device"):
            arena.empty((MIB,), torch.uint8)
        arena.close()


# --- what a peer says ------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Neighbour, socket.socket]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    neighbour = Neighbour(3, mine)
    yield neighbour, theirs
    neighbour.close()
    theirs.close()


def tell(theirs: socket.socket, nbytes: object, fd: int | None) -> None:
    message = json.dumps({"segment": 0, "nbytes": nbytes}).encode()
    socket.send_fds(theirs, [message], [] if fd is None else [fd])
    if fd is not None:
        os.close(fd)


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


@pytest.mark.parametrize("nbytes", [0, -PAGE, PAGE, 3 * PAGE, 1 << 60, "8192", None])
def test_a5_a_peer_that_lies_about_its_memory_is_refused(ends: tuple[Neighbour, socket.socket], nbytes: object) -> None:
    neighbour, theirs = ends
    before = set(os.listdir("/proc/self/fd"))
    tell(theirs, nbytes, segment_fd("theirs", 2 * PAGE))
    with pytest.raises(
        BackendError,
        match=rf"segment 0 of the memory of rank 3 .{nbytes} bytes. cannot be mapped: its size is 8192 bytes",
    ):
        neighbour.memory(Place(0, 0), 10)
    assert set(os.listdir("/proc/self/fd")) == before, "its descriptor stays open"


def test_a5_memory_that_may_shrink_is_refused(ends: tuple[Neighbour, socket.socket], tmp_path: Path) -> None:
    neighbour, theirs = ends
    tell(theirs, PAGE, unsealed(PAGE))
    with pytest.raises(BackendError, match="it is not sealed, so that it may shrink while it is mapped"):
        neighbour.memory(Place(0, 0), 10)
    (tmp_path / "file").write_bytes(bytes(PAGE))
    tell(theirs, PAGE, os.open(tmp_path / "file", os.O_RDWR))
    with pytest.raises(BackendError, match=r"it is no memfd|it is not sealed"):
        neighbour.memory(Place(0, 0), 10)
    tell(theirs, PAGE, None)
    with pytest.raises(BackendError, match="rank 3 names segment 0 of its memory, whose descriptor never came"):
        neighbour.memory(Place(0, 0), 10)


def test_a5_a_place_beyond_a_segment_is_refused(ends: tuple[Neighbour, socket.socket]) -> None:
    neighbour, theirs = ends
    tell(theirs, 2 * PAGE, segment_fd("theirs", 2 * PAGE))
    assert neighbour.memory(Place(0, PAGE), PAGE).numel() == PAGE
    for offset, nbytes in ((PAGE, PAGE + 1), (-1, 1), (2 * PAGE + 1, 0), (0, -1), (1 << 40, 1)):
        with pytest.raises(BackendError, match=rf"rank 3 names bytes {offset} to .*: expected some of 8192"):
            neighbour.memory(Place(0, offset), nbytes)


def test_a5_a_host_without_memfds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    async def all_meet() -> list[tuple[object, str]]:
        met = await asyncio.gather(*[meet(channel, [0, 0]) for channel in in_process(2)])
        return [(one.near, one.reason) for one in met]

    monkeypatch.setattr(os, "memfd_create", refuse)
    why = "[Errno 1] memfd_create: Operation not permitted"
    assert asyncio.run(all_meet()) == [(None, f"rank 0: {why}; rank 1: {why}")] * 2


# --- a container with a small /dev/shm --------------------------------------------------------------------------------

SMALL = """
import os, aiodist, torch
async def main():
    async with aiodist.init() as coll:
        if coll.rank == 0:
            with open("/dev/shm/full", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize)
            assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
            assert os.statvfs("/dev/shm").f_bavail == 0
        await coll.barrier()
        arena, ordinary = coll.arena_empty(24 << 20).fill_(1), torch.ones(24 << 20)
        moved = coll.to_arena_(torch.ones(24 << 20))
        for t in (arena, ordinary, moved):
            await coll.allreduce(t, impl="shm")
            assert t.min() == t.max() == 2
        if coll.rank == 0:
            print("arena:", coll.statistics().arena_bytes >> 20, os.listdir("/dev/shm"), flush=True)
aiodist.run(main)
"""


@needs_moving
@pytest.mark.timeout(120)
def test_a5_a_small_dev_shm_does_not_matter(tmp_path: Path) -> None:
    unshare = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    there = shutil.which("unshare") is not None
    if not there or subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a /dev/shm of his own (unshare -Urm)")
    (tmp_path / "small.py").write_text(SMALL)
    ended = subprocess.run(
        [*unshare, sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", "small.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "arena: 192 ['full']" in ended.stdout
