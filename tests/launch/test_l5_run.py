"""`aiodist run`: output, exit codes, signals, and that nothing is left behind. The scripts load no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

pytestmark = [pytest.mark.drawn(1), pytest.mark.timeout(90)]

FOREVER = "say('ready')\nstay()\n"


def causes(stderr: str) -> list[str]:
    """The lines that say who died: those without a rank's prefix."""
    return [line for line in stderr.splitlines() if not line.startswith("[")]


# Output


def test_l5_each_line_carries_its_rank(launcher: Launcher) -> None:
    script = launcher.script("say('hello', rank, size); say('oh', rank, file=sys.stderr)")
    done = launcher.run(script, n=3)
    assert (done.returncode, causes(done.stderr)) == (0, [])
    assert sorted(done.stdout.splitlines()) == ["[0] hello 0 3", "[1] hello 1 3", "[2] hello 2 3"]
    assert sorted(done.stderr.splitlines()) == ["[0] oh 0", "[1] oh 1", "[2] oh 2"]


def test_l5_lines_of_ranks_are_never_mixed(launcher: Launcher) -> None:
    script = launcher.script("""
        for i in range(1500):
            for part in (f"{rank} ", "abc" * 50, f" {i}\\n"):
                os.write(1, part.encode())
    """)
    done = launcher.run(script, n=4)
    assert done.returncode == 0
    expected = [f"[{rank}] {rank} {'abc' * 50} {i}" for rank in range(4) for i in range(1500)]
    assert Counter(done.stdout.splitlines()) == Counter(expected)


def test_l5_lines_of_one_rank_stay_in_order(plain: Launcher) -> None:
    script = plain.script("for i in range(2000): print(rank, i)")
    done = plain.run(script)
    for rank in range(2):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank} {i}" for i in range(2000)]


def test_l5_a_last_line_without_an_end_is_printed(plain: Launcher) -> None:
    done = plain.run(plain.script("sys.stdout.write('half'); sys.stderr.write('way')"))
    assert sorted(done.stdout.splitlines()) == ["[0] half", "[1] half"]
    assert sorted(done.stderr.splitlines()) == ["[0] way", "[1] way"]


def test_l5_output_of_a_dying_rank_comes_before_its_cause(launcher: Launcher) -> None:
    done = launcher.run(launcher.script("if rank == 1: sys.exit('no luck')\nstay()"))
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["[1] no luck", "rank 1: exit code 1"]


def test_l5_no_prefix_leaves_lines_as_they_are(plain: Launcher) -> None:
    done = plain.run("--no-prefix", plain.script("say('plain', rank)"))
    assert sorted(done.stdout.splitlines()) == ["plain 0", "plain 1"]


def test_l5_log_files_hold_what_each_rank_wrote(plain: Launcher) -> None:
    script = plain.script("os.write(1, b'bar 1%\\rbar 2%\\n'); os.write(2, b'\\xff\\x00 half')")
    done = plain.run("--log-dir", "logs/today", script, text=False)
    assert done.returncode == 0
    assert sorted(path.name for path in (plain.folder / "logs/today").iterdir()) == [
        "rank-0.err",
        "rank-0.out",
        "rank-1.err",
        "rank-1.out",
    ]
    for rank in range(2):
        assert (plain.folder / f"logs/today/rank-{rank}.out").read_bytes() == b"bar 1%\rbar 2%\n"
        assert (plain.folder / f"logs/today/rank-{rank}.err").read_bytes() == b"\xff\x00 half"
    assert b"[0] \xff\x00 half\n" in done.stderr


def test_l5_a_log_file_that_cannot_grow_ends_no_job(plain: Launcher) -> None:
    """The disk of the logs is full: it is said once for each file, and all is printed as before."""
    script = plain.script("for i in range(40): say(str(i % 10) * 1000)")
    command = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-", *plain.command("--log-dir", "logs", script, n=1)]
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "".join(f"[0] {str(i % 10) * 1000}\n" for i in range(40))
    assert (done.returncode, done.stderr) == (0, "aiodist run: --log-dir logs: rank-0.out ends here: File too large\n")


