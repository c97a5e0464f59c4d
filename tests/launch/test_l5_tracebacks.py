"""L5: the console shows the traceback of the rank that failed, and of ranks that only heard of it a line each."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from aiodist.launch.tracebacks import Tracebacks

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

HEAD = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    aiodist.run(main)
  … 4 frames of aiodist and asyncio
"""
OWN = f"""\
{HEAD}  File "train.py", line 6, in main
    raise ValueError("broken")
ValueError: broken
(AIODIST_TRACEBACK=full shows these frames too)
"""
HEARD = f"""\
{HEAD}  File "train.py", line 7, in main
    await coll.allreduce(t)
  … 2 frames of aiodist and asyncio
aiodist.errors.RemoteError: rank 1 failed: ValueError: broken
Traceback (most recent call last):
  File "train.py", line 6, in main
    raise ValueError("broken")
ValueError: broken
(AIODIST_TRACEBACK=full shows these frames too)
"""
END = "(AIODIST_TRACEBACK=full shows these frames too)\n"
CHAINED = """
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 8, in main
    raise RuntimeError("nothing was saved")
RuntimeError: nothing was saved
"""
LINE = "aiodist.errors.RemoteError: rank 1 failed: ValueError: broken (at train.py:7 in main)\n"


def _console(*said: tuple[int, str], prefix: bool = True) -> str:
    """Return the shown lines of the ranks' texts, in order, after the ranks have ended in their order."""
    shown, tracebacks = b"", Tracebacks()
    before = {rank: f"[{rank}] " if prefix else "" for rank, _ in said}
    for rank, text in said:
        for line in text.splitlines(keepends=True):
            shown += tracebacks.feed(rank, (before[rank] + line).encode(), before[rank].encode())
    for rank in sorted(before):
        shown += tracebacks.finish(rank, before[rank].encode())
    return shown.decode()


def _of(rank: int, text: str) -> str:
    return "".join(f"[{rank}] {line}" for line in text.splitlines(keepends=True))


def test_l5_who_heard_of_it_has_a_line() -> None:
    assert _console((1, OWN), (0, HEARD), (2, HEARD)) == _of(1, OWN) + _of(0, LINE) + _of(2, LINE)
    assert _console((0, HEARD), (1, OWN), (2, HEARD)) == _of(1, OWN) + _of(2, LINE) + _of(0, LINE)
    assert _console((1, OWN), (0, HEARD), prefix=False) == OWN + LINE


def test_l5_who_heard_of_an_error_with_a_context_has_a_line() -> None:
    heard = HEARD.replace("ValueError: broken\nTraceback", "RuntimeError: nothing was saved\nTraceback")
    heard = heard.replace(END, CHAINED + END)
    line = LINE.replace("ValueError: broken", "RuntimeError: nothing was saved")
    assert _console((1, OWN), (0, heard)) == _of(1, OWN) + _of(0, line)


def test_l5_the_first_is_whole_where_no_rank_shows_its_own() -> None:
    assert _console((0, HEARD), (2, HEARD)) == _of(0, HEARD) + _of(2, LINE)


@pytest.mark.parametrize(
    "text",
    [
        "epoch 1\nTraceback (most recent call last):\n",
        HEARD.replace("  … 4 frames of aiodist and asyncio\n", "").replace("  … 2 frames of aiodist and asyncio\n", ""),
        HEARD.replace("RemoteError", "MismatchError") + "more\n",
        HEARD.rpartition("(AIODIST")[0],
        OWN + OWN,
        HEARD.replace(END, CHAINED + END),
    ],
)
def test_l5_all_else_is_shown_as_it_is(text: str) -> None:
    assert _console((0, text)) == _of(0, text)
    assert _console((1, OWN), (0, text)) == _of(1, OWN) + _of(0, text)


def test_l5_what_comes_after_stays() -> None:
    assert _console((1, OWN), (0, f"before\n{HEARD}after\n")) == _of(1, OWN) + _of(0, f"before\n{LINE}after\n")


@pytest.mark.timeout(90)
def test_l5_one_error_is_a_line_for_each_other_rank_and_whole_in_their_logs(plain: Launcher) -> None:
    plain.script(
        """
        import torch, aiodist

        async def main():
            async with aiodist.init() as coll:
                if coll.rank == 1:
                    for _ in range(3):
                        await coll.recv(torch.empty(1))
                    raise ValueError("broken")
                total = coll.allreduce(torch.ones(2))
                coll.send(torch.ones(1), 1).detach()  # the one await of this rank is the next
                await total

        aiodist.run(main)
        """
    )
    done = plain.run("--log-dir", "logs", "script.py", n=4)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert sum("RemoteError: rank 1 failed: ValueError: broken (at " in line for line in lines) == 3
    own = (plain.folder / "logs" / "rank-1.err").read_text()
    assert [line.removeprefix("[1] ") for line in lines if line.startswith("[1] ")] == own.splitlines()
    assert len(lines) == len(own.splitlines()) + 3 + 1  # and the exit code
    for rank in (0, 2, 3):
        log = (plain.folder / "logs" / f"rank-{rank}.err").read_text()
        assert log.startswith("Traceback (most recent call last):\n")
        assert "    await total\n" in log
        assert '    raise ValueError("broken")\n' in log


@pytest.mark.timeout(90)
def test_l11_a_rank_that_is_killed_in_a_save_has_told_its_line(plain: Launcher) -> None:
    plain.script(
        """
        import torch, aiodist
        from aiodist.checkpoints import saving

        def slow(*_):
            say("ready")
            stay()

        async def main():
            async with aiodist.init(stop_on_signal=True) as coll:
                saving.write_file = slow
                torch.manual_seed(0)
                await aiodist.save("checkpoints", torch.nn.Linear(2, 1), coll=coll)  # here

        aiodist.run(main)
        """
    )
    (line,) = (n for n, text in enumerate((plain.folder / "script.py").read_text().splitlines(), 1) if "# here" in text)
    with plain.started("--no-prefix", "script.py", n=2) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 143
    for rank in range(2):
        assert f"rank {rank} has not ended 2 s after SIGTERM: " in told
    assert f"script.py:{line} in main" in told
    assert "ranks 0, 1 had not ended 3.0 s after SIGTERM: killed" in told


@pytest.mark.timeout(60)
def test_l5_ranks_that_are_killed_after_a_signal_are_named(plain: Launcher) -> None:
    plain.script(
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready")
        stay()
        """
    )
    with plain.started("--no-prefix", "--kill-after", "0.5", "script.py", n=2) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "ranks 0, 1 had not ended 0.5 s after SIGTERM: killed; --kill-after gives them more seconds" in told
