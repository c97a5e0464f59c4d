"""Starts Python programs without the seconds of importing torch: imports torch once, and forks for each program.

`nursery.py SOCKET` listens there. Each program is a process of its own. `stub.py` stands in for the program as the
child of its parent: the stub hands over its arguments, environment, folder and open files, forwards signals, and ends
with the status of the program. The nursery kills a program whose stub dies. The nursery ends with its standard input.
If NURSERY_ENDS is "soon", and for launchers, a program ends without the destructors of modules and libraries, which
take a quarter of a second for torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

given: dict[str, Any] | None = None  # in a child, what to be


def ends_soon() -> bool:
    assert given is not None
    return os.environ.get("NURSERY_ENDS") == "soon" or given["argv"][:2] == ["-m", "aiodist.cli"]


@atexit.register  # before any other, so that it is called last
def keep_modules() -> None:
    if given and ends_soon():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dict(sys.modules)))
        sys.modules.clear()


import torch  # noqa: E402
import torch._dynamo  # noqa: E402  - the first optimizer loads it, in a second

if core := os.environ.get("LIFECYCLE_CORE"):  # in place of the one that is installed
    spec = spec_from_file_location("aiodist._core", core)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["aiodist._core"] = built = module_from_spec(spec)
    spec.loader.exec_module(built)

for name in ("backends.gloo", "checkpoints", "cli", "data", "engine", "launch.job", "nn", "ps", "world.runtime"):
    import_module(f"aiodist.{name}")

from aiodist.alias.startup import install  # noqa: E402

del sys.modules["aiodist.cli"]  # the program imports and runs the module again

_PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent ends, here the nursery
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Nursery:
    """The loop that forks; in a child, `serve` returns what to be."""

    def __init__(self, path: str) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(64)
        self._children: dict[int, tuple[socket.socket, str | None]] = {}
        self._doorbell, doorbell = os.pipe()
        os.set_blocking(self._doorbell, False)
        os.set_blocking(doorbell, False)
        signal.set_wakeup_fd(doorbell, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._doorbells = (self._doorbell, doorbell)

    def serve(self) -> dict[str, Any] | None:
        selector = selectors.DefaultSelector()
        for source in (self._server, self._doorbell, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._server:
                    connection, _ = self._server.accept()
                    if (request := self._start(connection, selector)) is not None:
                        return request
                elif key.fileobj == self._doorbell:
                    os.read(self._doorbell, 4096)
                    self._reap(selector)
                elif key.fileobj is sys.stdin:
                    self._kill(lambda _: True)
                    return None
                else:  # the stub is gone
                    gone = selector.unregister(key.fileobj).fileobj
                    self._kill(lambda connection, gone=gone: connection is gone)  # type: ignore[misc]

    def _start(self, connection: socket.socket, selector: selectors.BaseSelector) -> dict[str, Any] | None:
        data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 16)
        if not data:  # it was killed as soon as it was started
            connection.close()
            return None
        length, _, text = data.partition(b"\n")
        while len(text) < int(length):
            text += connection.recv(1 << 20)
        request: dict[str, Any] = json.loads(text)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            for end in (self._server, connection, *(other for other, _ in self._children.values())):
                end.close()
            for fd in self._doorbells:
                os.close(fd)
            # First out of the way of the numbers that they are to have.
            high = [os.dup(fd) if fd in request["fds"] else fd for fd in fds]
            for fd, number in zip(high, request["fds"], strict=True):
                os.dup2(fd, number, inheritable=number > 2)
                os.close(fd)
            return request
        for fd in fds:
            os.close(fd)
        self._children[pid] = (connection, request["report"])
        connection.sendall(b"%d\n" % pid)
        selector.register(connection, selectors.EVENT_READ)
        return None

    def _kill(self, whose: Callable[[socket.socket], bool]) -> None:
        for pid, (connection, _) in self._children.items():
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    if whose(connection):
                        kill(pid, signal.SIGKILL)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection, report = self._children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if report:
                with Path(report).open("a") as file:
                    file.write(json.dumps([code, time.monotonic()]) + "\n")
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % code)
            connection.close()


def become(request: dict[str, Any]) -> list[str]:
    """Take the place that was handed over; return the arguments."""
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    for signum in SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    if ends_soon():
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # exits with the status before the handlers that torch registered at its import
    install()  # as the start-up of Python does under `aiodist run --as`
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    arguments: list[str] = request["argv"]
    return arguments


if __name__ == "__main__":
    gc.freeze()  # a program would copy the pages of all that torch has made, to look through it for garbage
    nursery = Nursery(sys.argv[1])
    print("ready", flush=True)
    given = nursery.serve()
    if given is None:
        sys.exit()
    sys.argv = become(given)
    if sys.argv[0] == "-m":
        module = sys.argv[1]
        sys.argv = sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        program = compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec")
        sys.modules["__main__"] = ModuleType("__main__")  # which nothing here keeps, so that it is the first to go
        vars(sys.modules["__main__"])["__file__"] = sys.argv[0]
        exec(program, vars(sys.modules["__main__"]))
