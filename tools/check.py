"""Run every check and then the tests, go on after a failure, and end with a summary; `make test` calls this.

With `--thorough` the tests that this leaves out are run, and no checks: `make test-all` calls both.

Many tests wait for processes, so there are several runs of pytest, two more at a time than there are cores; what the
first prints is seen at once, what the others print in the end. Where a few tests failed, these run once more when
nothing else does: many have a limit of time, and machines are shared. One that passes then is no failure; the summary
names it, and what it met at first. So does a run of pytest that a signal has ended, a crash, as a whole: the summary
shows what its threads were at. Other arguments are handed to pytest, which then runs once. The summary counts the tests
that ran under each MPI: those that recorded a property `mpi` (pytest's `record_property("mpi", "Open MPI")`), or whose
id names one.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
_FOLDERS = (
    ("lifecycle",),
    ("nn",),
    ("backends", "collectives", "communicator"),
    ("control", "ps"),
    ("core", "watch"),
    ("bench", "engine", "packaging", "testing"),
    ("compat", "hosts", "integration", "launch"),
    ("docs", "examples"),
)
"""The folders of tests that have a run of pytest to themselves, the longest first; the rest has one too."""
_AT_A_TIME = 2 + (os.cpu_count() or 1)
_FEW = 5
"""So many failed tests run once more; where more have failed, something is broken."""
_SOME_FAILED = 1
"""What pytest exits with when it ran to its end."""
_CRASH = "Fatal Python error"
"""What faulthandler begins with, before the stacks of all threads."""
_LAST_WORDS = 100
"""So many lines of them are in the summary, and of what a test met."""
_MPI_IN_ID = {
    "Open MPI": re.compile(r"open_?mpi", re.IGNORECASE),
    "MPICH": re.compile("mpich", re.IGNORECASE),
}


@dataclass(frozen=True)
class Step:
    """One command of the run, the JUnit report that it writes if it runs tests, and where what it prints waits."""

    name: str
    command: list[str]
    report: Path | None = None
    log: Path | None = None


_MYPY = Step("mypy", [sys.executable, "-m", "mypy"], log=BUILD / "mypy.log")
"""It takes half a minute where it has no cache: it runs beside the tests."""


@dataclass(frozen=True, eq=False)
class End:
    """How a step ended: its exit code, or less than zero for the signal that did it."""

    step: Step
    code: int
    seconds: float

    def __str__(self) -> str:
        said = "ok" if self.code == 0 else f"FAILED ({self.code})"
        return f"{self.step.name:<18} {said:<12} {self.seconds:6.1f} s"

    @property
    def crashed(self) -> bool:
        """Whether it is a run of pytest that a signal has ended."""
        return self.step.report is not None and self.code < 0


@dataclass(frozen=True)
class Tally:
    """What pytest's report says: how many tests ended how, and how many that ran used which MPI."""

    outcomes: Counter[str]
    mpis: Counter[str]

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        under = ", ".join(f"{count} under {mpi}" for mpi, count in sorted(self.mpis.items()))
        return f"tests: {ended or 'none'}\n       of those that ran: {under or 'none'}"


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


def tests(pytest_args: list[str], *, thorough: bool) -> list[Step]:
    """Return what runs the tests: several parts, or one run with the arguments that were given."""
    name, ours = ("thorough", "thorough and not soak") if thorough else ("pytest", "not soak and not thorough")
    if pytest_args:
        return [_pytest(name, ["-m", ours, *pytest_args], shown=True)]
    parts = [[f"tests/{folder}" for folder in folders] for folders in _FOLDERS]
    rest = [f"--ignore={folder}" for folders in parts for folder in folders]
    return [
        _pytest(f"{name} 1", ["-m", f"{ours} and not processes", *rest], shown=True),
        _pytest(f"{name} 2", ["-m", f"{ours} and processes", "tests"]),  # the ranks of one job serve many of these
        *(
            _pytest(f"{name} {number}", ["-m", f"{ours} and not processes", *folders])
            for number, folders in enumerate(parts, 3)
        ),
    ]


