"""Which cores a rank has: the rule, and that real ranks keep to it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiodist
from aiodist.errors import ConfigError
from aiodist.testing.seams.channel import in_process
from aiodist.testing.seams.world import Environment
from aiodist.topology import Topology
from aiodist.world import pinning
from aiodist.world.pinning import pinned, share, warn_of_one_core
from tests.support.environ import python_path

pytestmark = pytest.mark.timeout(60)

ROOT = Path(aiodist.__file__).parents[1]
ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
SCRIPT = """
import asyncio, json, os, threading
import torch
import aiodist

async def main():
    before = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    async with aiodist.init() as coll:
        threads = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
        await coll.barrier()
        inside = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    after = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    print(json.dumps([coll.rank, before, inside, after, all(cores == inside[0] for cores in threads)]), flush=True)

aiodist.run(main())
"""


@given(cores=st.sets(st.integers(0, 300), min_size=1, max_size=40), ranks=st.integers(1, 60))
def test_l6_shares_are_disjoint_while_there_are_cores_for_all(cores: set[int], ranks: int) -> None:
    dealt = [share(sorted(cores), rank, ranks) for rank in range(ranks)]
    uses = Counter(core for each in dealt for core in each)
    assert set(uses) <= cores
    assert {len(each) for each in dealt} == {max(1, len(cores) // ranks)}
    if ranks <= len(cores):
        assert set(uses.values()) == {1}
    else:  # in turn: no core has two ranks more than another
        assert set(uses) == cores
        assert max(uses.values()) - min(uses.values()) <= 1


def ranks(folder: Path, *options: str, n: int = 2) -> dict[int, tuple[list[object], list[object], list[object], bool]]:
    """Run ranks without MPI, which binds none; return what each saw before, within and after the block."""
    (folder / "script.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "AIODIST_"))}
    command = [sys.executable, "-m", "aiodist.cli", "run", "-n", str(n), "--mpi", "none", "--no-prefix"]
    done = subprocess.run(
        [*command, *options, "script.py"],
        cwd=folder,
        env={**environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    said = (json.loads(line) for line in done.stdout.splitlines())
    return {rank: (before, inside, after, alike) for rank, before, inside, after, alike in said}


@pytest.mark.skipif(not ALLOWED, reason="this system has no affinity")
def test_l6_ranks_hold_to_their_cores_and_give_them_back(tmp_path: Path) -> None:
    for rank, (before, inside, after, alike) in ranks(tmp_path, "--pin").items():
        cores = list(share(ALLOWED, rank, 2))
        assert before[0] == ALLOWED
        assert inside == [cores, min(len(cores), before[1])]  # type: ignore[call-overload]
        assert after == before
        assert alike, "threads that were there before moved too"


@pytest.mark.skipif(len(ALLOWED) < 2, reason="this process has one core")
def test_l6_what_the_user_chose_stays(tmp_path: Path) -> None:
    # One core for each rank, as a launcher that binds would do it, and a number of threads.
    bound = SCRIPT.replace(
        "async def", f"os.sched_setaffinity(0, [{ALLOWED}[int(os.environ['AIODIST_RANK'])]])\nasync def"
    )
    (tmp_path / "bound.py").write_text(bound)
    environ = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "2"}
    command = [
        sys.executable,
        "-m",
        "aiodist.cli",
        "run",
        "-n",
        "2",
        "--mpi",
        "none",
        "--no-prefix",
        "--pin",
        "bound.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        rank, _, inside, _, _ = json.loads(line)
        assert inside == [[ALLOWED[rank]], 2]


def test_l6_the_switch_is_read() -> None:
    assert Environment.read({}).pin is None
    assert Environment.read({"AIODIST_PIN": "0"}).pin is False
    assert Environment.read({"AIODIST_PIN": "1"}).pin is True
    with pytest.raises(ConfigError, match="AIODIST_PIN"):
        Environment.read({"AIODIST_PIN": "perhaps"})


def test_l6_workers_on_one_core_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "warned", [])
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4}, raising=False)
    warn_of_one_core(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    warn_of_one_core(0)
    with pytest.warns(RuntimeWarning, match=r"one core .* 2 loader worker"):
        warn_of_one_core(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_one_core(2)


class Machine:
    """Cores and torch threads that are not there: what ranks were held to, and the threads they took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.cores = set(range(cores))
        self.threads = cores  # torch by itself takes them all
        self.moves: list[set[int]] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: self.cores, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: self.moves.append(set(cores)), raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "threads", count))

    async def ranks(self, count: int, **variables: str) -> list[tuple[set[int], int]]:
        """Return the cores and the threads of each rank in its block, which are restored after the block."""
        environment = Environment.read(variables)
        channels = in_process(count)
        hosts = ("here",) * count
        blocks = await asyncio.gather(*(pinned(c, Topology(hosts, c.rank), environment) for c in channels))
        seen = []
        before = self.threads
        for block in blocks:
            self.moves.clear()
            with block:
                seen.append((self.moves[-1] if self.moves else self.cores, self.threads))
            assert self.threads == before
            assert not self.moves or self.moves[-1] == self.cores
        return seen


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        (4, 2, [({0, 1}, 2), ({2, 3}, 2)]),
        (7, 3, [({0, 1}, 2), ({2, 3}, 2), ({4, 5}, 2)]),
        # With one core each, a rank shares its core with other work, so it is not pinned.
        (2, 2, [({0, 1}, 1), ({0, 1}, 1)]),
        (2, 3, [({0, 1}, 1)] * 3),
        (4, 1, [({0, 1, 2, 3}, 4)]),
    ],
)
async def test_l6_by_default_ranks_are_held_where_each_has_two_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, count: int, expected: object
) -> None:
    assert await Machine(monkeypatch, cores).ranks(count) == expected


