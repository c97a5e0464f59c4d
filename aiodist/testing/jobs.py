"""Jobs of processes in which marked tests run: started for many tests at once, asked for the result of each.

Each rank of a job runs `python -m aiodist.testing.jobs FOLDER`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from aiodist.env import Environment
from aiodist.errors import BackendUnavailable
from aiodist.launch.discover import find_mpi

_End = dict[str, Any]  # how one test ended on one rank: nodeid, mpi, skipped, failures

_POLL_SECONDS = 0.01
_OTHERS_SECONDS = 5.0  # seconds for other ranks to fail, after one has failed
_LEAVE_SECONDS = 15.0  # seconds for a job to end after its tests
_MPICH = "AIODIST_TEST_MPICH"
"""Variable with the prefix of an MPICH that is not on the path. Jobs under it do without shared memory, so that MPI
carries messages as it does between hosts."""


class Spec(NamedTuple):
    """One run of a test: how many ranks, over what."""

    size: int
    backend: str
    seeds: tuple[int, ...] = ()
    """Seeds of a test in one process, or () for the options of the command."""

    @property
    def id(self) -> str:
        """The text in the brackets of the test's name."""
        return str(self.size) if self.backend == "local" else f"{self.size}-{self.backend}"


class RanksFunction(pytest.Function):
    """A test that runs once per rank."""

    @property
    def spec(self) -> Spec:
        """Which of its runs it is."""
        return cast(Spec, self.callspec.params["coll"])

    @property
    def on_processes(self) -> bool:
        """Whether other processes run it, and this one only tells how it went."""
        return self.spec.backend != "local" and not self.config.getoption("--aiodist-worker")

    @property
    def job(self) -> tuple[str, int]:
        """The key of a job of processes, which its tests share."""
        return carrier(self.spec.backend), self.spec.size

    @classmethod
    def like(cls, item: pytest.Function) -> RanksFunction:
        """Return it in place of pytest's item."""
        return cls.from_parent(
            item.parent,
            name=item.name,
            callspec=item.callspec,
            fixtureinfo=item._fixtureinfo,
            keywords={item.callspec.id: True},
            originalname=item.originalname,
        )

    def _getobj(self) -> object:
        return one_per_rank(super()._getobj(), self)  # type: ignore[no-untyped-call]

    def setup(self) -> None:
        """Set fixtures up, where the test runs."""
        if not self.on_processes:
            super().setup()

    def runtest(self) -> None:
        """Run it, or have it run."""
        if self.on_processes:
            Jobs.of(self.session).run(self)
        else:
            super().runtest()


def one_per_rank(function: Callable[..., Any], item: RanksFunction | None) -> Callable[..., None]:
    """Return a plain function that runs the coroutine function on all ranks, or on this one in a job."""

    @wraps(function)
    def run(*args: Any, coll: Spec, **fixtures: Any) -> None:  # noqa: ANN401
        import aiodist

        async def main() -> object:
            async with aiodist.init() as world:
                try:
                    return await function(*args, coll=world, **fixtures)
                except pytest.skip.Exception as skipped:
                    return skipped  # no failure of this rank: the world is closed as always

        if item is not None and coll.backend == "local":
            seeds = coll.seeds or range(item.config.getoption("--aiodist-seeds")) or None
            ends = aiodist.testing.run_ranks(coll.size, main, item.config.getoption("--aiodist-seed"), seeds=seeds)
        else:
            ends = [aiodist.run(main)]
        for end in ends:
            if isinstance(end, pytest.skip.Exception):
                raise end

    return run


class Jobs:
    """The jobs of one pytest session: one at a time."""

    _key = pytest.StashKey["Jobs"]()

    def __init__(self) -> None:
        self._job: _ProcessJob | None = None

    @classmethod
    def of(cls, session: pytest.Session) -> Jobs:
        """Return the session's."""
        if cls._key not in session.stash:
            session.stash[cls._key] = cls()
        return session.stash[cls._key]

    def run(self, item: RanksFunction) -> None:
        """Run `item` on its ranks; raise its error."""
        if self._job is None or item.nodeid not in self._job.left:
            self.close()
            self._job = _ProcessJob(item)
        job = self._job
        try:
            ended = job.wait_for(item.nodeid, _seconds(item))
        except BaseException:  # pytest-timeout, or Ctrl-C: it hangs, and the next test shall not wait for it
            self.close()
            raise
        if mpi := next((end["mpi"] for end in ended.values() if end["mpi"]), None):
            item.user_properties.append(("mpi", mpi))
        complaint = None
        if not job.left:
            complaint = job.finish()
            self._job = None
        elif any(end["failures"] for end in ended.values()) or len(ended) < job.size:
            self.close()
        _tell(item, job, ended)
        if complaint:
            pytest.fail(complaint, pytrace=False)

    def close(self) -> None:
        """End the job that runs, if any."""
        if self._job is not None:
            self._job.kill()
            self._job = None


