"""The hub, to which all ranks connect. It keeps the store, routes messages, and reports exits.

It runs in the launcher, or in the listener thread of one rank. It has one connection for each rank, and does not read
the messages between ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from aiodist.control.link import Link, Listener, Pulse
from aiodist.control.places import listen, outward_host, tcp_address
from aiodist.control.roster import Exit, Members, Roster, Store
from aiodist.frames import EVERYBODY, Frame, FrameKind, WireError, frame, pack, unpack
from aiodist.handshake import Hello, Refused

_FAREWELL_TIMEOUT = 1.0


class Hub:
    """A hub on the running loop; use it as `async with Hub(size) as hub`, then connect ranks to `hub.address`.

    `host` is a name or an address, IPv4 or IPv6, and `""` is all addresses. Port 0 is any free port. `host_rank` is the
    rank in whose process the hub runs, or None in a launcher. In an elastic job `members` gets the reports of this
    session, which is that of one generation. After `heartbeat` seconds of silence a rank is lost; each side sends a
    heartbeat six times as often. At its close, a rank with the hub waits `linger` seconds for the others. Entering
    raises `OSError` if it cannot listen. A hub that other users can reach needs a token, which each rank must know.
    """

    def __init__(
        self,
        size: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        heartbeat: float = 30.0,
        linger: float = 5.0,
        host_rank: int | None = None,
        members: Members | None = None,
    ) -> None:
        self._host = host
        self.port = port
        self._host_rank = host_rank
        self._heartbeat = heartbeat
        self._linger = linger
        self._members = members
        self.roster = Roster(size)
        self.store = Store()
        self._token = token
        self._links: dict[int, Link] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._listener: Listener | None = None
        self._pulse: Pulse | None = None

    @property
    def address(self) -> str:
        """Address for ranks: `tcp://host:port`."""
        return tcp_address(self._host or outward_host(), self.port)

    async def __aenter__(self) -> Hub:
        self.listen_at(await listen(self._host, self.port, backlog=max(128, self.roster.size)))
        return self

    def listen_at(self, sock: socket.socket) -> None:
        """Start on a listening socket."""
        self.port = sock.getsockname()[1]
        self._listener = Listener(sock, self._token, self._admit)
        self._pulse = Pulse(self._heartbeat, self._links.values, _farewell)

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    async def linger(self) -> None:
        """Accept no more ranks, and wait until all have left, at most `linger` seconds.

        Without a complete session it returns immediately.
        """
        if not self.roster.ready:
            return
        self._stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._linger):
                await self._idle.wait()

    async def aclose(self, cause: str = "the hub was closed") -> None:
        """Stop. Connected ranks get the cause, and the ranks that never joined."""
        self._stop_listening()
        if self._pulse is not None:
            self._pulse.cancel()
        if self._listener is not None:
            await self._listener.wait_closed()
        links = tuple(self._links.values())
        late = [] if self.roster.ready else list(self.roster.missing().items())
        closing = frame(FrameKind.CLOSING, body=pack({"cause": cause, "clean": True, "late": late}))
        for link in links:
            link.write(closing)
            link.close(cause)
        for link in links:
            await link.wait_closed(_FAREWELL_TIMEOUT)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _admit(self, link: Link, hello: Hello, welcome: Callable[[dict[str, Any]], bytes]) -> None:
        rank = hello.rank
        if self._members is not None and rank in self.roster.exits:
            raise Refused("over", f"rank {rank} has left this elastic job, in which a process opens the world once")
        self.roster.join(rank, hello.size)
        link.trust()
        link.on_frame = partial(self._serve, rank)
        link.on_closed = partial(self._gone, rank, link)
        self._links[rank] = link
        self._idle.clear()
        link.write(welcome({"heartbeat": self._heartbeat, "host_rank": self._host_rank}))
        if self.roster.ready:
            self._write_all(frame(FrameKind.READY))
        if self._members is not None:
            self._members.joined(rank)

    def _serve(self, rank: int, received: Frame) -> None:
        match received.kind:
            case FrameKind.MESSAGE:
                data = frame(FrameKind.MESSAGE, rank, received.body)
                if received.number == EVERYBODY:
                    self._write_all(data, but=rank)
                elif link := self._links.get(received.number):
                    link.write(data)
            case FrameKind.REQUEST:
                self._answer(rank, received.number, unpack(received.body))
            case FrameKind.CANCEL:
                self.store.cancel(rank, received.number)
            case FrameKind.PING:
                pass
            case kind:
                raise WireError(f"a frame of kind {kind} from a rank")

    def _write_all(self, data: bytes, but: int | None = None) -> None:
        for rank, link in tuple(self._links.items()):
            if rank != but:
                link.write(data)

    def _answer(self, rank: int, number: int, request: Any) -> None:  # noqa: ANN401
        value: Any = None
        match request:
            case ["missing"]:
                value = list(self.roster.missing().items())
            case ["fail", str(cause), str(trace), int(code)]:
                self._leave(Exit(rank, clean=False, cause=cause, traceback=trace, exitcode=code))
            case ["bye", str(cause)]:
                self._leave(Exit(rank, clean=True, cause=cause, exitcode=0))
            case ["regroup", int(joiners)] if self._members is not None:
                self._members.ask(rank, joiners, partial(self._reply, rank, number))
                return
            case ["late"] if self._members is not None:
                value = list(self._members.missing(rank).items())
            case _:
                if not self.store.answer(request, (rank, number), partial(self._reply, rank, number)):
                    raise WireError("a request that cannot be read")
                return
        self._reply(rank, number, value, None)

    def _reply(self, rank: int, number: int, value: Any, error: Exception | None) -> None:  # noqa: ANN401
        if link := self._links.get(rank):
            link.write(frame(FrameKind.REPLY, number, pack([None if error is None else str(error), value])))

    def _leave(self, exit: Exit) -> None:
        if self.roster.leave(exit):
            self._write_all(frame(FrameKind.EXIT, body=pack(asdict(exit))), but=exit.rank)
        if self._members is not None:
            self._members.left(exit)

    def _gone(self, rank: int, link: Link, cause: str) -> None:
        """Handle the end of a connection, which is no exit after a goodbye or a report of failure."""
        if self._links.get(rank) is not link:  # the rank has left before all had joined, and has joined again
            return
        del self._links[rank]
        self.store.cancel(rank)
        self._leave(Exit(rank, clean=False, cause=f"it left without a goodbye: {cause}"))
        if not self._links:
            self._idle.set()
            if self._members is None and self.roster.start_over():
                self.store = Store()


def _farewell(cause: str) -> bytes:
    notice = {"cause": f"the hub gave this rank up: {cause}", "clean": False, "late": []}
    return frame(FrameKind.CLOSING, body=pack(notice))
