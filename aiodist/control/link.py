"""Control connections: frames in and out, who is at the other end, why they ended, and heartbeats to watch over them.

Before anything else is said a rank and a hub make sure of each other. The hub greets with a challenge; the rank says
who it is and proves that it knows the token; the hub proves the same in its welcome. The token itself never travels, so
a rank that an outdated address led to a stranger gives nothing away, and each side knows whether the other belongs to
its job. (What follows is neither encrypted nor signed: who can change packets on the network is not kept out.)
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from aiodist.control.roster import Refused
from aiodist.control.thread import forget, guard, settle
from aiodist.control.wire import MAX_FRAME, Frame, FrameReader, Kind, WireError, frame, pack, unpack

MAX_BACKLOG: Final = 16 * MAX_FRAME
"""How many bytes may wait for a peer that does not read before it is given up."""

HANDSHAKE_TIMEOUT: Final = 10.0
PROTOCOL: Final = "aiodist control 3"

_PAUSE: Final = 0.2
_PING: Final = frame(Kind.PING)


class Link(asyncio.Protocol):
    """A connection that speaks frames.

    `on_frame` and `on_closed` are attributes, since who listens changes: first the handshake, then the hub or the
    channel. A frame that cannot be understood ends the connection.
    """

    def __init__(
        self, on_frame: Callable[[Frame], None], on_closed: Callable[[str], None], greeting: bytes = b""
    ) -> None:
        self.on_frame = on_frame
        self.on_closed = on_closed
        self.heard = 0.0
        self.source = ""
        """The address of this end."""
        self.closed = asyncio.Event()
        self._reader = FrameReader()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        self._cause = ""
        self._greeting = greeting

    def trust(self) -> None:
        """Allow frames of full size: the other side has shown who it is."""
        self._reader.limit = MAX_FRAME

    def write(self, data: bytes) -> None:
        """Send frames; when the connection is over they are dropped, `on_closed` having said so."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > MAX_BACKLOG:
            self.abort(f"it did not read {MAX_BACKLOG >> 20} MiB that were waiting for it")

    def close(self, cause: str) -> None:
        """End the connection after what was written has been sent; `cause` is what `on_closed` will be told."""
        self._cause = self._cause or cause
        if self._transport is not None:
            self._transport.close()

    def abort(self, cause: str) -> None:
        """End the connection at once."""
        self._cause = self._cause or cause
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self, timeout: float) -> None:
        """Wait until the connection is over; after `timeout` seconds make it so."""
        try:
            async with asyncio.timeout(timeout):
                await self.closed.wait()
        except TimeoutError:
            self.abort("it did not take what was sent to it")
            await self.closed.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start; called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        sock = transport.get_extra_info("socket")
        # asyncio does so for sockets that say they are TCP's, which one that a listener accepted does not.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._fd = sock.fileno()
        self.source = str(transport.get_extra_info("sockname")[0])
        guard(self._fd)
        self.heard = self._loop.time()
        self.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        """Hand on each frame that is complete; called by the loop."""
        self.heard = self._loop.time()
        try:
            for received in self._reader.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self.on_frame(received)
        except WireError as error:
            self.abort(f"it broke the protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """Tell `on_closed`; called by the loop, before it closes the socket."""
        forget(self._fd)
        self._transport = None
        self.closed.set()
        self.on_closed(self._cause or ("the connection was closed" if error is None else str(error)))


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
        guard(sock.fileno())
        self._listen()

    def close(self) -> None:
        """Stop; the system refuses a process that is not accepted yet. Calling it again does nothing."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        forget(self._sock.fileno())
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


class Pulse:
    """Sends heartbeats on links, and ends those that have been silent for too long."""

    def __init__(
        self, timeout: float, links: Callable[[], Iterable[Link]], farewell: Callable[[str], bytes] | None = None
    ) -> None:
        self._timeout = timeout
        self._links = links
        self._farewell = farewell
        self._interval = timeout / 6
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._beat)

    def cancel(self) -> None:
        """Beat no more."""
        self._timer.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        # When this very process was stopped or starved, it is not the others who were silent.
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


# --- the handshake ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself to join."""

    rank: int
    size: int
    token: str = field(repr=False)

    def prove(self, role: bytes, challenge: bytes, counter_challenge: bytes) -> bytes:
        """Return what only somebody who knows the token can say about this conversation."""
        said = b"|".join((role, challenge, counter_challenge, f"{self.rank}/{self.size}".encode()))
        return hmac.digest(self.token.encode(), said, "sha256")


async def dial(host: str, port: int, hello: Hello, welcomed: Callable[[Link, dict[str, Any]], None]) -> None:
    """Connect to a hub and introduce this rank; `welcomed(link, settings)` runs before any later frame is read.

    Raises `OSError` where nobody listens, and also where what listens is no hub of this protocol
    (`ConnectionError`) or does not answer in time (`TimeoutError`); `Refused` when the hub, or the rank, does not
    accept the other.
    """
    outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    challenge, counter_challenge = b"", os.urandom(16)

    def hear(received: Frame) -> None:
        nonlocal challenge
        match received.kind, unpack(received.body):
            case Kind.GREETING, [str(protocol), bytes(challenge)]:
                if protocol != PROTOCOL:
                    raise WireError(f"it speaks {protocol!r}, this is {PROTOCOL!r}")
                proof = hello.prove(b"rank", challenge, counter_challenge)
                link.write(frame(Kind.HELLO, body=pack([hello.rank, hello.size, proof, counter_challenge])))
            case Kind.REFUSED, [str(code), str(message)]:
                settle(outcome, None, Refused(code, message))
            case Kind.WELCOME, [bytes(answer), dict(settings)]:
                if hmac.compare_digest(answer, hello.prove(b"hub", challenge, counter_challenge)):
                    link.trust()
                    welcomed(link, settings)
                    settle(outcome, None, None)
                else:
                    settle(outcome, None, Refused("token", "the hub does not know this job's token"))
            case _:
                raise WireError("no handshake of a hub")

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
