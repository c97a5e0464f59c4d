"""`aiodist run --as`, AIODIST_AS and the start-up hook: a program that asks for another backend gets aiodist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from aiodist.alias import hook
from aiodist.env import START_UP, alias
from aiodist.errors import ConfigError
from tests.support.environ import python_path
from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
STARTED_BY = ROOT / "aiodist" / "alias" / "ranks"


def python(
    *arguments: object, folder: Path | None = None, seconds: float = 200, **environ: str
) -> tuple[int, str, str]:
    """Run Python with these arguments and variables; return exit code, output and errors."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def run(*arguments: object, ranks: int = 2, folder: Path | None = None) -> tuple[int, str, str]:
    return python("-m", "aiodist.cli", "run", "-n", ranks, *arguments, folder=folder)


def check_ways(size: int, name: str, ended: tuple[int, str, str]) -> None:
    """Compare what `asks_for_gloo.py` found on each rank, and the error that it provokes."""
    code, output, errors = ended
    assert code == 1, output + errors
    found = [json.loads(line.partition("] ")[2]) for line in output.splitlines() if "{" in line]
    assert len(found) == size, output + errors
    devices = {"gloo": "cpu:gloo,cuda:gloo", "nccl": "cuda:nccl", "mpi": "cpu:mpi,cuda:mpi"}[name]
    for seen in found:
        for asked in (name, None, f"cpu:{name},cuda:nccl"):
            shown = asked or name
            config = shown if ":" in shown else devices
            assert seen[f"init {asked}"] == ["AiodistProcessGroup", shown, config]
            assert seen.get(f"group {asked}", seen[f"init {asked}"]) == seen[f"init {asked}"]
            assert seen[f"named group {asked}"] == ["AiodistProcessGroup", name, devices]
            assert seen[f"mesh {asked}"][:2] == ["AiodistProcessGroup", shown]
        assert seen["fake"] != "AiodistProcessGroup"
        assert seen["available"] == [True, name]
    line = (PROGRAMS / "asks_for_gloo.py").read_text().splitlines().index("dist.init_process_group(ASKED)") + 2
    assert f"float32[2] sum at {PROGRAMS}/asks_for_gloo.py:{line} in <module>" in errors, errors


@pytest.mark.processes
def test_t8_a_program_that_asks_for_gloo_gets_aiodist() -> None:
    check_ways(2, "gloo", run("--as", "gloo", PROGRAMS / "asks_for_gloo.py", "gloo"))


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), [("gloo", 1), ("nccl", 3), ("mpi", 2), ("mpi", 3)])
def test_t8_programs_that_ask_for_others_too(name: str, size: int) -> None:
    if size == 1:  # there is no other rank to disagree with
        code, output, errors = run("--as", name, PROGRAMS / "asks_for_gloo.py", name, ranks=1)
        assert (code, output.count("AiodistProcessGroup")) == (0, 12), errors
    else:
        check_ways(size, name, run("--as", name, PROGRAMS / "asks_for_gloo.py", name, ranks=size))


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
def test_t8_a_training_comes_to_what_gloo_comes_to(tmp_path: Path, size: int) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size)
    (tmp_path / "gloo").mkdir()
    (tmp_path / "as").mkdir()
    assert python(*torchrun, PROGRAMS / "trains.py", tmp_path / "gloo", AIODIST_AS="")[0] == 0
    code, output, errors = run("--as", "gloo", PROGRAMS / "trains.py", tmp_path / "as", ranks=size)
    assert code == 0, output + errors
    for rank in range(size):
        theirs, ours = (torch.load(tmp_path / folder / f"{rank}.pt") for folder in ("gloo", "as"))
        if size == 2:
            assert ours[0] == theirs[0]
            assert all(map(torch.equal, ours[1], theirs[1]))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # gloo adds three summands in another order
    names = [(tmp_path / folder / f"{rank}.txt").read_text() for folder in ("gloo", "as") for rank in range(size)]
    assert names[:size] == ["ProcessGroup, and in a child ProcessGroup", *["ProcessGroup"] * (size - 1)]
    assert names[size:] == [
        "AiodistProcessGroup, and in a child AiodistProcessGroup",
        *["AiodistProcessGroup"] * (size - 1),
    ]


@pytest.mark.processes
def test_t8_the_example_asks_for_gloo(nursery: str) -> None:
    program = stub(nursery, ROOT / "examples" / "gloo_unchanged.py")
    code, output, errors = python("-m", "aiodist.cli", "run", "-n", "2", "--as", "gloo", *program, NURSERY_ENDS="soon")
    assert code == 0, output + errors
    lines = output.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [f"[0] step {step}" for step in range(0, 101, 25)]
    assert max(map(float, lines[-2].partition("losses ")[2].split(", "))) < 0.2
    assert lines[-1] == "[0] over gloo, a AiodistProcessGroup"


# --- settings -----------------------------------------------------------------------------------------------------


