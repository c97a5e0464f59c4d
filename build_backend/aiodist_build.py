"""Builds aiodist: setuptools, and the C compiler for `aiodist._core`, which pip fetches where the machine has none.

Everything about compiling the core is here: its sources, flags and compilers. Three things call it. pip and build use
it as a PEP 517 backend, setup.py hands `settings()` to setuptools, and the tests compile the library without Python.

From the environment: `CC`, `CFLAGS` and `LDFLAGS`, as everywhere, and `AIODIST_MANYLINUX`, a machine such as x86_64 or
aarch64: then zig makes a wheel for this machine that needs no newer glibc than `GLIBC`, whatever compiler is here.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
HEADERS = sorted(ROOT.glob("core/*.h"))
SOURCES = sorted(ROOT.glob("core/*.c"))
BINDING = [path for path in SOURCES if '#include "binding.h"' in path.read_text()]  # these know Python
LIBRARY = [path for path in SOURCES if path not in BINDING]

# No contraction: a product and a sum are rounded apart on every machine, so that all of them get the same bits.
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
WARNINGS = ["-Wall", "-Wextra"]  # errors in tests and `make core`; a newer compiler of a user may warn of more

ZIGLANG = "ziglang >= 0.17.1, < 0.18"
GLIBC = (2, 28)

_PROBE = """
#include <stdatomic.h>
_Atomic int count;
#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2")))
#endif
int counted(void) { return atomic_load(&count); }
"""


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return what pip installs before it builds."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *fetched()]


get_requires_for_build_editable = get_requires_for_build_wheel


def fetched() -> list[str]:
    """Return the requirement of a compiler, some 100 MB, where the machine has none."""
    _refuse_other_systems()
    return [] if compiler() else [ZIGLANG]


def settings() -> dict[str, Any]:
    """Return what setup.py hands to setuptools: one wheel for all Pythons from 3.11 on, or one for a free-threaded."""
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")  # the limited API has no free-threaded form before 3.15
    extension = Extension(
        "aiodist._core",
        [path.relative_to(ROOT).as_posix() for path in SOURCES],
        depends=[path.relative_to(ROOT).as_posix() for path in HEADERS],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if limited else [],
        py_limited_api=limited,
    )
    tags = {"py_limited_api": "cp311"} if limited else {}
    if machine := os.environ.get("AIODIST_MANYLINUX"):
        if not limited and machine != platform.machine():
            sys.exit("a wheel for another machine needs the limited API, which this free-threaded Python has not")
        tags["plat_name"] = "manylinux_{}_{}_{}".format(*GLIBC, machine)
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildCore, "build_py": CopyPages},
        "options": {"bdist_wheel": tags},
    }


class CopyPages(build_py):  # type: ignore[misc]  # it has no types
    """Copies the page that `aiodist explain` prints into the package; an editable install reads it in docs/."""

    def run(self) -> None:
        """Copy the modules, then the page."""
        super().run()
        if not self.editable_mode:
            self.mkpath(str(self._page().parent))
            self.copy_file(str(ROOT / "docs" / "debug.md"), str(self._page()))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files that are made."""
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else [str(self._page())])]

    def _page(self) -> Path:
        return Path(self.build_lib, "aiodist", "doctor", "debug.md")


class BuildCore(build_ext):  # type: ignore[misc]  # it has no types
    """Compiles what changed since the last time; not with sysconfig's flags, which are for Python's own compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link into where setuptools expects it."""
        _refuse_other_systems()
        if not any(Path(folder, "Python.h").exists() for folder in self.include_dirs):
            sys.exit(f"there is no Python.h in {self.include_dirs}: install the headers of this Python (python3-dev)")
        command = [*(compiler() or zig()), *FLAGS, *WARNINGS, *_words("CFLAGS")]
        command += [f"-D{name}={value}" for name, value in ext.define_macros]
        command += [f"-I{folder}" for folder in self.include_dirs]
        objects = Path(self.build_temp, f"{zlib.crc32(repr(command).encode()):08x}")  # what other flags made is apart
        objects.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            files = list(threads.map(partial(_object, command, objects), ext.sources))
        _run([*command, "-shared", "-Wl,-s", *files, "-o", str(target), *_words("LDFLAGS")])


def _object(command: list[str], folder: Path, source: str) -> str:
    """Return the object file of a source, compiled anew if that or what it includes is younger."""
    target = folder / Path(source).with_suffix(".o").name
    made_of = target.with_suffix(".d")
    if not (target.exists() and made_of.exists() and target.stat().st_mtime > max(_times(made_of), default=0.0)):
        _run([*command, "-MMD", "-c", source, "-o", str(target)])
    return str(target)


def _times(made_of: Path) -> Iterator[float]:
    for name in made_of.read_text().replace("\\\n", " ").partition(":")[2].split():
        yield Path(name).stat().st_mtime if Path(name).exists() else float("inf")


def _run(command: Sequence[str]) -> None:
    if (code := subprocess.call(command)) != 0:
        raise CompileError(f"exit code {code} of {shlex.join(command)}")


@cache
def compiler() -> list[str]:
    """Return how to call the machine's compiler; nothing where none compiles what the core is written in, or is wanted.

    That is C11 with atomics, and functions for one kind of processor.
    """
    if os.environ.get("AIODIST_MANYLINUX"):
        return []
    if own := _words("CC"):
        if not _compiles(own):
            sys.exit(f"CC={shlex.join(own)} does not compile C11 with atomics and AVX-512, as GCC 12 does")
        return own
    return next(([name] for name in ("cc", "gcc", "clang") if _compiles([name])), [])


def _compiles(command: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(_PROBE)
        try:
            tried = [*command, *FLAGS, "-shared", str(source), "-o", str(source.with_suffix(".so"))]
            return subprocess.run(tried, capture_output=True, check=False).returncode == 0
        except OSError:  # there is none of that name
            return False


def zig() -> list[str]:
    """Return how to call clang from the wheel `ziglang`.

    It is told what its defaults spoil: for which glibc, for any processor of the kind and not for the one at hand, and
    no traps at undefined behaviour. Debian keeps a part of Python's headers by machine in /usr/include, where clang
    does not look when it is told a target; its own headers of glibc still come first.
    """
    if find_spec("ziglang") is None:
        sys.exit("no C compiler was found that knows C11 with atomics and AVX-512: install gcc, clang or ziglang")
    machine = os.environ.get("AIODIST_MANYLINUX") or platform.machine()
    target = "{}-linux-gnu.{}.{}".format(machine, *GLIBC)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-mcpu=baseline", "-fno-sanitize=undefined"]
    return [*command, "-idirafter", "/usr/include"]


def _words(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


def _refuse_other_systems() -> None:
    if platform.system() != "Linux":
        sys.exit(f"aiodist is for Linux only, and this is {platform.system()}")
