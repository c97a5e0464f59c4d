"""A client of the debug adapter protocol, as VS Code is one."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["DebugClient", "free_port"]


def free_port() -> int:
    """Return a port of the loopback interface on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class DebugClient:
    """A connection to a debug adapter.

    Source: the Debug Adapter Protocol, microsoft.github.io/debug-adapter-protocol.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}

    @classmethod
    @contextlib.contextmanager
    def attached(cls, port: int, program: Path, lines: list[int], limit: float = 60) -> Iterator[DebugClient]:
        """Attach as VS Code does, with breakpoints at `lines` of `program`, after a wait for the port."""
        end = time.monotonic() + limit
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=limit)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end, f"no process listens on port {port}"
                time.sleep(0.02)
        with sock:
            client = cls(sock)
            client.ask("initialize", adapterID="debugpy", clientID="vscode", pathFormat="path", linesStartAt1=True)
            attached = client.send("attach", justMyCode=True)
            client.event("initialized")
            source = {"path": str(program)}
            set_ = client.ask("setBreakpoints", source=source, breakpoints=[{"line": line} for line in lines])
            assert all(each["verified"] for each in set_["breakpoints"]), set_
            client.ask("configurationDone")
            client.answer(attached)
            yield client

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request, and return its number."""
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self._sock.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        return self._number

    def answer(self, number: int) -> Any:
        """Return the body of the answer to a request."""
        while number not in self._answers:
            self._read()
        answer = self._answers.pop(number)
        assert answer["success"], answer
        return answer.get("body")

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request, and return the body of its answer."""
        return self.answer(self.send(command, **arguments))

    def event(self, name: str) -> Any:
        """Return the body of the next event of this name."""
        while True:
            for event in self._events:
                if event["event"] == name:
                    self._events.remove(event)
                    return event.get("body")
            self._read()

    def stopped(self) -> tuple[str, int, Any]:
        """Return function and line of the next stop, and a function that evaluates an expression there."""
        thread = self.event("stopped")["threadId"]
        top = self.ask("stackTrace", threadId=thread)["stackFrames"][0]

        def value(expression: str) -> str:
            return str(self.ask("evaluate", expression=expression, frameId=top["id"], context="repl")["result"])

        return top["name"], top["line"], value

    def go_on(self) -> None:
        """Let all threads continue."""
        self.ask("continue", threadId=1)

    def _read(self) -> None:
        length = 0
        while line := self._file.readline().strip():
            length = int(line.split(b":")[1])
        assert length, "the debug adapter has closed the connection"
        message = json.loads(self._file.read(length))
        if message["type"] == "event":
            self._events.append(message)
        elif message["type"] == "response":
            self._answers[message["request_seq"]] = message
