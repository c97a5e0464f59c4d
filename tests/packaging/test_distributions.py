"""Wheel, sdist and editable install, with the three links in aiodist/ and without them; each has the extension."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from build_backend import aiodist_build

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not aiodist_build.compiler(), reason="there is no C compiler that compiles the core"),
]

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("handles", "streams", "nn")
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "*.so")

_HOOK = """
import sys
sys.path.insert(0, "build_backend")
import aiodist_build
getattr(aiodist_build, "build_" + sys.argv[1])(sys.argv[2])
"""
_QUICK = {"CFLAGS": "-O1 -Werror"}

# -S: an editable install in the environment that runs the tests must not answer; its libraries come last.
_IMPORT = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import aiodist, aiodist.handles, aiodist.streams, aiodist._core
aiodist._core.kernels()
assert not {"handles", "streams", "nn"} & sys.modules.keys()
print(aiodist.__file__, aiodist.handles.__file__, aiodist.streams.__file__, aiodist._core.__file__, sep="\\n")
"""


@dataclass(frozen=True)
class Builds:
    """The unpacked builds, and the tree without links that two of them came from."""

    plain_tree: Path
    sdist: Path
    wheel: Path
    wheel_from_plain: Path
    wheel_from_sdist: Path
    editable: Path


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    base = tmp_path_factory.mktemp("builds")
    linked = copy_tree(base / "linked", links=True)
    plain = copy_tree(base / "plain", links=False)
    sdist = build(linked, "sdist", base / "sdist")
    return Builds(
        plain_tree=plain,
        sdist=sdist,
        wheel=build(linked, "wheel", base / "wheel"),
        wheel_from_plain=build(plain, "wheel", base / "wheel_from_plain"),
        wheel_from_sdist=build(sdist, "wheel", base / "wheel_from_sdist"),
        editable=build(plain, "editable", base / "editable"),
    )


def copy_tree(target: Path, *, links: bool) -> Path:
    """Copy the checkout; without links each is a small text file, as unpacking a .zip may leave it."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=_LEFT_OUT)
    for name in LINKS:
        link = target / "aiodist" / name
        link.unlink(missing_ok=True)
        if links:
            link.symlink_to(f"../{name}")
        else:
            link.write_text(f"../{name}")
    return target


def build(tree: Path, kind: str, unpacked: Path) -> Path:
    """Build `wheel`, `sdist` or `editable` from `tree` with the installed setuptools; return it unpacked."""
    made = unpacked.with_suffix(".made")
    made.mkdir()
    command = [sys.executable, "-c", _HOOK, kind, str(made)]
    environ = os.environ | _QUICK
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = made.iterdir()
    if kind != "sdist":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(unpacked)
        return unpacked
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (top,) = unpacked.iterdir()
    return top


def files(folder: Path) -> dict[str, str]:
    """Return the hash of each file below `folder` by its path, what a later build left there apart."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not {"build", "aiodist.egg-info"} & set(path.relative_to(folder).parts)
    }


def modules() -> list[str]:
    """Return the place in the wheel of each module of the checkout, sorted."""
    top = [path.relative_to(ROOT).as_posix() for path in (ROOT / "aiodist").rglob("*.py")]
    return sorted(top + [f"aiodist/{p.relative_to(ROOT).as_posix()}" for n in LINKS for p in (ROOT / n).rglob("*.py")])


def import_from(site: Path, cwd: Path) -> list[Path]:
    """Import aiodist with `site` as its site-packages; return the files of three of its packages, and the extension."""
    command = [sys.executable, "-I", "-S", "-c", _IMPORT, str(site), sysconfig.get_path("purelib")]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def test_wheel_has_every_module_once_and_nothing_beside_aiodist(builds: Builds) -> None:
    found = files(builds.wheel)
    assert sorted(name for name in found if name.endswith(".py")) == modules()
    (info,) = builds.wheel.glob("*.dist-info")
    assert {name.split("/")[0] for name in found} == {"aiodist", info.name}
    assert {"aiodist/py.typed", "aiodist/_core.pyi", f"aiodist/{extension()}"} <= found.keys()
    assert [name for name in found if name.endswith((".c", ".h", ".o"))] == []


def extension() -> str:
    """Return the name of the extension's file."""
    free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
    return f"_core{sysconfig.get_config_var('EXT_SUFFIX')}" if free_threaded else "_core.abi3.so"


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="it has no limited API")
def test_one_wheel_serves_all_later_pythons(builds: Builds) -> None:
    (info,) = builds.wheel.glob("*.dist-info")
    said = (info / "WHEEL").read_text().splitlines()
    assert {"Root-Is-Purelib: false", f"Tag: cp311-abi3-linux_{platform.machine()}"} <= set(said)


def test_wheel_is_the_same_without_links_and_from_the_sdist(builds: Builds) -> None:
    wheel = files(builds.wheel)
    assert files(builds.wheel_from_plain) == wheel
    assert files(builds.wheel_from_sdist) == wheel


def test_wheel_metadata(builds: Builds) -> None:
    (info,) = builds.wheel.glob("*.dist-info")
    entry_points = (info / "entry_points.txt").read_text()
    assert "aiodist = aiodist.__main__:main" in entry_points
    assert "aiodist = aiodist.testing.plugin" in entry_points
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_sdist_has_the_folders_at_the_root_and_no_second_copy(builds: Builds) -> None:
    found = files(builds.sdist)
    assert [name for name in found if name.startswith(tuple(f"aiodist/{link}" for link in LINKS))] == []
    assert [path for path in builds.sdist.rglob("*") if path.is_symlink()] == []
    ours = [name for name in found if name.endswith(".py") and name.split("/")[0] in ("aiodist", *LINKS)]
    assert sorted(name if name.startswith("aiodist/") else f"aiodist/{name}" for name in ours) == modules()
    assert {"LICENSE", "Makefile", "constraints.txt", "conftest.py", "setup.py", "tools/check.py"} <= found.keys()
    for folder in ("core", "build_backend"):
        sources = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".c", ".h", ".py")]
        here = {path.relative_to(ROOT).as_posix() for path in sources}
        packed = {name for name in found if name.startswith(f"{folder}/")}
        # A wheel has been built of it since, which runs what is in build_backend.
        assert here == {name for name in packed if "__pycache__" not in name}


def test_wheel_imports_from_elsewhere(builds: Builds, tmp_path: Path) -> None:
    for file in import_from(builds.wheel, tmp_path):
        assert file.is_relative_to(builds.wheel)


def test_editable_install_of_a_tree_without_links_imports(builds: Builds, tmp_path: Path) -> None:
    tree = builds.plain_tree
    expected = [tree / name / "__init__.py" for name in ("aiodist", "handles", "streams")]
    assert import_from(builds.editable, tmp_path) == [*expected, tree / "aiodist" / extension()]


def test_aiodist_explain_has_its_page_in_a_wheel(builds: Builds, tmp_path: Path) -> None:
    page = "aiodist/doctor/debug.md"
    assert (builds.wheel / page).read_bytes() == (ROOT / "docs/debug.md").read_bytes()
    assert page not in files(builds.editable)  # which reads docs/
    run = "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2])\nfrom aiodist.cli import app\n"
    for site in (builds.wheel, builds.editable):
        code = f"{run}app(['explain', 'mismatcherror'])"
        command = [sys.executable, "-I", "-S", "-c", code, str(site), sysconfig.get_path("purelib")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "MismatchError: ranks disagree on operation #0" in done.stdout
