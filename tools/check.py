"""Run every check and then the tests, go on after a failure, and end with a summary; `make test` calls this.

Arguments are handed to pytest. The summary counts the tests that ran under each MPI: those that recorded a
property `mpi` (pytest's `record_property("mpi", "Open MPI")`), or whose id names one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "tests.xml"
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
class Tally:
    """What pytest's report says: how many tests ended how, and how many that ran used which MPI."""

    outcomes: Counter[str]
    mpis: Counter[str]

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        under = ", ".join(f"{count} under {mpi}" for mpi, count in sorted(self.mpis.items()))
        return f"tests: {ended or 'none'}\n       of those that ran: {under or 'none'}"


def steps(pytest_args: list[str]) -> list[Step]:
    """Return the commands in order, each from the folder of the running interpreter."""
    bin_dir = Path(sys.executable).parent
    python = [sys.executable, "-m"]
    return [
        Step("ruff check", [*python, "ruff", "check", "."]),
        Step("ruff format", [*python, "ruff", "format", "--check", "."]),
        Step("mypy", [*python, "mypy"]),
        Step("import contracts", [str(bin_dir / "lint-imports")]),
        Step("rows", [sys.executable, "tools/rows.py"]),
        Step("pytest", [*python, "pytest", f"--junit-xml={REPORT}", *pytest_args]),
    ]


def tally(report: ElementTree.Element) -> Tally:
    """Return the counts of a JUnit report."""
    outcomes: Counter[str] = Counter()
    mpis: Counter[str] = Counter()
    for case in report.iter("testcase"):
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


def main(pytest_args: list[str]) -> int:
    """Run all steps, print the summary, return 1 when one of them failed."""
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    lines: list[str] = []
    failed = False
    for step in steps(pytest_args):
        print(f"\n=== {step.name}", flush=True)
        start = time.monotonic()
        code = subprocess.run(step.command, cwd=ROOT, check=False).returncode
        failed = failed or code != 0
        verdict = "ok" if code == 0 else f"FAILED ({code})"
        lines.append(f"{step.name:<18} {verdict:<12} {time.monotonic() - start:6.1f} s")
    print("\n=== summary")
    print("\n".join(lines))
    if REPORT.exists():
        print(tally(ElementTree.parse(REPORT).getroot()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