@pytest.mark.parametrize(
    ("closed", "out", "err"), [("<&-", 4, 2), (">&-", 0, 2), ("2>&-", 4, 0), ("<&- >&- 2>&-", 0, 0)]
)
def test_l5_closed_standard_streams_are_as_dev_null(plain: Launcher, closed: str, out: int, err: int) -> None:
    script = plain.script("say(rank); say(repr(sys.stdin.read())); say('err', file=sys.stderr)")
    command = ["bash", "-c", f'"$@" {closed}', "-", *plain.command("--log-dir", "logs", script)]
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stdout.splitlines()), len(done.stderr.splitlines())) == (0, out, err)
    assert [(plain.folder / f"logs/rank-{rank}.out").read_text() for rank in range(2)] == ["0\n''\n", "1\n''\n"]


def test_l5_output_that_cannot_be_written_ends_the_job_and_says_why(plain: Launcher) -> None:
    with open("/dev/full", "w") as full:
        done = plain.run(plain.script("say('a')\nstay()"), capture_output=False, stdout=full, stderr=-1)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == "aiodist run: standard output: No space left on device\n"


@pytest.mark.thorough
def test_l5_as_many_ranks_as_descriptors_allow(plain: Launcher) -> None:
    """The limit is raised where that is allowed; where it is not, that is said, and nothing is started."""
    script = plain.script("say(rank)")
    refused = ["bash", "-c", 'ulimit -n 60; exec "$@"', "-", *plain.command(script, n=40)]
    options: dict[str, Any] = {"cwd": plain.folder, "env": plain.environ, "capture_output": True, "text": True}
    done = subprocess.run(refused, **options, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    said = "aiodist: 40 ranks: expected a limit of at least 384 open files (ulimit -n), it is 60"
    assert done.stderr == f"{said} (see: aiodist explain launcherror)\n"
    raised = ["bash", "-c", 'ulimit -Sn 40; exec "$@"', "-", *plain.command(script, n=24)]
    done = subprocess.run(raised, **options, timeout=60)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 24)


def test_l5_a_folder_that_is_gone_is_named(plain: Launcher) -> None:
    command = ["bash", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "-", *plain.command("-m", "this")]
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    said = "aiodist: the working directory is gone: expected one in which ranks can be started"
    assert done.stderr == f"{said} (see: aiodist explain launcherror)\n"


def test_l5_what_a_terminal_cannot_show_is_no_error(plain: Launcher) -> None:
    program = "cli.app = lambda: print('paths \u2026'); sys.exit(cli.main())"
    command = [sys.executable, "-c", f"import sys; from aiodist import cli; {program}"]
    environ = {**plain.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("paths ?\n", "")


def test_l5_what_the_system_refuses_is_one_line(plain: Launcher) -> None:
    """Here a program that may not be read, as seen by a user that is not root."""
    program = "from aiodist.cli import main; pathlib.Path.open = lambda *_: open('/no/such'); sys.exit(main())"
    (plain.folder / "script").write_text("#!/bin/sh")
    (plain.folder / "script").chmod(0o755)
    command = [sys.executable, "-c", f"import pathlib, sys; {program}", "run", "-n", "2", "./script"]
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "aiodist: [Errno 2] No such file or directory: '/no/such'\n")


@pytest.mark.thorough
def test_l5_a_hundred_megabytes_neither_block_nor_pile_up(launcher: Launcher) -> None:
    script = launcher.script("""
        line = b"x" * 999 + b"\\n"
        with open(1, "wb", closefd=False) as out:
            for _ in range(100_000):
                out.write(line)
    """)
    with launcher.started(script, n=1, text=False, stderr=None) as process:
        assert process.stdout is not None
        count, largest = 0, 0
        own = psutil.Process(process.pid)
        while data := os.read(process.stdout.fileno(), 1 << 20):
            count += len(data)
            if count < 90_000_000:
                largest = max(largest, own.memory_info().rss)
        assert process.wait(20) == 0
    assert count == 100_000 * (1000 + len("[0] "))
    assert largest < 120e6


