"""How a rank and a hub make sure of each other before anything else is said.

The hub greets with a challenge; the rank says who it is and proves that it knows the token; the hub proves the same
in its welcome. The token itself never travels, so a rank that an outdated address led to a stranger gives nothing
away, and each side knows whether the other belongs to its job. (What follows is neither encrypted nor signed: who
can change packets on the network is not kept out.)
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aiodist.control.link import Link
from aiodist.control.roster import Refused
from aiodist.control.thread import settle
from aiodist.control.wire import Frame, Kind, WireError, frame, pack, unpack

HANDSHAKE_TIMEOUT: Final = 10.0
_ABORT_TIMEOUT: Final = 1.0
_PROTOCOL: Final = "aiodist control 2"


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


class Authenticator:
    """The hub's side: greets each process that connects, and hands over those that know the token.

    `admit(link, hello, proof)` takes a rank in, with the proof to send along, or raises `Refused`.
    """

    def __init__(self, token: str, admit: Callable[[Link, Hello, bytes], None]) -> None:
        self._token = token
        self._admit = admit
        self._strangers: set[Link] = set()

    def greet(self) -> Link:
        """Return the protocol for a new connection."""
        challenge = os.urandom(16)

        def closed(cause: str) -> None:
            timer.cancel()
            self._strangers.discard(link)

        def hear(received: Frame) -> None:
            if received.kind != Kind.HELLO:
                raise WireError("expected a hello first")
            timer.cancel()
            self._judge(link, challenge, unpack(received.body))

        link = Link(hear, closed, frame(Kind.GREETING, body=pack([_PROTOCOL, challenge])))
        timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT, link.abort, "it did not say who it is")
        self._strangers.add(link)
        return link

    async def aclose(self) -> None:
        """Send away those who have not been let in; to be called when nobody can connect any more."""
        for link in tuple(self._strangers):
            link.abort("the hub was closed")
            await link.wait_closed(_ABORT_TIMEOUT)

    def _judge(self, link: Link, challenge: bytes, said: Any) -> None:  # noqa: ANN401
        match said:
            case [int(rank), int(size), bytes(proof), bytes(counter_challenge)]:
                pass
            case _:
                raise WireError("a hello that cannot be read")
        hello = Hello(rank, size, self._token)
        try:
            if not hmac.compare_digest(proof, hello.prove(b"rank", challenge, counter_challenge)):
                raise Refused("token", "wrong token: this hub belongs to another job")
            self._admit(link, hello, hello.prove(b"hub", challenge, counter_challenge))
            self._strangers.discard(link)
        except Refused as refusal:
            link.write(frame(Kind.REFUSED, body=pack([refusal.code, str(refusal)])))
            link.close(str(refusal))


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
                if protocol != _PROTOCOL:
                    raise WireError(f"it speaks {protocol!r}, this is {_PROTOCOL!r}")
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
