"""The launcher's standard streams: whole lines of output with the rank as prefix, and the input of rank 0."""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist.errors import ConfigError
from aiodist.frames import FrameKind
from aiodist.launch.tracebacks import Tracebacks
from aiodist.terminal import is_lent

if TYPE_CHECKING:
    from aiodist.launch.commands import Job

_LONGEST = 1 << 20
_REDRAW = 1.0
_RULE = 60
_OF_AN_END = (b"has exited due to process rank", b"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES")
_AFTER_IT = (b"YOUR APPLICATION TERMINATED WITH", b"This typically refers to a problem", b"Please see the FAQ page")
_PIECE = 4096
"""Bytes that a pipe with room takes without blocking (PIPE_BUF)."""
_LAST_WORDS = 2.0
"""Time for a slow reader of the last output, in seconds."""
_LENT_SECONDS = 0.05
"""Pause between two looks if a rank uses the terminal, in seconds."""
_FDS = {FrameKind.OUT: 1, FrameKind.ERR: 2}


class Lines:
    """Cuts one stream of a rank into lines, each with `prefix`.

    A line longer than 1 MiB is cut. A carriage return starts the line again, as on a terminal. The state of a progress
    bar, which redraws itself, is printed at most once a second, and its last state when the line ends.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""
        self._drawn = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the lines that `data` completes."""
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        lines = whole.split(b"\n") if newline and b"\r" in whole else [whole] if newline else []
        if newline and b"\r" in whole:
            lines = [_last_state(line) for line in lines]
        if b"\r" in rest:
            # A final return may belong to a line end.
            tail = b"\r" if rest.endswith(b"\r") else b""
            before, _, state = rest[: len(rest) - len(tail)].rpartition(b"\r")
            rest, drawn = state + tail, _last_state(before)
            if drawn and now >= self._drawn + _REDRAW:
                self._drawn = now
                lines.append(drawn)
        if len(rest) > _LONGEST:
            lines.append(rest)
            rest = b""
        self._rest = rest
        return b"".join(self._prefix + line.replace(b"\n", b"\n" + self._prefix) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Return the text after the last line end, as a line."""
        rest, self._rest = _last_state(self._rest), b""
        return self._prefix + rest + b"\n" if rest else b""


class Notices:
    """Removes mpirun's notices about the exits of ranks, which stand between two rules: the launcher reports exits.

    Open MPI and MPICH print one also for a rank that ends well without MPI_Finalize, for example after aborted
    transfers. MPICH prints an empty line before it, and some lines after it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._notice: list[bytes] | None = None
        """Lines since a rule, until the next rule."""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes, without notices."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self._line(line + b"\n") for line in lines)

    def flush(self) -> bytes:
        """Return the rest, of a notice without an end."""
        rest = b"".join(self._notice or ()) + self._rest
        self._notice, self._rest = None, b""
        return rest

    def _line(self, line: bytes) -> bytes:
        is_rule = len(line) > _RULE and len(set(line.strip())) == 1
        if self._notice is None:
            if not is_rule:
                return b"" if line.startswith(_AFTER_IT) or line == b"\n" else line
            self._notice = [line]
            return b""
        self._notice.append(line)
        if not is_rule:
            return b""
        notice, self._notice = b"".join(self._notice), None
        return b"" if any(text in notice for text in _OF_AN_END) else notice


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Console:
    """Writes to the standard streams without blocking the loop, one writer at a time.

    The descriptors do not become O_NONBLOCK, since the shell shares them. `broken` gets the error if standard output
    takes no more. Later output is dropped.
    """

    def __init__(self, broken: Callable[[OSError], None]) -> None:
        self._lock = asyncio.Lock()
        self._tell_broken = broken
        self._broken: set[int] = set()

    async def write(self, kind: FrameKind, data: bytes) -> None:
        """Write all of `data`, which are whole lines. Wait for the reader without a limit."""
        fd = _FDS[kind]
        async with self._lock:
            view = memoryview(data)
            while view and fd not in self._broken:
                try:
                    if _may_block(fd):
                        await _writable(fd)
                        view = view[os.write(fd, view[:_PIECE]) :]
                    else:
                        view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await _writable(fd)
                except OSError as error:  # a pipe without a reader, a closed terminal, a full disk
                    self._broken.add(fd)
                    if fd == 1:
                        self._tell_broken(error)


def _may_block(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    await _ready(fd, loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    ready = asyncio.Event()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)


async def read_input() -> bytes:
    """Return a piece of standard input, empty at its end. In the background of a terminal it never returns."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
                return await loop.create_future()  # type: ignore[no-any-return]  # a read would stop this process
            if _may_block(0):
                await _ready(0, loop.add_reader, loop.remove_reader)
            if is_lent():
                await asyncio.sleep(_LENT_SECONDS)
            elif select.select([0], [], [], 0)[0]:  # else a rank has read the line, and this read would block
                return os.read(0, 1 << 16)
        except BlockingIOError:
            continue
        except OSError:  # standard input is closed
            return b""


class Logs:
    """Files with the exact output of each rank: `DIR/rank-0.out` and `DIR/rank-0.err`."""

    def __init__(self, folder: Path | None, ranks: int) -> None:
        self._folder = folder
        self._files: dict[tuple[int, FrameKind], int] = {}
        for rank in range(ranks):
            self.add(rank)

    def add(self, rank: int) -> None:
        """Open the files of one more rank. Raises `ConfigError` if the system refuses."""
        if (folder := self._folder) is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files[rank, FrameKind.OUT] = os.open(folder / f"rank-{rank}.out", flags, 0o644)
            self._files[rank, FrameKind.ERR] = os.open(folder / f"rank-{rank}.err", flags, 0o644)
        except OSError as error:
            self.close()
            raise ConfigError(f"--log-dir {folder}: {error.strerror}") from error

    def write(self, rank: int, kind: FrameKind, data: bytes) -> None:
        """Append to the rank's file, if any. Raises `ConfigError` if the file ends here, as on a full disk."""
        view = memoryview(data)
        while view and (rank, kind) in self._files:
            try:
                view = view[os.write(self._files[rank, kind], view) :]
            except OSError as error:
                os.close(self._files.pop((rank, kind)))
                name = f"rank-{rank}.{kind.name.lower()}"
                raise ConfigError(f"--log-dir {self._folder}: {name} ends here: {error.strerror}") from error

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


class Streams:
    """The output of all ranks and of the launcher."""

    def __init__(self, job: Job, broken: Callable[[OSError], None], beside: str = "mpirun") -> None:
        """`beside` is the program that starts the ranks, which has output too."""
        self._console = Console(broken)
        self._logs = Logs(job.log_dir, job.ranks)
        self._prefix = job.prefix
        self._tracebacks = Tracebacks()
        self._lines: dict[tuple[int, FrameKind], Lines] = {}
        for rank in range(job.ranks):
            self._add_lines(rank)
        self._mpirun = Lines(f"[{beside}] ".encode())
        self._notices = Notices()
        self._words: set[asyncio.Task[None]] = set()

    def add(self, rank: int) -> None:
        """Add one rank."""
        self._add_lines(rank)
        with self._saying():
            self._logs.add(rank)

    @contextmanager
    def _saying(self) -> Iterator[None]:
        """Print an error of a log file, which does not end the job."""
        try:
            yield
        except ConfigError as error:
            self.say(f"aiodist run: {error}")

    def _add_lines(self, rank: int) -> None:
        for kind in (FrameKind.OUT, FrameKind.ERR):
            self._lines[rank, kind] = Lines(self._prefix_of(rank))

    def _prefix_of(self, rank: int) -> bytes:
        return f"[{rank}] ".encode() if self._prefix else b""

    def interrupted(self) -> None:
        """Print one line for each rank that reports only the interrupt of another rank."""
        self._tracebacks.interrupted()

    async def write(self, rank: int, kind: FrameKind, data: bytes) -> None:
        """Print the whole lines of a rank's output. Wait until they are read."""
        with self._saying():
            self._logs.write(rank, kind, data)
        said = self._lines[rank, kind].feed(data, asyncio.get_running_loop().time())
        if kind is FrameKind.ERR:
            said = self._tracebacks.feed(rank, said, self._prefix_of(rank))
        await self._console.write(kind, said)

    async def finish(self, rank: int) -> None:
        """Print the output of the rank after its last line end."""
        await self._console.write(FrameKind.OUT, self._lines[rank, FrameKind.OUT].flush())
        prefix = self._prefix_of(rank)
        said = self._tracebacks.feed(rank, self._lines[rank, FrameKind.ERR].flush(), prefix)
        await self._console.write(FrameKind.ERR, said + self._tracebacks.finish(rank, prefix))

    async def overheard(self, data: bytes) -> None:
        """Print the output of mpirun itself."""
        said = self._notices.feed(data)
        await self._console.write(FrameKind.ERR, self._mpirun.feed(said, asyncio.get_running_loop().time()))

    def say(self, line: str) -> None:
        """Print a line of the launcher, without a wait for the reader."""
        task = asyncio.create_task(self._console.write(FrameKind.ERR, f"{line}\n".encode()))
        self._words.add(task)
        task.add_done_callback(self._words.discard)

    async def aclose(self) -> None:
        """Wait a short time for the reader of the last lines, and close the files."""
        rest = self._mpirun.feed(self._notices.flush(), asyncio.get_running_loop().time()) + self._mpirun.flush()
        if rest:
            self.say(rest.decode(errors="replace").rstrip("\n"))
        if self._words:
            await asyncio.wait(self._words, timeout=_LAST_WORDS)
        for task in self._words:
            task.cancel()
        self._logs.close()
