"""The handshake of a control connection, without I/O: each side proves that it knows the token of the job.

The listener greets with a challenge. The caller answers with its rank and a proof, and the listener proves the same in
its welcome. The token is never sent, so a caller with an outdated address reveals nothing to a stranger. Later frames
are neither encrypted nor signed: an attacker who can change packets on the network can change them.
"""

from __future__ import annotations

import hmac
import os
from typing import Any, Final

from aiodist.frames import Frame, FrameKind, WireError, frame, pack, unpack

_PROTOCOL: Final = "aiodist control 4"


class Refused(Exception):
    """The listener refuses the caller, or the caller the listener.

    `code` is `token`, `size`, `rank`, `duplicate`, `left`, `over` or `failed`. After `left` the rank may come back
    later: it has left the session, and other ranks have not.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Hello:
    """The introduction of a rank."""

    def __init__(self, rank: int, size: int, token: str) -> None:
        self.rank = rank
        self.size = size
        self._token = token

    def prove(self, role: bytes, challenge: bytes, counter_challenge: bytes) -> bytes:
        """Return the proof of one side that it knows the token, valid in this conversation only."""
        said = b"|".join((role, challenge, counter_challenge, f"{self.rank}/{self.size}".encode()))
        return hmac.digest(self._token.encode(), said, "sha256")


class Caller:
    """The side that connects."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._challenge = b""
        self._counter_challenge = os.urandom(16)
        self.settings: dict[str, Any] | None = None
        """Settings from the listener, or None before its welcome."""

    def answer(self, received: Frame) -> bytes:
        """Return the bytes to send. Raises `Refused`, and `WireError` for a frame of another protocol."""
        match received.kind, unpack(received.body):
            case FrameKind.GREETING, [str(protocol), bytes(challenge)]:
                if protocol != _PROTOCOL:
                    raise WireError(f"it speaks {protocol!r}, this is {_PROTOCOL!r}")
                self._challenge = challenge
                proof = self._hello.prove(b"rank", challenge, self._counter_challenge)
                said = [self._hello.rank, self._hello.size, proof, self._counter_challenge]
                return frame(FrameKind.HELLO, body=pack(said))
            case FrameKind.REFUSED, [str(code), str(message)]:
                raise Refused(code, message)
            case FrameKind.WELCOME, [bytes(answer), dict(settings)]:
                proof = self._hello.prove(b"hub", self._challenge, self._counter_challenge)
                if not hmac.compare_digest(answer, proof):
                    raise Refused("token", "the other side does not know this job's token")
                self.settings = settings
                return b""
            case _:
                raise WireError("no handshake of aiodist")


class Challenge:
    """The side that listens, for one caller."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._challenge = os.urandom(16)
        self._proof = b""

    def greeting(self) -> bytes:
        """Return the first bytes to send."""
        return frame(FrameKind.GREETING, body=pack([_PROTOCOL, self._challenge]))

    def check(self, received: Frame) -> Hello:
        """Return the introduction of a caller that knows the token. Raises `Refused` and `WireError`."""
        if received.kind != FrameKind.HELLO:
            raise WireError("expected a hello first")
        match unpack(received.body):
            case [int(rank), int(size), bytes(proof), bytes(counter_challenge)]:
                hello = Hello(rank, size, self._token)
            case _:
                raise WireError("a hello that cannot be read")
        if not hmac.compare_digest(proof, hello.prove(b"rank", self._challenge, counter_challenge)):
            raise Refused("token", "wrong token: this hub belongs to another job")
        self._proof = hello.prove(b"hub", self._challenge, counter_challenge)
        return hello

    def welcome(self, settings: dict[str, Any]) -> bytes:
        """Return the bytes that let the caller in, after `check`."""
        return frame(FrameKind.WELCOME, body=pack([self._proof, settings]))


def refusal(refused: Refused) -> bytes:
    """Return the bytes that refuse a caller."""
    return frame(FrameKind.REFUSED, body=pack([refused.code, str(refused)]))
