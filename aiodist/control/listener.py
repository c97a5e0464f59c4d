"""Accepts connections on a listening socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from aiodist.control import forks

__all__ = ["Listener"]

_PAUSE = 0.2


class Listener:
    """Accepts each process that connects, until it is closed.

    asyncio's own server loses a socket, open, when it is closed in the moment in which somebody connects (its
    transport fails to attach to a closed server); in a rendezvous that ranks give up, that moment is a common one.
    """

    def __init__(self, sock: socket.socket, greet: Callable[[], asyncio.Protocol]) -> None:
        self._sock = sock
        self._greet = greet
        self._loop = asyncio.get_running_loop()
        self._accepted: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        forks.guard(sock.fileno())
        self._listen()

    def close(self) -> None:
        """Stop; the system refuses a process that is not accepted yet. Calling it again does nothing."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        forks.forget(self._sock.fileno())
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until each connection that was accepted has its protocol."""
        if self._accepted:
            await asyncio.wait(self._accepted)

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # too many open files, as a rule: it will not help to try again at once
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(_PAUSE, self._listen)
            self._loop.call_exception_handler({"message": "the hub cannot accept a connection", "exception": error})
            return
        task = self._loop.create_task(self._connect(connection))
        self._accepted.add(task)
        task.add_done_callback(self._accepted.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(self._greet, connection)
        except OSError:  # it went before it was greeted
            connection.close()
