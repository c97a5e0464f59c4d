"""Tests of torchft and torchcomms pass over aiodist where they pass over gloo.

torchft's groups of gloo are replaced by aiodist's. torchcomms is not installed, since it has no wheel: a front in
`fronts` has its interface, over aiodist's groups and over torch's. The tests themselves come from the folder
that AIODIST_TEST_JUDGES names, see `tests/judges.txt`.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.environ import python_path

FRONTS = Path(__file__).parent / "fronts"
PLACE = os.environ.get("AIODIST_TEST_JUDGES")
SECONDS = 1000

pytestmark = [pytest.mark.thorough, pytest.mark.processes, pytest.mark.timeout(2400)]

TORCHCOMMS = (
    *("AllGatherSingle", "AllGather", "AllReduce", "AllToAllSingle", "AllToAll", "AllToAllvSingle", "Barrier"),
    *("BatchSendRecv", "Broadcast", "FinalizeWarning", "GatherSingle", "Gather", "MultiComm", "ObjCol", "Options"),
    *("ReduceScatterSingle", "ReduceScatter", "ReduceScatterV", "Reduce", "Scatter", "SendRecv", "Split"),
    "WaitBlocking",
)
"""Its tests of communicators on the CPU. The others are of CUDA, windows, reconfiguration and its C++ wrapper."""


def python(needs: str) -> Path:
    """Return the interpreter of the judges, which has a module."""
    if not PLACE:
        pytest.skip("AIODIST_TEST_JUDGES is not set: `make judges` builds the environment of the judges")
    found = Path(PLACE).resolve() / "bin" / "python"
    if subprocess.run([found, "-c", f"import {needs}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{PLACE} lacks {needs}")
    return found


def start(command: Sequence[object], folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start pytest of the judges with a report and an output in `folder`. torchft numbers its tests by hash."""
    folder.mkdir(parents=True)
    (folder / "pytest.ini").touch()
    apart = ("-c", folder / "pytest.ini", "--noconftest", "-p", "no:cacheprovider")
    options = (*apart, "-q", "--timeout", "300", "--junitxml", folder / "report.xml")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")}
    environ |= {"OMP_NUM_THREADS": "1", "AIODIST_SELECTOR": "none", "PYTHONHASHSEED": "0", **variables}
    with (folder / "output").open("w") as output:
        every = list(map(str, (*command, *options)))
        return subprocess.Popen(every, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)


def ends(processes: Sequence[subprocess.Popen[bytes]], folders: Sequence[Path]) -> list[dict[str, str]]:
    """Return for each process how its tests ended: passed, skipped, failure or error."""
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for code, folder in zip(codes, folders, strict=True):
        assert code == 0, (folder / "output").read_text()[-6000:]
    return [
        {
            f"{case.get('classname')} {case.get('name')}": next(
                (child.tag for child in case if child.tag in ("skipped", "failure", "error")), "passed"
            )
            for case in ElementTree.parse(folder / "report.xml").iter("testcase")
        }
        for folder in folders
    ]


def test_t8_torchfts_groups_pass_where_gloo_passes(tmp_path: Path) -> None:
    """Groups in children do not run: torchft gives them 10 s to answer, which a busy machine misses over gloo too."""
    command = (python("torchft"), "-m", "pytest", "--pyargs", "torchft.process_group_test", "-k", "not baby")
    path = os.pathsep.join((str(FRONTS), python_path()))
    folders = [tmp_path / name for name in ("gloo", "aiodist")]
    gloo = ends([start(command, folders[0], PYTHONPATH=path)], folders[:1])
    plugin = ("-p", "torchft_front")
    aiodist = ends([start((*command, *plugin), folders[1], PYTHONPATH=path)], folders[1:])
    assert aiodist == gloo
    assert list(gloo[0].values()).count("passed") >= 28
    opened = re.search(r"aiodist opened (\d+) groups here", (folders[1] / "output").read_text())
    assert opened is not None
    assert int(opened[1]) >= 25


@pytest.mark.parametrize("size", [2, 3])
def test_t8_torchcomms_pass_where_gloo_passes(size: int, tmp_path: Path) -> None:
    """Over gloo one of the tests of messages never ends: only aiodist runs these, and 3 ranks."""
    interpreter = python("torch")
    source = Path(PLACE or "") / "torchcomms" / "comms" / "torchcomms"
    if not source.exists():
        pytest.skip(f"{PLACE} lacks torchcomms")
    found = {}
    for group in ("aiodist", "gloo")[: 4 - size]:
        names = [name for name in TORCHCOMMS if group == "aiodist" or name != "SendRecv"]
        tests = [source / "tests/integration/py" / f"{name}Test.py" for name in names]
        variables = {"FRONT_GROUP": group, "FRONT_SOURCE": str(source.resolve()), "WORLD_SIZE": str(size)}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "FRONT_PORT": free_port()}
        variables |= {"TEST_BACKEND": "gloo", "TEST_DEVICE": "cpu", "TEST_FULL_SWEEP": "0", "PYTHONPATH": python_path()}
        command = (interpreter, FRONTS / "run_torchcomms.py", *tests)
        folders = [tmp_path / group / str(rank) for rank in range(size)]
        ranks = [start(command, folder, RANK=str(rank), **variables) for rank, folder in enumerate(folders)]
        found[group] = ends(ranks, folders)
        assert all(list(rank.values()).count("passed") >= 90 for rank in found[group])
    for gloo, aiodist in zip(found.get("gloo", ()), found["aiodist"], strict=False):
        assert gloo.items() <= aiodist.items()


def free_port() -> str:
    """Return the number of a port that is free now. The tests of torchcomms listen there themselves."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])
