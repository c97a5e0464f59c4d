"""L5: what Open MPI leaves on a host goes with the job, and that of a launcher that was killed with the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aiodist.launch.scratch import scratch_folder
from aiodist.testing.seams.memory import boot_id
from tests.launch.conftest import Launcher
from tests.support.mpi import find

HOLD = """
import signal, sys
from aiodist.launch.scratch import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    print(folder, flush=True)
    signal.pause()
"""


def held(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Return a process that has a folder, and the folder, in which something lies."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "below").mkdir()
    (folder / "below" / "segment").write_bytes(b"x" * 100)
    return process, folder


def test_l5_folders_of_killed_launchers_are_removed_by_the_next(tmp_path: Path) -> None:
    other = tmp_path / f"aiodist-{'0' * 8}-abc"  # of another kernel, or of before the machine started
    other.mkdir()
    (tmp_path / f"aiodist-{boot_id()[:8]}-file").touch()
    lives, kept = held(tmp_path)
    killed, left = held(tmp_path)
    killed.kill()
    killed.communicate()
    assert left.exists()
    try:
        with scratch_folder(str(tmp_path)) as mine:
            (Path(mine) / "of ours").touch()
            assert not left.exists()
            assert (kept / "below" / "segment").exists()
            with scratch_folder(str(tmp_path)) as second:
                assert second != mine
                assert Path(mine).exists()
        assert not Path(mine).exists()
        assert other.exists()
    finally:
        lives.kill()
        lives.communicate()


def test_l5_a_folder_that_another_launcher_removes_at_once_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def removed_at_once(prefix: str, dir: str) -> str:
        made.append(path := f"{dir}/{prefix}{len(made)}")
        if len(made) > 1:
            Path(path).mkdir()
        return path

    monkeypatch.setattr("tempfile.mkdtemp", removed_at_once)
    with scratch_folder(str(tmp_path)) as folder:
        assert [folder] == made[1:]


def test_l5_no_segment_of_a_killed_openmpi_job_stays(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    launcher = Launcher(find("openmpi"), tmp_path)
    script = launcher.script("from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); say('in'); sys.argv[1:] and stay()")
    parents = (Path("/dev/shm"), tmp_path)

    def folders() -> set[Path]:
        return {path for parent in parents for path in parent.glob(f"aiodist-{boot_id()[:8]}-*")}

    before = folders()
    environ = {**launcher.environ, "TMPDIR": str(tmp_path)}
    with launcher.started(script, "stay", env=environ) as process:
        launcher.read_until(process.stdout, "[0] in", "[1] in")
        ours = {path for path in folders() - before if any(path.rglob("*"))}
        assert {path.parent for path in ours} == set(parents)
        assert any("sm_segment" in path.name for folder in ours for path in folder.iterdir())
        process.kill()
        assert launcher.left_after(20) == []
    done = launcher.run(script, env=environ)
    assert done.returncode == 0, done.stderr
    assert not ours & folders()
    assert not list(tmp_path.glob("aiodist-*"))
