"""The guard of one rank: `python -m aiodist.launch.worker HOST:PORT`, started by the launcher or an mpirun.

It connects to the launcher, starts the rank in a session of its own, reports output and exit, and forwards signals.
mpirun watches the guard and not the rank, so the exit code of a rank arrives unchanged under every MPI. If the launcher
dies, the guard kills the rank; if the guard dies, the kernel kills the rank. Processes that a rank has left have a
second to end, then the guard kills them. The guard does not load asyncio, which would double its time to start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from os import _exit as exit_at_once
from typing import Final

from aiodist.env import Environment, replace_variables, variables
from aiodist.frames import MAX_FRAME, Frame, FrameKind, FrameReader, WireError, frame, pack, set_options, unpack
from aiodist.handshake import Caller, Hello, Refused
from aiodist.launch.start import Start
from aiodist.machine import job_socket, process_table

_CHUNK: Final = 1 << 16
_CONNECT: Final = 30.0
_OUTPUT_BYTES: Final = 1 << 17
"""Output that the launcher has not taken, in bytes. With more the rank waits.

So the connection always has room: the kernel ends a connection that has none for half a minute.
"""
_LEFTOVERS: Final = 1.0
"""Time that processes of an ended rank have to end, in seconds."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_TRACEBACK: Final = b"Traceback (most recent call last):\n"
_FRAME: Final = re.compile(rb'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *_PASSED_ON)


def main() -> int:
    """Guard the rank of the environment until the rank has ended and the launcher closes the connection."""
    here = Environment.read()
    host, _, port = sys.argv[1].rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT) as sock:
        set_options(sock)
        reader = FrameReader()
        try:
            start = _introduce(sock, reader, Caller(Hello(here.rank, here.size, here.token)))
        except Refused as refused:
            why = "does the remote shell pass standard input on?" if not here.token else refused
            sys.exit(f"aiodist: the launcher at {sys.argv[1]} refused the guard of rank {here.rank}: {why}")
        sock.setblocking(False)
        _RankGuard(sock, reader, start).run()
    return 0


def _introduce(sock: socket.socket, reader: FrameReader, caller: Caller) -> Start:
    """Make the handshake, and return the program of the rank."""
    for received in _received(sock, reader):
        if caller.settings is not None:
            return Start(**unpack(received.body))
        sock.sendall(caller.answer(received))
        if caller.settings is not None:
            reader.limit = MAX_FRAME
    raise ConnectionError("the launcher closed the connection")


def _received(sock: socket.socket, reader: FrameReader) -> Iterator[Frame]:
    while data := sock.recv(_CHUNK):
        yield from reader.feed(data)


