"""A client's calls: questions in JSON that a server answers, as steps of programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from aiodist.backends.base import Done
from aiodist.collectives.program import Call, Program
from aiodist.errors import AiodistError, MismatchError, PeerLost, RemoteError
from aiodist.ps.names import NameEntry
from aiodist.ps.request_queue import RequestQueue
from aiodist.ps.requests import Freed
from aiodist.ps.wire import Kind

__all__ = ["Calls", "Said", "error_of"]

Said = dict[str, Any]
_Answered = Callable[[Said | None, BaseException | None], None]


class Calls:
    """Every method runs with the transport lock held."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._context = queue.context
        self._waiting: dict[tuple[int, int], _Answered] = {}
        """By server and number."""
        self._refusal: AiodistError | None = None

    def call(self, dst: int, op: str, **said: Any) -> Generator[list[Call], None, Said]:  # noqa: ANN401
        """Ask server `dst`, as a step of a program, and return what it answers."""
        answers: list[Said] = []
        yield [partial(self._ask, dst, self._queue.number(), {"op": op, **said}, answers.append)]
        return answers[0]

    def everywhere(self, op: str) -> Program[None]:
        """Ask all servers that are there, as one request; raises PeerLost where the first of them dies, or has."""
        number = self._queue.number()

        def ask(dst: int, done: Done) -> None:
            def answered(error: BaseException | None) -> None:
                done(None if isinstance(error, PeerLost) and dst != self._context.servers[0] else error)

            self._ask(dst, number, {"op": op}, lambda _: None, answered)

        yield [partial(ask, rank) for rank in self._context.servers]

    def configuring(self, entry: NameEntry, settings: dict[str, float]) -> Program[None]:
        """Change settings of the rule of `entry`, on all of its shards: one request, so one number."""
        number = self._queue.number()
        said = {"op": "configure", "key": entry.key, "settings": settings}
        yield [partial(self._ask, span.rank, number, said, lambda _: None) for span in entry.spans]

    def _ask(self, dst: int, number: int, said: Said, answer: Callable[[Said], object], done: Done) -> None:
        def answered(got: Said | None, error: BaseException | None) -> None:
            if got is not None:
                answer(got)
            done(error)

        if self._refusal is not None or dst in self._context.gone:
            done(self._refusal or self._context.lost(dst))
            return
        self._waiting[(dst, number)] = answered
        self._context.coalescer.put(dst, Kind.CALL, json.dumps({**said, "n": number}).encode(), request=True)
        self._context.coalescer.flush()

    def tell(self, dst: int, op: str, **said: Any) -> Call:  # noqa: ANN401
        """Return the call that tells server `dst` something which it does not answer."""

        def put(done: Done) -> None:
            if dst not in self._context.gone:
                body = json.dumps({"op": op, **said}).encode()
                self._context.coalescer.put(dst, Kind.CALL, body, request=True)
                self._context.coalescer.flush()
            done(None)

        return put

    def answered(self, src: int, said: Said, error: BaseException | None) -> bool:
        """Take an answer; False when it belongs to no call."""
        answered = self._waiting.pop((src, said["n"]), None)
        if answered is not None:
            answered(said if error is None else None, error)
        return answered is not None

    def late(self) -> dict[int, str]:
        """Return the servers that have not answered."""
        return {rank: "a call" for rank, _ in list(self._waiting)}

    def lose(self, rank: int, error: AiodistError) -> None:
        """`rank` died."""
        for asked, answered in list(self._waiting.items()):
            if asked[0] == rank:
                del self._waiting[asked]
                answered(None, error)

    def abort(self, error: AiodistError) -> None:
        """Fail everything."""
        self._refusal = error  # also of calls that were left for the lock's holder
        waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            answered(None, error)


def error_of(said: Said, src: int) -> BaseException | None:
    """Return what a server's refusal raises here; None for an answer that is none."""
    if "error" not in said:
        return None
    text = f"{said['error']}"
    if "lost" in said:
        return PeerLost(text, lost=said["lost"])
    if said["type"] == MismatchError.__name__:
        return MismatchError(text)
    if said["type"] == Freed.__name__:
        return KeyError(text)
    return RemoteError(f"server {src} raised {said['type']}: {text}", raised_by=src)
