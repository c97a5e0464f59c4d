"""Run every check and the contract tier of the tests, continue after a failure, and print a summary, for `make test`.

`--tier thorough` runs the tests that this leaves to `make test-all`, and `--changed COMMIT` those of the tier that the
difference to a commit concerns (tools/changed.py). Other arguments are given to pytest; the checks are skipped then.

pytest-xdist runs the tests in one process more than cores. One failed test fails the run. Failed tests run once more,
alone, and the summary shows the result, as a sign of chance. `--forgive N`, for a shared machine, passes a run with at
most N failed tests if all of them passed the second time. After a crash, which nothing forgives,
faulthandler prints the stacks of all threads. Tests listed in tests/quarantine.toml may fail. The summary compares the
CPU time of each folder with tests/budget.toml, and counts the tests that ran under each MPI: those that recorded a
property `mpi` (pytest's `record_property("mpi", "Open MPI")`), or whose id names one. Each row of tests/CONTRACT.md
needs a test in the contract tier.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import psutil

from tools.changed import tests_of_changes
from tools.rows import row_ids

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
_TIERS = {"contract": "not soak and not thorough", "thorough": "(thorough or hypothesis) and not soak"}
_OVER = 1.5
"""The factor over its budget with which a folder fails the run."""
_STEAL = 0.05
"""The part of the CPU time that other machines may take of this one before it counts as busy."""
_ROW = re.compile(r"test_([a-z]\d+)_")
_MPI_IN_ID = {
    "Open MPI": re.compile(r"open_?mpi", re.IGNORECASE),
    "MPICH": re.compile("mpich", re.IGNORECASE),
}


@dataclass(frozen=True)
class Step:
    """One command of the run."""

    name: str
    command: list[str]


@dataclass(frozen=True)
class End:
    """The end of a step, with its exit code."""

    name: str
    code: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name:<18} {'ok' if self.code == 0 else f'FAILED ({self.code})':<12} {self.seconds:6.1f} s"


@dataclass(frozen=True)
class Machine:
    """The processes that were ready to run before the tests, and the CPU times of the machine."""

    load: float
    times: tuple[float, ...]

    @classmethod
    def now(cls) -> Machine:
        """Return it as it is."""
        return cls(psutil.getloadavg()[0], tuple(psutil.cpu_times()))

    def busy(self) -> str | None:
        """Return what else used this machine since then, or None."""
        past = [after - before for before, after in zip(self.times, psutil.cpu_times(), strict=True)]
        steal = past[psutil.cpu_times()._fields.index("steal")] / max(sum(past), 1e-9)
        if self.load > 1 or steal > _STEAL:
            return f"load {self.load:.1f} before the run, {steal:.0%} stolen during it"
        return None


def steps() -> list[Step]:
    """Return the quick checks in order, each from the folder of the running interpreter."""
    bin_dir = Path(sys.executable).parent
    python = [sys.executable, "-m"]
    return [
        Step("ruff check", [*python, "ruff", "check", "."]),
        Step("ruff format", [*python, "ruff", "format", "--check", "."]),
        Step("import contracts", [str(bin_dir / "lint-imports")]),
        Step("rows", [sys.executable, "tools/rows.py"]),
    ]


def run(step: Step) -> End:
    """Run a step to its end."""
    print(f"\n=== {step.name}", flush=True)
    start = time.monotonic()
    return End(step.name, subprocess.call(step.command, cwd=ROOT), time.monotonic() - start)


@contextlib.contextmanager
def beside(log: Path, ends: list[End]) -> Iterator[None]:
    """Run mypy, which takes half a minute without a cache, during the block."""
    start = time.monotonic()
    with log.open("wb") as output:
        mypy = subprocess.Popen([sys.executable, "-m", "mypy"], cwd=ROOT, stdout=output, stderr=output)
        yield
        ends.append(End("mypy", mypy.wait(), time.monotonic() - start))
    print(f"\n=== mypy\n{log.read_text()}", flush=True)


def pytest(name: str, report: Path, arguments: list[str]) -> Step:
    """Return the step that runs pytest with a JUnit report."""
    report.unlink(missing_ok=True)
    return Step(name, [sys.executable, "-m", "pytest", f"--junit-xml={report}", *arguments])


def cases(report: Path) -> Iterator[ElementTree.Element]:
    """Iterate over the tests of a JUnit report; over none if pytest has not written one."""
    if report.exists():
        yield from ElementTree.parse(report).getroot().iter("testcase")


def outcome(case: ElementTree.Element) -> str:
    """Return how a test ended."""
    for tag in ("error", "failure", "skipped"):
        if case.find(tag) is not None:
            return "skipped" if tag == "skipped" else "failed"
    return "passed"


def mpis(case: ElementTree.Element) -> set[str]:
    """Return the MPIs that a test ran under."""
    recorded = {p.get("value", "") for p in case.iter("property") if p.get("name") == "mpi"}
    return recorded or {mpi for mpi, pattern in _MPI_IN_ID.items() if pattern.search(case.get("name", ""))}


def failed_in(report: Path) -> set[str]:
    """Return the names of the tests that failed."""
    return {f"{case.get('classname')}.{case.get('name')}" for case in cases(report) if outcome(case) == "failed"}


def crashed_in(report: Path) -> bool:
    """Return True if a test ended the process that ran it."""
    errors = [error.get("message") or "" for case in cases(report) for error in case.iter("error")]
    return any("crashed while running" in text for text in errors)


def tally(report: Path) -> str:
    """Return the number of tests that ended in each way, and that ran under each MPI."""
    outcomes: Counter[str] = Counter()
    under: Counter[str] = Counter()
    for case in cases(report):
        outcomes[outcome(case)] += 1
        if outcome(case) != "skipped":
            under.update(mpis(case) or {"no MPI"})
    ended = ", ".join(f"{count} {how}" for how, count in sorted(outcomes.items()))
    which = ", ".join(f"{count} under {mpi}" for mpi, count in sorted(under.items()))
    return f"tests: {ended or 'none'}\n       of those that ran: {which or 'none'}"


def cpu_of_folders(report: Path) -> dict[str, float]:
    """Return the CPU seconds of each folder of tests; tests/conftest.py records those of each file."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in cases(report):
        folder = (case.get("classname") or "").removeprefix("tests.").split(".")[0]
        seconds[folder] += sum(float(p.get("value", 0)) for p in case.iter("property") if p.get("name") == "cpu")
    return seconds