class _RankGuard:
    """One rank, its two pipes and the connection to the launcher, in one poll loop."""

    def __init__(self, sock: socket.socket, reader: FrameReader, start: Start) -> None:
        self._sock = sock
        self._reader = reader
        self._job = variables().get("AIODIST_JOB", "")
        self._outbox = bytearray()
        self._untaken = 0
        """Output that the launcher has not taken, in bytes."""
        self._input = bytearray()
        self._stopped = False
        """True after a signal that asks the rank to stop."""
        self._shortens = False
        """True after an interrupt, whose traceback is shortened to a line."""
        self._shortens_none = {**variables(), **start.environ}.get("AIODIST_TRACEBACK", "").lower() == "full"
        self._traceback = b""
        """Error output of the rank since the beginning of a traceback."""
        self._killed = False
        self._ended = False
        self._released = False
        self._deadline: float | None = None
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for signum in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)  # the number is in the wake-up pipe
        self._pid, self._stdin, out, err = _spawn(start)
        self._pipes = {out: FrameKind.OUT, err: FrameKind.ERR}
        self._send(FrameKind.STARTED, pack([self._pid, process_table()]))
        if self._stdin is not None:
            self._send(FrameKind.WANT)
        self._obey(b"")  # frames after `START`

    def run(self) -> None:
        """Return when the launcher has closed the connection. No process of the rank is left then."""
        try:
            while not self._released:
                for fd in self._poll():
                    self._serve(fd)
                if self._ended and self._deadline is not None:
                    self._leave()
        finally:
            _kill_all(self._pid)
            with contextlib.suppress(OSError):  # rank 0 may have been killed before it could
                job_socket(self._job).unlink(missing_ok=True)

    def _poll(self) -> list[int]:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        if self._untaken < _OUTPUT_BYTES:
            for pipe in self._pipes:
                poll.register(pipe, select.POLLIN)
        if self._stdin is not None and self._input:
            poll.register(self._stdin, select.POLLOUT)
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return [fd for fd, _ in poll.poll(None if left is None else left * 1e3)]

    def _serve(self, fd: int) -> None:
        if fd in self._pipes:
            self._read(fd)
        elif fd == self._wakeup:
            for signum in os.read(self._wakeup, _CHUNK):
                if signum != signal.SIGCHLD:
                    self._signal(signum)
            self._reap()
        elif fd == self._stdin:
            self._feed()
        else:
            self._flush()
            self._receive()

    def _read(self, pipe: int) -> bool:
        """Take output of the rank. Return True if there was any."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if data and self._shortens and self._pipes[pipe] is FrameKind.ERR and not self._ended:
            self._hold(data)
        elif data:
            self._print(self._pipes[pipe], data)
        else:
            os.close(pipe)
            del self._pipes[pipe]
        return bool(data)

    def _hold(self, data: bytes) -> None:
        """Print the output of the rank up to a traceback, which waits for the end of the rank."""
        text = self._traceback + data
        start = text.find(_TRACEBACK)
        self._traceback = b"" if start < 0 else text[start:]
        if passed := text if start < 0 else text[:start]:
            self._print(FrameKind.ERR, passed)

    def _drain(self) -> None:
        """Take the contents of the pipes, but no later output of other processes."""
        for pipe in list(self._pipes):
            for _ in range(32):
                if not self._read(pipe):
                    break

    def _print(self, kind: FrameKind, data: bytes) -> None:
        self._untaken += len(data)
        self._send(kind, data)

    def _send(self, kind: FrameKind, body: bytes = b"") -> None:
        self._outbox += frame(kind, body=body)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._released = True

    def _receive(self) -> None:
        """Read the connection. Without the launcher the guard ends."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._released = self._released or not data
        self._obey(data)

    def _obey(self, data: bytes) -> None:
        for received in self._reader.feed(data):
            if received.kind == FrameKind.SIGNAL:
                self._signal(received.number)
            elif received.kind == FrameKind.TAKEN:
                self._untaken -= received.number
            elif received.kind == FrameKind.INPUT and self._stdin is not None:
                self._input += received.body
                if not received.body:
                    self._close_stdin()

    def _feed(self) -> None:
        """Write input to the rank, and ask for more when the rank has read it."""
        if self._stdin is None:
            return
        try:
            del self._input[: os.write(self._stdin, self._input[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError:  # the rank has closed its standard input
            self._close_stdin()
            return
        if not self._input:
            self._send(FrameKind.WANT)

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
        self._stdin = None
        self._input.clear()

    def _signal(self, signum: int) -> None:
        if not self._ended:
            self._shortens = self._shortens or (signum == signal.SIGINT and not self._shortens_none)
            self._stopped = self._stopped or signum not in _PASSED_ON
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the process may change its user
                os.kill(self._pid, signum)
        if signum == signal.SIGKILL:
            self._killed = True
            self._deadline = self._deadline and time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect orphans of the rank, and notice its end. The rank remains a zombie, so its id stays valid."""
        _orphans(self._pid)
        gone = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if gone is None or self._ended:
            return
        self._drain()
        self._ended = True
        code = gone.si_status if gone.si_code == os.CLD_EXITED else -gone.si_status
        if self._traceback:
            self._print(FrameKind.ERR, shortened(self._traceback) if code == -signal.SIGINT else self._traceback)
        self._send(FrameKind.ENDED, pack([code, self._stopped]))
        self._deadline = time.monotonic() + (0.0 if self._killed else _LEFTOVERS)

    def _leave(self) -> None:
        """Send DONE when no process of the rank is left, at the latest after the time for leftovers."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if not late and (self._pipes or _orphans(self._pid)):
            return
        self._deadline = None
        _kill_all(self._pid)
        self._drain()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
        self._send(FrameKind.DONE)


def shortened(text: bytes) -> bytes:
    r"""Return the traceback of an interrupted program as one line with its position, and other text unchanged.

    >>> shortened(b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nKeyboardInterrupt\n')
    b'KeyboardInterrupt at train.py:1 in <module>\n'
    """
    if text.split()[-1] != b"KeyboardInterrupt":
        return text
    import sysconfig

    libraries = (b"<frozen ", *{os.fsencode(f"{path}/") for path in sysconfig.get_paths().values()})
    frames = [found for found in _FRAME.findall(text) if not found[0].startswith(libraries)]
    return b"KeyboardInterrupt at %b:%b in %b\n" % frames[-1] if frames else b"KeyboardInterrupt\n"


def _spawn(start: Start) -> tuple[int, int | None, int, int]:
    """Start the rank. Return its process id, and the pipes of its input, output and error output."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    its_in, stdin = 0, None
    if start.stdin == "sent":
        its_in, stdin = os.pipe()
    elif start.stdin == "null":
        its_in = os.open(os.devnull, os.O_RDONLY)
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the rank has the default actions
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                exit_at_once(1)
            os.dup2(its_in, 0)
            os.dup2(its_out, 1)
            os.dup2(its_err, 2)
            signal.set_wakeup_fd(-1)
            for signum in (*_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            replace_variables(start.environ)
            _enter(start.folder)
            os.execvp(start.argv[0], start.argv)
        except OSError as error:
            os.write(2, f"aiodist: cannot start {start.argv[0]}: {error}\n".encode())
        finally:
            exit_at_once(127)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    for fd in (its_out, its_err, *([its_in] if its_in else [])):
        os.close(fd)
    for fd in (out, err, *([stdin] if stdin is not None else [])):
        os.set_blocking(fd, False)
    return pid, stdin, out, err


def _enter(folder: str | None) -> None:
    """Change to the launcher's folder, since an mpirun may choose another one."""
    try:
        os.chdir(folder or ".")
    except OSError as error:
        os.write(2, f"aiodist: {socket.gethostname()} has no folder {folder}: {error.strerror}\n".encode())
        exit_at_once(127)


def _orphans(rank: int) -> list[int]:
    """Return the orphans of the rank that live, and collect the others."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            listed = file.read().split()
    except OSError:  # the kernel has no such list
        return []
    return [pid for pid in map(int, listed) if pid != rank and os.waitpid(pid, os.WNOHANG) == (0, 0)]


def _kill_all(rank: int) -> None:
    """Kill the rank, its session and its orphans. The children of an orphan become orphans too."""
    end = time.monotonic() + 0.5
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(rank, signal.SIGKILL)
    while (left := _orphans(rank)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, WireError) as failure:
        where = f"the launcher at {' '.join(sys.argv[1:2])}"
        sys.exit(f"aiodist: the guard of a rank on {socket.gethostname()} lost or never reached {where}: {failure}")
