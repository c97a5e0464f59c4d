"""The client of one rank: makes requests, keeps the order of its own, and completes handles by what servers say."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES
from aiodist.backends.inplace import copy
from aiodist.collectives.program import Call, Program
from aiodist.errors import AiodistError, MismatchError, RemoteError
from aiodist.handles import Handle
from aiodist.ps.codes import Codes
from aiodist.ps.context import LIGHT_BYTES, Context
from aiodist.ps.known import Known, Span
from aiodist.ps.operation import Operation, PullPart, PushPart
from aiodist.ps.raw import as_bytes, bytes_in
from aiodist.ps.wire import DATA_BYTES, FILL, Data, Done, Kind, Reads, Release, Stage, Way, pack_pull, pack_push

__all__ = ["Client"]

_INLINE, _PUSH = int(Way.INLINE), int(Kind.PUSH)
_Said = dict[str, Any]
_Posting = Callable[[], None]
_Answered = Callable[[_Said | None, BaseException | None], None]


class Client:
    """Calls from the loop's thread make requests; what is `heard` comes with the transport lock held."""

    def __init__(self, context: Context, own: dict[tuple[int, int], Tensor], shown: Callable[[int], Tensor]) -> None:
        """`own` is where the server of this very rank finds what is pushed to it, `shown` its shards' memory."""
        self.context = context
        self._own = own
        self._shown = shown
        self._number = 0
        self._pushes: dict[int, PushPart] = {}
        self._pulls: dict[int, PullPart] = {}
        self._calls: dict[tuple[int, int], _Answered] = {}
        """By server and number."""
        self._open: dict[int, None] = {}
        """Pushes that are neither applied nor dropped, in order."""
        self._first_open = 1  # none before this number is open; a dict finds its first slowly when many were removed
        self._syncs: deque[tuple[int, Handle[None]]] = deque()
        self._watched: list[tuple[Known, Callable[[BaseException | None], None]]] = []
        self._late_error: BaseException | None = None
        self.codes = Codes(context)
        self._encodes = context.codec is not None
        self._inline_bytes = context.post.inline_bytes
        self._laned = 0  # requests on their way through the service thread
        self.programs: set[Handle[Any]] = set()
        """Calls of several steps that are not over."""

    @property
    def number(self) -> int:
        """The number of the last request."""
        return self._number

    @property
    def busy(self) -> bool:
        """Something is not over."""
        return bool(self._open or self._pulls or self.programs)

    def late(self) -> dict[int, str]:
        """Return the servers that have not answered, and what they were asked."""
        pushes = {rank: f"push of {part.known}" for part in list(self._pushes.values()) for rank in part.applying}
        pulls = {rank: f"pull of {part.known}" for part in list(self._pulls.values()) for rank in part.left}
        calls = {rank: "a call" for rank, _ in list(self._calls)}
        return calls | pulls | pushes

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    # --- pushing ---------------------------------------------------------------------------------------------

    def push(self, operation: Operation, known: Known, value: Tensor, rule: int, alpha: float) -> None:
        """Push flat `value`; copied now where it is small, else the operation's until it is over."""
        number = self._next_number()
        spans = known.spans
        accepts = self.context.policy.accepts and rule != FILL
        part = PushPart(operation, known, [span.rank for span in spans], accepts=accepts)
        self._pushes[number] = part
        self._open[number] = None
        metrics = self.context.metrics
        metrics.pushes += 1
        metrics.push_bytes += value.nbytes
        if self._encodes and rule != FILL and self.codes.takes(known):
            self._push_code(number, part, value, rule, alpha)
            return
        if len(spans) == 1 and value.nbytes <= self._inline_bytes and spans[0].rank != self.context.rank:
            self._push_small(number, known, value, rule, alpha)
            return
        # The one span of an object does not say how long its code is.
        parts = [value] if len(spans) == 1 else [value[start:stop] for _, start, stop in spans]
        self._issue([self._posting(number, known, span, t, rule, alpha) for span, t in zip(spans, parts, strict=True)])

    def _push_small(self, number: int, known: Known, value: Tensor, rule: int, alpha: float) -> None:
        """Do what `_posting` does, for what is pushed fifty thousand times a second."""
        nbytes = value.nbytes
        head = pack_push(known.key, rule, _INLINE, False, number, known.base, alpha, nbytes, 0, 0)
        posting = partial(self._put_push, known.spans[0].rank, head, as_bytes(value))
        if self._laned:
            self._issue([posting])
        else:
            self.context.progress.start(partial(self._post_one, posting))

    def _posting(
        self, number: int, known: Known, span: Span, value: Tensor, rule: int, alpha: float, *, coded: bool = False
    ) -> _Posting:
        """Return what sends one shard's part of a push."""
        dst, nbytes = span.rank, value.nbytes
        post = self.context.post
        segment = offset = 0
        data = b""
        way = Way.MESSAGE
        if dst == self.context.rank:
            way = Way.OWN
            self._own[(number, known.key)] = (
                value.view(torch.uint8).clone() if nbytes <= post.inline_bytes else value.view(torch.uint8)
            )
        elif nbytes <= post.inline_bytes:
            way = Way.INLINE
            data = as_bytes(value)
        elif self.context.near_rank(dst) is not None and self.context.near is not None:
            place = self.context.near.locate(value)
            if place is not None:
                way = Way.MEMORY
                segment, offset = place
        head = pack_push(known.key, rule, way, coded, number, known.base, alpha, nbytes, segment, offset)
        if way != Way.MESSAGE:
            put = partial(self._put, dst, _PUSH) if rule == FILL else partial(self._put_push, dst)
            return partial(put, head, data)

        def send() -> None:
            post.put(dst, Kind.PUSH, head, request=True)
            post.send(value.view(torch.uint8), dst, number, partial(_keep, value))
            if rule != FILL:
                self.context.metrics.push_sent_bytes += nbytes

        return partial(self._put_first, dst, send)

    def _push_code(self, number: int, part: PushPart, value: Tensor, rule: int, alpha: float) -> None:
        """Encode in the service thread what is large, and keep what comes after it behind it."""
        known = part.known
        if self._laned and value.nbytes <= self._inline_bytes:
            value = value.clone()  # it is the user's again when the call returns

        def encode() -> None:
            part.keep = self.codes.encode(known, value, self.context.rules[rule], alpha)

        def postings() -> list[_Posting]:
            codes, left = part.keep
            return [
                self._posting(number, known, span, code, rule, left, coded=coded)
                for span, (code, coded) in zip(known.spans, codes, strict=True)
            ]

        def encoded(error: BaseException | None) -> None:
            self._laned -= 1
            if error is not None:
                self._finish_push(number, part, error)
            elif number in self._pushes:
                self._post(postings())

        if value.nbytes > LIGHT_BYTES or self._laned:
            self._laned += 1
            self.context.progress.start(partial(self.context.service.run, encode, encoded))
            return
        try:
            encode()
        except Exception as error:  # noqa: BLE001  - it belongs to whoever awaits the push
            self.context.progress.start(partial(self._finish_push, number, part, error))
        else:
            self._issue(postings())

    # --- pulling ---------------------------------------------------------------------------------------------

    def pull(self, part: PullPart, reads: Reads, wants: int) -> None:
        """Pull what `part` says."""
        number = self._next_number()
        known, into = part.known, part.into
        self._pulls[number] = part
        metrics = self.context.metrics
        metrics.pulls += 1
        metrics.pull_bytes += 0 if into is None else into.nbytes
        postings = []
        for span in known.spans:
            way = Way.MESSAGE
            if span.rank == self.context.rank:
                way = Way.OWN
            elif self.context.near_rank(span.rank) is not None:
                way = Way.MEMORY
            head = pack_pull(known.key, way, reads, number, wants)
            postings.append(partial(self._put, span.rank, Kind.PULL, head, b""))
        self._issue(postings)

    def _data(self, src: int, body: memoryview) -> None:
        data = Data.unpack(body)
        part = self._pulls.get(data.number)
        if part is None:  # it was given up
            return
        metrics = self.context.metrics
        part.version = data.version if part.version is None else min(part.version, data.version)
        if part.into is None:
            metrics.pull_bytes += data.nbytes
        if data.way in (Way.INLINE, Way.MESSAGE):
            metrics.pull_received_bytes += data.nbytes
            self._receive(part, src, data, body)
            return
        found = (
            self._shown(data.offset).view(torch.uint8)
            if data.way == Way.OWN
            else self.context.memory(src, data.segment, data.offset, data.nbytes)
        )

        def look() -> None:
            if part.into is None:
                part.value = found.clone()
            else:
                copy(self._span(part, src).view(torch.uint8), found)

        def looked(error: BaseException | None) -> None:
            self.context.post.put(src, Kind.RELEASE, Release(part.known.key, data.number).pack())
            self.context.post.flush()
            self._part_read(data.number, part, src, error)

        if data.nbytes <= LIGHT_BYTES:
            look()
            looked(None)
        else:
            self.context.service.run(look, looked)

    def _receive(self, part: PullPart, src: int, data: Data, body: memoryview) -> None:
        """Take what came with the entry, or comes in a message behind it."""
        over = partial(self._part_read, data.number, part, src)
        into = None if part.into is None else self._span(part, src)
        arrived = self.codes.expect(part.known, src, into, over) if data.coded and into is not None else None
        if data.way == Way.INLINE:
            raw = bytes_in(body, DATA_BYTES, data.nbytes)
            if arrived is not None:
                arrived(raw)
                return
            if into is None:
                part.value = raw.clone()
            else:
                copy(into.view(torch.uint8), raw)  # as bytes: what lies in an entry is aligned for 8 of them
            over(None)
            return
        plain = into is not None and arrived is None
        target = into.view(torch.uint8) if into is not None and plain else torch.empty(data.nbytes, dtype=torch.uint8)

        def received(error: BaseException | None) -> None:
            if arrived is not None:
                arrived(target if error is None else error)
                return
            part.value = None if plain else target
            over(error)

        self.context.post.receive(target, src, data.number, received)

    def _span(self, part: PullPart, src: int) -> Tensor:
        """Return the part of the destination that server `src` has."""
        assert part.into is not None
        span = next(span for span in part.known.spans if span.rank == src)
        return part.into[span.start : span.stop]

    def _part_read(self, number: int, part: PullPart, src: int, error: BaseException | None) -> None:
        part.left.discard(src)
        if error is not None and self._pulls.get(number) is part:
            del self._pulls[number]
            part.operation.part_over(self.located(error))
        elif not part.left and self._pulls.pop(number, None) is part:
            assert part.version is not None
            part.known.base = max(part.known.base, part.version)
            part.operation.read(part.version)
            if part.operation.part_over():
                self.context.metrics.pull_seconds += part.operation.seconds
        if self._watched:
            self._look_at_watched()

    # --- calls -----------------------------------------------------------------------------------------------

    def call(self, dst: int, op: str, **said: Any) -> Generator[list[Call], None, _Said]:  # noqa: ANN401
        """Ask server `dst`, as a step of a program, and return what it answers."""
        box: list[_Said] = []
        yield [partial(self._ask, dst, self._next_number(), {"op": op, **said}, box.append)]
        return box[0]

    def _ask(
        self,
        dst: int,
        number: int,
        said: _Said,
        answer: Callable[[_Said], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        def answered(got: _Said | None, error: BaseException | None) -> None:
            if got is not None:
                answer(got)
            done(error)

        if dst in self.context.gone:
            done(self.context.lost(dst))
            return
        self._calls[(dst, number)] = answered
        self.context.post.put(dst, Kind.CALL, json.dumps({**said, "n": number}).encode(), request=True)
        self.context.post.flush()

    def configuring(self, known: Known, settings: dict[str, float]) -> Program[None]:
        """Change settings of the rule of `known`, on all of its shards."""
        number = self._next_number()
        said = {"op": "configure", "key": known.key, "settings": settings}
        yield [partial(self._ask, span.rank, number, said, lambda _: None) for span in known.spans]

    def tell(self, dst: int, op: str, **said: Any) -> Call:  # noqa: ANN401
        """Return the call that tells server `dst` something which it does not answer."""

        def put(done: Callable[[BaseException | None], None]) -> None:
            if dst not in self.context.gone:
                body = json.dumps({"op": op, **said}).encode()
                self.context.post.put(dst, Kind.CALL, body, request=True)
                self.context.post.flush()
            done(None)

        return put

    def filling(self, known: Known, value: Tensor, spans: Sequence[Span]) -> Program[None]:
        """Make the shards `spans` of `known` and give them the first values."""
        servers = [span.rank for span in known.spans]

        def fill(span: Span, done: Callable[[BaseException | None], None]) -> None:
            number = self._next_number()
            operation = _Told(done)
            self._pushes[number] = PushPart(operation, known, [span.rank], accepts=False)  # type: ignore[arg-type]
            part = value[span.start : span.stop]
            self._posting(number, known, span, part, FILL, 1.0)()
            self.context.post.flush()

        yield [
            self.tell(
                span.rank,
                "make",
                key=known.key,
                name=known.name,
                dtype=DTYPES.index(known.dtype),
                numel=span.stop - span.start,
                servers=servers,
                rule=known.rule_number,
                codec=known.codec is not None,
            )
            for span in spans
        ]
        yield [partial(fill, span) for span in spans]

    # --- what comes ----------------------------------------------------------------------------------------

    def heard(self, src: int, kind: int, body: memoryview) -> None:
        """Take one entry that is meant for a client."""
        if kind == Kind.DONE:
            number, _, stage = Done.unpack(body)
            self._done(src, number, stage)
        elif kind == Kind.DATA:
            self._data(src, body)
        else:
            self._answered(src, json.loads(bytes(body)))

    def _done(self, src: int, number: int, stage: int) -> None:
        part = self._pushes.get(number)
        if part is None:
            return
        if stage == Stage.ACCEPTED:
            if part.accepting:
                part.accepting.discard(src)
                if not part.accepting:
                    self._push_over(part, None)
            return
        part.applying.discard(src)
        if not part.applying:
            del self._pushes[number]
            if part.accepting is None:
                self._push_over(part, None)
            self._applied(number)

    def _push_over(self, part: PushPart, error: BaseException | None) -> None:
        if part.operation.part_over(error):
            self.context.metrics.push_seconds += part.operation.seconds

    def _finish_push(self, number: int, part: PushPart, error: BaseException) -> None:
        """A push failed: its handle says so, or, where that is done already, the next sync."""
        if self._pushes.pop(number, None) is None:
            return
        error = self.located(error)
        if part.accepting is not None and not part.accepting:
            self._late_error = self._late_error or error
        else:
            self._push_over(part, error)
        self._own.pop((number, part.known.key), None)
        self._applied(number)

    def _answered(self, src: int, said: _Said) -> None:
        number = said["n"]
        error = _error_of(said, src) if "error" in said else None
        if (answered := self._calls.pop((src, number), None)) is not None:
            answered(said if error is None else None, error)
        elif error is not None and number in self._pushes:
            self._finish_push(number, self._pushes[number], error)
        elif error is not None and number in self._pulls:
            self._part_read(number, self._pulls[number], src, error)

    def located(self, error: BaseException) -> BaseException:
        """Return `error`, which says where it happened."""
        if isinstance(error, AiodistError):
            error.located(rank=self.context.rank, comm=self.context.name, op=None)
        return error

    # --- sync ----------------------------------------------------------------------------------------------

    def when_applied(self, known: Known, done: Callable[[BaseException | None], None]) -> None:
        """Call `done` when all pushes and pulls of one tensor are over, and nothing is kept of it."""
        pushed, pulled = self._pushes.values(), self._pulls.values()
        if any(part.known is known for part in pushed) or any(part.known is known for part in pulled):
            self._watched.append((known, done))
            return
        self.codes.forget(known)
        done(None)

    def _look_at_watched(self) -> None:
        watched, self._watched = self._watched, []
        for known, done in watched:
            self.when_applied(known, done)

    def sync(self, handle: Handle[None]) -> None:
        """Resolve `handle` when every push issued so far is applied or dropped."""
        limit = self._number

        def look() -> None:
            self._syncs.append((limit, handle))
            self._look()

        self.context.progress.start(look)

    def _applied(self, number: int) -> None:
        self._open.pop(number, None)
        if self._syncs:
            self._look()
        if self._watched:
            self._look_at_watched()

    def _look(self) -> None:
        while self._syncs:
            limit = self._syncs[0][0]
            while self._first_open <= limit and self._first_open not in self._open:
                self._first_open += 1
            if self._first_open <= limit:
                return
            _, handle = self._syncs.popleft()
            if handle.done():
                continue
            error, self._late_error = self._late_error, None
            if error is None:
                handle.resolve(None)
            else:
                handle.reject(error)

    # --- the rest --------------------------------------------------------------------------------------------

    def _issue(self, postings: Sequence[_Posting]) -> None:
        """Post requests now, or behind those that are being encoded."""
        if self._laned:
            self._laned += 1

            def later(error: BaseException | None) -> None:
                self._laned -= 1
                self._post(postings)

            self.context.progress.start(partial(self.context.service.run, _nothing, later))
        elif len(postings) == 1:
            self.context.progress.start(partial(self._post_one, postings[0]))
        else:
            self.context.progress.start(partial(self._post, postings))

    def _post_one(self, posting: _Posting) -> None:
        posting()
        self.context.post.flush()

    def _post(self, postings: Sequence[_Posting]) -> None:
        for posting in postings:
            posting()
        self.context.post.flush()

    def _put(self, dst: int, kind: int, head: bytes, data: bytes) -> None:
        if dst in self.context.gone:
            self._lost(dst)
            return
        self.context.post.put(dst, kind, head, data, request=True)

    def _put_push(self, dst: int, head: bytes, data: bytes) -> None:
        if dst in self.context.gone:
            self._lost(dst)
            return
        self.context.metrics.push_sent_bytes += len(data)
        self.context.post.put(dst, _PUSH, head, data, request=True)

    def _put_first(self, dst: int, send: _Posting) -> None:
        if dst in self.context.gone:
            self._lost(dst)
            return
        send()

    def lose(self, rank: int) -> None:
        """`rank` died: what it should have answered never comes."""
        self._lost(rank)

    def _lost(self, rank: int) -> None:
        for number, part in list(self._pushes.items()):
            if rank in part.applying:
                self._finish_push(number, part, self.context.lost(rank))
        for number, pull in list(self._pulls.items()):
            if rank in pull.left:
                self._part_read(number, pull, rank, self.context.lost(rank))
        for asked, answered in list(self._calls.items()):
            if asked[0] == rank:
                del self._calls[asked]
                answered(None, self.context.lost(rank))

    def give_up(self, error: AiodistError) -> None:
        """Fail everything."""
        for number, part in list(self._pushes.items()):
            self._finish_push(number, part, error)
        for number, pull in list(self._pulls.items()):
            del self._pulls[number]
            pull.operation.part_over(error)
        self._look_at_watched()
        calls, self._calls = self._calls, {}
        for answered in calls.values():
            answered(None, error)
        self._open.clear()
        self._look()


class _Told:
    """Stands for an operation whose end a program waits for."""

    def __init__(self, done: Callable[[BaseException | None], None]) -> None:
        self._done = done
        self.seconds = 0.0

    def part_over(self, error: BaseException | None = None) -> bool:
        self._done(error)
        return True


def _error_of(said: _Said, src: int) -> BaseException:
    """Return what a server's refusal raises here."""
    text = f"{said['error']}"
    if said["kind"] == "mismatch":
        return MismatchError(text)
    if said["type"] == "LookupError":
        return KeyError(text)
    return RemoteError(f"server {src} raised {said['type']}: {text}", raised_by=src)


def _keep(value: Tensor, error: BaseException | None) -> None:
    """Hold on to `value` until it is sent; whether that went well its server tells."""


def _nothing() -> None:
    return None