async def test_l6_pin_holds_them_to_one_core_too_in_turn_where_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await Machine(monkeypatch, 2).ranks(2, AIODIST_PIN="1") == [({0}, 1), ({1}, 1)]
    assert await Machine(monkeypatch, 2).ranks(3, AIODIST_PIN="1") == [({0}, 1), ({1}, 1), ({0}, 1)]


async def test_l6_what_leaves_cores_or_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = {0, 1, 2, 3}
    assert await Machine(monkeypatch, 4).ranks(2, AIODIST_PIN="0") == [(everything, 4)] * 2
    assert await Machine(monkeypatch, 4).ranks(2, OMP_NUM_THREADS="3") == [({0, 1}, 4), ({2, 3}, 4)]
    machine = Machine(monkeypatch, 4)
    machine.threads = 3  # the program called torch.set_num_threads
    assert await machine.ranks(2) == [({0, 1}, 3), ({2, 3}, 3)]


WORKERS = """
import asyncio, warnings
import aiodist
from aiodist import data

async def main():
    async with aiodist.init():
        for _ in range(2):
            async with data.prefetch(range(4), workers=2, transform=abs) as items:
                print([item async for item in items])

aiodist.run(main())
"""


@pytest.mark.thorough
@pytest.mark.skipif(len(ALLOWED) < 2, reason="this process has one core")
@pytest.mark.parametrize("cores", [1, 2])
def test_l6_a_program_with_workers_is_warned_once_where_it_has_one_core(tmp_path: Path, cores: int) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    run = "import runpy; runpy.run_path('workers.py', run_name='__main__')"
    held = f"import os; os.sched_setaffinity(0, {ALLOWED[:cores]}); {run}"
    done = subprocess.run(
        [sys.executable, "-c", held],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1, 2, 3]\n" * 2), done
    text = "this process has one core for its loop, its computation and 2 loader worker(s)"
    assert done.stderr.count(text) == (1 if cores == 1 else 0), done.stderr
    assert done.stderr.count("Warning") == (1 if cores == 1 else 0)
