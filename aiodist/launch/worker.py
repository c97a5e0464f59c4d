"""The guard of one rank: `python -m aiodist.launch.worker HOST:PORT`, started by the launcher or an mpirun.

It connects to the launcher, starts the rank in a session of its own, carries its output and the way it ended
back, and passes signals on. Because mpirun watches the guard and not the rank, a dying rank comes to the
launcher with its true exit code under every MPI. When the launcher is gone, the rank is killed; when the guard
is killed, the kernel kills the rank. What the rank leaves behind has a second to go, then it is killed too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import sys
import sysconfig
import time
from os import _exit as exit_at_once
from pathlib import Path

from aiodist.env import Environment, replace_variables, variables
from aiodist.errors import LaunchError
from aiodist.launch import wire
from aiodist.launch.wire import Kind, Start
from aiodist.machine import job_socket, process_table

_CHUNK = 1 << 16
_CONNECT = 30.0
_OUTBOX = 1 << 18  # bytes that wait for the launcher before the rank has to wait too
_LEFTOVERS = 1.0  # seconds that what the rank left behind has to end by itself
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TRACEBACK = b"Traceback (most recent call last):\n"
_FRAME = re.compile(rb'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARIES = (b"<frozen ", *{os.fsencode(f"{path}/") for path in sysconfig.get_paths().values()})
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *_PASSED_ON)


def main() -> int:
    """Guard the rank that the environment names until it has ended and the launcher lets go."""
    here = Environment.read()
    host, _, port = sys.argv[1].rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.keep_alive(sock)
        sock.sendall(wire.pack(Kind.HELLO, [here.rank, here.size, here.token]))
        kind, length = wire.header(_exactly(sock, wire.HEADER.size) or wire.pack(Kind.DONE))
        if kind is not Kind.START:
            why = "does the remote shell pass standard input on?" if not here.token else "it is of another job"
            sys.exit(f"aiodist: the launcher at {sys.argv[1]} refused the guard of rank {here.rank}: {why}")
        start = Start(**json.loads(_exactly(sock, length)))
        sock.setblocking(False)
        _RankGuard(sock, start).run()
    return 0


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


class _RankGuard:
    """One rank, its two pipes and the connection to the launcher, in one poll loop."""

    def __init__(self, sock: socket.socket, start: Start) -> None:
        self._sock = sock
        self._job = variables().get("AIODIST_JOB", "")
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._input = bytearray()
        self._told = False
        self._shortens = False
        """It was interrupted: a traceback that comes from that is told in a line."""
        self._shortens_none = {**variables(), **start.environ}.get("AIODIST_TRACEBACK", "").lower() == "full"
        self._traceback = b""
        """What it has written to its standard error since one began."""
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
        self._pipes = {out: Kind.OUT, err: Kind.ERR}
        self._send(Kind.STARTED, [self._pid, process_table()])
        if self._stdin is not None:
            self._send(Kind.WANT)

    def run(self) -> None:
        """Return when the launcher has let go or is gone; no process of the rank is left then."""
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
        if len(self._outbox) < _OUTBOX:
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
            self._obey()

    def _read(self, pipe: int) -> bool:
        """Take what the rank wrote; return whether there was anything."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if data and self._shortens and self._pipes[pipe] is Kind.ERR and not self._ended:
            self._hold(data)
        elif data:
            self._send(self._pipes[pipe], data)
        else:
            os.close(pipe)
            del self._pipes[pipe]
        return bool(data)

    def _hold(self, data: bytes) -> None:
        """Pass on what the rank wrote, but what begins with a traceback only at its end."""
        text = self._traceback + data
        start = text.find(_TRACEBACK)
        self._traceback = b"" if start < 0 else text[start:]
        if passed := text if start < 0 else text[:start]:
            self._send(Kind.ERR, passed)

    def _drain(self) -> None:
        """Take what lies in the pipes now, and no more of what others may still write."""
        for pipe in list(self._pipes):
            for _ in range(32):
                if not self._read(pipe):
                    break

    def _send(self, kind: Kind, payload: object = b"") -> None:
        self._outbox += wire.pack(kind, payload)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._released = True

    def _obey(self) -> None:
        """Do what the launcher says; without it there is nothing left to do."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._released = self._released or not data
        self._inbox += data
        while len(self._inbox) >= wire.HEADER.size:
            kind, length = wire.header(self._inbox[: wire.HEADER.size])
            end = wire.HEADER.size + length
            if len(self._inbox) < end:
                return
            payload = bytes(self._inbox[wire.HEADER.size : end])
            del self._inbox[:end]
            if kind is Kind.SIGNAL:
                self._signal(payload[0])
            elif kind is Kind.INPUT and self._stdin is not None:
                self._input += payload
                if not payload:
                    self._close_stdin()

    def _feed(self) -> None:
        """Hand input on, and ask for more once the rank has taken it."""
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
            self._send(Kind.WANT)

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
        self._stdin = None
        self._input.clear()

    def _signal(self, signum: int) -> None:
        if not self._ended:
            self._shortens = self._shortens or (signum == signal.SIGINT and not self._shortens_none)
            self._told = self._told or signum not in _PASSED_ON
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has become another user's
                os.kill(self._pid, signum)
        if signum == signal.SIGKILL:
            self._killed = True
            self._deadline = self._deadline and time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect orphans of the rank, and notice its own end; it stays a zombie, so that its id stays ours."""
        _orphans(self._pid)
        gone = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if gone is None or self._ended:
            return
        self._drain()
        self._ended = True
        code = gone.si_status if gone.si_code == os.CLD_EXITED else -gone.si_status
        if self._traceback:
            self._send(Kind.ERR, shortened(self._traceback) if code == -signal.SIGINT else self._traceback)
        self._send(Kind.EXIT, [code, self._told])
        self._deadline = time.monotonic() + (0.0 if self._killed else _LEFTOVERS)

    def _leave(self) -> None:
        """Say DONE once nothing of the rank is left, at the latest when the time for leftovers is over."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if not late and (self._pipes or _orphans(self._pid)):
            return
        self._deadline = None
        _kill_all(self._pid)
        self._drain()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
        self._send(Kind.DONE)


def shortened(text: bytes) -> bytes:
    r"""Return the traceback of an interrupted program as a line that says where it was; other text as it is.

    >>> shortened(b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nKeyboardInterrupt\n')
    b'KeyboardInterrupt at train.py:1 in <module>\n'
    """
    if text.split()[-1] != b"KeyboardInterrupt":
        return text
    frames = [frame for frame in _FRAME.findall(text) if not frame[0].startswith(_LIBRARIES)]
    return b"KeyboardInterrupt at %b:%b in %b\n" % frames[-1] if frames else b"KeyboardInterrupt\n"


def _spawn(start: Start) -> tuple[int, int | None, int, int]:
    """Start the rank; return its process id, where its input is written, and where its output is read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    its_in, stdin = 0, None
    if start.stdin == "sent":
        its_in, stdin = os.pipe()
    elif start.stdin == "null":
        its_in = os.open(os.devnull, os.O_RDONLY)
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a signal meets the rank or its default action
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
    """Go where the launcher is: an mpirun falls back on another folder where there is no such."""
    try:
        os.chdir(folder or ".")
    except OSError as error:
        os.write(2, f"aiodist: {socket.gethostname()} has no folder {folder}: {error.strerror}\n".encode())
        exit_at_once(127)


def _orphans(rank: int) -> list[int]:
    """Return what the rank started and left to us, after collecting those of them that have ended."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:  # a kernel without this list
        return []
    return [pid for pid in map(int, listed) if pid != rank and os.waitpid(pid, os.WNOHANG) == (0, 0)]


def _kill_all(rank: int) -> None:
    """Kill the rank, its session and the orphans it leaves, each of which brings up its own children."""
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
    except (OSError, LaunchError) as failure:
        where = f"the launcher at {' '.join(sys.argv[1:2])}"
        sys.exit(f"aiodist: the guard of a rank on {socket.gethostname()} lost or never reached {where}: {failure}")
