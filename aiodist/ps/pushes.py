"""A client's pushes, from the call until servers have applied them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.errors import AiodistError, CommunicatorError, PeerLost
from aiodist.handles import Account, Handle
from aiodist.ps.coalescer import keep
from aiodist.ps.codes import Codes
from aiodist.ps.log import Logged
from aiodist.ps.names import NameEntry
from aiodist.ps.operation import Operation, PushPart
from aiodist.ps.request_queue import RequestQueue, Sender
from aiodist.ps.service import LIGHT_BYTES, error_of
from aiodist.ps.sharding import Span
from aiodist.ps.wire import FILL, Kind, Stage, Way, as_bytes, pack_push

_INLINE, _PUSH = int(Way.INLINE), int(Kind.PUSH)


class Pushes:
    """`push` and `sync` are called on the loop's thread; the rest runs with the transport lock held."""

    def __init__(
        self,
        queue: RequestQueue,
        codes: Codes,
        own: dict[tuple[int, int], Tensor],
        one_over: Callable[[NameEntry], None],
    ) -> None:
        """`own` is where the server of this very rank finds what is pushed to it.

        `one_over` is called after each push, with what it pushed to.
        """
        self._queue = queue
        self._context = queue.context
        self._codes = codes
        self._own = own
        self._one_over = one_over
        self._log = queue.context.log
        self._inline_bytes = self._context.coalescer.inline_bytes
        self._parts: dict[int, PushPart] = {}
        self._open: set[int] = set()
        """Those that are neither applied nor dropped."""
        self._first_open = 1  # none before this number is open
        self._last = 0
        self._syncs: deque[tuple[int, Handle[None], Account | None]] = deque()
        self._late_error: BaseException | None = None
        self._refusal: AiodistError | None = None

    # --- going up --------------------------------------------------------------------------------------------

    def push(self, operation: Operation, entry: NameEntry, value: Tensor, rule: int, alpha: float) -> None:
        """Push flat `value`; copied now where it is small, else the operation's until it is over."""
        spans = entry.spans
        number = self._begin(operation, entry, value.nbytes)
        if self._codes.takes(entry):
            if self._queue.behind and value.nbytes <= self._inline_bytes:
                value = value.clone()  # it is the user's again when the call returns
            encode = partial(self._codes.encode, entry, value, self._context.rules[rule], alpha)
            self._encode(number, entry, value.nbytes, encode, rule)
        elif len(spans) == 1 and value.nbytes <= self._inline_bytes and spans[0].rank != self._context.rank:
            # What `_sender` does, for what is pushed fifty thousand times a second.
            head = pack_push(entry.key, rule, _INLINE, False, number, entry.base, alpha, value.nbytes, 0, 0)
            send = partial(self._put, spans[0].rank, head, as_bytes(value))
            if self._log is None:
                self._queue.issue((send,))
            else:
                self._queue.issue((self._logging(number, entry, [(value, False)], rule, alpha), send))
        else:
            # The one span of an object does not say how long its code is.
            blocks = [value] if len(spans) == 1 else [value[start:stop] for _, start, stop in spans]
            self._queue.issue(self._senders(number, entry, [(block, False) for block in blocks], rule, alpha))

    def push_rows(
        self,
        operation: Operation,
        entry: NameEntry,
        nbytes: int,
        pack: Callable[[], Sequence[Tensor]],
        rule: int,
    ) -> None:
        """Push `nbytes` of rows of a table; `pack` returns each server's block, in order, in any thread."""
        number = self._begin(operation, entry, nbytes)
        self._encode(number, entry, nbytes, lambda: ([(block, False) for block in pack()], 1.0), rule)

    def _encode(
        self,
        number: int,
        entry: NameEntry,
        nbytes: int,
        encode: Callable[[], tuple[Sequence[tuple[Tensor, bool]], float]],
        rule: int,
    ) -> None:
        """Send each server what `encode` makes of so many bytes: its block, and whether that is a code; and the alpha.

        At once, or in the service thread; then what comes after it is kept behind it.
        """
        found: list[tuple[Sequence[tuple[Tensor, bool]], float]] = []

        def work() -> None:
            found.append(encode())

        def senders() -> list[Sender]:
            blocks, alpha = found[0]
            return self._senders(number, entry, blocks, rule, alpha)

        def over(error: BaseException | None) -> None:
            if error is not None:
                self.refuse(number, error)
            elif number in self._parts:
                self._queue.send(senders())

        if nbytes > LIGHT_BYTES or self._queue.behind:
            self._queue.issue_later(work, over)
        elif (error := error_of(work)) is not None:
            self._queue.issue((partial(self.refuse, number, error),))
        else:
            self._queue.issue(senders())

    def _senders(
        self, number: int, entry: NameEntry, blocks: Sequence[tuple[Tensor, bool]], rule: int, alpha: float
    ) -> list[Sender]:
        """Return what sends each server its block, of which some are codes."""
        senders: list[Sender] = [
            self._sender(number, entry, span, block, rule, alpha, coded=coded)
            for span, (block, coded) in zip(entry.spans, blocks, strict=True)
        ]
        return senders if self._log is None else [self._logging(number, entry, blocks, rule, alpha), *senders]

    def _logging(
        self, number: int, entry: NameEntry, blocks: Sequence[tuple[Tensor, bool]], rule: int, alpha: float
    ) -> Sender:
        """Return what keeps copies of the blocks, when the push is sent."""
        assert self._log is not None
        with torch.inference_mode(False):
            kept = [
                (block if coded else block.clone(), span.stop - span.start if coded else None)
                for span, (block, coded) in zip(entry.spans, blocks, strict=True)
            ]
        return partial(self._log.add, entry.name, Logged(number, rule, alpha, entry.base, kept))

    def again(self, entry: NameEntry, push: Logged, blocks: Sequence[Tensor]) -> None:
        """Push once more what may not have counted; an error of it is raised by the next sync."""

        def over(error: BaseException | None) -> None:
            self._late_error = self._late_error or error

        servers = {span.rank for span in entry.spans}
        self._parts[push.number] = PushPart(
            over, entry, servers, servers.copy() if self._context.policy.accepts else None
        )
        self._open.add(push.number)
        entry.open.add(push.number)
        self._queue.issue(
            [
                self._sender(push.number, entry, span, block, push.rule, push.alpha)
                for span, block in zip(entry.spans, blocks, strict=True)
            ]
        )

    def _begin(self, operation: Operation, entry: NameEntry, nbytes: int) -> int:
        """Number a push, and have it wait for the servers of `entry`."""
        number = self._last = self._queue.number()
        servers = {span.rank for span in entry.spans}
        accepting = servers.copy() if self._context.policy.accepts else None
        self._parts[number] = PushPart(partial(self._over, operation), entry, servers, accepting)
        self._open.add(number)
        entry.open.add(number)
        counts = self._context.counts
        counts["pushes"] += 1
        counts["push_bytes"] += nbytes
        return number

    def _sender(
        self, number: int, entry: NameEntry, span: Span, value: Tensor, rule: int, alpha: float, *, coded: bool = False
    ) -> Sender:
        """Return what sends one shard's part of a push."""
        dst, nbytes = span.rank, value.nbytes
        way, place = (Way.OWN, (0, 0)) if dst == self._context.rank else self._context.way_to(dst, value)
        raw = value.view(torch.uint8)
        data = b""
        if way == Way.OWN:
            self._own[(number, entry.key)] = raw.clone() if nbytes <= self._inline_bytes else raw
        elif way == Way.INLINE:
            data = as_bytes(value)
        head = pack_push(entry.key, rule, way, coded, number, entry.base, alpha, nbytes, *place)
        put = partial(self._queue.put, dst, _PUSH) if rule == FILL else partial(self._put, dst)
        if way != Way.MESSAGE:
            return partial(put, head, data)

        def send() -> None:
            put(head)
            if dst not in self._context.gone:
                self._context.coalescer.send(raw, dst, number, partial(keep, value))
                self._context.counts["push_sent_bytes"] += 0 if rule == FILL else nbytes

        return send

    def fill(self, entry: NameEntry, span: Span, value: Tensor, done: Done) -> None:
        """Give a new shard its first values; with the transport lock held."""
        number = self._queue.number()
        self._parts[number] = PushPart(done, entry, {span.rank})
        self._sender(number, entry, span, value[span.start : span.stop], FILL, 1.0)()
        self._context.coalescer.flush()

    def _put(self, dst: int, head: bytes, data: bytes = b"") -> None:
        self._context.counts["push_sent_bytes"] += len(data)
        self._queue.put(dst, _PUSH, head, data)

    # --- what servers say ------------------------------------------------------------------------------------

    def done(self, src: int, number: int, version: int, stage: int) -> None:
        """Server `src` says how far a push is."""
        part = self._parts.get(number)
        if part is None:
            return
        if stage == Stage.ACCEPTED:
            if part.accepting:
                part.accepting.discard(src)
                if not part.accepting:
                    part.over(None)
            return
        if self._log is not None and stage == Stage.APPLIED:
            self._log.applied(part.entry.name, number, version)
        elif self._log is not None:
            self._log.forget(part.entry.name, number)
        part.applying.discard(src)
        if not part.applying:
            del self._parts[number]
            if part.accepting is None:
                part.over(None)
            self._applied(number, part.entry)

    def refuse(self, number: int, error: BaseException) -> bool:
        """A push failed: its handle says so, or, where that is done already, the next sync. False: it is none."""
        part = self._parts.pop(number, None)
        if part is None:
            return False
        error = self._queue.located(error)
        if self._log is not None and not isinstance(error, PeerLost | CommunicatorError):
            self._log.forget(part.entry.name, number)  # else it comes again
        if part.accepting is not None and not part.accepting:
            self._late_error = self._late_error or error
        else:
            part.over(error)
        self._own.pop((number, part.entry.key), None)
        self._applied(number, part.entry)
        return True

    def _over(self, operation: Operation, error: BaseException | None) -> None:
        if operation.part_over(error):
            self._context.counts["push_seconds"] += operation.seconds

    def _applied(self, number: int, entry: NameEntry) -> None:
        self._open.discard(number)
        entry.open.discard(number)
        if self._syncs:
            self._look()
        self._one_over(entry)

    # --- waiting for them ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Something is not applied yet."""
        return bool(self._open)

    def late(self) -> dict[int, str]:
        """Return the servers that have not applied something, and what."""
        return {rank: f"push of {part.entry}" for part in list(self._parts.values()) for rank in list(part.applying)}

    def sync(self, handle: Handle[None], account: Account | None) -> None:
        """Resolve `handle` when every push issued so far is applied or dropped; `account` is told of it."""
        waiting = (self._last, handle, account)

        def look() -> None:
            self._syncs.append(waiting)
            self._look()

        self._context.progress.start(look)

    def _look(self) -> None:
        while self._syncs:
            limit, handle, account = self._syncs[0]
            while self._first_open <= limit and self._first_open not in self._open:
                self._first_open += 1
            if self._first_open <= limit:
                return
            self._syncs.popleft()
            if handle.done():
                continue
            error, self._late_error = self._refusal or self._late_error, None
            if account is not None:
                self._context.progress.post(partial(account.cover, handle.seq))
            if error is None:
                handle.resolve(None)
            else:
                handle.reject(error)

    # --- the end ---------------------------------------------------------------------------------------------

    def lose(self, rank: int, error: AiodistError) -> None:
        """`rank` died: what it should have answered never comes."""
        for number, part in list(self._parts.items()):
            if rank in part.applying:
                self.refuse(number, error)

    def abort(self, error: AiodistError) -> None:
        """Fail everything."""
        self._refusal = error  # also of syncs that were left for the lock's holder
        for number in list(self._parts):
            self.refuse(number, error)
        self._open.clear()
        self._look()
