"""A client's pushes and pulls, from the call until servers have applied them, or the data are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.errors import AiodistError, CommunicatorError, PeerLost
from aiodist.handles import Account, Handle, Operation
from aiodist.ps import wire
from aiodist.ps.context import Context
from aiodist.ps.log import LoggedPush
from aiodist.ps.names import NameEntry
from aiodist.ps.requests import Codes, PullPart, PushPart, RequestQueue, Sender, UserCall
from aiodist.ps.service import LIGHT_BYTES, error_of
from aiodist.ps.settings import Span
from aiodist.ps.wire import FILL, Kind, Reads, Stage, Way

_PUSH = int(Kind.PUSH)
_Blocks = Sequence[tuple[Tensor, bool]]
"""What each server gets, and whether it is a code."""


class Pushes:
    """`push` and `sync` are called on the loop's thread; the rest runs with the transport lock held."""

    def __init__(self, queue: RequestQueue, codes: Codes) -> None:
        self._queue = queue
        self._context = queue.context
        self._codes = codes
        self._log = queue.context.log
        self._parts: dict[int, PushPart] = {}
        self._line: deque[int] = deque()
        """The numbers of pushes, from the first on for which a sync waits."""
        self._open: set[int] = set()
        """Those for which a sync waits."""
        self._last = 0
        self._syncs: deque[tuple[int, Handle[None], Account]] = deque()
        self._late_error: BaseException | None = None
        self._refusal: AiodistError | None = None

    # --- going up --------------------------------------------------------------------------------------------

    def push(self, operation: UserCall, entry: NameEntry, value: Tensor, rule: int, alpha: float) -> None:
        """Push flat `value`; copied now where it is small and on the host, else the operation's until it is over."""
        number = self._begin(operation, entry, value.nbytes)
        value, fetch = self._context.staged(value)
        if self._codes.takes(entry):
            if self._queue.behind and value.nbytes <= self._context.coalescer.inline_bytes:
                value = value.clone()  # it is the user's again when the call returns
            encode = partial(self._codes.encode, entry, value, self._context.rules[rule], alpha)
            self._encode(number, entry, value.nbytes, encode, rule, fetch)
        else:
            # The one span of an object does not say how long its code is.
            spans = entry.spans
            if len(spans) == 1 and self._log is None and fetch is None:  # what `_senders` does, for small ones
                self._queue.issue((self._sender(number, entry, spans[0], value, rule, alpha, False),))
                return
            blocks = [value] if len(spans) == 1 else [value[start:stop] for _, start, stop in spans]
            plain = [(block, False) for block in blocks]
            if fetch is None:
                self._queue.issue(self._senders(number, entry, plain, rule, alpha))
            else:
                self._encode(number, entry, value.nbytes, lambda: (plain, alpha), rule, fetch)

    def push_rows(
        self, operation: UserCall, entry: NameEntry, nbytes: int, pack: Callable[[], Sequence[Tensor]], rule: int
    ) -> None:
        """Push `nbytes` of rows of a table; `pack` returns each server's block, in order, in any thread."""
        number = self._begin(operation, entry, nbytes)
        self._encode(number, entry, nbytes, lambda: ([(block, False) for block in pack()], 1.0), rule)

    def _encode(
        self,
        number: int,
        entry: NameEntry,
        nbytes: int,
        encode: Callable[[], tuple[_Blocks, float]],
        rule: int,
        fetch: Callable[[Done], None] | None = None,
    ) -> None:
        """Send what `encode` makes of so many bytes, with its alpha, once `fetch` is done, which brings them.

        At once, or in the service thread; then what comes after it is kept behind it.
        """
        found: list[tuple[_Blocks, float]] = []

        def work() -> None:
            found.append(encode())

        def over(error: BaseException | None) -> None:
            if error is not None:
                self.refuse(number, error)
            elif number in self._parts:
                blocks, alpha = found[0]
                self._queue.send(self._senders(number, entry, blocks, rule, alpha))

        def begin(done: Done) -> None:
            self._context.service.run(work, done)

        def fetched(done: Done, error: BaseException | None) -> None:
            (done(error) if error is not None else begin(done))

        if fetch is not None:
            self._queue.issue_later(lambda done: fetch(partial(fetched, done)), over)
        elif nbytes > LIGHT_BYTES or self._queue.behind:
            self._queue.issue_later(begin, over)
        elif (error := error_of(work)) is not None:
            self._queue.issue((partial(self.refuse, number, error),))
        else:
            self._queue.issue(self._senders(number, entry, found[0][0], rule, found[0][1]))

    def _senders(self, number: int, entry: NameEntry, blocks: _Blocks, rule: int, alpha: float) -> list[Sender]:
        senders: list[Sender] = [
            self._sender(number, entry, span, block, rule, alpha, coded)
            for span, (block, coded) in zip(entry.spans, blocks, strict=True)
        ]
        if self._log is not None:
            with torch.inference_mode(False):
                kept = [
                    (block if coded else block.clone(), span.stop - span.start if coded else None)
                    for span, (block, coded) in zip(entry.spans, blocks, strict=True)
                ]
            senders.insert(0, partial(self._log.add, entry.name, LoggedPush(number, rule, alpha, kept)))
        return senders

    def again(self, entry: NameEntry, push: LoggedPush, blocks: Sequence[Tensor]) -> None:
        """Push once more what may not have counted; an error of it is raised by the next sync."""

        def over(error: BaseException | None) -> None:
            self._late_error = self._late_error or error

        self._wait(push.number, entry, over)
        self._queue.issue(
            [
                self._sender(push.number, entry, span, block, push.rule, push.alpha, False)
                for span, block in zip(entry.spans, blocks, strict=True)
            ]
        )

    def _begin(self, operation: UserCall, entry: NameEntry, nbytes: int) -> int:
        """Number a push, and have it wait for the servers of `entry`."""
        number = self._queue.number()
        self._wait(number, entry, partial(self._over, operation))
        counts = self._context.counts
        counts["pushes"] += 1
        counts["push_bytes"] += nbytes
        return number

    def _wait(self, number: int, entry: NameEntry, over: Done) -> None:
        servers = {span.rank for span in entry.spans}
        accepting = servers.copy() if self._context.policy.accepts else None
        self._parts[number] = PushPart(over, entry, servers, accepting)
        self._open.add(number)
        self._line.append(number)  # in this order: what is in the line alone is over
        entry.open.add(number)
        self._last = number

    def _sender(
        self, number: int, entry: NameEntry, span: Span, value: Tensor, rule: int, alpha: float, coded: bool
    ) -> Sender:
        dst, nbytes = span.rank, value.nbytes
        way, place = self._context.shared.way_to(dst, value)
        head = wire.pack_push(entry.key, rule, way, coded, number, entry.base, alpha, nbytes, *place)
        if way is not Way.MEMORY and dst != self._context.rank and rule != FILL:
            self._context.counts["push_sent_bytes"] += nbytes
        return self._queue.sender(dst, number, _PUSH, head, value, way)

    def fill(self, entry: NameEntry, span: Span, value: Tensor, done: Done) -> None:
        number = self._queue.number()
        self._parts[number] = PushPart(done, entry, {span.rank})
        self._sender(number, entry, span, value[span.start : span.stop], FILL, 1.0, False)()
        self._context.coalescer.flush()

    # --- what servers say ------------------------------------------------------------------------------------

    def done(self, src: int, body: memoryview) -> None:
        """Server `src` reports the stage of a push."""
        number, stage = wire.unpack_done(body)
        part = self._parts.get(number)
        if part is None:
            return
        if stage == Stage.ACCEPTED:
            if part.accepting is None:  # it is held there for other workers' pushes
                self._passed(number)
            elif part.accepting:
                part.accepting.discard(src)
                if not part.accepting:
                    self._done(number, part, None)
            return
        if self._log is not None and stage == Stage.DROPPED:
            self._log.forget(part.entry.name, number)
        part.applying.discard(src)
        if not part.applying:
            del self._parts[number]
            if part.accepting is None:
                self._done(number, part, None)
            part.entry.part_over(number)

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
            self._done(number, part, error)
        part.entry.part_over(number)
        return True

    def _done(self, number: int, part: PushPart, error: BaseException | None) -> None:
        part.over(error)
        self._passed(number)

    def _passed(self, number: int) -> None:
        """No sync waits for a push any more."""
        self._open.discard(number)
        while self._line and self._line[0] not in self._open:
            self._line.popleft()
        self._look()

    def _over(self, operation: UserCall, error: BaseException | None) -> None:
        if operation.part_over(error):
            self._context.counts["push_seconds"] += operation.seconds

    # --- waiting for them ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._parts)

    def late(self) -> dict[int, str]:
        return {rank: f"push of {part.entry}" for part in list(self._parts.values()) for rank in list(part.applying)}

    def late_error(self) -> BaseException | None:
        """Return what made a push fail whose handle was done, once; else why nothing can be pushed any more."""
        error, self._late_error = self._refusal or self._late_error, None
        return error

    def sync(self, handle: Handle[None], account: Account) -> None:
        """Resolve `handle` when servers have all pushes issued so far; `account` is told of it."""
        waiting = (self._last, handle, account)

        def look() -> None:
            self._syncs.append(waiting)
            self._look()

        self._context.progress.start(look)

    def _look(self) -> None:
        while self._syncs and not (self._line and self._line[0] <= self._syncs[0][0]):
            _, handle, account = self._syncs.popleft()
            if handle.done():
                continue
            error = self.late_error()
            self._context.progress.post(partial(account.cover, handle.seq))
            if error is None:
                Operation.of(handle).resolve(None)
            else:
                Operation.of(handle).reject(error)

    # --- the end ---------------------------------------------------------------------------------------------

    def lose(self, rank: int, error: AiodistError) -> None:
        for number, part in list(self._parts.items()):
            if rank in part.applying:
                self.refuse(number, error)

    def abort(self, error: AiodistError) -> None:
        self._refusal = error  # also of syncs that were left for the lock's holder
        for number in list(self._parts):
            self.refuse(number, error)
        self._look()


