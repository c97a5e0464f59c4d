"""L5: Ctrl-C while programs, or the command itself, still import what they need is a line each, and exit code 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from aiodist.launch.worker import shortened

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

SLOW = """
import signal
def wait():
    print("importing", flush=True); signal.pause()
wait()
"""


@pytest.mark.drawn(1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("full", [False, True])
def test_l5_ranks_that_are_interrupted_in_an_import_tell_a_line_each(
    plain: Launcher, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    if full:
        monkeypatch.setenv("AIODIST_TRACEBACK", "full")
    (plain.folder / "slow.py").write_text(SLOW)
    plain.script("import slow\n")
    with plain.started("--no-prefix", "script.py") as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["importing\n"] * 2
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    first, *lines = told.splitlines()
    assert first == "aiodist run: interrupted; stopping ranks 0, 1"
    if full:
        assert sum(line.startswith("Traceback") for line in lines) == 2
    else:
        assert lines == [f"KeyboardInterrupt at {plain.folder}/slow.py:4 in wait"] * 2


@pytest.mark.timeout(60)
def test_l5_a_rank_that_hears_of_an_interrupted_one_before_its_own_signal_has_a_line(plain: Launcher) -> None:
    script = plain.script(
        """
        import torch, aiodist

        async def main():
            async with aiodist.init() as coll:
                await coll.barrier()
                say("ready")
                await coll.recv(torch.empty(1), 1 - coll.rank)

        if rank == 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        aiodist.run(main)
        """
    )
    with plain.started(script) as process:
        plain.read_until(process.stdout, "[0] ready", "[1] ready")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=40)
    assert process.returncode == 130
    first, *lines = told.splitlines()
    assert first == "aiodist run: interrupted; stopping ranks 0, 1"
    own, heard = sorted(lines)
    assert own.startswith(f"[0] KeyboardInterrupt at {plain.folder}/script.py:")
    assert heard.startswith("[1] aiodist.errors.RemoteError: rank 0 failed: ")
    assert f"(at {plain.folder}/script.py:" in heard


def test_l5_what_an_interrupted_program_says_itself_stays(plain: Launcher) -> None:
    plain.script(
        """
        import traceback
        try:
            say("ready")
            stay()
        except KeyboardInterrupt:
            say("before", file=sys.stderr)
            traceback.print_exc()
            say("behind", file=sys.stderr)
            sys.exit(3)
        """
    )
    with plain.started("--no-prefix", "script.py", n=1) as process:
        plain.read_until(process.stdout, "ready")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    lines = told.splitlines()
    assert lines[1:3] == ["before", "Traceback (most recent call last):"]
    assert lines[-2:] == ["KeyboardInterrupt", "behind"]


def test_l5_of_a_traceback_the_last_line_of_the_program_is_told() -> None:
    text = "Traceback (most recent call last):\n"
    places = ("/home/me/train.py", 3, "<module>"), (os.__file__, 9, "walk"), ("<frozen importlib._bootstrap>", 1, "_x")
    for place in places:
        text += '  File "{}", line {}, in {}\n    code\n'.format(*place)
    assert shortened(f"{text}KeyboardInterrupt\n".encode()) == b"KeyboardInterrupt at /home/me/train.py:3 in <module>\n"
    assert shortened(f"{text}ValueError: no\n".encode()) == f"{text}ValueError: no\n".encode()
    assert shortened(b"Traceback (most recent call last):\nKeyboardInterrupt\n") == b"KeyboardInterrupt\n"


def test_l5_a_command_that_is_interrupted_while_it_loads() -> None:
    code = """if True:
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "typer":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Finder())
        from aiodist.__main__ import main
        sys.exit(main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "aiodist: interrupted\n")


@pytest.mark.drawn(1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", [["inspect", "--help"], ["bench", "allreduce", "--sizes", "1KiB", "--repeat", "1"]])
def test_l5_commands_import_nothing_from_the_working_directory(plain: Launcher, words: list[str]) -> None:
    for name in ("select", "random", "socket", "json"):
        (plain.folder / f"{name}.py").write_text("raise SystemExit('this one was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "aiodist", *words],
        cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this one was imported" not in done.stdout + done.stderr


def test_l5_the_option_of_mpirun_is_answered_with_ours(plain: Launcher) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aiodist", "run", "-np", "3", "script.py"],
        env=plain.environ, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2,
        "aiodist: -np 3: expected -n 3 (see: aiodist explain configerror)\n",
    )
