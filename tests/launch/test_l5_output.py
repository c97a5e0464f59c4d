"""Lines of one rank, with no process: how what comes in pieces goes out whole."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path

import pytest

from aiodist.errors import ConfigError
from aiodist.frames import FrameKind
from aiodist.launch.output import Console, Lines, Logs, Notices

pytestmark = pytest.mark.timeout(30)


def test_l5_pieces_become_lines() -> None:
    lines = Lines(b"[3] ")
    assert lines.feed(b"ab", 0) == b""
    assert lines.feed(b"c\nde\n\nf", 0) == b"[3] abc\n[3] de\n[3] \n"
    assert lines.flush() == b"[3] f\n"
    assert lines.flush() == b""


@pytest.mark.parametrize("size", range(1, 12))
def test_l5_where_the_pieces_are_cut_makes_no_difference(size: int) -> None:
    text = b"one\ntwo\r\n\nthree \xc3\xa9\nfo\rfour\nend"
    lines = Lines(b"[0] ")
    out = b"".join(lines.feed(text[i : i + size], 0) for i in range(0, len(text), size)) + lines.flush()
    shown = [line for line in out.split(b"\n") if line != b"[0] fo"]  # a state that may be drawn in between
    assert shown == [b"[0] one", b"[0] two", b"[0] ", b"[0] three \xc3\xa9", b"[0] four", b"[0] end", b""]


def test_l5_a_progress_bar_is_printed_once_a_second_and_at_its_end() -> None:
    lines = Lines(b"[0] ")
    shown = [lines.feed(f"\r{percent}%".encode(), percent / 10) for percent in range(40)]
    assert [line for line in shown if line] == [b"[0] 0%\n", b"[0] 10%\n", b"[0] 20%\n", b"[0] 30%\n"]
    assert lines.feed(b"\r100%\n", 4) == b"[0] 100%\n"


def test_l5_a_progress_bar_that_stops_is_printed_as_it_was() -> None:
    lines = Lines(b"[0] ")
    lines.feed(b"\r1%\r2%", 0)
    assert lines.flush() == b"[0] 2%\n"


def test_l5_a_line_without_end_does_not_grow_for_ever() -> None:
    lines = Lines(b"[0] ")
    out = b"".join(lines.feed(b"x" * 65536, 0) for _ in range(100)) + lines.flush()
    assert max(map(len, out.splitlines())) <= (1 << 20) + 65536 + 4
    assert out.count(b"x") == 100 * 65536


def test_l5_without_a_prefix_lines_are_still_whole() -> None:
    lines = Lines(b"")
    assert lines.feed(b"a\nb", 0) + lines.flush() == b"a\nb\n"


OPENMPI_ENDED = f"""\
{76 * "-"}
prterun has exited due to process rank 1 with PID 7 on node a exiting
improperly.
{76 * "-"}
"""
MPICH_ENDED = f"""\

{83 * "="}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 7 RUNNING AT a
{83 * "="}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""


@pytest.mark.parametrize("ended", [OPENMPI_ENDED, MPICH_ENDED], ids=["openmpi", "mpich"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_l5_notices_of_how_ranks_ended_are_left_out(ended: str, size: int) -> None:
    dashes = 76 * "-" + "\n"
    other = dashes + "There are not enough slots\n" + dashes
    notices, text = Notices(), f"before\n{ended}between\n{other}--\n{dashes}cut".encode()
    said = b"".join(notices.feed(text[i : i + size]) for i in range(0, len(text), size))
    assert said.decode() == f"before\nbetween\n{other}--\n"
    assert notices.flush().decode() == dashes + "cut"


def test_l5_log_files_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--log-dir .*file: "):
        Logs(tmp_path / "file", 2)


async def test_l5_a_slow_reader_does_not_block_the_loop() -> None:
    """If standard output is a pipe without a reader, writing waits, and the loop continues."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    saved = os.dup(1)
    os.dup2(write, 1)
    try:
        console = Console(lambda _: None)
        text = b"z" * 200_000
        writing = asyncio.create_task(console.write(FrameKind.OUT, text))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not writing.done()
        count = 0
        async with asyncio.timeout(10):
            while count < len(text):
                with contextlib.suppress(BlockingIOError):
                    count += len(os.read(read, 1 << 16))
                await asyncio.sleep(0)
            await writing
        assert count == len(text)
    finally:
        os.dup2(saved, 1)
        for fd in (read, write, saved):
            os.close(fd)


async def test_l5_a_reader_that_is_gone_is_told_once() -> None:
    read, write = os.pipe()
    os.close(read)
    saved = os.dup(1)
    os.dup2(write, 1)
    told: list[int | None] = []
    try:
        console = Console(lambda error: told.append(error.errno))
        async with asyncio.timeout(10):
            await console.write(FrameKind.OUT, b"a\n")
            await console.write(FrameKind.OUT, b"b\n")
    finally:
        os.dup2(saved, 1)
        os.close(write)
        os.close(saved)
    assert told == [errno.EPIPE]
