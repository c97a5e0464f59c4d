"""Tests that carry the mark `ranks`: collected once for each size and backend. Loaded with the first of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType

import pytest

from aiodist.testing import jobs
from aiodist.testing.jobs import RanksFunction, Spec, one_per_rank

_BACKENDS = ("local", "mpi", "openmpi", "mpich", "gloo", "shm")


def backends(names: str) -> tuple[str, ...]:
    """Return the backends that a list with commas names; raise a UsageError for a name that is none."""
    found = tuple(filter(None, (name.strip() for name in names.split(","))))
    for name in found:
        if name not in _BACKENDS:
            raise pytest.UsageError(f"aiodist: backend {name!r} is unknown: expected one of {', '.join(_BACKENDS)}")
    return found


def collect(collector: pytest.Module | pytest.Class, name: str, function: FunctionType) -> list[pytest.Item] | None:
    """Return the runs of a marked test as items of our own, so that no other plugin runs its coroutine on one loop.

    None if the mark is another project's, which declares a mark of this name and takes no fixture `coll`.
    """
    if not collector.config.pluginmanager.has_plugin(__name__):
        collector.config.pluginmanager.register(inspect.getmodule(collect), __name__)
    test = one_per_rank(function, None)  # what generates the tests sees a plain function
    definition = pytest.Function.from_parent(collector, name=name, callobj=test)
    takes_coll = "coll" in definition.fixturenames
    if not takes_coll and _declares_the_mark(collector.config):
        return None
    try:
        specs = _all_specs(definition)
        wrong = _misuse(function, definition, takes_coll)
    except pytest.UsageError as error:
        wrong = str(error)
    if wrong:
        fail = partial(pytest.fail, f"{definition.nodeid}: {wrong}", pytrace=False)
        return [pytest.Function.from_parent(collector, name=name, callobj=fail)]
    sizes = pytest.mark.parametrize("coll", specs, ids=[spec.id for spec in specs], indirect=True)
    vars(test)["pytestmark"] = [sizes.mark, *vars(function).get("pytestmark", [])]
    return [RanksFunction.like(item) for item in collector._genfunctions(name, test)]


def _declares_the_mark(config: pytest.Config) -> bool:
    """Return True if the project declares a mark `ranks` in addition to ours."""
    lines: list[str] = config.getini("markers")
    return sum(line.split(":")[0].split("(")[0].strip() == "ranks" for line in lines) > 1


def _misuse(function: Callable[..., object], definition: pytest.Function, takes_coll: bool) -> str:
    """Return what is wrong with a marked test, which fails it and leaves the others of its file alone."""
    while type(wrapped := vars(function).get("__wrapped__")) is FunctionType:
        function = wrapped
    if not inspect.iscoroutinefunction(function):
        return f"a test marked `ranks` is an async function: expected `async def {definition.name}`"
    return "" if takes_coll else "a test marked `ranks` takes the fixture coll"


def _all_specs(test: pytest.Function) -> list[Spec]:
    """Return the runs that the markers of a test ask for, each once."""
    marks = reversed(list(test.iter_markers("ranks")))
    return list(dict.fromkeys(spec for mark in marks for spec in _specs(mark, test.config)))


def _specs(mark: pytest.Mark, config: pytest.Config) -> Iterator[Spec]:
    def read(
        *sizes: int, backend: str | tuple[str, ...] | None = None, seeds: Iterable[int] = ()
    ) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        names = (backend,) if isinstance(backend, str) else backend
        return sizes, backends(",".join(names or ()) or config.getoption("--aiodist-backend")), tuple(seeds)

    try:
        sizes, names, seeds = read(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"@pytest.mark.ranks: {error}") from None
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise pytest.UsageError(f"@pytest.mark.ranks{sizes}: expected numbers of ranks, at least 1")
    return (Spec(size, backend, seeds) for backend in names for size in sizes)


@pytest.hookimpl(trylast=True)  # after pytest has put tests together that share a fixture
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share a job of processes side by side, after the others."""
    items.sort(key=lambda item: item.job if type(item) is RanksFunction and item.on_processes else ("", 0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the job that still runs."""
    jobs.Jobs.of(session).close()
