"""docs/run.md: its programs and templates run, and its tables are complete."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.run_blocks import blocks
from tests.support.environ import python_path
from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/run.md").read_text(encoding="utf-8")
SRUN = ROOT / "tests/lifecycle/srun.py"
FAILS = """import aiodist


async def main():
    async with aiodist.init() as coll:
        if coll.rank == 1:
            await coll.recv_object(0)  # until rank 0 has left `init`
            raise ValueError("no such file")
        await aiodist.gather(coll.send_object(None, 1), coll.barrier())


aiodist.run(main)
"""
WELL = {f"rank {rank} of 2: the sum is 3" for rank in range(2)}


def block(language: str, name: str) -> str:
    """Return the blocks of a file, joined."""
    found = [text for _, text in blocks(PAGE, language) if re.search(rf"^# {re.escape(name)}\b", text, re.MULTILINE)]
    assert found
    return "\n\n".join(found)


def environ(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PYTHONPATH": python_path(), "PATH": path, "OMP_NUM_THREADS": "1", **more}


def job(nursery: str, folder: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", *stub(nursery, name)],
        cwd=folder,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_l4_the_tables_have_every_variable() -> None:
    """The variables that aiodist reads or sets; tests of this repository have one more."""
    read = {
        name
        for file in (ROOT / "aiodist").rglob("*.py")
        if "testing" not in file.parts
        for name in re.findall(r"\bAIODIST_[A-Z_]*[A-Z]\b", file.read_text())
    }
    section = PAGE.partition("## Environment variables")[2]
    rows = [
        name for row in re.findall(r"^\|(.*?)\|", section, re.MULTILINE) for name in re.findall(r"AIODIST_\w+", row)
    ]
    assert sorted(rows) == sorted(read)


@pytest.mark.drawn(1)
def test_l5_the_first_program_prints_what_the_page_shows(nursery: str, tmp_path: Path) -> None:
    ended = job(nursery, tmp_path, "train.py", block("py", "train.py"))
    assert (ended.returncode, ended.stderr) == (0, "")
    [shown] = [text for _, text in blocks(PAGE, "text") if "the sum is" in text]
    assert sorted(ended.stdout.splitlines()) == shown.splitlines()


@pytest.mark.drawn(1)
def test_l5_a_rank_that_fails_is_shown_as_on_the_page(nursery: str, tmp_path: Path) -> None:
    ended = job(nursery, tmp_path, "train.py", FAILS)
    [shown] = [text for _, text in blocks(PAGE, "text") if "RemoteError" in text]
    assert ended.returncode == 1
    assert set(shown.splitlines()) <= set(ended.stderr.replace(f"{tmp_path}/", "").splitlines())


@pytest.mark.thorough
def test_l4_the_slurm_template(tmp_path: Path) -> None:
    """On one machine, with Slurm's variables alone: `srun` is a stand-in."""
    (tmp_path / "train.py").write_text(block("py", "train.py"))
    (tmp_path / "job.sbatch").write_text(block("bash", "job.sbatch"))
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/sh\nwhile case "$1" in -*) true;; *) false;; esac; do shift; done\n'
        f'exec {sys.executable} {SRUN} 2 2 localhost "$@"\n'
    )
    srun.chmod(0o755)
    variables = environ(SLURM_CPUS_PER_TASK="1")
    ended = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=tmp_path,
        env={**variables, "PATH": f"{tmp_path}:{variables['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert all(line in ended.stdout for line in WELL)  # they may run together


def test_l4_the_recipe_for_kubernetes_agrees_with_itself() -> None:
    yaml: Any = pytest.importorskip("yaml")
    described = yaml.safe_load(block("yaml", "job.yaml"))
    spec = described["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["WORLD_SIZE"])
    assert variables["MASTER_ADDR"] == f"{described['metadata']['name']}-0.{pod['subdomain']}"
    assert set(variables) == {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AIODIST_TOKEN"}


@pytest.mark.thorough
def test_l4_variables_of_the_recipe_for_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("py", "train.py"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "AIODIST_TOKEN": "secret"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=environ(RANK=str(rank), **meeting), **pipes)
        for rank in range(2)
    ]
    try:
        said = {process.communicate(timeout=60)[0].strip() for process in started}
    finally:
        for process in started:
            process.kill()
    assert said == WELL


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("uvicorn") is None, reason="uvicorn is not installed")
def test_t7_a_service_of_uvicorn_answers_and_stops_with_all_ranks(nursery: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    program = block("py", "serve.py")
    assert "port=8000" in program
    (tmp_path / "serve.py").write_text(program.replace("port=8000", f"port={port}"))
    command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", "--kill-after", "30"]
    with subprocess.Popen(
        [*command, *stub(nursery, "serve.py")],
        cwd=tmp_path,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            assert running.stdout is not None
            assert any("Uvicorn running" in line for line in running.stdout)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=30) as answer:
                assert re.fullmatch(r"-?\d\.\d{3} after \d+ steps\n", answer.read().decode())
            running.send_signal(signal.SIGTERM)
            output = running.communicate(timeout=60)[0]
        finally:
            running.kill()
    assert running.returncode == 128 + signal.SIGTERM
    stopped = dict(re.findall(r"rank (\d) stops after (\d+) steps", output))
    assert len(stopped) == 2, output
    assert len(set(stopped.values())) == 1


@pytest.mark.thorough
def test_t2_the_test_of_the_page_passes(tmp_path: Path) -> None:
    (tmp_path / "test_sum.py").write_text(block("py", "test_sum.py"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_sum.py"],
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, "3 passed" in ended.stdout) == (0, True), ended.stdout + ended.stderr
