"""The connection between launcher, hub and ranks: frames in and out, the handshake, and heartbeats.

A guard speaks the same frames on a loop of `poll`, since asyncio would double the time that it needs to start.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from aiodist.control.thread import forget, guard, settle
from aiodist.frames import MAX_FRAME, Frame, FrameKind, FrameReader, WireError, frame, set_options
from aiodist.handshake import Caller, Challenge, Hello, Refused, refusal

MAX_BACKLOG: Final = 16 * MAX_FRAME
"""Largest backlog of a peer that does not read, in bytes. After that the connection is aborted."""

HANDSHAKE_TIMEOUT: Final = 10.0

_PAUSE: Final = 0.2
_FAREWELL_TIMEOUT: Final = 1.0
_PING: Final = frame(FrameKind.PING)


class Link(asyncio.Protocol):
    """A connection that carries frames.

    `on_frame` and `on_closed` change their owner: first the handshake, then the hub, the channel or the launcher. A
    frame that the protocol does not allow ends the connection.
    """

    def __init__(
        self, on_frame: Callable[[Frame], None], on_closed: Callable[[str], None], greeting: bytes = b""
    ) -> None:
        self.on_frame = on_frame
        self.on_closed = on_closed
        self.heard = 0.0
        """Time of the last data from the peer, by the loop's clock."""
        self.source = ""
        """Address of this end."""
        self.closed = asyncio.Event()
        self._reader = FrameReader()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        self._cause = ""
        self._greeting = greeting

    def trust(self) -> None:
        """Allow frames of full size, since the peer has shown that it belongs to the job."""
        self._reader.limit = MAX_FRAME

    def write(self, data: bytes) -> None:
        """Send frames. A closed connection drops them."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > MAX_BACKLOG:
            self.abort(f"it did not read {MAX_BACKLOG >> 20} MiB that were waiting for it")

    def close(self, cause: str) -> None:
        """Close the connection after the frames in flight are sent. `on_closed` gets the cause."""
        self._cause = self._cause or cause
        if self._transport is not None:
            self._transport.close()

    def abort(self, cause: str) -> None:
        """Close the connection now."""
        self._cause = self._cause or cause
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self, timeout: float) -> None:
        """Wait until the connection is closed. Abort it after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self.closed.wait()
        except TimeoutError:
            self.abort("it did not take what was sent to it")
            await self.closed.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start. The loop calls it."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        sock = transport.get_extra_info("socket")
        set_options(sock)
        self._fd = sock.fileno()
        self.source = str(transport.get_extra_info("sockname")[0])
        guard(self._fd)
        self.heard = self._loop.time()
        self.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        """Deliver each complete frame. The loop calls it."""
        self.heard = self._loop.time()
        try:
            for received in self._reader.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self.on_frame(received)
        except WireError as error:
            self.abort(f"it broke the protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """Notify the owner. The loop calls it, before it closes the socket."""
        forget(self._fd)
        self._transport = None
        self.closed.set()
        self.on_closed(self._cause or ("the connection was closed" if error is None else str(error)))


Admit = Callable[[Link, Hello, Callable[[dict[str, Any]], bytes]], None]


class Listener:
    """Accepts connections, and lets in each caller that knows the token, until it is closed.

    asyncio's own server leaks an open socket if it is closed while a process connects: the transport fails to attach to
    a closed server. This is common in a rendezvous that ranks abort.
    """

    def __init__(self, sock: socket.socket, token: str, admit: Admit) -> None:
        """`admit(link, hello, welcome)` owns the link and sends `welcome(settings)`, or raises `Refused`."""
        self._sock = sock
        self._token = token
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._accepted: set[asyncio.Task[None]] = set()
        self._strangers: set[Link] = set()
        """Connections before the end of their handshake."""
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        guard(sock.fileno())
        self._listen()

    def close(self) -> None:
        """Stop; the system refuses a process that is not accepted yet. A second call is a no-op."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        forget(self._sock.fileno())
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until no accepted connection is in its handshake, and abort handshakes in progress."""
        if self._accepted:
            await asyncio.wait(self._accepted)
        for stranger in tuple(self._strangers):  # no process can connect any more
            stranger.abort("the hub was closed")
            await stranger.wait_closed(_FAREWELL_TIMEOUT)

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # usually too many open files: an immediate retry would fail too
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
        except OSError:  # the process left before the greeting
            connection.close()

    def _greet(self) -> Link:
        """Return the protocol of a new connection, which makes the handshake."""
        challenge = Challenge(self._token)

        def closed(cause: str) -> None:
            timer.cancel()
            self._strangers.discard(link)

        def hear(received: Frame) -> None:
            timer.cancel()
            try:
                self._admit(link, challenge.check(received), challenge.welcome)
            except Refused as refused:
                link.write(refusal(refused))
                link.close(str(refused))
            else:
                self._strangers.discard(link)

        link = Link(hear, closed, challenge.greeting())
        timer = self._loop.call_later(HANDSHAKE_TIMEOUT, link.abort, "it did not introduce itself")
        self._strangers.add(link)
        return link


async def dial(host: str, port: int, hello: Hello, welcomed: Callable[[Link, dict[str, Any]], None]) -> None:
    """Connect to a hub and introduce this rank. `welcomed(link, settings)` runs before any later frame.

    Raises `OSError` if no process listens, `ConnectionError` for another protocol, and `TimeoutError` for no answer in
    time. Raises `Refused` if the hub refuses the rank, or the rank the hub.
    """
    outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    caller = Caller(hello)

    def hear(received: Frame) -> None:
        try:
            link.write(caller.answer(received))
        except Refused as refused:
            settle(outcome, None, refused)
        if caller.settings is not None:
            link.trust()
            welcomed(link, caller.settings)
            settle(outcome, None, None)

    def closed(cause: str) -> None:
        settle(outcome, None, ConnectionError(f"no hub of aiodist, or a closing one: {cause}"))

    link = Link(hear, closed)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await asyncio.get_running_loop().create_connection(lambda: link, host, port)
            await outcome
    except BaseException:
        link.abort("the handshake failed")
        outcome.cancel()
        raise


class Pulse:
    """Sends heartbeats on links, and aborts links without heartbeats, as those of a stopped process."""

    def __init__(
        self, timeout: float, links: Callable[[], Iterable[Link]], farewell: Callable[[str], bytes] | None = None
    ) -> None:
        """`farewell(cause)` returns the last bytes to an aborted link."""
        self._timeout = timeout
        self._links = links
        self._farewell = farewell
        self._interval = timeout / 6
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._beat)

    def cancel(self) -> None:
        """Stop."""
        self._timer.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        # A late timer means that this process was stopped or starved, not the others.
        forgive = now - self._due > self._interval
        for link in tuple(self._links()):
            if forgive:
                link.heard = now
            silent = now - link.heard
            if silent > self._timeout:
                cause = f"no heartbeat for {silent:.3g} s (the limit is {self._timeout:g} s)"
                link.write(self._farewell(cause) if self._farewell else b"")
                link.abort(cause)
            else:
                link.write(_PING)
        self._due = now + self._interval
        self._timer = self._loop.call_at(self._due, self._beat)
