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
from dataclasses import dataclass
from typing import Any, Final

from aiodist.control.link import Link
from aiodist.control.wire import Frame, Kind, WireError, frame, pack, unpack

__all__ = ["Door", "Hello", "Refused", "dial"]

HANDSHAKE_TIMEOUT: Final = 10.0
_PROTOCOL: Final = "aiodist control 1"


class Refused(Exception):
    """The hub does not let this rank in; `code` is `token`, `size`, `rank`, `duplicate`, `left` or `failed`.

    `left`: this rank left the session and others have not yet, so that it may come back later.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Hello:
    """Who wants to come in, and what the hub must answer to prove itself."""

    rank: int
    size: int
    answer: bytes


class Door:
    """The hub's side: greets whoever connects, and hands over those who know the token."""

    def __init__(self, token: str, admit: Callable[[Link, Hello], None]) -> None:
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
            self._strangers.discard(link)
            self._judge(link, challenge, unpack(received.body))

        link = _Greeting(frame(Kind.GREETING, body=pack([_PROTOCOL, challenge])), hear, closed)
        timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT, link.abort, "it did not say who it is")
        self._strangers.add(link)
        return link

    def close(self) -> None:
        """Send away whoever has not said yet who they are."""
        for link in tuple(self._strangers):
            link.abort("the hub was closed")

    def _judge(self, link: Link, challenge: bytes, said: Any) -> None:  # noqa: ANN401
        match said:
            case [int(rank), int(size), bytes(proof), bytes(counter_challenge)]:
                pass
            case _:
                raise WireError("a hello that cannot be read")
        place = f"{rank}/{size}".encode()
        try:
            expected = _prove(self._token, b"rank", challenge, counter_challenge, place)
            if not hmac.compare_digest(proof, expected):
                raise Refused("token", "wrong token: this hub belongs to another job")
            answer = _prove(self._token, b"hub", challenge, counter_challenge, place)
            self._admit(link, Hello(rank, size, answer))
        except Refused as refusal:
            link.write(frame(Kind.REFUSED, body=pack([refusal.code, str(refusal)])))
            link.close(str(refusal))


class _Greeting(Link):
    """A link that speaks first."""

    def __init__(
        self, greeting: bytes, on_frame: Callable[[Frame], None], on_closed: Callable[[str], None]
    ) -> None:
        super().__init__(on_frame, on_closed)
        self._words = greeting

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(self._words)


async def dial(
    host: str, port: int, *, rank: int, size: int, token: str, welcomed: Callable[[Link, dict[str, Any]], None]
) -> None:
    """Connect to a hub and introduce this rank; `welcomed(link, settings)` runs before any later frame is read.

    Raises `OSError` where nobody listens, and also where whoever listens is no hub of this protocol (`ConnectionError`)
    or does not answer in time (`TimeoutError`); `Refused` when the hub, or the rank, does not accept the other.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[None] = loop.create_future()
    counter_challenge = os.urandom(16)
    place = f"{rank}/{size}".encode()
    challenge = b""

    def hear(received: Frame) -> None:
        nonlocal challenge
        said = unpack(received.body)
        match received.kind, said:
            case Kind.GREETING, [str(protocol), bytes(challenge)]:
                if protocol != _PROTOCOL:
                    raise WireError(f"it speaks {protocol!r}, this is {_PROTOCOL!r}")
                proof = _prove(token, b"rank", challenge, counter_challenge, place)
                link.write(frame(Kind.HELLO, body=pack([rank, size, proof, counter_challenge])))
            case Kind.REFUSED, [str(code), str(message)]:
                fail(Refused(code, message))
            case Kind.WELCOME, [bytes(answer), dict(settings)]:
                if not hmac.compare_digest(answer, _prove(token, b"hub", challenge, counter_challenge, place)):
                    return fail(Refused("token", "the hub does not know this job's token"))
                link.trust()
                welcomed(link, settings)
                if not outcome.done():
                    outcome.set_result(None)
            case _:
                raise WireError("no handshake of a hub")

    def fail(error: Exception) -> None:
        if not outcome.done():
            outcome.set_exception(error)

    link = Link(hear, lambda cause: fail(ConnectionError(f"no hub of aiodist, or a closing one: {cause}")))
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await loop.create_connection(lambda: link, host, port)
            await outcome
    except BaseException:
        link.abort("the handshake failed")
        outcome.cancel()
        raise


def _prove(token: str, role: bytes, *said: bytes) -> bytes:
    """Return what only somebody with the token can say about this conversation."""
    return hmac.digest(token.encode(), b"|".join((role, *said)), "sha256")