class Pulls:
    """`pull` is called on the loop's thread; the rest runs with the transport lock held."""

    def __init__(self, queue: RequestQueue, codes: Codes) -> None:
        self._queue = queue
        self._codes = codes
        self._context: Context = queue.context
        self._parts: dict[int, PullPart] = {}

    def pull(self, part: PullPart, reads: Reads, wants: int) -> None:
        number = self._queue.number()
        entry = part.entry
        self._parts[number] = part
        entry.open.add(number)
        counts = self._context.counts
        counts["pulls"] += 1
        counts["pull_bytes"] += part.nbytes
        head = wire.pack_pull(entry.key, reads, number, wants)
        self._queue.issue([self._sender(number, span.rank, head, part.ids.get(span.rank)) for span in entry.spans])

    def _sender(self, number: int, dst: int, head: bytes, ids: Tensor | None) -> Sender:
        if ids is None:
            return partial(self._queue.put, dst, Kind.PULL, head)
        way, place = self._context.shared.way_to(dst, ids)
        head += wire.pack_ids(way, ids.nbytes, *place)
        return self._queue.sender(dst, number, Kind.PULL, head, ids, way)

    # --- what servers say ------------------------------------------------------------------------------------

    def data(self, src: int, body: memoryview) -> None:
        """Server `src` has data for a pull, or lets us look at them."""
        data = wire.unpack(wire.Data, body)
        part = self._parts.get(data.number)
        if part is None:  # all was given up
            return
        counts, over = self._context.counts, partial(self.over, data.number, src)
        part.version = data.version if part.version is None else min(part.version, data.version)
        if part.place is None:
            counts["pull_bytes"] += data.nbytes
        if data.way != Way.MEMORY and src != self._context.rank:
            counts["pull_received_bytes"] += data.nbytes
        decode = self._codes.expect(part, src, over) if data.coded else None
        if data.way == Way.MEMORY:
            self._look(part, src, data)
        elif data.way == Way.INLINE:
            raw = wire.bytes_in(body, wire.DATA_BYTES, data.nbytes)
            if decode is not None:
                decode(raw)
            else:
                part.fill(src, raw)
                over(None)
        else:
            self._receive(part, src, data, over, decode)

    def _receive(
        self,
        part: PullPart,
        src: int,
        data: wire.Data,
        over: Done,
        decode: Callable[[Tensor | BaseException], None] | None,
    ) -> None:
        if decode is None and part.place is not None:
            self._context.coalescer.receive(part.place(src).view(torch.uint8), src, data.number, over)
            return
        room = torch.empty(data.nbytes, dtype=torch.uint8, device="cpu")

        def received(error: BaseException | None) -> None:
            if decode is not None:
                decode(room if error is None else error)
            else:
                part.value = room
                over(error)

        self._context.coalescer.receive(room, src, data.number, received)

    def _look(self, part: PullPart, src: int, data: wire.Data) -> None:
        found = self._context.shared.find(src, data.segment, data.offset, data.nbytes)

        def looked(error: BaseException | None) -> None:
            if src not in self._context.gone:
                self._context.coalescer.put(src, Kind.RELEASE, wire.pack_release(part.entry.key, data.number))
            self.over(data.number, src, error)

        part.copying.add(src)
        self._context.service.do(data.nbytes, partial(part.fill, src, found), looked)

    def over(self, number: int, src: int, error: BaseException | None) -> None:
        """One server's part is there, or never will be; the buffer is the user's again when all of them are over."""
        part = self._parts.get(number)
        if part is None:
            return
        part.left.discard(src)
        part.error = part.error or error
        if part.left:
            return
        del self._parts[number]
        if part.error is None and part.version is not None:
            part.entry.base = max(part.entry.base, part.version)
            part.operation.read(part.version)
        if part.operation.part_over(None if part.error is None else self._queue.located(part.error)):
            self._context.counts["pull_seconds"] += part.operation.seconds
        part.entry.part_over(number)

    # --- waiting for them, and the end -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._parts)

    def late(self) -> dict[int, str]:
        return {rank: f"pull of {part.entry}" for part in list(self._parts.values()) for rank in list(part.left)}

    def lose(self, rank: int, error: AiodistError) -> None:
        for number, part in list(self._parts.items()):
            if rank in part.left and rank not in part.copying:  # a buffer that is written is not given back
                self.over(number, rank, error)

    def abort(self, error: AiodistError) -> None:
        parts, self._parts = self._parts, {}
        for number, part in parts.items():
            part.operation.part_over(error)
            part.entry.part_over(number)
