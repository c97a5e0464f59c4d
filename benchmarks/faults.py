"""`python -m benchmarks faults`: runs of four ranks with a fault at a random moment; loads no torch.

A run is *survived* if every rank got the right result, *named* if every rank raised an error that names the right rank,
*ended* if the job had to end and did, *hung* if it did not end in time, and *wrong* otherwise. A run that leaves a
process, a file or memory is *wrong* too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import typer

from aiodist.bench.plan import parse_names
from aiodist.errors import BackendUnavailable
from aiodist.launch.discover import find_mpi

__all__ = ["FAULTS", "Outcome", "app", "observe"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FAULTS = {
    "kill": "named",
    "raise": "named",
    "stop": "survived",
    "block": "survived",
    "crossed": "named",
    "mismatch": "survived",
    "interrupt": "ended",
    "absent": "named",
    "launcher": "ended",
    "stall": "survived",
    "cut": "named",
}
"""Faults, and the expected end of a run."""
WORKER = Path(__file__).with_name("faults_worker.py")
_RANKS = 4
_LAUNCHERS = ("none", "openmpi", "mpich")
_DEADLINE = 40.0
_GONE_SECONDS = 5.0
_MEMORY = Path("/dev/shm")

Notes = dict[int, dict[str, Any]]
"""The notes of each rank."""


@dataclass(frozen=True)
class Outcome:
    """The end of one run."""

    fault: str
    launcher: str
    seed: int
    how: str
    why: str
    seconds: float
    """The run time of the launcher."""


def observe(fault: str, launcher: str, seed: int, command: Callable[[list[str]], Sequence[str]]) -> Outcome:
    """Run a job once; `command` returns the command of four ranks of `faults_worker.py` with these arguments."""
    with tempfile.TemporaryDirectory(prefix="f") as folder:
        said, scratch = Path(folder, "said"), Path(folder, "tmp")
        said.mkdir()
        scratch.mkdir()
        before = set(_MEMORY.iterdir())
        began = time.monotonic()
        with subprocess.Popen(
            command([fault, str(seed), str(said)]),
            cwd=scratch,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            late = _until_over(process, fault, said, Random(seed))
            errors = process.stderr.read() if process.stderr is not None and not late else ""
        seconds = time.monotonic() - began
        notes = _read(said)
        # a killed launcher cannot remove mpirun's folder
        left = _left(notes, scratch, before, everything=fault != "launcher" or launcher not in _LAUNCHERS[1:])
        why = left or ("" if late else _judge(fault, seed, process.returncode, notes, errors))
        how = "hung" if late else "wrong" if why else FAULTS[fault]
        return Outcome(fault, launcher, seed, how, f"{why}\n{errors}" if why else "", seconds)


def _until_over(process: subprocess.Popen[str], fault: str, said: Path, random: Random) -> bool:
    """Inject faults of the launcher, and wait for its end; return True if it is late."""
    deadline = time.monotonic() + _DEADLINE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if fault in ("interrupt", "launcher"):
        while sum("ready" in notes for notes in _read(said).values()) < _RANKS and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.random() / 2)
        process.send_signal(signal.SIGINT if fault == "interrupt" else signal.SIGKILL)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return True
    return False


def _read(said: Path) -> Notes:
    notes: Notes = {}
    for file in said.iterdir():
        merged = notes.setdefault(int(file.name), {})
        for line in file.read_text().splitlines():
            if not merged.get("end"):  # the first error counts
                merged.update(json.loads(line))
    return notes


def _left(notes: Notes, scratch: Path, before: set[Path], *, everything: bool) -> str:
    """Return the remaining processes, files and memory after a grace time."""
    until = time.monotonic() + _GONE_SECONDS
    while True:
        processes = [pid for note in notes.values() if _lives(pid := note["pid"])]
        files = [str(path.relative_to(scratch)) for path in scratch.rglob("*") if not path.is_dir()]
        memory = [path.name for path in set(_MEMORY.iterdir()) - before]
        if memory and not processes:
            memory = _unused(memory)
        if not (processes or (everything and (files or memory))):
            return ""
        if time.monotonic() > until:
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
            return f"left: processes {processes}, files {files}, memory {memory}"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().partition(")")[2][:4]
    except OSError:
        return False


def _unused(names: list[str]) -> list[str]:
    """Return the names that no process maps or has open; the others belong to other jobs."""
    used = ""
    for found, seen in (("[0-9]*/maps", Path.read_text), ("[0-9]*/fd/*", os.readlink)):
        for path in Path("/proc").glob(found):
            with suppress(OSError):  # the process has ended, or belongs to another user
                used += str(seen(path))
    return [name for name in names if name not in used]


def _judge(fault: str, seed: int, code: int, notes: Notes, errors: str) -> str:
    """Return the problem with the end of a run, or an empty string."""
    victim = _victim(seed)
    ends = {rank: note.get("end") for rank, note in notes.items()}
    if sorted(notes) != list(range(_RANKS)):
        return f"only {sorted(notes)} came"
    others = [rank for rank in range(_RANKS) if rank != victim]
    match FAULTS[fault]:
        case "survived":
            named = fault != "mismatch" or all(victim in note.get("told", []) for note in notes.values())
            fine = code == 0 and set(ends.values()) == {"right"} and named
        case "named":
            cause = {"kill": f"rank {victim}: signal SIGKILL", "raise": f"rank {victim}: exit code 1"}.get(fault)
            told = cause is None or cause in errors.splitlines()
            # a rank that has finished all calls does not need a rank without a connection
            left = [rank for rank in others if fault != "cut" or ends[rank] != "right"]
            blamed = [notes[rank].get("named", []) for rank in left]
            # if two ranks wait for each other, both are named
            right = all(victim in names if fault == "crossed" else names == [victim] for names in blamed)
            fine = (code > 0 or not left) and told and right
        case _:
            fine = code == (130 if fault == "interrupt" else -signal.SIGKILL)
    return "" if fine else f"exit code {code}, the fault was rank {victim}'s, {notes}"


def _victim(seed: int) -> int:
    """Return the victim, the first number that the worker's `Plan` draws."""
    return Random(seed).randrange(_RANKS)


