"""A running job answers `aiodist inspect`: rank 0 asks all ranks, and sends the answers to the clients.

Ranks answer twice, as for `Inquiry`: immediately on the listener thread, and later on the loop. A separate thread waits
for connections, and answers also if everything else is blocked.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from time import monotonic
from typing import Any

from aiodist.communicator.watchdog import Watch
from aiodist.control import Channel
from aiodist.control.thread import forget, guard
from aiodist.handles.stacks import stack_of_task, stack_of_thread
from aiodist.threads import OwnThread
from aiodist.watch import jobs

_TOPIC = "inspect"
_ANSWER_SECONDS = 0.5
_STACKS = 16


@contextmanager
def inspected(watch: Watch, channel: Channel, job: int | None) -> Iterator[None]:
    """Let `aiodist inspect` find this job during the block by `job`, the process id of its launcher, unless None."""
    inspector = Inspector(watch, channel)
    try:
        with nullcontext() if job is None or channel.rank else _served(inspector, job):
            yield
    finally:
        with suppress(RuntimeError):  # the channel is closed
            channel.unsubscribe(_TOPIC)


class Inspector:
    """Answers and questions of one rank."""

    def __init__(self, watch: Watch, channel: Channel) -> None:
        self._watch = watch
        self._channel = channel
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Event()
        channel.subscribe(_TOPIC, self._heard)

    def ask(self) -> list[dict[str, Any]]:
        """Return the state of each rank (separate thread)."""
        self._number += 1
        exits, mine = self._channel.exits(), self._channel.rank
        answers: dict[int, dict[str, Any]] = {rank: {} for rank in range(self._channel.size) if rank not in exits}
        self._answers = answers
        with suppress(RuntimeError):
            self._channel.broadcast(_TOPIC, ["ask", self._number, None])
        answers[mine].update(self._here())
        self._watch.progress.post(lambda: self._note(mine, self._on_loop()))
        until = monotonic() + _ANSWER_SECONDS
        while not all("tasks" in answer for answer in answers.values()) and (left := until - monotonic()) > 0:
            self._news.wait(left)
            self._news.clear()
        found = [{"rank": rank, **answer} for rank, answer in answers.items()]
        found += [{"rank": rank, "left": exit.cause} for rank, exit in exits.items() if exit.host is None]
        return sorted(found, key=lambda answer: answer["rank"])

    def _heard(self, src: int, message: list[Any]) -> None:
        what, number, content = message
        if what == "ask":
            self._reply(src, number, self._here())
            self._watch.progress.post(lambda: self._reply(src, number, self._on_loop()))
        elif number == self._number:
            self._note(src, content)

    def _note(self, rank: int, content: dict[str, Any]) -> None:
        self._answers[rank].update(content)
        self._news.set()

    def _reply(self, dst: int, number: int, content: dict[str, Any]) -> None:
        with suppress(RuntimeError):  # the channel was closed
            self._channel.send(dst, _TOPIC, ["answer", number, content])

    def _here(self) -> dict[str, Any]:
        """Return the state of this rank that any thread can read."""
        watch = self._watch
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "thread": stack_of_thread(threading.main_thread().ident or 0),  # the loop may run in another thread
            "waits": [{"what": w.what, "seconds": w.seconds, "ranks": w.ranks} for w in watch.waits()],
            "communicators": {name: member.as_json() for name, member in list(watch.members.items())},
        }

    def _on_loop(self) -> dict[str, Any]:
        stacks = ((task.get_name(), stack_of_task(task)) for task in self._watch.tasks())
        return {"tasks": [[name, stack] for name, stack in stacks if stack][:_STACKS]}


@contextmanager
def _served(inspector: Inspector, job: int) -> Iterator[None]:
    """Serve the states of the ranks on the job's socket in this block, in a thread."""
    with socket.socket(socket.AF_UNIX) as server:
        path = None
        with suppress(OSError):  # no such folder, or another job of this name is open
            claimed = jobs.claim(job)
            server.bind(str(claimed))
            server.listen()
            path = claimed
        if path is None:  # this job cannot be inspected
            yield
            return
        guard(server.fileno())
        thread = OwnThread("aiodist-inspect", _serve, server, inspector, job)
        thread.start()
        try:
            yield
        finally:
            forget(server.fileno())
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(2 * _ANSWER_SECONDS)
    path.unlink(missing_ok=True)


def _serve(server: socket.socket, inspector: Inspector, job: int) -> None:
    while callers := _callers(server):
        answer = json.dumps({"job": job, "program": sys.argv[:1], "ranks": inspector.ask()}).encode()
        for connection in callers:
            with connection, suppress(OSError):
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(answer)


def _callers(server: socket.socket) -> list[socket.socket]:
    """Wait for a client. Return all waiting clients, which get the same answer, or none after the shutdown."""
    callers: list[socket.socket] = []
    with suppress(OSError):
        server.settimeout(None)
        while True:
            callers.append(server.accept()[0])
            server.settimeout(0)
    return callers
