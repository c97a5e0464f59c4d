"""The pytest plugin: a test that runs once per rank.

    @pytest.mark.ranks(1, 2, 4)
    async def test_sum(coll):                          # runs as [1], [2] and [4]: once per rank, all ranks at once
        assert await coll.allreduce(coll.rank) == sum(range(coll.size))

`coll` is the communicator over all ranks, opened for this test and closed after it; what a rank raises fails the
test. The body is a coroutine function; other fixtures and parameters go with it as always.

The ranks live in this process (see `aiodist.testing.run_ranks`: the clock is a fake one, a deadlock is an error, the
order comes from `--aiodist-seed`; `--aiodist-seeds=20`, or `seeds=range(20)` in the mark, tries several and fails if
what the test returns differs by seed), or are processes:

    @pytest.mark.ranks(2, 4, backend="mpi")            # as [2-mpi] and [4-mpi]
    @pytest.mark.ranks(2, backend=("mpi", "gloo"))

`backend` is "local", "mpi" (whichever MPI is found first), "openmpi", "mpich", "gloo" or "shm"; where a marker
names none, `--aiodist-backend=local,mpi` does, or else it is local alone. Several markers add up. A backend that is
not installed is a skip. All tests with the same backend and size run in one job of processes, after all others: pytest
runs on each rank, with all of them in its arguments. After a failure the rest run in a new job. The failure shown is
the one that came first.
In a job fixtures are set up on each rank, and nowhere else. Local ranks share them: a module that a fixture returns is
one object for all ranks, so make it in the test, or have the fixture return a function that makes it.

The plugin is loaded in every run of pytest where aiodist is installed. It looks at functions that pytest collects and
that carry the mark, and imports the rest of aiodist with the first of them, torch when a test needs it. A project that
declares a mark `ranks` of its own keeps it: its tests that do not take the fixture `coll` are left to it.
"""

from __future__ import annotations

import argparse
from types import FunctionType

import pytest

_LOCAL = "local"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("aiodist", "tests that run once per rank")
    group.addoption(
        "--aiodist-backend",
        default=_LOCAL,
        metavar="NAMES",
        help="where tests marked `ranks` run whose mark has no backend: local, mpi, openmpi, mpich, gloo, shm "
        "(default: local)",
    )
    group.addoption("--aiodist-seed", type=int, default=0, metavar="N", help="the interleaving of local ranks")
    group.addoption(
        "--aiodist-seeds", type=int, default=0, metavar="N", help="run each test on local ranks with N seeds, from 0 on"
    )
    group.addoption(
        "--aiodist-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that a test on processes may take, the start of its job included, unless its mark `timeout` "
        "allows more (default: 60)",
    )
    group.addoption("--aiodist-worker", help=argparse.SUPPRESS)  # this pytest is one rank of a job


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; in a rank of a job, the reporter of its results."""
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, backend=None, seeds=()): run an async test once per rank, for each size; "
        "its fixture `coll` is the communicator",
    )
    if (names := config.getoption("--aiodist-backend")) != _LOCAL:
        from aiodist.testing.marked import backends

        backends(names)
    if folder := config.getoption("--aiodist-worker"):
        from aiodist.testing import jobs

        config.pluginmanager.register(jobs.Reporter(folder), "aiodist-reporter")


@pytest.fixture
def coll(request: pytest.FixtureRequest) -> object:
    """The communicator over all ranks, in a test marked `ranks`."""
    if not hasattr(request, "param"):
        pytest.fail("the fixture coll goes with @pytest.mark.ranks(…) on an async test", pytrace=False)
    return request.param  # the test's body gets a communicator in its place


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Collect a test function that carries our mark; leave all else to pytest.

    This sees each name of each module. Only types and dictionaries of functions are read, since an attribute of an
    object may be anything, or raise.
    """
    function = obj.__func__ if type(obj) is staticmethod or type(obj) is classmethod else obj
    if type(function) is not FunctionType or not _carries_the_mark(function, collector):
        return None
    if not collector.istestfunction(obj, name):
        return None
    from aiodist.testing import marked

    return marked.collect(collector, name, function)


def _carries_the_mark(function: FunctionType, collector: pytest.Collector) -> bool:
    """Return True if a function, or its class, module or package, is marked `ranks`."""
    own = vars(function).get("pytestmark")
    marks = own if type(own) is list else ()
    return any(type(mark) is pytest.Mark and mark.name == "ranks" for mark in marks) or (
        collector.get_closest_marker("ranks") is not None
    )