def test_t8_an_unknown_name_is_an_error() -> None:
    assert [alias({}), alias({"AIODIST_AS": ""}), alias({"AIODIST_AS": "mpi"})] == [None, None, "mpi"]
    with pytest.raises(ConfigError, match="AIODIST_AS='ucc': expected one of gloo, nccl, mpi"):
        alias({"AIODIST_AS": "ucc"})


@pytest.mark.thorough
def test_t8_a_group_of_an_unknown_name_is_an_error() -> None:
    """The hook raises nothing at the start of Python, since that would not stop the program."""
    program = "import torch.distributed as d; print('here'); d.init_process_group('gloo', 'file:///x', None, 1, 0)"
    code, output, errors = python("-c", program, AIODIST_AS="ucc", PYTHONPATH=f"{STARTED_BY}:{ROOT}")
    assert (code, output) == (1, "here\n")
    assert "ConfigError: AIODIST_AS='ucc': expected one of gloo, nccl, mpi" in errors


# --- the start of Python ------------------------------------------------------------------------------------------

MODULES = "import sys; print(*sorted(sys.modules))"


def test_t8_an_interpreter_without_the_variable_imports_nothing(tmp_path: Path) -> None:
    """The hook runs as site runs it; with the variable aiodist is there, and torch is not."""
    assert "installed" in hook.install(tmp_path)
    (tmp_path / "empty").mkdir()
    start = f"import site; site.addsitedir({str(tmp_path)!r}); {MODULES}"
    without = python("-c", start.replace(str(tmp_path), str(tmp_path / "empty")), AIODIST_AS="")
    assert python("-c", start, AIODIST_AS="") == without
    code, output, errors = python("-c", start, AIODIST_AS="gloo")
    assert (code, errors) == (0, "")
    added = set(output.split()) - set(without[1].split())
    assert "aiodist.alias.startup" in added
    assert not {"torch", "numpy", "asyncio"} & added


def test_t8_the_hook_is_installed_once_and_removed_once(tmp_path: Path) -> None:
    path = tmp_path / "aiodist-as.pth"
    assert hook.uninstall(tmp_path) == f"the hook is not installed: there is no {path}"
    assert hook.install(tmp_path).startswith(f"installed {path}: ")
    assert path.read_text() == START_UP
    assert hook.install(tmp_path) == f"the hook is installed already: {path}"
    assert hook.uninstall(tmp_path).startswith(f"removed {path}: ")
    assert not path.exists()


def test_t8_a_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    """A file in place of the folder refuses root too."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot change .*aiodist-as\.pth: Not a directory; .*aiodist run --as"):
        hook.install(tmp_path / "file")


def test_t8_the_start_up_of_the_environment_runs_too(tmp_path: Path) -> None:
    """A sitecustomize of the user's follows ours. An error of that module is printed, and ours has run."""
    (tmp_path / "sitecustomize.py").write_text("print('mine')\nimport nonsense\n")
    program = "import sys; print('aiodist.alias.startup' in sys.modules)"
    path = f"{STARTED_BY}:{ROOT}"
    code, output, errors = python("-c", program, AIODIST_AS="gloo", PYTHONPATH=f"{path}:{tmp_path}", folder=tmp_path)
    assert (code, output) == (0, "mine\nTrue\n"), errors
    assert "No module named 'nonsense'" in errors
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    program = f"{program}; import sitecustomize; print(sitecustomize.__file__)"
    code, output, errors = python("-c", program, AIODIST_AS="gloo", PYTHONPATH=f"{path}:{tmp_path}", folder=tmp_path)
    assert (code, output, errors) == (0, f"mine\nTrue\n{tmp_path}/sitecustomize.py\n", "")


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_t8_torchrun_follows_the_variable_with_the_hook(tmp_path: Path) -> None:
    """In a virtual environment that sees the packages of this one."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    interpreter = tmp_path / "env" / "bin" / "python"
    [site] = (tmp_path / "env" / "lib").glob("python*/site-packages")
    packages = Path(torch.__file__).parents[1]
    (site / "above.pth").write_text(f"{packages}\n{ROOT}\n")

    def there(*words: object, **environ: str) -> str:
        done = subprocess.run(
            [interpreter, *map(str, words)],
            env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            text=True,
            timeout=200,
            check=True,
        )
        return done.stdout

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3, PROGRAMS / "trains.py", tmp_path)
    names = [tmp_path / f"{rank}.txt" for rank in range(3)]
    assert there("-m", "aiodist", "hook", "--install").startswith(f"installed {site}/aiodist-as.pth: ")
    there(*torchrun, AIODIST_AS="gloo")
    assert [name.read_text().count("AiodistProcessGroup") for name in names] == [2, 1, 1]
    (tmp_path / "store").unlink(missing_ok=True)
    there(*torchrun)
    assert [name.read_text().count("AiodistProcessGroup") for name in names] == [0, 0, 0]
    assert there("-m", "aiodist", "hook", "--uninstall").startswith(f"removed {site}/aiodist-as.pth: ")
    (tmp_path / "store").unlink(missing_ok=True)
    there(*torchrun, AIODIST_AS="gloo")
    assert [name.read_text().count("AiodistProcessGroup") for name in names] == [0, 0, 0]