def test_l5_ctrl_c_works_while_nobody_reads_the_output(launcher: Launcher) -> None:
    script = launcher.script("""
        say("ready")
        while True:
            os.write(1, b"y" * 4095 + b"\\n")
    """)
    with launcher.started("--kill-after", "0.5", script) as process:
        launcher.read_until(process.stdout, "[0] ready")
        process.send_signal(signal.SIGINT)
        assert process.wait(50) == 130
        assert launcher.left_after(1) == []


def test_l5_a_reader_that_goes_away_ends_the_job(launcher: Launcher) -> None:
    script = launcher.script("while True: say('y')")
    with launcher.started(script) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(50) == 128 + signal.SIGPIPE
        assert launcher.left_after(1) == []


def test_l5_a_script_may_open_its_standard_streams_by_name(plain: Launcher) -> None:
    script = plain.script("""
        with open("/dev/stdout", "w") as out:
            out.write("by name\\n")
    """)
    assert sorted(plain.run(script).stdout.splitlines()) == ["[0] by name", "[1] by name"]


def test_l5_a_lot_of_input_goes_no_faster_than_it_is_read(launcher: Launcher) -> None:
    script = launcher.script("""
        if rank == 0:
            say("first", len(sys.stdin.buffer.read(1000)))
            say("rest", len(sys.stdin.buffer.read()))
    """)
    with launcher.started(script, n=1, stdin=subprocess.PIPE) as process:
        stdout, stderr = process.communicate("x" * 20_000_000, timeout=60)
    assert (process.returncode, stdout, stderr) == (0, "[0] first 1000\n[0] rest 19999000\n", "")


def test_l5_input_that_nobody_reads_holds_nothing_up(launcher: Launcher) -> None:
    with launcher.started(launcher.script("say('ready')"), stdin=subprocess.PIPE) as process:
        assert process.wait(20) == 0


@pytest.mark.parametrize("killed", [False, True])
def test_l5_no_file_of_mpirun_is_left(mpi_launcher: Launcher, killed: bool) -> None:
    """Files of a killed mpirun in a common folder, under its process id, stop a later one with the same id."""
    scratch = mpi_launcher.folder / "scratch"
    scratch.mkdir()
    script = mpi_launcher.script(f"""
        import psutil
        say("files:", sum(len(names) for _, _, names in os.walk({str(scratch)!r})))
        if {killed} and rank == 0:
            psutil.Process({os.getpid()}).children()[-1].children()[0].kill()
            stay()
    """)
    done = mpi_launcher.run(script, env={**mpi_launcher.environ, "TMPDIR": str(scratch)})
    assert (done.returncode != 0) == killed, done
    if mpi_launcher.mpi == "openmpi":
        assert "files:" in done.stdout, done
        assert "files: 0" not in done.stdout, done
    assert list(scratch.iterdir()) == []


# Arguments and variables of ranks


