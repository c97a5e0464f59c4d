"""Rules and fixtures of all tests.

Every async test runs under asyncio's own loop and under uvloop. One that is slow, or about one of the two, says so:
`@pytest.mark.asyncio(loop_factories=["asyncio"])`.

`make test` leaves tests marked `thorough` to `make test-all`, and so it does combinations of a test's parameters: it
has as few as show every value, with one of the two loops, and n where a test is marked `drawn(n)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import pytest
from hypothesis import HealthCheck, settings

from aiodist.handles import Progress
from aiodist.testing.jobs import Spec
from tests.support.contract import Cpu, FilesAndJobs, NoSleeping, note_quarantine
from tests.support.drawing import draw
from tests.support.nursed import nursed
from tests.support.nursed import nursery as nursery
from tests.support.simulated_cuda.fixture import simulated_cuda as simulated_cuda
from tests.support.startup import sitecustomize

if TYPE_CHECKING:
    from tests.support.fake_nccl.core import FakeNccl
    from tests.support.simulated_cuda.device import SimulatedCuda

# A busy machine takes its time.
settings.register_profile("thorough", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=25)

collect_ignore_glob = ["*/programs/*"]  # they are run, and some open a world when they are imported

os.environ["AIODIST_SELECTOR"] = "none"  # what `aiodist tune` measured for this user is no part of the tests

try:
    import uvloop
except ImportError:  # Windows has none
    _FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
else:
    _FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_configure(config: pytest.Config) -> None:
    """Let processes of tests get signals that this run ignores, under nohup or in the background of a shell.

    In a quick run these processes import torch in less time; in a thorough one they start as users' processes do.
    """
    settings.load_profile("quick" if "not thorough" in config.option.markexpr else "thorough")
    if "not thorough" in config.option.markexpr:
        startup = str(Path(sitecustomize.__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [startup, os.environ.get("PYTHONPATH")]))
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)  # which is as good here, and not inherited
    if not config.getoption("--aiodist-worker"):
        _take_away_what_is_left()
        config.pluginmanager.register(NoSleeping())


def _take_away_what_is_left() -> None:
    """Put temporary files into one folder that is removed after this run: killed launchers and MPIs leave files."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps its own of some runs
    folder = tempfile.mkdtemp(prefix="tests-")
    # After multiprocessing's own folder, which is in it; and not in forked children.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-101)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what pytest and torch have made out of the garbage collections that tests ask for: each took 0.6 s.

    In a quick run, have the ranks of jobs come from a nursery, see tests/support/startup.
    """
    gc.collect()
    gc.freeze()
    session.stash[_CPU], session.stash[_MODULES] = Cpu(), len(sys.modules)
    if "not thorough" in session.config.option.markexpr and any(
        getattr(i, "on_processes", False) for i in session.items
    ):
        stack = contextlib.ExitStack()
        os.environ["NURSERY_OF_JOBS"] = stack.enter_context(nursed(Path(tempfile.mkdtemp())))
        session.config.add_cleanup(stack.close)


_CPU = pytest.StashKey[Cpu]()
_MODULES = pytest.StashKey[int]()
"""How many modules there were when what exists was last kept out of the collections."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return FilesAndJobs(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Record the CPU seconds of each file with its last test, for tools/check.py."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        item.user_properties.append(("cpu", item.session.stash[_CPU].lap()))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep a large library that a test was the first to import out of the collections too.

    A thread may hold objects of a test for a moment more; frozen objects are never freed. Then a later test freezes.
    """
    result = yield
    if len(sys.modules) > item.session.stash[_MODULES] + 200:
        gc.collect()
        if not any(progress.loop.is_closed() for progress in list(Progress._of_loop.values())):
            gc.freeze()
            item.session.stash[_MODULES] = len(sys.modules)
    return result


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return _FACTORIES


_JOBS = frozenset({("openmpi", 2), ("openmpi", 3), ("mpich", 2), ("gloo", 2), ("gloo", 3), ("shm", 2)})
"""The jobs of processes that `make test` starts: to start one for a few tests takes longer than these do."""


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    note_quarantine(items)
    combinations: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if getattr(item, "on_processes", False):
            item.add_marker("processes")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("soak"):
            combinations[_name(item)].append(item)
    usual = {_name(item) for item in items if _in_usual_job(item)}
    for name, tests in combinations.items():
        mark = tests[0].get_closest_marker("drawn")
        among = [test for test in tests if _in_usual_job(test) or name not in usual]
        if mark is None:
            chosen = draw(name, [(test, _shown(test)) for test in among])
        else:
            chosen = draw(name, [(test, _values(test).items()) for test in among], mark.args[0])
        for test in tests:
            if test not in chosen:
                test.add_marker("thorough")


def _in_usual_job(item: pytest.Item) -> bool:
    return not getattr(item, "on_processes", False) or item.job in _JOBS  # type: ignore[attr-defined]


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _values(test: pytest.Function) -> dict[str, int]:
    """Return which value each parameter has; what pytest calls its index is another one in each combination."""
    return {name: id(value) for name, value in test.callspec.params.items()}


def _shown(test: pytest.Function) -> list[object]:
    """Return what a combination shows: its values but for the loop, the size, the carrier, and the test."""
    values: dict[str, object] = {**_values(test)}
    values.pop("_asyncio_loop_factory", None)
    if values.pop("coll", None) is not None:
        size, backend, _ = cast(Spec, test.callspec.params["coll"])
        values |= {"ranks": size, "carrier": backend}
    return [*values.items(), None]


@pytest.fixture(autouse=True)
def _nothing_reported() -> Iterator[None]:
    """Fail the test if an error was reported that no task awaits and the test does not collect.

    pytest itself fails a test during which a thread ended with an exception: warnings are errors.
    """
    said: list[str] = []
    tell = Progress._report

    def note(progress: Progress, message: str, error: BaseException) -> None:
        if progress.loop.get_exception_handler() is None:
            said.append(f"{message}: {error!r}")
        tell(progress, message, error)

    # A patch of its own: the fixture would be set up first, and so undo what tests patch after all else is undone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "_report", note)
        yield
    assert not said, "\n".join(said)


_STAYING = (
    "aiodist-progress",
    "aiodist-future",
    "aiodist-leave",
    "asyncio_",
    "pytest_timeout",
    "pt_autograd",
    "Dummy-",
)
"""They serve the whole process."""


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Fail the test that leaves a thread: later ones in this process would no longer stand still, or be slow."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        since = [thread.name for thread in threading.enumerate() if thread not in before]
        return [name for name in since if not name.startswith(_STAYING)]

    until = time.monotonic() + 5
    while left() and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert not left(), f"the test left threads behind: {left()}"


async def _until(true: Callable[[], object]) -> None:
    """Let the loop run until it is true, for ten seconds at most."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  - what is waited for sets no event
            await asyncio.sleep(0)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """`await until(lambda: condition)`."""
    return _until


@pytest.fixture
async def reports() -> list[dict[str, object]]:
    """The reports to the loop's exception handler."""
    caught: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: caught.append(context))
    return caught


class NcclOnDevices(NamedTuple):
    """The stand-in for NCCL, and its devices."""

    library: FakeNccl
    device: SimulatedCuda


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclOnDevices]:
    """NCCL, which devices wait for and the host does not, among five simulated ones; what it leaves unchecked is."""
    from aiodist.backends import nccl
    from tests.support.fake_nccl.core import FakeNccl
    from tests.support.simulated_cuda.simulation import simulated_cuda

    library = FakeNccl()
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "load", lambda: nccl.Library(library))
    with simulated_cuda(devices=5, delay=2e-4) as device:
        yield NcclOnDevices(library, device)
        assert not library.violations
        assert not device.hazards
