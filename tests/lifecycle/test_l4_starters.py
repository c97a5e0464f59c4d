"""Programs under each starter: mpirun, torchrun, Slurm's variables."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiodist.testing.seams.mpi import find_mpi

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Jobs, Run

pytestmark = pytest.mark.drawn(1)


PROGRAMS = Path(__file__).parent / "programs"
SRUN = Path(__file__).with_name("srun.py")


def lines(backend: str) -> set[str]:
    return {f"rank {rank} of 2 over {backend}: tensor([2., 2.])" for rank in range(2)}


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def mpirun(run: Run, *arguments: str) -> list[str]:
    """Return the command line of a plain mpirun, and have its variables set."""
    from aiodist.testing.seams.mpi import mpirun_environment

    found = find_mpi(run.mpi, os.environ.get("PATH", os.defpath))
    assert found is not None
    run.environ = mpirun_environment(found, dict(os.environ), root=os.geteuid() == 0)
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if run.backend == "openmpi" else []
    return [found.mpirun, *options, "-n", "2", sys.executable, *run.stub("pair.py", *arguments)]


@pytest.mark.parametrize("run", ["openmpi", "mpich"], indirect=True)
def test_l4_plain_mpirun(run: Run) -> None:
    with run.started(mpirun(run, "well")) as process:
        ended = run.finish(process)
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert all(line in ended.text for line in lines("mpi"))  # mpirun may run lines together


@pytest.mark.parametrize("singleton", ["openmpi", "mpich"], indirect=True)
@pytest.mark.parametrize("place", [{}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}], ids=["alone", "torchrun"])
def test_l4_mpi_of_ranks_that_no_mpirun_has_started(singleton: Jobs, place: dict[str, str]) -> None:
    """Each would be alone in a world of its own, and never know of the others."""
    names = ("RANK", "WORLD_SIZE") if place else ("AIODIST_RANK", "AIODIST_SIZE")
    place = {name: free_port() if value == "0" else value for name, value in place.items()}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                singleton.started(
                    [sys.executable, *singleton.stub("pair.py", "well")],
                    **place,
                    **dict(zip(names, (str(rank), "2"), strict=True)),
                    AIODIST_BACKEND="mpi",
                )
            )
            for rank in range(2)
        ]
        for process in started:
            ended = singleton.finish(process)
            assert ended.code == 1, ended
            assert "ConfigError: backend 'mpi' for 2 ranks, but no mpirun started them" in ended.errors


@pytest.mark.parametrize("run", ["openmpi", "mpich"], indirect=True)
def test_l4_plain_mpirun_of_a_program_that_fails(run: Run) -> None:
    with run.started(mpirun(run, "badly")) as process:
        ended = run.finish(process)
    assert ended.code != 0
    # MPICH's mpirun kills all processes as soon as one has ended, which may be one that was notified.
    if run.backend == "openmpi":
        assert ended.exits[1][0] == 3, ended
    assert "released" in ended.text, ended  # the other had the time, before mpirun killed it


@pytest.mark.parametrize("run", ["openmpi", "mpich"], indirect=True)
def test_l1_under_a_plain_mpirun_worlds_may_be_nested(run: Run) -> None:
    command = mpirun(run)
    with run.started([*command[:-1], *run.stub("opening.py", "twice")[-2:]]) as process:
        ended = run.finish(process)
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert [ended.text.count(line) for line in ("inner: 0 2 2", "inner: 1 2 2", "outer: 2")] == [1, 1, 2], ended


STARTERS = {
    "torchrun": {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "2"},
    "slurm": {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{rank}"},
}


@pytest.mark.parametrize("starter", STARTERS)
def test_l4_variables_of(jobs: Jobs, starter: str) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ExitStack() as stack:
        command = [sys.executable, *jobs.stub("pair.py", "well")]
        places = [{name: text.format(rank=rank) for name, text in STARTERS[starter].items()} for rank in range(2)]
        started = [stack.enter_context(jobs.started(command, **meeting, **place)) for place in places]
        ended = [jobs.finish(process) for process in started]
    assert [end.code for end in ended] == [0, 0], ended
    assert {line for end in ended for line in end.text.splitlines()} == lines("shm")


def test_l4_the_loss_of_rank_0_with_the_hub_aborts_communicators_without_rank_0(jobs: Jobs) -> None:
    """The other ranks would no longer learn of the loss of one another."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    with ExitStack() as stack:
        command = [sys.executable, *jobs.stub("hub_lost.py")]
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
        started = [stack.enter_context(jobs.started(command, **meeting, **place)) for place in places]
        ended = [jobs.finish(process) for process in started]
    assert [end.code for end in ended[1:]] == [0, 0], ended
    assert all(end.text.startswith("raised: the hub left: the hub, which rank 0 hosted, was lost") for end in ended[1:])


@pytest.mark.thorough
def test_l4_torchrun_itself(jobs: Jobs) -> None:
    arguments = ("--nproc-per-node", "2", "--master-port", free_port(), str(PROGRAMS / "pair.py"), "well")
    with jobs.started([sys.executable, "-m", "torch.distributed.run", *arguments]) as process:
        ended = jobs.finish(process, limit=60)
    assert ended.code == 0, ended
    assert all(line in ended.text for line in lines("shm"))


def test_l4_plain_python(jobs: Jobs) -> None:
    ended = jobs.alone("pair.py", "well")
    assert (ended.code, ended.text) == (0, "rank 0 of 1 over local: tensor([1., 1.])\n"), ended


@pytest.mark.thorough
@pytest.mark.parametrize(("tasks", "per_node"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("node", ["localhost", socket.gethostname()])
def test_l4_slurms_variables_alone(jobs: Jobs, tasks: int, per_node: int, node: str) -> None:
    """A training job meets at the first node of the step, at a port that its number gives."""
    command = [sys.executable, str(SRUN), str(tasks), str(per_node), node, sys.executable, *jobs.stub("trains.py")]
    with jobs.started(command) as process:
        ended = jobs.finish(process, limit=60)
    assert ended.code == 0, ended
    said = {f"rank {rank} of {tasks} over shm, {rank} of {tasks} on its host: True" for rank in range(tasks)}
    assert set(ended.text.splitlines()) == said, ended


@pytest.mark.thorough
def test_l4_two_jobs_of_slurm_on_one_node(jobs: Jobs) -> None:
    command = [sys.executable, str(SRUN), "2", "2", "localhost", sys.executable, *jobs.stub("trains.py")]
    with jobs.started(command) as one, jobs.started(command) as other:
        ended = [jobs.finish(process, limit=60) for process in (one, other)]
    assert [end.code for end in ended] == [0, 0], ended
    assert [end.text.count("True") for end in ended] == [2, 2], ended
