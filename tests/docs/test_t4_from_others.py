"""docs/migrate.md: each pair of programs prints what the page says, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrate.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MPI = (sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--no-prefix")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STARTED = {
    "torch.distributed collectives": TORCHRUN,
    "mpi4py": (*MPI, "--mpi", "openmpi"),
    "torch RPC": TORCHRUN,
}
"""How programs there are started, for libraries that are installed with the tests."""
CHANGED = {
    "torch.distributed collectives": (
        'dist.init_process_group("gloo")',
        'import aiodist.c10d; dist.init_process_group("aiodist")',
    ),
    "mpi4py": ("from mpi4py import MPI", "import aiodist.compat.mpi as MPI"),
}
"""The change that makes the other program run on aiodist."""


class Pair(NamedTuple):
    name: str
    there: str
    here: str
    printed: list[str]


def pairs() -> list[Pair]:
    found = []
    for section in PAGE.read_text(encoding="utf-8").replace("\n### ", "\n## ").split("\n## ")[1:]:
        name = section.partition("\n")[0]
        blocks = FENCE.findall(section)
        if [kind[:2] for kind, _ in blocks] == ["py", "py", "te"]:  # the last is the output of both
            there, here, printed = (text for _, text in blocks)
            found.append(Pair(name, there, here, printed.splitlines()))
    return found


PAIRS = pairs()


def test_t4_the_page_has_its_pairs() -> None:
    names = ["torch.distributed collectives", "Horovod", "mpi4py", "torch RPC"]
    assert [pair.name for pair in PAIRS] == names


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_t4_the_program_here_prints_what_the_page_says(nursery: str, pair: Pair, tmp_path: Path) -> None:
    assert _printed(MPI, pair.here, tmp_path, *stub(nursery, "program.py")) == pair.printed


@pytest.mark.thorough
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.name in STARTED], ids=lambda pair: pair.name)
def test_t4_the_program_there_prints_it_too(pair: Pair, tmp_path: Path) -> None:
    assert _printed(STARTED[pair.name], pair.there, tmp_path) == pair.printed
    if pair.name in CHANGED:
        changed = pair.there.replace(*CHANGED[pair.name])
        assert changed != pair.there
        assert _printed(STARTED[pair.name], changed, tmp_path) == pair.printed


def _printed(start: tuple[str, ...], text: str, folder: Path, *program: str) -> list[str]:
    (folder / "program.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [*start, *(program or ["program.py"])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    apart = ended.stdout.replace("rank ", "\nrank ")  # torchrun mixes the lines of ranks
    return sorted(line for line in apart.splitlines() if line)
