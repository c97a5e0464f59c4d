"""P12: a parameter server whose worker or server is killed, and one whose body raises, as real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lifecycle.conftest import shared_files

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Run

pytestmark = [pytest.mark.drawn(1), pytest.mark.parametrize("run", ["none"], indirect=True)]


def outlived(run: Run, backend: str, *arguments: str) -> Ended:
    """Return the end of a job in which rank 2 is killed and the others run to the end."""
    files = shared_files()
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("parameters.py", *arguments, n=3, options=("--keep-going",))
    assert (ended.code, ended.codes()) == (137, [0, 0, -9]), ended
    assert shared_files() <= files, "a file was left behind"
    return ended


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "policy"),
    [("gloo", "asynchronous"), ("shm", "bounded"), ("gloo", "quorum"), ("shm", "synchronous")],
)
def test_p12_a_killed_worker_holds_nobody_up(run: Run, backend: str, policy: str) -> None:
    ended = outlived(run, backend, "worker", policy)
    for rank in range(2):
        assert ended.said(rank) == ["steps: 30", "nothing lost: True", "left: [] only the dead's dropped: True"]


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "policy"), [("gloo", "synchronous"), ("shm", "bounded"), ("gloo", "quorum")])
def test_p12_who_is_killed_before_the_barrier_holds_nobody_up_there(run: Run, backend: str, policy: str) -> None:
    ended = outlived(run, backend, "uneven", policy)
    for rank in range(2):
        assert ended.said(rank) == ["nothing lost: True"]


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "servers", "met"), [("shm", "012", "done"), ("gloo", "201", "PeerLost")])
def test_p12_a_killed_server_takes_only_its_tensors_along(run: Run, backend: str, servers: str, met: str) -> None:
    """The first of the servers is where ranks meet."""
    ended = outlived(run, backend, "server", "asynchronous", servers)
    for rank in range(2):
        assert ended.said(rank) == [
            "heard: PeerLost",
            "all over: True",
            "ends: ['PeerLost', 'done']",
            "later: ['PeerLost', 'done']",
            "the same are lost: True",
            "cut: PeerLost PeerLost",
            "sync: done",
            f"barrier: {met}",
            "init: PeerLost",
            "left: []",
        ]


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "policy"), [("shm", "synchronous"), ("gloo", "asynchronous"), ("shm", "bounded")])
def test_p12_a_killed_server_of_a_table_is_named_by_all_that_needs_it(run: Run, backend: str, policy: str) -> None:
    ended = outlived(run, backend, "tables", policy)
    for rank in range(2):
        assert ended.said(rank) == [
            "heard: PeerLost",
            "ends: ['PeerLost']",
            "later: PeerLost PeerLost",
            "layer: PeerLost",
            "sync ends: True",
            "left: []",
        ]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_p12_an_exception_of_one_body_ends_all_and_is_named(run: Run, backend: str) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("parameters.py", "raised", "asynchronous", n=3, options=("--keep-going",))
    assert (ended.code, ended.codes()) == (1, [1, 1, 1]), ended
    for rank in range(2):
        (told, left) = ended.said(rank)[-2:]
        assert told.startswith("told: ")
        assert told.endswith(" True")
        assert left == "still there: []"
    assert "ValueError: the body of rank 2" in ended.errors
