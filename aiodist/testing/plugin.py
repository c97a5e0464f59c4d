"""The pytest plugin: a test that runs once per rank.

    @pytest.mark.ranks(1, 2, 4)
    async def test_sum(coll):                          # runs as [1], [2] and [4]: once per rank, all ranks at once
        assert await coll.allreduce(coll.rank) == sum(range(coll.size))

`coll` is the communicator over all ranks, opened for this test and closed after it; what a rank raises fails the
test. The body is a coroutine function; other fixtures and parameters go with it as always.

The ranks live in this process (see `aiodist.testing.run_ranks`: the clock is a fake one, a deadlock is an error, the
order comes from `--aiodist-seed`), or are processes:

    @pytest.mark.ranks(2, 4, backend="mpi")            # as [2-mpi] and [4-mpi]
    @pytest.mark.ranks(2, backend=("mpi", "gloo"))

`backend` is "local", "mpi" (whichever MPI is found first), "openmpi", "mpich", "gloo" or "shm"; where a marker
names none, `--aiodist-backend=local,mpi` says which, local alone without it. Several markers add up. A backend that
is not installed is a skip. All tests with the same backend and size run in one job of processes, behind all others:
pytest runs on each rank, and is told of them at once. After a failure the rest run in a new job. The failure shown is
the one that came first. Fixtures are set up on each rank, and nowhere else.

The plugin is loaded in every run of pytest where aiodist is installed: it imports no torch until a test needs it.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from aiodist.testing import jobs
from aiodist.testing.jobs import RanksFunction, Spec, one_per_rank

_BACKENDS = ("local", "mpi", "openmpi", "mpich", "gloo", "shm")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("aiodist", "tests that run once per rank")
    group.addoption(
        "--aiodist-backend",
        default="local",
        metavar="NAMES",
        help=f"where tests marked `ranks` run that do not say it themselves: {', '.join(_BACKENDS)} (default: local)",
    )
    group.addoption("--aiodist-seed", type=int, default=0, metavar="N", help="the interleaving of local ranks")
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
    """Register the marker; in a rank of a job, what tells the results."""
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, backend=None): run an async test once per rank, for each size; "
        "its fixture `coll` is the communicator",
    )
    _backends(config.getoption("--aiodist-backend"))
    if folder := config.getoption("--aiodist-worker"):
        config.pluginmanager.register(jobs.Reporter(folder), "aiodist-reporter")


@pytest.fixture
def coll(request: pytest.FixtureRequest) -> object:
    """The communicator over all ranks, in a test marked `ranks`."""
    spec = getattr(request, "param", None)
    if not isinstance(spec, Spec):
        pytest.fail("the fixture coll goes with @pytest.mark.ranks(…) on an async test", pytrace=False)
    return spec  # the test's body gets a communicator in its place


# --- collecting --------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a marked test over its sizes and backends."""
    if specs := _all_specs(metafunc.definition):
        metafunc.parametrize("coll", specs, ids=[spec.id for spec in specs], indirect=True)


def _all_specs(test: pytest.Function) -> list[Spec]:
    """Return the runs that the markers of a test ask for, each once."""
    marks = reversed(list(test.iter_markers("ranks")))
    return list(dict.fromkeys(spec for mark in marks for spec in _specs(mark, test.config)))


def _specs(mark: pytest.Mark, config: pytest.Config) -> Iterator[Spec]:
    def read(*sizes: int, backend: str | tuple[str, ...] | None = None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        names = (backend,) if isinstance(backend, str) else backend
        return sizes, _backends(",".join(names or ()) or config.getoption("--aiodist-backend"))

    try:
        sizes, backends = read(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"@pytest.mark.ranks: {error}") from None
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise pytest.UsageError(f"@pytest.mark.ranks{sizes}: expected numbers of ranks, at least 1")
    return (Spec(size, backend) for backend in backends for size in sizes)


def _backends(names: str) -> tuple[str, ...]:
    found = tuple(filter(None, (name.strip() for name in names.split(","))))
    for name in found:
        if name not in _BACKENDS:
            raise pytest.UsageError(f"aiodist: backend {name!r} is unknown: expected one of {', '.join(_BACKENDS)}")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> object:
    """Make items of our own of the marked tests, so that no other plugin runs their coroutines on one loop."""
    function = inspect.unwrap(obj.__func__ if isinstance(obj, staticmethod) else obj)  # type: ignore[arg-type]
    if not inspect.isfunction(function) or not collector.istestfunction(obj, name):
        return None
    definition = pytest.Function.from_parent(collector, name=name, callobj=one_per_rank(function, None))
    if definition.get_closest_marker("ranks") is None:
        return None
    if wrong := _misuse(function, definition):
        return [pytest.Function.from_parent(collector, name=name, callobj=partial(pytest.fail, wrong, pytrace=False))]
    # What generates the tests sees a plain function.
    generated = collector._genfunctions(name, one_per_rank(function, None))
    return [RanksFunction.like(item) for item in generated]


def _misuse(function: Callable[..., object], definition: pytest.Function) -> str:
    """Return what is wrong with a marked test, which fails it and leaves the others of its file alone."""
    if not inspect.iscoroutinefunction(function):
        return (
            f"{definition.nodeid}: a test marked `ranks` is an async function: expected `async def {definition.name}`"
        )
    if "coll" not in definition.fixturenames:
        return f"{definition.nodeid}: a test marked `ranks` takes the fixture coll"
    try:
        _all_specs(definition)
    except pytest.UsageError as error:
        return f"{definition.nodeid}: {error}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share a job of processes side by side, behind the others."""
    items.sort(key=lambda item: item.job if isinstance(item, RanksFunction) and item.on_processes else ("", 0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what still runs."""
    jobs.Jobs.of(session).close()
