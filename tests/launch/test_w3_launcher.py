"""W3 at the launcher: the option --elastic, its errors, and the end of such a job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from aiodist.control.roster import Roster
from aiodist.elastic.sessions import ElasticSessions, joiner_variables
from aiodist.env import Generation
from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.launch import commands
from aiodist.launch.hosts import Host
from aiodist.launch.processes import ProcessEnded
from aiodist.launch.ranks import Finished
from aiodist.launch.supervisor import Event, Supervisor
from aiodist.launch.verdict import Ending, JobVerdict
from aiodist.testing.seams.mpi import Flavour, Job, Mpi, elastic_range
from aiodist.testing.seams.world import Environment

OPENMPI = Mpi("/opt/ompi/bin/mpirun", Flavour.OPENMPI, "5.0.11", None)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"elastic": (3, 4)}, "--elastic 3:4 with 2 ranks: expected 1 <= MIN <= ranks <= MAX"),
        ({"elastic": (0, 4)}, "expected 1 <= MIN"),
        ({"elastic": (1, 1)}, "ranks <= MAX"),
        ({"timeout": float("nan")}, "--timeout nan: expected seconds, at least 0"),
        ({"kill_after": -1.0}, "--kill-after -1.0: expected seconds, at least 0"),
        ({"keep_going": True}, "--keep-going with --elastic 1:2, whose ranks continue when one fails"),
        ({"ranks": 3, "elastic": (1, 3), "servers": 1}, "--servers with --elastic 1:3: ranks get new numbers"),
    ],
)
def test_w3_what_cannot_be_is_refused_with_the_reason(changed: dict[str, Any], why: str) -> None:
    wanted: dict[str, Any] = {"command": ("train.py",), "ranks": 2, "elastic": (1, 2), **changed}
    with pytest.raises(ConfigError) as caught:
        Job(**wanted)
    assert why in str(caught.value)


def test_w3_an_mpirun_says_that_it_ends_all_unless_it_is_open_mpi_5_on_this_host() -> None:
    job = Job(("train.py",), 2, elastic=(1, 2))
    commands.check_mpi(job, OPENMPI)
    assert "--enable-recovery" in commands.mpirun_command(job, OPENMPI, ["guard"])
    assert "--enable-recovery" not in commands.mpirun_command(replace(job, elastic=None), OPENMPI, ["guard"])
    ends_all = "MPI ends every rank when one dies; say --mpi none, or take Open MPI 5"
    for mpi in (replace(OPENMPI, version="4.1.6"), Mpi("/opt/mpich/bin/mpirun", Flavour.MPICH, "5.0.2", None)):
        with pytest.raises(BackendUnavailable, match=f"--elastic with {mpi.mpirun}: {ends_all}"):
            commands.check_mpi(job, mpi)
    with pytest.raises(BackendUnavailable, match=r"--elastic with --hosts and .*: it starts no new ranks"):
        commands.check_mpi(replace(job, hosts=(Host("a", 2),)), OPENMPI)


@pytest.mark.parametrize("text", ["2", "a:b", "2:", ":4", "-1:2"])
def test_w3_the_range_is_two_numbers(text: str) -> None:
    assert elastic_range("2:16") == (2, 16)
    with pytest.raises(ConfigError, match="expected MIN:MAX"):
        elastic_range(text)


def test_w3_a_rank_that_joins_is_told_its_place() -> None:
    common = commands.common_variables({"AIODIST_GENERATION": "7"}, "tcp://here:1", "secret", elastic=(1, 4))
    first = Environment.read({**common, **commands.place_variables(1, 2)})
    assert (first.elastic, first.generation) == ((1, 4), Generation(0, (None, None)))
    place = joiner_variables(Generation(3, (0, 2, None)), 2, "tcp://there:2")
    joiner = Environment.read({**common, **place})
    assert (joiner.generation, joiner.rank, joiner.size) == (Generation(3, (0, 2, None)), 2, 3)
    assert joiner.rendezvous == "tcp://there:2"


def elastic(size: int, least: int) -> JobVerdict:
    known = Roster(size)
    known.ready = True
    known.joined |= set(range(size))
    return JobVerdict(Job(("train.py",), size, elastic=(least, size)), known)


def test_w3_the_job_goes_on_while_enough_have_not_failed() -> None:
    v = elastic(4, 2)
    assert v.ended(Ending(0, -9), 0, elastic=True) == ["rank 0: signal SIGKILL"]
    assert v.ended(Ending(3, 5), 1, elastic=True) == ["rank 3: exit code 5"]
    assert (v.code, v.working) == (None, {1, 2})
    v.started(4)
    assert v.ended(Ending(1, 1), 2, elastic=True) == ["rank 1: exit code 1"]
    assert v.code is None
    assert v.ended(Ending(4, -11), 3, elastic=True) == [
        "rank 4: signal SIGSEGV",
        "1 of at least 2 ranks are left: ranks 0, 1, 3, 4 failed",
    ]
    assert v.code == 137, "that of the first"
    assert v.ended(Ending(2, -15, told=True), 4, elastic=True) == []


def test_w3_one_that_leaves_without_a_goodbye_counts_too_and_one_that_is_not_needed_does_not() -> None:
    v = elastic(3, 2)
    assert v.ended(Ending(2, 0), 0, elastic=True) == []
    assert v.due == 0.5
    assert v.tick(1) == ["rank 2: exit code 0, while others still worked (0, 1)"]
    assert v.code is None
    v.started(3)
    assert v.dismissed(3) == []
    assert v.ended(Ending(1, 0), 2, elastic=True) == []
    assert v.tick(3) == [
        "rank 1: exit code 0, while others still worked (0)",
        "1 of at least 2 ranks are left: ranks 1, 2 failed",
    ]
    assert v.code == 1


def test_w3_those_that_were_to_join_do_not_make_up_for_those_that_failed() -> None:
    """The last rank dies while it grows: what was started for it is ended, and the job with it."""
    v = elastic(1, 1)
    v.started(1)
    assert v.ended(Ending(0, -9), 0, elastic=True) == ["rank 0: signal SIGKILL"]
    assert v.dismissed(1) == ["0 of at least 1 ranks are left: rank 0 failed"]
    assert v.code == 137


def test_w3_before_it_has_begun_it_is_a_job_like_any_other() -> None:
    v = elastic(3, 1)
    assert v.ended(Ending(2, 7), 0) == ["rank 2: exit code 7"]
    assert v.code == 7


class Started:
    """The guards of ranks, all connected."""

    came = frozenset({0, 1})

    def signal(self, signum: int) -> None:
        raise AssertionError(f"no rank may be asked to stop ({signum})")


async def test_w3_an_mpirun_that_ends_after_its_ranks_leaves_those_that_joined() -> None:
    job = Job(("train.py",), 1, mpi="openmpi", elastic=(1, 2))
    said: list[str] = []
    sessions = ElasticSessions(1, "127.0.0.1", "secret")
    sessions.generations.machine.begun = True
    supervisor = Supervisor(job, Started(), sessions, said.append)  # type: ignore[arg-type]
    supervisor.started(1)
    events: asyncio.Queue[Event] = asyncio.Queue()
    for event in (Ending(0, -9), ProcessEnded(None, 1), Finished(0)):
        events.put_nowait(event)
    late = 0.7  # seconds: longer than the time of ranks after the end of their mpirun
    for event in (Ending(1, 0), Finished(1)):
        asyncio.get_running_loop().call_later(late, events.put_nowait, event)
    assert await supervisor.watch(events) == 0
    assert said == ["rank 0: signal SIGKILL"]
