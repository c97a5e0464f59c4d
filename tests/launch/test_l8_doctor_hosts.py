"""`aiodist doctor --hosts` with a remote shell that fakes hosts, each with a fault of its own."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aiodist.doctor.hosts import HostsReport, Question, examine_hosts, show_hosts, try_together
from aiodist.doctor.report import Finding, State
from aiodist.launch.hosts import Host
from aiodist.testing.seams.mpi import Flavour, Mpi

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
nompi) exec sh -c "$(printf %s "$*" | sed 's#{mpi}#/no/mpi#g')";;
old) exec sh -c "$(printf %s "$*" | sed 's#{python}#{old}#g')";;
silent) exec sleep 60;;
esac
"""
_OLD = """\
#!/bin/sh
read -r program
read -r question
echo '{answer}'
read -r others
echo '{{}}'
read -r end
"""


@pytest.fixture
def question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Question:
    """A question without hosts, put in a folder with a script."""
    (tmp_path / "bin").mkdir()
    _program(tmp_path / "bin" / "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    _program(tmp_path / "bin" / "prted", "#!/bin/sh\n")
    answer = {
        "host": "old",
        "python": "3.11.0",
        "packages": {"aiodist": None, "torch": "1.0", "numpy": None},
        "aiodist": "0123",
        "folder": False,
        "script": None,
        "cores": 1,
        "launcher": "timed out",
        "address": None,
        "port": None,
    }
    old = _program(tmp_path / "old-python", _OLD.format(answer=json.dumps(answer)))
    agent = _AGENT.format(python=sys.executable, mpi=tmp_path / "bin", old=old)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    mpi, packages = str(tmp_path / "bin" / "mpirun"), ("aiodist", "torch", "numpy")
    return Question([], _program(tmp_path / "agent", agent), mpi=mpi, script="train.py", packages=packages)


def _program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def _not_tried(question: Question, mpi: Mpi | None, found: object) -> Finding:
    return Finding("MPI over all", State.UNUSABLE, "")


def ask(question: Question, *names: str) -> dict[str, dict[str, Finding]]:
    """Return what is found on the hosts of these names, by host and check."""
    asked = replace(question, hosts=[Host(name) for name in names])
    report = asyncio.run(asyncio.wait_for(examine_hosts(asked, _not_tried), 60))
    return {name: {finding.name: finding for finding in found} for name, found in report.hosts.items()}


def test_l8_doctor_hosts_that_have_everything(question: Question) -> None:
    for found in ask(question, "good", "chatty", "csh").values():
        assert list(found) == [
            "reachable",
            "MPI",
            "Python",
            "packages",
            "aiodist",
            "folder",
            "script",
            "ports",
            "cores",
        ]
        assert {finding.state for finding in found.values()} <= {State.AVAILABLE, State.LIMITED}
        assert found["script"].detail == "train.py, the same"


def test_l8_doctor_hosts_takes_no_file_of_the_working_directory_for_a_module(question: Question) -> None:
    for name in ("json.py", "hashlib.py", "torch.py"):
        Path(name).write_text("raise RuntimeError('not that one')")
    (found,) = ask(question, "good").values()
    assert {finding.state for finding in found.values()} <= {State.AVAILABLE, State.LIMITED}


def test_l8_doctor_hosts_that_cannot_be_reached_say_why(question: Question) -> None:
    found = ask(question, "closed", "unknown", "stranger")
    assert all(list(of_one) == ["reachable"] for of_one in found.values())
    seen = {name: of_one["reachable"] for name, of_one in found.items()}
    assert "Permission denied" in seen["closed"].detail
    assert "ssh-copy-id closed" in seen["closed"].remedy
    assert "a name that this host knows" in seen["unknown"].remedy
    assert "accept its key" in seen["stranger"].remedy


def test_l8_doctor_hosts_that_lack_something(question: Question) -> None:
    found = ask(question, "nopython", "nompi", "old")
    python = found["nopython"]["Python"]
    assert (python.state, "/no/python" in python.detail) == (State.UNUSABLE, True)
    assert "same path" in python.remedy
    mpi = found["nompi"]["MPI"]
    assert (mpi.state, "prted" in mpi.detail, mpi.remedy) == (
        State.UNUSABLE,
        True,
        "install the same Open MPI at the same path",
    )
    old = found["old"]
    assert (old["Python"].state, old["Python"].detail.startswith("3.11.0, here ")) == (State.UNUSABLE, True)
    assert "torch 1.0, here " in old["packages"].detail
    assert "numpy missing, here " in old["packages"].detail
    assert "-m pip install" in old["packages"].remedy
    assert "differs" in old["aiodist"].detail
    for name in ("folder", "script", "ports"):
        assert old[name].state is State.UNUSABLE
    assert old["ports"].detail == "this host: timed out"
    assert old["cores"].state is State.LIMITED


def test_l8_doctor_hosts_that_say_nothing_are_not_waited_for(question: Question) -> None:
    assert ask(replace(question, seconds=0.3), "silent")["silent"]["reachable"].detail == "no answer within 0.3 s"


def test_l8_doctor_hosts_in_a_table_and_as_json() -> None:
    closed = [Finding("reachable", State.UNUSABLE, "Permission denied", "ssh-copy-id b")]
    untried = Finding("MPI over all", State.UNUSABLE, "")
    report = HostsReport({"a": [Finding("reachable", State.AVAILABLE, "")], "b": closed}, untried)
    text = io.StringIO()
    show_hosts(report, Console(file=text, width=120))
    assert text.getvalue().splitlines()[0] == report.verdict
    for word in ("a", "b", "all", "Permission denied", "ssh-copy-id b", "MPI over all"):
        assert word in text.getvalue()
    said = json.loads(report.to_json())
    assert (said["usable"], said["hosts"]["b"][0]["state"]) == (False, "unusable")


def test_l8_doctor_hosts_tries_mpi_only_where_all_is_well() -> None:
    bad = {"a": [Finding("folder", State.UNUSABLE, "")]}
    mpi = Mpi("/x/mpirun", Flavour.OPENMPI, "5", None)
    for started in (mpi, None):
        assert try_together(Question([Host("a")]), started, bad).detail == "not tried: see above"


def test_l8_doctor_hosts_has_ranks_meet_without_mpi_too() -> None:
    met = try_together(Question([Host("localhost")]), None, {})
    assert (met.name, met.state, met.detail) == (
        "ranks over all",
        State.AVAILABLE,
        "a rank on each of 1 hosts met: without MPI",
    )
