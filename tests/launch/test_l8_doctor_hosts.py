"""`aiodist doctor --hosts` with a remote shell that fakes hosts, each with a fault of its own."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aiodist.doctor import hosts as doctor
from aiodist.doctor.ask import Answer
from aiodist.doctor.findings import Finding, Report, State, fail, ok
from aiodist.doctor.hosts import Question, examine_hosts
from aiodist.launch.hosts import Host

_AGENT = """\
#!/bin/sh
host=$1; shift
case $host in
good) exec env -i PATH=/usr/bin:/bin sh -c "$*";;
closed) echo "closed: Permission denied (publickey,password)." >&2; exit 255;;
unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255;;
stranger) echo "Host key verification failed." >&2; exit 255;;
csh) case "$*" in *'!'*|*"
"*) echo "Unmatched '." >&2; exit 1;; esac; exec env -i PATH=/usr/bin:/bin sh -c "$*";;
chatty) echo "Welcome to chatty!"; exec env -i PATH=/usr/bin:/bin sh -c "$*";;
nopython) exec sh -c "$(printf %s "$*" | sed 's#{python}#/no/python#g')";;
old) exec sh -c "$(printf %s "$*" | sed 's#{python}#{old}#g')";;
silent) exec sleep 60;;
esac
"""
_OLD = """\
#!/bin/sh
read -r program
read -r question
echo '{answer}'
"""


@pytest.fixture
def question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Question:
    """A question without hosts, put in a folder with a script."""
    (tmp_path / "bin").mkdir()
    _program(tmp_path / "bin" / "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    _program(tmp_path / "bin" / "prted", "#!/bin/sh\n")
    parts = {
        "Python": "3.11.0",
        "torch": "1.0",
        "source": "0123",
        **dict.fromkeys(["aiodist", "numpy", "folder", "script"]),
    }
    answer = {"parts": parts, "daemon": None, "cores": 1, "all cores": 1, "address": None, "trouble": "timed out"}
    old = _program(tmp_path / "old-python", _OLD.format(answer=json.dumps(answer)))
    agent = _AGENT.format(python=sys.executable, old=old)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    mpi, packages = str(tmp_path / "bin" / "mpirun"), ("aiodist", "torch", "numpy")
    return Question([], _program(tmp_path / "agent", agent), mpi=mpi, script="train.py", packages=packages)


def _program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def ask(monkeypatch: pytest.MonkeyPatch, question: Question, *names: str) -> Report:
    """Return the report on the hosts of these names, whose ranks do not meet."""
    monkeypatch.setattr(doctor, "ask_ranks", lambda *job: Answer(None, "not tried"))
    return examine_hosts(replace(question, hosts=[Host(name) for name in names]))


def found_on(report: Report, name: str) -> Mapping[str, Finding]:
    return report.findings[name]


def test_l8_doctor_hosts_that_have_everything(monkeypatch: pytest.MonkeyPatch, question: Question) -> None:
    report = ask(monkeypatch, question, "good", "chatty", "csh")
    assert report.verdict == "not ready: the ranks did not meet: not tried"
    parts = ["Python", "aiodist", "torch", "numpy", "source", "folder", "script"]
    for name in ("good", "chatty", "csh"):
        found = found_on(report, name)
        assert list(found) == ["reachable", "MPI", *parts, "ports", "cores"]
        assert {finding.state for finding in found.values()} <= {State.OK, State.WARN}


def test_l8_doctor_hosts_takes_no_file_of_the_working_directory_for_a_module(
    monkeypatch: pytest.MonkeyPatch, question: Question
) -> None:
    for name in ("json.py", "hashlib.py", "torch.py"):
        Path(name).write_text("raise RuntimeError('not that one')")
    found = found_on(ask(monkeypatch, question, "good"), "good")
    assert {finding.state for finding in found.values()} <= {State.OK, State.WARN}


def test_l8_doctor_hosts_that_cannot_be_reached_say_why(monkeypatch: pytest.MonkeyPatch, question: Question) -> None:
    report = ask(monkeypatch, question, "closed", "unknown", "stranger")
    assert not report.usable
    assert all(list(found_on(report, name)) == ["reachable"] for name in report.findings)
    seen = {name: found_on(report, name)["reachable"] for name in report.findings}
    assert "Permission denied" in seen["closed"].detail
    assert "ssh-copy-id closed" in seen["closed"].remedy
    assert "DNS, /etc/hosts" in seen["unknown"].remedy
    assert "accept its key" in seen["stranger"].remedy
    assert "closed: reachable: closed: Permission denied" in report.verdict


def test_l8_doctor_hosts_that_lack_something(monkeypatch: pytest.MonkeyPatch, question: Question) -> None:
    report = ask(monkeypatch, question, "nopython", "old")
    python = found_on(report, "nopython")["Python"]
    assert (python.state, "/no/python" in python.detail) == (State.FAIL, True)
    assert "same path" in python.remedy
    old = found_on(report, "old")
    assert (old["Python"].state, old["Python"].detail.startswith("3.11.0, here ")) == (State.FAIL, True)
    assert old["torch"].detail.startswith("1.0, here ")
    assert old["numpy"].detail.startswith("missing, here ")
    assert "-m pip install numpy==" in old["numpy"].remedy
    for name in ("MPI", "source", "folder", "script", "ports"):
        assert old[name].state is State.FAIL
    assert old["ports"].detail == "to this host: timed out"
    assert old["cores"].state is State.WARN
    Path("bin/prted").unlink()
    mpi = found_on(ask(monkeypatch, question, "good"), "good")["MPI"]
    assert (mpi.state, "prted" in mpi.detail) == (State.FAIL, True)
    assert mpi.remedy == "install the same MPI at the same path"


def test_l8_doctor_hosts_that_say_nothing_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, question: Question
) -> None:
    report = ask(monkeypatch, replace(question, seconds=0.3), "silent")
    assert found_on(report, "silent")["reachable"].detail == "no answer within 0.3 s"


def test_l8_doctor_hosts_as_json() -> None:
    closed = {"reachable": fail("Permission denied", "ssh-copy-id b")}
    said = json.loads(Report(False, "not ready", {"a": {}, "b": closed}).to_json())
    assert (said["usable"], said["findings"]["b"]["reachable"]["state"]) == (False, "fail")


def test_l8_doctor_hosts_with_problems_are_named() -> None:
    closed = {"reachable": fail("Permission denied [publickey]", "ssh-copy-id b")}
    text = io.StringIO()
    Report(False, "not ready", {"a": {"reachable": ok()}, "b": closed}).show(Console(file=text, width=40))
    assert text.getvalue().splitlines() == [
        *("not ready", "Problems and their fixes", "  b, reachable   fail Permission denied [publickey]"),
        *(f"{'':<22}do: ssh-copy-id b", "a", "  reachable      ok"),
    ]


def test_l8_doctor_hosts_has_ranks_meet_without_mpi_too() -> None:
    report = examine_hosts(Question([Host("localhost")], mpi="none"))
    assert (report.usable, report.verdict) == (True, "ready: a rank on each of 1 hosts met: local")