def _seconds(item: RanksFunction) -> float:
    """Return how long a test may take on its ranks: what pytest-timeout allows it by a mark, where that is more."""
    seconds: float = item.config.getoption("--aiodist-timeout")
    mark = item.get_closest_marker("timeout")
    return seconds if mark is None else max(seconds, *mark.args[:1], mark.kwargs.get("timeout") or 0)


def _tell(item: RanksFunction, job: _ProcessJob, ended: dict[int, _End]) -> None:
    """Raise what the ranks report."""
    failures = sorted((f for end in ended.values() for f in end["failures"]), key=lambda f: (f["peer"], f["at"]))
    missing = [rank for rank in range(job.size) if rank not in ended]
    if failures:
        first = failures[0]
        others = [f"rank {f['rank']}: {f['short']}" for f in failures[1:]]
        others += [f"rank {rank}: no result" for rank in missing]
        lines = [f"rank {first['rank']} of {job.size} over {item.spec.backend}:", first["text"], *others]
        pytest.fail("\n".join(lines), pytrace=False)
    if missing:
        pytest.fail(f"ranks {missing} of {job.size} gave no result; the job's output:\n{job.output()}", pytrace=False)
    if skipped := next((end["skipped"] for end in ended.values() if end["skipped"]), None):
        pytest.skip(skipped)