def over_budget(seconds: Mapping[str, float]) -> list[str]:
    """Print the CPU time and the budget of each folder; return the folders that are far over budget."""
    budget: dict[str, float] = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())["seconds"]
    print("\nCPU seconds     used  budget")
    for folder in sorted(budget.keys() | seconds.keys(), key=lambda folder: -seconds.get(folder, 0.0)):
        print(f"{folder:<14} {seconds.get(folder, 0.0):6.1f} {budget.get(folder, 0.0):7.1f}")
    print(f"{'all':<14} {sum(seconds.values()):6.1f} {sum(budget.values()):7.1f}")
    return [folder for folder, used in seconds.items() if used > _OVER * budget.get(folder, 1.0)]


def rows_without_tests(report: Path) -> list[str]:
    """Return the rows of tests/CONTRACT.md that no test of the report bears."""
    found = {match[1].upper() for case in cases(report) if (match := _ROW.match(case.get("name") or ""))}
    return [row for row in row_ids((ROOT / "tests" / "CONTRACT.md").read_text(encoding="utf-8")) if row not in found]


def let_cores_be_written() -> None:
    """Raise the limit of core files, and print where the system puts them."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    pattern = Path("/proc/sys/kernel/core_pattern")
    print(f"cores of crashed processes: {pattern.read_text().strip() if pattern.exists() else 'as the system has it'}")


def main(arguments: list[str]) -> int:
    """Run all steps, print the summary, return 1 if one of them failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", choices=_TIERS, default="contract")
    parser.add_argument("--forgive", type=int, default=0, help="the number of failed tests that may pass once more")
    parser.add_argument("--changed", metavar="COMMIT", help="run the tests of what differs from this commit alone")
    parser.add_argument("--build", type=Path, default=BUILD, help="the folder of reports and of pytest's cache")
    options, pytest_args = parser.parse_known_args(arguments)
    options.build.mkdir(exist_ok=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile and rewrite the tests again
    let_cores_be_written()
    whole = options.tier == "contract" and not (options.changed or pytest_args)
    if options.changed and not (concerned := tests_of_changes(ROOT, options.changed)):
        print(f"no test is concerned by what differs from {options.changed}")
        return 0
    if options.changed:
        pytest_args += concerned

    ends = [run(step) for step in (steps() if whole else ())]
    machine, report = Machine.now(), options.build / f"{options.tier}.xml"
    cache = ["-o", f"cache_dir={options.build / 'pytest_cache'}", "-m", _TIERS[options.tier]]
    spread = ["-n", str(1 + (os.cpu_count() or 1))]  # many tests wait for processes
    with beside(options.build / "mypy.log", ends) if whole else contextlib.nullcontext():
        end = run(pytest(options.tier, report, [*cache, *spread, *pytest_args]))
    failed, again = failed_in(report), set[str]()
    if failed:
        second = run(pytest("once more", options.build / "again.xml", [*cache, "--last-failed", *pytest_args]))
        again = failed_in(options.build / "again.xml")
        if second.code == 0 and len(failed) <= options.forgive and not crashed_in(report):
            end = replace(end, code=0)
    ends.append(end)
    print("\n=== summary", *ends, tally(report), sep="\n")
    for name in sorted(failed):
        print(f"failed, and {'failed again' if name in again else 'passed'} when it ran once more: {name}")
    if whole and (bare := rows_without_tests(report)):
        print(f"rows that have no test in this tier: {' '.join(bare)}")
        ends.append(End("rows of the tier", 1, 0))
    if whole and (over := over_budget(cpu_of_folders(report))):
        busy = machine.busy()
        print(f"far over the budget: {', '.join(over)}", f"({busy}: no failure)" if busy else "")
        ends.append(End("budget", int(not busy), 0))
    return int(any(end.code for end in ends))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
