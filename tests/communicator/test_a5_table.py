"""A5: `coll.shared_table`, one table in memory for all ranks of a host."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from aiodist import BackendError, Communicator, MismatchError
from tests.support.environ import python_path

HERE = Path(__file__).parent


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 3)
@pytest.mark.ranks(3, backend=("shm", "openmpi"))
async def test_a5_what_one_rank_writes_all_read(coll: Communicator) -> None:
    for shape, kind in (((5, 7), torch.float64), (3, torch.int32), ((), torch.bool), ((2, 0), torch.float32)):
        table = await coll.shared_table(shape, kind)
        assert type(table) is torch.Tensor
        assert tuple(table.shape) == ((shape,) if isinstance(shape, int) else shape)
        assert (table.dtype, table.is_contiguous(), table.device.type) == (kind, True, "cpu")
        assert not table.any()
        for writer in range(coll.size):
            await coll.barrier()
            if coll.rank == writer:
                table.fill_(writer % 2 == 0)
            await coll.barrier()
            assert bool((table == (writer % 2 == 0)).all())


@pytest.mark.ranks(4)
@pytest.mark.ranks(4, backend="shm")
async def test_a5_a_group_has_a_table_of_its_own(coll: Communicator) -> None:
    half = await coll.split(coll.rank % 2)
    first, second = await half.shared_table(4), await half.shared_table(4)
    first[half.rank] = coll.rank + 1.0
    second[half.rank] = -1.0
    await coll.barrier()
    assert first.tolist() == [coll.rank % 2 + 1.0, coll.rank % 2 + 3.0, 0, 0]
    assert second.tolist() == [-1, -1, 0, 0]
    await half.aclose()
    del second
    gc.collect()
    again = await coll.shared_table(4)  # no memory of another one
    assert first.tolist()[:2] == [coll.rank % 2 + 1.0, coll.rank % 2 + 3.0]
    assert not again.any()


@pytest.mark.ranks(2)
@pytest.mark.ranks(2, backend="shm")
async def test_a5_ranks_ask_for_the_same_table(coll: Communicator) -> None:
    with pytest.raises(MismatchError, match="shared_table"):
        await coll.shared_table(2 + coll.rank)
    for shape, kind, error in (("ab", torch.int8, TypeError), (-1, torch.int8, ValueError), (2, "f", TypeError)):
        with pytest.raises(error, match=r"shape is|dtype is"):
            coll.shared_table(shape, kind)  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match=r"on rank 0.*bytes"):
        await coll.shared_table((1 << 50,), torch.int64)
    assert (await coll.shared_table(3)).tolist() == [0, 0, 0]


@pytest.mark.ranks(2, backend="shm")
async def test_a5_a_table_is_in_memory_once_and_goes_with_its_last_tensor(coll: Communicator) -> None:
    gc.collect()
    before, parts = held()
    assert not parts
    table = await coll.shared_table(1 << 20)
    table[coll.rank] = coll.rank
    await coll.barrier()
    assert table[:2].tolist() == [0, 1]
    assert held() == (before + 1, {"map": 1, "descriptor": 1})  # Python's map has a descriptor of its own
    view = table[1:]
    del table
    gc.collect()
    assert view[0].item() == 1
    del view
    gc.collect()
    assert held() == (before, {})


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.ranks(2, backend=("shm", "openmpi"))
async def test_a5_tables_that_are_dropped_leave_nothing(coll: Communicator) -> None:
    half = await coll.split(coll.rank // 2)
    before = await held_by_all(coll)
    for number in range(50):
        table = await (coll, half)[number % 2].shared_table((1 << 20,))
        table[coll.rank] = number + coll.rank
        await coll.barrier()
        assert table[:2].tolist() == [number, number + 1]
        del table
    assert await held_by_all(coll) == before
    kept = [await coll.shared_table(4) for _ in range(5)]
    for number, table in enumerate(kept):
        table[coll.rank] = number
    await coll.barrier()
    assert [table[:2].tolist() for table in kept] == [[number, number] for number in range(5)]


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, backend="shm")
async def test_a5_calls_that_fail_leave_nothing(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await held_by_all(coll)
    for _ in range(5):
        with pytest.raises(MismatchError, match="shared_table"):
            await coll.shared_table(2 + coll.rank)
        with pytest.raises(MemoryError, match="on rank 0"):
            await coll.shared_table((1 << 50,), torch.int64)
    with monkeypatch.context() as patch:
        if coll.rank == 1:
            patch.setattr("aiodist.backends.shm.tables.mmap.mmap", no_map)
        for _ in range(5):
            with pytest.raises(BackendError, match=r"shared_table: rank 1 cannot map .*4096 bytes.*Too many open"):
                await coll.shared_table(2)
    assert await held_by_all(coll) == before
    assert (await coll.shared_table(3)).tolist() == [0, 0, 0]


def no_map(fd: int, nbytes: int) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def held_by_all(coll: Communicator) -> tuple[int, dict[str, int]]:
    """Return `held()` at a time when no rank makes a table: ranks may be in one process."""
    await coll.barrier()
    gc.collect()
    found = held()
    await coll.barrier()
    return found


def held() -> tuple[int, dict[str, int]]:
    """Return how many descriptors this process has, and how many maps and descriptors of tables: what keeps pages."""
    names = os.listdir("/proc/self/fd")
    kinds = {"map": maps(), "descriptor": "".join(map(target, names))}
    return len(names), {kind: n for kind, text in kinds.items() if (n := text.count("aiodist-table"))}


def target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # that of the listing itself
        return ""


def maps() -> str:
    return Path("/proc/self/maps").read_text()


PROGRAM = """
import sys, aiodist, gc, os, signal

async def main():
    async with aiodist.init() as coll:
        table = await coll.shared_table((1 << 20,))
        table[coll.rank] = 1.0 + coll.rank
        await coll.barrier()
        print(coll.rank, table[:2].tolist(), flush=True)
        if "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
    assert table[:2].tolist() == [1.0, 2.0]  # it outlives the world
    assert not [fd for fd in os.listdir("/proc/self/fd") if "table" in target(fd)][1:]
    del table
    gc.collect()
    assert not [fd for fd in os.listdir("/proc/self/fd") if "table" in target(fd)]

def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""

aiodist.run(main)
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("how", ["end", "kill"])
def test_a5_no_file_is_left(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run(program, how)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 [1.0, 2.0]", "[1] 1 [1.0, 2.0]"], done
    assert (done.returncode == 0) == (how == "end"), done
    assert not [name for name in os.listdir("/dev/shm") if "table" in name]


def test_a5_without_shared_memory_a_table_is_an_error_on_each_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run(program, "end", AIODIST_SHM="0")
    assert done.returncode == 1
    assert done.stderr.count("AIODIST_SHM=0") >= 2, done.stderr
    assert "BackendUnavailable: shared_table: rank 0 shares no memory" in done.stderr


def run(program: Path, how: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", str(program), how],
        env={**os.environ, "PYTHONPATH": python_path(), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