def test_l5_arguments_and_environment_pass_through(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B", "from here")
    script = launcher.script("import json; say(json.dumps([sys.argv[1:], os.environ['A'], os.environ['B']]))")
    arguments = ["-n", "4", "--mpi", "x", ":", "", "a b", "--help"]
    done = launcher.run("-x", "A=1 2=3", "-x", "B", script, *arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    for line in done.stdout.splitlines():
        assert json.loads(line[4:]) == [arguments, "1 2=3", "from here"]


def test_l5_standard_input_goes_to_rank_0(launcher: Launcher) -> None:
    script = launcher.script("say(repr(sys.stdin.read()))")
    with launcher.started(script, stdin=subprocess.PIPE) as process:
        stdout, _ = process.communicate("some\ninput\n", timeout=30)
    assert sorted(stdout.splitlines()) == ["[0] 'some\\ninput\\n'", "[1] ''"]


def test_l5_a_module_is_run_with_m(plain: Launcher) -> None:
    (plain.folder / "package").mkdir()
    plain.script("say(__name__, sys.argv[1:])", "package/tool.py")
    done = plain.run("-m", "package.tool", "-m", "x")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] __main__ ['-m', 'x']" for rank in range(2)]


def test_l5_ranks_learn_their_place_the_hub_and_the_secret(launcher: Launcher) -> None:
    script = launcher.script("""
        from aiodist.env import Environment
        here = Environment.read()
        say(here.starter, here.rank, here.size, here.rendezvous[:6], len(here.token))
    """)
    done = launcher.run(script, n=3)
    assert sorted(done.stdout.splitlines()) == [f"[{r}] aiodist run {r} 3 tcp:// 32" for r in range(3)]


def test_l5_a_job_within_a_job_is_a_new_job(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OMPI_COMM_WORLD_RANK": "7", "PMI_RANK": "7", "PMI_SIZE": "9", "AIODIST_RANK": "7"}.items():
        monkeypatch.setenv(name, value)
    done = launcher.run(launcher.script("from aiodist.env import Environment; say(Environment.read().size)"))
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"]


def test_l5_files_beside_the_script_do_not_disturb_the_guard(launcher: Launcher) -> None:
    for name in ("select.py", "socket.py", "types.py", "ctypes.py"):
        (launcher.folder / name).write_text("raise RuntimeError('not the standard one')")
    (launcher.folder / "sub").mkdir()
    launcher.script("say('fine')", "sub/script.py")
    environ = {**launcher.environ, "PYTHONSAFEPATH": "1"}
    done = launcher.run("sub/script.py", env=environ)
    assert sorted(done.stdout.splitlines()) == ["[0] fine", "[1] fine"], done.stderr


def test_l5_files_of_the_working_directory_do_not_disturb_the_launcher(plain: Launcher) -> None:
    for name in ("select.py", "json.py", "torch.py", "typer.py"):
        (plain.folder / name).write_text("raise RuntimeError('not that one')")
    for module in ("aiodist", "aiodist.cli"):
        command = [sys.executable, "-m", module, "run", "-n", "2", "--mpi", "none", "echo", "fine"]
        done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=60)
        assert sorted(done.stdout.splitlines()) == ["[0] fine", "[1] fine"], done.stderr


def test_l5_auto_is_one_rank_per_core_where_there_is_no_gpu(plain: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = plain.command(plain.script("say(size)"))
    command[command.index("-n") + 1] = "auto"
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=60)
    cores = len(os.sched_getaffinity(0))
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {cores}" for rank in range(cores))


# MPI


def test_l5_mpi4py_is_in_the_job_with_more_ranks_than_cores(mpi_launcher: Launcher) -> None:
    script = mpi_launcher.script("""
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        say(world.rank == rank, world.size, world.allreduce(rank), len(os.sched_getaffinity(0)))
    """)
    n = 2 * len(os.sched_getaffinity(0))
    done = mpi_launcher.run(script, n=n)
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"True {n} {n * (n - 1) // 2} {len(os.sched_getaffinity(0))}"
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {expected}" for rank in range(n))


def test_l5_mpi_abort_gives_its_code(mpi_launcher: Launcher) -> None:
    script = mpi_launcher.script("""
        from mpi4py import MPI
        if rank == 1:
            MPI.COMM_WORLD.Abort(3)
        stay()
    """)
    with mpi_launcher.started(script) as process:
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 3, stderr
        assert [line for line in causes(stderr) if "3" in line]
        assert mpi_launcher.left_after(1) == []


def test_l5_mpi_arguments_reach_mpirun(mpi_launcher: Launcher) -> None:
    done = mpi_launcher.run("--mpi-arg=--no-such-option-at-all", mpi_launcher.script("say('never')"))
    assert done.returncode == 2
    assert "never" not in done.stdout
    assert "no-such-option-at-all" in done.stderr
    assert "aiodist: mpirun ended before it had started a rank" in done.stderr


def test_l5_a_killed_mpirun_takes_its_ranks_along(mpi_launcher: Launcher) -> None:
    with mpi_launcher.started(mpi_launcher.script(FOREVER)) as process:
        mpi_launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        for child in psutil.Process(process.pid).children():
            child.kill()
        _, stderr = process.communicate(timeout=50)
        assert process.returncode == 137
        assert "mpirun: signal SIGKILL before its ranks had ended" in causes(stderr)
        assert mpi_launcher.left_after(2) == []


# Exit codes


def test_l5_exit_code_three_comes_back(launcher: Launcher) -> None:
    script = launcher.script("if rank == 1: sys.exit(3)\nstay()")
    done = launcher.run(script, n=3)
    assert (done.returncode, causes(done.stderr)) == (3, ["rank 1: exit code 3"])
    assert launcher.left_after(0) == []


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV"])
def test_l5_a_rank_killed_by_a_signal_is_named(launcher: Launcher, name: str) -> None:
    script = launcher.script(f"""
        if rank == 1:
            signal.signal(signal.{name}, signal.SIG_DFL) if "{name}" != "SIGKILL" else None
            os.kill(os.getpid(), signal.{name})
        stay()
    """)
    done = launcher.run(script, n=3)
    assert (done.returncode, causes(done.stderr)) == (128 + signal.Signals[name], [f"rank 1: signal {name}"])
    assert launcher.left_after(0) == []


def test_l5_ranks_that_ignore_sigterm_are_killed(launcher: Launcher) -> None:
    script = launcher.script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready")
        if rank == 0:
            sys.stdin.readline()
            sys.exit(4)
        stay()
    """)
    with launcher.started(script, stdin=subprocess.PIPE) as process:
        launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        _, stderr = process.communicate("\n", timeout=50)
        assert (process.returncode, causes(stderr)) == (4, ["rank 0: exit code 4"])
        assert launcher.left_after(0) == []


def test_l5_the_time_is_up(plain: Launcher) -> None:
    done = plain.run("--timeout", "2", plain.script(FOREVER))
    assert (done.returncode, causes(done.stderr)) == (124, ["aiodist run: not finished within 2 s: ranks 0, 1"])
    assert plain.left_after(0) == []


def test_l5_an_early_exit_with_0_is_a_failure_while_others_work(launcher: Launcher) -> None:
    script = launcher.script("if rank == 1: sys.exit(0)\nstay()")
    done = launcher.run("--finish-within", "0.3", script)
    assert (done.returncode, causes(done.stderr)) == (1, ["rank 1: exit code 0, while others still worked (0)"])
    assert launcher.left_after(0) == []


def test_l5_others_may_finish_after_an_early_exit_with_0(plain: Launcher) -> None:
    script = plain.script("if rank == 0: sys.stdin.readline()\nif rank == 1: say('out')")
    with plain.started(script, stdin=subprocess.PIPE) as process:
        plain.read_until(process.stdout, "[1] out")
        _, stderr = process.communicate("\n", timeout=20)
        assert (process.returncode, stderr) == (0, "")


_JOIN = """
import asyncio
from aiodist.control import connect
from aiodist.env import Environment

async def main():
    here = Environment.read()
    channel = await connect(here.rendezvous, rank=rank, size=size, token=here.token)
    await act(channel)

"""


def test_l5_a_rank_that_said_goodbye_may_leave_early(launcher: Launcher) -> None:
    script = launcher.script(
        _JOIN
        + """
async def act(channel):
    await channel.aclose()
    if rank == 1:
        say("out")
    else:
        sys.stdin.readline()

asyncio.run(main())
"""
    )
    with launcher.started("--finish-within", "0", script, stdin=subprocess.PIPE) as process:
        launcher.read_until(process.stdout, "[1] out")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        _, stderr = process.communicate("\n", timeout=20)
        assert (process.returncode, stderr) == (0, "")


def test_l5_a_rank_that_leaves_without_goodbye_is_named(launcher: Launcher) -> None:
    script = launcher.script(
        _JOIN
        + """
async def act(channel):
    if rank == 1:
        os._exit(0)
    stay()

asyncio.run(main())
"""
    )
    done = launcher.run("--finish-within", "60", script)
    assert (done.returncode, causes(done.stderr)) == (1, ["rank 1: exit code 0, while others still worked (0)"])


def test_l5_who_failed_first_is_named_though_others_leave_before(launcher: Launcher) -> None:
    script = launcher.script(
        _JOIN
        + """
async def act(channel):
    if rank == 1:
        channel.fail("ValueError: no", "", 5)
        while not {0, 2} <= channel.exits().keys():  # it frees what it holds, while its peers have heard already
            await asyncio.sleep(0)
        os._exit(5)
    lost = asyncio.Event()
    loop = asyncio.get_running_loop()
    channel.on_lost(lambda exit: loop.call_soon_threadsafe(lost.set))
    await lost.wait()
    os._exit(1)

asyncio.run(main())
"""
    )
    done = launcher.run(script, n=3)
    assert (done.returncode, causes(done.stderr)) == (5, ["rank 1: exit code 5"])


# Signals


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_l5_signals_are_forwarded_and_end_the_job(launcher: Launcher, name: str, code: int) -> None:
    script = launcher.script(f"""
        def heard(*_):
            say("heard")
            sys.exit(0)
        signal.signal(signal.{name}, heard)
        say("ready")
        stay()
    """)
    with launcher.started(script) as process:
        launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        process.send_signal(signal.Signals[name])
        launcher.read_until(process.stdout, "[0] heard", "[1] heard")
        _, stderr = process.communicate(timeout=50)
        told = "aiodist run: interrupted; stopping ranks 0, 1\n" if name == "SIGINT" else ""
        assert (process.returncode, stderr) == (code, told)
        assert launcher.left_after(0) == []


def test_l5_ctrl_c_leaves_no_process_behind(launcher: Launcher) -> None:
    script = launcher.script("""
        import subprocess
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "601"], start_new_session=True)
        say("ready")
        stay()
    """)
    with launcher.started("--kill-after", "0.5", script) as process:
        launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert launcher.left_after(0) == []


def test_l5_a_second_ctrl_c_kills_at_once(launcher: Launcher) -> None:
    script = launcher.script("""
        signal.signal(signal.SIGINT, lambda *_: say("heard"))
        say("ready")
        stay()
    """)
    with launcher.started("--kill-after", "60", script) as process:
        launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        process.send_signal(signal.SIGINT)
        launcher.read_until(process.stdout, "[0] heard", "[1] heard")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130  # not after the minute
        assert launcher.left_after(0) == []


def test_l5_user_signals_are_passed_on_and_end_nothing(launcher: Launcher) -> None:
    script = launcher.script("""
        def heard(*_):
            say("heard")
            sys.exit(0)
        signal.signal(signal.SIGUSR1, heard)
        say("ready")
        stay()
    """)
    with launcher.started(script) as process:
        launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = process.communicate(timeout=50)
        assert (process.returncode, stderr) == (0, "")
        assert sorted(stdout.splitlines()) == ["[0] heard", "[1] heard"]


def test_l5_a_killed_launcher_leaves_no_rank_behind(launcher: Launcher) -> None:
    with launcher.started(launcher.script(FOREVER)) as process:
        launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        process.kill()
        assert launcher.left_after(50) == []


def test_l5_a_killed_guard_takes_its_rank_along(launcher: Launcher) -> None:
    script = launcher.script("""
        import subprocess
        subprocess.Popen(["sleep", "600"])
        say("ready")
        stay()
    """)
    with launcher.started(script) as process:
        launcher.read_until(process.stdout, "[0] ready", "[1] ready")
        guards = [p for p in launcher.processes() if "aiodist.launch.worker" in p.cmdline()]
        guards[0].kill()
        process.communicate(timeout=50)
        assert process.returncode != 0
        assert launcher.left_after(10) == []  # the kernel kills the rank, which has no parent now


def test_l5_what_a_finished_rank_left_running_is_ended(launcher: Launcher) -> None:
    script = launcher.script("""
        import subprocess
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    """)
    assert launcher.run(script).returncode == 0
    assert launcher.left_after(0) == []


# The command line


def test_l5_the_launcher_loads_neither_torch_nor_numpy_nor_mpi4py(launcher: Launcher) -> None:
    script = launcher.script("say('fine')")
    code = (
        "import sys, aiodist.cli\n"
        "sys.argv = ['aiodist', *sys.argv[1:]]\n"
        "try: aiodist.cli.main()\n"
        "finally: print(sorted({'torch', 'numpy', 'mpi4py'} & set(sys.modules)))"
    )
    arguments = launcher.command(script)[3:]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=launcher.folder,
        env=launcher.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] fine", "[1] fine", "[]"]


def test_l5_the_guard_loads_neither_torch_nor_numpy_nor_mpi4py(plain: Launcher) -> None:
    code = (
        "import sys, aiodist.launch.worker; print(sorted({'torch', 'numpy', 'mpi4py', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=plain.environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such.py"], "no-such.py: there is no such file"),
        (["-n", "0", "script.py"], "0 ranks: expected at least 1"),
        (["-n", "two", "script.py"], "-n two: expected a number of ranks, or auto"),
        (["-n", "9" * 30, "script.py"], "expected a limit of at least"),
        (["-np", "2", "script.py"], "-n p: expected a number of ranks, or auto"),
        (["--mpi", "lam", "script.py"], "--mpi lam: expected auto, openmpi, mpich, none or the path of an mpirun"),
        (["--mpi", "/no/such/mpirun", "script.py"], "/no/such/mpirun: expected an mpirun that answers --version"),
        (["--mpi-arg=-v", "script.py"], "--mpi-arg -v needs an mpirun, but --mpi is none"),
        (["-x", "NO_SUCH_VARIABLE", "script.py"], "-x NO_SUCH_VARIABLE: expected NAME=VALUE"),
        (["--log-dir", "script.py/logs", "script.py"], "script.py/logs"),
        (["--servers", "-1", "script.py"], "--servers -1: expected a number of ranks, 0 for none"),
        (["-n", "0", "--servers", "2", "script.py"], "0 workers beside 2 servers: expected at least 1"),
        (["--keep-going", "--mpi", "openmpi", "script.py"], "--keep-going with --mpi openmpi: MPI ends every rank"),
    ],
)
def test_l5_bad_input_is_one_line_and_code_2(plain: Launcher, arguments: list[str], words: str) -> None:
    plain.script("say('never')")
    done = plain.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"aiodist: .+\n", done.stderr)
    assert words in done.stderr


def test_l5_the_version_is_printed(plain: Launcher) -> None:
    code = (
        "import importlib.metadata as m, sys; m.version = lambda name: '1.2.3'; import aiodist.cli; aiodist.cli.main()"
    )
    command = [sys.executable, "-c", code, "--version"]
    done = subprocess.run(command, env=plain.environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1.2.3\n")


def test_l5_ctrl_c_typed_at_a_terminal(launcher: Launcher) -> None:
    """A terminal interrupts all of its foreground group: the ranks are outside, and hear it from the launcher alone."""
    script = launcher.script("""
        typed = input()
        try:
            say(typed)
            stay()
        except KeyboardInterrupt:
            say()  # the terminal shows ^C
            say("heard")
    """)
    terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    process = subprocess.Popen(
        [sys.executable, "-c", terminal, *launcher.command(script, n=1)],
        cwd=launcher.folder,
        env=launcher.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        process.stdin.write("typed\n")
        process.stdin.flush()
        launcher.read_until(process.stdout, "[0] typed")
        process.stdin.write("\x03")
        process.stdin.flush()
        launcher.read_until(process.stdout, "[0] heard")
        assert process.wait(50) == 130
    assert launcher.left_after(1) == []