def _pytest(name: str, arguments: list[str], *, shown: bool = False) -> Step:
    file = BUILD / name.replace(" ", "-")
    report = file.with_suffix(".xml")
    # What failed is remembered for each part: they run at the same time.
    options = [f"--junit-xml={report}", "-o", f"cache_dir={file.with_suffix('.cache')}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return Step(name, command, report, None if shown else file.with_suffix(".log"))


def again(part: Step) -> Step:
    """Return what runs the failed tests of a part once more; all of them where it crashed, and left no report."""
    assert part.report is not None
    name = f"{part.name} again"
    report = part.report.with_stem(f"{part.report.stem}-again")
    command = [word.replace(str(part.report), str(report)) for word in part.command]
    few = ["--last-failed", "--last-failed-no-failures=none"] if part.report.exists() else []
    return Step(name, [*command, *few], report)


def failed(report: Path | None) -> dict[str, str]:
    """Return the tests that a report calls failed, by name, and what each met."""
    assert report is not None
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {f"{c.get('classname')}.{c.get('name')}": _met(c) for c in cases if _outcome(c) in {"failed", "errors"}}


def _met(case: ElementTree.Element) -> str:
    found = [case.find(tag) for tag in ("error", "failure")]
    words = "\n".join(tag.get("message", "") for tag in found if tag is not None)
    return "\n".join(f"    {line}" for line in words.splitlines()[:_LAST_WORDS])


def tally(*reports: ElementTree.Element) -> Tally:
    """Return the counts of JUnit reports."""
    outcomes: Counter[str] = Counter()
    mpis: Counter[str] = Counter()
    for case in (case for report in reports for case in report.iter("testcase")):
        outcome = _outcome(case)
        outcomes[outcome] += 1
        if outcome != "skipped":
            mpis.update(_mpis(case) or {"no MPI"})
    return Tally(outcomes, mpis)


def _outcome(case: ElementTree.Element) -> str:
    for tag, outcome in (("error", "errors"), ("failure", "failed"), ("skipped", "skipped")):
        if case.find(tag) is not None:
            return outcome
    return "passed"


def _mpis(case: ElementTree.Element) -> set[str]:
    recorded = {p.get("value", "") for p in case.iter("property") if p.get("name") == "mpi"}
    name = case.get("name", "")
    return recorded or {mpi for mpi, pattern in _MPI_IN_ID.items() if pattern.search(name)}


def run(step: Step) -> End:
    """Run it, with what it prints in its log where it has one."""
    start = time.monotonic()
    if step.report is not None:
        step.report.unlink(missing_ok=True)
    # Thousands of processes import our modules and the tests: each would compile and rewrite them all anew.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with contextlib.ExitStack() as stack:
        output = None if step.log is None else stack.enter_context(step.log.open("wb"))
        code = subprocess.call(step.command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    return End(step, code, time.monotonic() - start)


def announced(step: Step) -> End:
    """Run what prints by itself."""
    print(f"\n=== {step.name}", flush=True)
    return run(step)


def printed(step: Step) -> str:
    """Return what went into its log."""
    return "" if step.log is None else step.log.read_text(errors="replace")


def last_words(log: str) -> list[str]:
    """Return the stacks of a run that crashed; the end of its log where there are none, as of one that was killed."""
    lines = log.splitlines()
    at = max((number for number, line in enumerate(lines) if line.startswith(_CRASH)), default=-_LAST_WORDS)
    return lines[at:][:_LAST_WORDS]


def once_more(ends: list[End]) -> dict[End, End]:
    """Run again what failed, where that was little, or crashed; return how that ended, by how it had ended before."""
    some_failed = [end for end in ends if end.step.report is not None and end.code == _SOME_FAILED]
    few = sum(len(failed(end.step.report)) for end in some_failed) <= _FEW
    for end in ends:
        if end.crashed and end.step.report is not None:
            end.step.report.unlink(missing_ok=True)  # one that crashed in its very last moment has left one
    return {end: announced(again(end.step)) for end in ends if few and (end.crashed or end in some_failed)}


def main(arguments: list[str]) -> int:
    """Run all steps, print the summary, return 1 when one of them failed."""
    thorough = arguments[:1] == ["--thorough"]
    pytest_args = arguments[thorough:]
    BUILD.mkdir(exist_ok=True)
    checks = [announced(step) for step in (() if thorough else steps())]
    parts = [*tests(pytest_args, thorough=thorough), *(() if thorough else (_MYPY,))]
    print(f"\n=== {parts[0].name}", flush=True)
    ends: list[End] = []
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        for end in threads.map(run, parts):
            ends.append(end)
            if end.step.log is not None:
                print(f"\n=== {end.step.name}", printed(end.step), sep="\n", flush=True)
    repeats = once_more(ends)
    print("\n=== summary")
    print(*checks, *ends, *repeats.values(), sep="\n")
    counted = [(repeats.get(end, end) if end.crashed else end).step.report for end in ends]
    print(tally(*(ElementTree.parse(report).getroot() for report in counted if report is not None and report.exists())))
    for first, second in repeats.items():
        names = {f"{first.step.name}, which crashed": ""} if first.crashed else failed(first.step.report)
        for name, met in names.items() if second.code == 0 else ():
            print(f"failed at first, and passed when it ran once more: {name}", met, sep="\n")
        if first.crashed:
            print(f"\n=== what {first.step.name} was at when it crashed", *last_words(printed(first.step)), sep="\n")
    return int(any(repeats.get(end, end).code for end in (*checks, *ends)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