class _ProcessJob:
    """Processes that run some tests in order, each process all of them."""

    def __init__(self, first: RanksFunction) -> None:
        """Start the job of `first` and of all that comes after it and goes with it."""
        spec, config = first.spec, first.config
        choice = _mpi_choice(spec.backend)
        items = first.session.items[first.session.items.index(first) :]
        self.size = spec.size
        self.left = [
            item.nodeid
            for item in items
            if isinstance(item, RanksFunction) and item.on_processes and item.job == first.job
        ]
        self._output = ""
        self._seen: dict[str, dict[int, _End]] = {nodeid: {} for nodeid in self.left}
        self._read = [0] * self.size
        self._folder = folder = Path(tempfile.mkdtemp(prefix="aiodist-test-"))
        paths = [str(config.rootpath / nodeid) for nodeid in self.left]
        (folder / "arguments").write_text(json.dumps([*_pytest_arguments(config, folder), *paths]))
        launcher = [sys.executable, "-m", "aiodist.cli", "run", "-n", str(spec.size), "--mpi", choice]
        worker = ["--kill-after", "2", "-m", "aiodist.testing.jobs", str(folder)]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*launcher, *worker],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=config.invocation_params.dir,
                env={**os.environ, "PYTHONPATH": path}
                | ({"AIODIST_BACKEND": spec.backend} if choice == "none" else {})
                | ({"AIODIST_SHM": "0"} if spec.backend == "mpich" and _MPICH in os.environ else {}),
            )

    def wait_for(self, nodeid: str, seconds: float) -> dict[int, _End]:
        """Return how the test ended, by rank; a rank is missing that died or did not end in time."""
        self.left.remove(nodeid)
        until = time.monotonic() + seconds
        ended = self._seen[nodeid]
        while len(ended) < self.size and time.monotonic() < until:
            alive = self._process.poll() is None
            self._read_on()
            if any(end["failures"] for end in ended.values()):
                until = min(until, time.monotonic() + _OTHERS_SECONDS)
            if not alive:
                break
            time.sleep(_POLL_SECONDS)
        return ended

    def _read_on(self) -> None:
        for rank in range(self.size):
            file = self._folder / f"rank-{rank}"
            if not file.exists():
                continue
            with file.open("rb") as lines:
                lines.seek(self._read[rank])
                # A line that is still being written is read later, from where it begins.
                for line in takewhile(lambda line: line.endswith(b"\n"), lines):
                    self._read[rank] += len(line)
                    record = json.loads(line)
                    self._seen.setdefault(record["nodeid"], {})[rank] = record

    def finish(self) -> str | None:
        """Wait for the end of the job after its tests; return the problem with that end, if any."""
        try:
            code = self._process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        failed = any(end["failures"] for ends in self._seen.values() for end in ends.values())
        complaint = None
        if code is None:
            complaint = f"the job did not end within {_LEAVE_SECONDS:g} s of its last test:\n{self.output()}"
        elif code and not failed:
            complaint = f"its tests passed, then the job ended with exit code {code}:\n{self.output()}"
        self.kill()
        return complaint

    def output(self) -> str:
        """Return the end of the processes' output."""
        if self._folder.exists():
            self._output = (self._folder / "output").read_text(errors="replace")[-8000:]
        return self._output

    def kill(self) -> None:
        """Leave nothing of it behind."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(signum)  # the launcher passes it on, and kills what does not heed it
                try:
                    self._process.wait(_LEAVE_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        self.output()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def carrier(backend: str) -> str:
    """Return what carries the ranks of `backend`: its own name, for "mpi" that of the MPI which is found first."""
    found = find_mpi("auto", os.environ.get("PATH", os.defpath)) if backend == "mpi" else None
    return backend if found is None else found.flavour.value


def _mpi_choice(backend: str) -> str:
    """Return what `--mpi` is given; skip where the backend is not installed."""
    if backend in ("gloo", "shm"):
        return "none"
    choice = {"mpi": "auto"}.get(backend, backend)
    if backend == "mpich" and (prefix := os.environ.get(_MPICH)):
        return str(Path(prefix) / "bin" / "mpirun")
    try:
        found = find_mpi(choice, os.environ.get("PATH", os.defpath))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    if found is None:
        pytest.skip("no MPI is installed")
    return choice


def _pytest_arguments(config: pytest.Config, folder: Path) -> list[str]:
    """Return the options with which each rank runs pytest."""
    plugin = sys.modules["aiodist.testing.plugin"]
    manager = config.pluginmanager
    arguments = [f"--aiodist-worker={folder}", f"--rootdir={config.rootpath}", "-p", "no:cacheprovider", "-q"]
    # A rank has imported aiodist by the time pytest would rewrite the assertions of its plugin.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if manager.get_name(plugin) == plugin.__name__:  # it was not found as an installed plugin
        arguments += ["-p", plugin.__name__]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    if manager.has_plugin("xdist"):
        arguments += ["-n0"]
    # this process decides which failures are expected, which tests run, and the output
    return [
        *arguments,
        f"--aiodist-backend={config.getoption('--aiodist-backend')}",
        f"--import-mode={config.getoption('importmode')}",
        "--runxfail",
        "--no-header",
        "-m",
        "",
    ]


class Reporter:
    """In a rank of a job: writes down how each test ended, and stops at the first failure."""

    def __init__(self, folder: str) -> None:
        self._rank = Environment.read().rank
        self._file = Path(folder) / f"rank-{self._rank}"
        self._failures: list[dict[str, Any]] = []
        self._skipped = ""
        self._peer = False
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember whom to stop."""
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """See whether the failure is only news of another rank's."""
        from aiodist.errors import CommunicatorAborted, PeerError

        self._peer = call.excinfo is not None and isinstance(call.excinfo.value, (PeerError, CommunicatorAborted))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what went wrong."""
        if report.failed:
            captured = [f"--- {name}\n{text}" for name, text in report.sections if text]
            text = "\n".join([report.longreprtext, *captured])
            short = text if report.longrepr is None else str(report.longrepr).strip().splitlines()[-1]
            self._failures.append(
                {"rank": self._rank, "text": text, "short": short, "peer": self._peer, "at": time.time()}
            )
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._skipped = report.longrepr[2]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write it down."""
        library = sys.modules.get("aiodist.backends.mpi")
        version = "" if library is None else library.library_version()  # of the MPI that this process runs under
        mpi = next((name for name in ("Open MPI", "MPICH") if name in version), version)
        record = {"nodeid": nodeid, "mpi": mpi, "skipped": self._skipped, "failures": self._failures}
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._failures and self._session is not None:
            self._session.shouldstop = "a test failed: the others run in a new job"
        self._failures, self._skipped = [], ""


def main() -> int:
    """Be one rank of a job: run pytest as the folder says; results go to a file there. A failed test fails no job."""
    # When one rank fails, the launcher ends the others: first they shall write down how it went for them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    arguments = json.loads((folder / "arguments").read_text())
    # ranks with a common folder would remove the files of each other
    code = pytest.main([*arguments, f"--basetemp={folder / f'tmp-{Environment.read().rank}'}"])
    fine = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    return 0 if code in fine else int(code)


if __name__ == "__main__":
    sys.exit(main())
