"""The rules of `verdict` for failed ranks and exit codes, without processes and clocks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aiodist.control.roster import Exit, Roster
from aiodist.launch.verdict import HOLD, Ending, JobVerdict, Left, describe
from aiodist.testing.seams.mpi import Job


def verdict(
    size: int,
    *,
    left: Mapping[int, Left] | None = None,
    first: tuple[int, int] | None = None,
    within: float = 5.0,
    servers: int = 0,
    keep_going: bool = False,
) -> JobVerdict:
    job = Job(("train.py",), size, finish_within=within, servers=servers, keep_going=keep_going)
    return JobVerdict(job, roster(size, left or {}, first))


def roster(size: int, left: Mapping[int, Left], first: tuple[int, int] | None = None) -> Roster:
    """Return what the hub knows, where all ranks had come."""
    known = Roster(size)
    known.ready = True
    known.joined |= {rank for rank, how in left.items() if how is not Left.NEVER_JOINED}
    for rank, how in left.items():
        if how is Left.CLEAN:
            known.leave(Exit(rank, clean=True, cause="goodbye"))
    if first is not None:
        known.leave(Exit(first[0], clean=False, cause="bad", exitcode=first[1]))
    return known


def test_l5_all_end_with_0() -> None:
    v = verdict(3)
    assert [v.ended(Ending(rank, 0), rank) for rank in range(3)] == [[], [], []]
    assert (v.code, v.due) == (None, None)


@pytest.mark.parametrize(
    ("code", "line", "exit_code"),
    [(3, "rank 1: exit code 3", 3), (-9, "rank 1: signal SIGKILL", 137), (-2, "rank 1: signal SIGINT", 130)],
)
def test_l5_a_failure_is_named_and_gives_the_code(code: int, line: str, exit_code: int) -> None:
    v = verdict(2)
    assert v.ended(Ending(1, code), 0) == [line]
    assert v.code == exit_code


def test_l5_the_first_failure_gives_the_code_and_each_is_named() -> None:
    v = verdict(3)
    assert v.ended(Ending(2, 7), 0) == ["rank 2: exit code 7"]
    assert v.ended(Ending(0, -11), 0.1) == ["rank 0: signal SIGSEGV"]
    assert v.ended(Ending(1, -15, told=True), 0.2) == []
    assert v.code == 7


def test_l5_a_peer_that_gave_up_is_no_cause() -> None:
    v = verdict(3, left=dict.fromkeys(range(3), Left.OPEN))
    assert v.ended(Ending(1, -9), 0) == ["rank 1: signal SIGKILL"]
    assert v.ended(Ending(0, 1), 0.1) == []


def test_l5_an_early_end_is_a_failure_when_its_time_is_over() -> None:
    v = verdict(3)
    assert v.ended(Ending(1, 0), 10) == []
    assert v.due == 15
    assert v.tick(14.9) == []
    assert v.tick(15) == ["rank 1: exit code 0, while others still worked (0, 2)"]
    assert v.code == 1


def test_l5_an_early_end_is_fine_when_the_others_end_in_time() -> None:
    v = verdict(2)
    v.ended(Ending(1, 0), 0)
    assert v.ended(Ending(0, 0), 4) == []
    assert (v.due, v.code) == (None, None)


def test_l5_after_a_goodbye_there_is_no_hurry() -> None:
    v = verdict(2, left={1: Left.CLEAN})
    assert v.ended(Ending(1, 0), 0) == []
    assert v.due is None


def test_l5_a_goodbye_may_arrive_after_the_end() -> None:
    known = roster(2, {1: Left.OPEN})
    v = JobVerdict(Job(("train.py",), 2), known)
    v.ended(Ending(1, 0), 0)
    assert v.due is not None
    assert v.due < 1
    known.leave(Exit(1, clean=True, cause="goodbye"))
    assert v.tick(v.due) == []
    assert v.code is None


def test_l5_who_left_without_goodbye_is_named_before_who_noticed() -> None:
    v = verdict(3, left={0: Left.OPEN, 1: Left.OPEN})
    v.ended(Ending(1, 0), 0)
    assert v.ended(Ending(0, 1), 0.1) == [
        "rank 1: exit code 0, while others still worked (0, 2)",
        "rank 0: exit code 1",
    ]
    assert v.code == 1


def test_l5_who_failed_first_is_waited_for() -> None:
    v = verdict(3, left=dict.fromkeys(range(3), Left.OPEN), first=(1, 5))
    assert v.ended(Ending(0, 1), 0) == []
    assert v.due == HOLD
    assert v.ended(Ending(1, 5), 1) == ["rank 1: exit code 5"]
    assert v.code == 5


def test_l5_who_failed_first_and_does_not_end_is_named_all_the_same() -> None:
    v = verdict(3, first=(1, 5))
    v.ended(Ending(0, 1), 0)
    assert v.tick(HOLD) == ["rank 1: exit code 5"]
    assert v.code == 5
    assert v.ended(Ending(1, -15, told=True), HOLD) == []


def test_l5_a_rank_stopped_by_others_is_named_when_nothing_else_explains_it() -> None:
    v = verdict(2)
    assert v.ended(Ending(0, -15, told=True), 0) == []
    assert v.due is not None
    assert v.tick(v.due) == ["rank 0: signal SIGTERM"]
    assert v.code == 143


def test_l5_mpirun_gives_its_code_when_it_ended_its_ranks() -> None:
    v = verdict(2)
    v.ended(Ending(0, -9, told=True), 0)
    v.ended(Ending(1, -9, told=True), 0)
    assert v.stopped_by_mpirun(3) == ["mpirun: exit code 3 before its ranks had ended"]
    assert v.code == 3


def test_l5_an_mpirun_that_ends_after_its_ranks_says_nothing_new() -> None:
    v = verdict(2)
    v.ended(Ending(0, 0), 0)
    v.ended(Ending(1, 0), 0)
    assert v.stopped_by_mpirun(0) == []
    assert v.code is None


def test_l5_a_signal_without_a_name_has_its_number() -> None:
    assert describe(-63) in ("signal 63", "signal SIGRTMAX-1")
    assert Ending(0, -63).exit_code == 191


def test_l5_servers_are_called_so() -> None:
    v = verdict(4, servers=2, within=1)
    assert v.ended(Ending(2, -9), 0) == ["rank 2 (server): signal SIGKILL"]
    assert v.ended(Ending(1, 3), 0) == ["rank 1: exit code 3"]
    v = verdict(4, servers=2, within=1)
    v.ended(Ending(3, 0), 0)
    assert v.tick(1) == ["rank 3 (server): exit code 0, while others still worked (0, 1, 2)"]


def test_l5_keep_going_names_each_at_once_and_the_first_gives_the_code() -> None:
    v = verdict(4, left=dict.fromkeys(range(4), Left.OPEN), first=(1, 5), keep_going=True)
    assert v.ended(Ending(0, 1), 0) == ["rank 0: exit code 1"]
    assert v.ended(Ending(1, 5), 1) == ["rank 1: exit code 5"]
    assert v.ended(Ending(2, -15, told=True), 2) == ["rank 2: signal SIGTERM"]
    assert (v.code, v.due, v.working) == (1, None, {3})


def test_l5_keep_going_names_who_left_early_also_after_a_failure() -> None:
    v = verdict(3, left={1: Left.OPEN}, keep_going=True)
    v.ended(Ending(0, -9), 0)
    v.ended(Ending(1, 0), 1)
    assert v.due is not None
    assert v.tick(v.due) == ["rank 1: exit code 0, while others still worked (2)"]
    assert v.code == 137


def test_l5_keep_going_waits_for_nothing_when_the_last_has_failed() -> None:
    v = verdict(2, keep_going=True)
    v.ended(Ending(0, 0), 0)
    due = [v.due]
    assert v.ended(Ending(1, 3), 1) == ["rank 1: exit code 3"]
    assert (v.code, [*due, v.due]) == (3, [5.0, None])