def _command(launcher: str) -> Callable[[list[str]], list[str]]:
    path = launcher
    if launcher != "none":
        prefix = os.environ.get("AIODIST_TEST_MPICH") if launcher == "mpich" else None
        path = f"{prefix}/bin/mpirun" if prefix else launcher
        find_mpi(path, os.environ.get("PATH", os.defpath))
    run = [sys.executable, "-m", "aiodist.cli", "run", "-n", str(_RANKS), "--mpi", path, str(WORKER)]
    return lambda arguments: [*run, *arguments]


@app.command()
def faults(
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each fault under each launcher.")] = 10,
    only: Annotated[str | None, typer.Option(metavar="NAMES", help=f"Some of {', '.join(FAULTS)} (all).")] = None,
    mpi: Annotated[str, typer.Option(metavar="NAMES", help="Launchers.")] = ",".join(_LAUNCHERS),
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the first run.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Every run, as JSON.")] = None,
) -> None:
    """Inject faults into ranks, and print how the runs ended. The exit code is 1 if a run hung or was wrong."""
    outcomes: list[Outcome] = []
    typer.echo(
        f"{'fault':<10} {'launcher':<8} {'survived':>8} {'named':>6} {'ended':>6} {'hung':>5} {'wrong':>6}   seconds"
    )
    for launcher in parse_names("--mpi", mpi, _LAUNCHERS):
        try:
            command = _command(launcher)
        except BackendUnavailable as error:
            typer.echo(f"{launcher}: {error}")
            continue
        for fault in parse_names("--only", only, tuple(FAULTS)) if only else FAULTS:
            mine = [observe(fault, launcher, seed + number, command) for number in range(runs)]
            outcomes += mine
            _show(mine)
            if json_file is not None:  # now, since the next run can be interrupted
                json_file.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    raise typer.Exit(any(outcome.why or outcome.how == "hung" for outcome in outcomes))


def _show(outcomes: list[Outcome]) -> None:
    how = Counter(outcome.how for outcome in outcomes)
    times = [outcome.seconds for outcome in outcomes]
    typer.echo(
        f"{outcomes[0].fault:<10} {outcomes[0].launcher:<8} {how['survived']:>8} {how['named']:>6} {how['ended']:>6} "
        f"{how['hung']:>5} {how['wrong']:>6}   {median(times):.1f} (at most {max(times):.1f})"
    )
    for outcome in outcomes:
        if outcome.why or outcome.how == "hung":
            typer.echo(f"  seed {outcome.seed}: {outcome.how} {outcome.why}")
