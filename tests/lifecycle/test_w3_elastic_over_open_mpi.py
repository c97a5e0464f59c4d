"""W3 over Open MPI, which carries the world until the first rank dies or the first joins, and is left then."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Run

pytestmark = pytest.mark.parametrize("run", ["openmpi"], indirect=True)


def causes(ended: Ended) -> list[str]:
    """Return the launcher's own lines, and those of mpirun."""
    return [line for line in ended.errors.splitlines() if not line.startswith("[")]


@pytest.mark.parametrize("seed", range(32))
@pytest.mark.drawn(1)
def test_w3_ranks_are_killed_at_any_moment_and_the_others_end_right(run: Run, seed: int) -> None:
    size, deaths, joiners = 4 + seed % 2, 1 + (seed % 5 == 0), seed // 2 % 2
    words = map(str, (seed, deaths, joiners))
    ended = run("elastic_mpi.py", *words, n=size, options=("--elastic", "2:6"))
    assert ended.code == 0, ended
    dead = [int(line.split()[1].rstrip(":")) for line in causes(ended)]
    assert sorted(causes(ended)) == sorted(f"rank {rank}: signal SIGKILL" for rank in dead)
    assert len(dead) == deaths
    living = [number for number in range(size + joiners) if number not in dead]
    assert [ended.value(number, "right") for number in living] == [f"{i} {len(living)}" for i in range(len(living))]
    lines = [line for number in range(size) for line in ended.said(number)]  # a rank may enter after a death: no line
    mapped = {path for line in lines if line.startswith("mapped: ") for path in line.split()[1:]}
    assert len(mapped) == size
    assert not [path for path in mapped if Path(path).exists()]


@pytest.mark.thorough
def test_w3_a_job_over_open_mpi_grows_though_nobody_died(run: Run) -> None:
    ended = run("elastic_mpi.py", "7", "0", "1", n=3, options=("--elastic", "3:4"))
    assert (ended.code, causes(ended)) == (0, []), ended
    assert [ended.value(number, "right") for number in range(4)] == [f"{number} 4" for number in range(4)]


@pytest.mark.thorough
@pytest.mark.parametrize("joiners", [0, 2])
def test_w3_a_job_over_open_mpi_of_which_one_rank_is_left(run: Run, joiners: int) -> None:
    """All ranks that mpirun has started but one have died, and then others join."""
    ended = run("elastic_mpi.py", "3", "2", str(joiners), n=3, options=("--elastic", "1:3"))
    assert ended.code == 0, ended
    assert len(causes(ended)) == 2
    rights = [line for line in ended.text.splitlines() if "right: " in line]
    assert len(rights) == 1 + joiners


@pytest.mark.thorough
def test_w3_two_are_killed_two_join_and_the_weights_are_as_if_open_mpi_had_stayed(run: Run) -> None:
    ended = run("elastic.py", "train", n=4, options=("--elastic", "2:4"))
    assert (ended.code, causes(ended)) == (0, ["rank 0: signal SIGKILL", "rank 2: signal SIGKILL"]), ended
    for process, rank in ((1, 0), (3, 1), (4, 2), (5, 3)):
        lost = ["lost: 0 of 4", "lost: 1 of 3"] if process < 4 else []
        assert ended.said(process) == [*lost, f"equal: True {rank} of 4"]


def test_w3_over_open_mpi_ranks_that_may_not_share_memory_are_told(run: Run) -> None:
    run.environ["AIODIST_SHM"] = "0"
    ended = run("elastic.py", "again", options=("--elastic", "1:2"))
    assert (ended.code, causes(ended)[0][:4]) == (1, "rank"), ended
    assert "an elastic world over MPI is for ranks that share memory: AIODIST_SHM=0" in ended.errors


@pytest.mark.thorough
@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["count", "again", "closes", "raises", "too_few", "early"])
def test_w3_over_open_mpi_an_elastic_job_ends_as_without_it(run: Run, name: str) -> None:
    size, least, code, lines = {
        "count": (4, 2, 0, ["rank 0: signal SIGKILL", "rank 2: signal SIGKILL"]),
        "again": (2, 1, 0, []),
        "closes": (3, 1, 0, ["rank 1: signal SIGKILL"]),
        "raises": (3, 1, 0, ["rank 1: exit code 1"]),
        "too_few": (3, 2, 137, ["1 of at least 2 ranks are left: ranks 1, 2 failed"]),
        "early": (2, 1, 137, ["rank 1: signal SIGKILL"]),
    }[name]
    ended = run("elastic.py", name, n=size, options=("--elastic", f"{least}:4"))
    assert ended.code == code, ended
    assert causes(ended)[-len(lines) or 9 :] == lines
    told = {"count": "once: True", "again": "held: True", "closes": "closed", "raises": "sum: 2.0"}.get(name)
    assert told is None or sum(told in line for line in ended.text.splitlines()) >= 2
