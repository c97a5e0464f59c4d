"""A client's pushes and pulls, from the call until servers have applied them, or the data have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.errors import AiodistError, CommunicatorError, PeerLost
from aiodist.handles import Account, Handle, Operation
from aiodist.ps import wire
from aiodist.ps.encoding import Codes
from aiodist.ps.log import LoggedPush
from aiodist.ps.names import NameEntry
from aiodist.ps.requests import Ends, Entry, PullPart, PushPart, Reported, RequestQueue, UserCall
from aiodist.ps.service import LIGHT_BYTES, error_of
from aiodist.ps.settings import Span
from aiodist.ps.wire import FILL, Kind, Reads, Stage, Way, as_bytes

_PUSH = int(Kind.PUSH)
_INLINE = int(Way.INLINE)
_Blocks = Sequence[tuple[Tensor, bool]]
"""Each server's block, with True for a code."""


class Pushes:
    """The pushes of one client. `push` and `sync` run on the loop's thread, the rest with the transport lock held."""

    def __init__(self, queue: RequestQueue, codes: Codes) -> None:
        self._queue = queue
        self._context = queue.context
        self._codes = codes
        self._log = queue.context.log
        self._parts: dict[int, PushPart] = {}
        self._line: deque[int] = deque()
        """Numbers of pushes, from the first one that a sync waits for."""
        self._open: set[int] = set()
        """Numbers of the pushes that a sync waits for."""
        self._last = 0
        self._syncs: deque[tuple[int, Handle[None], Account]] = deque()
        self._late_error: BaseException | None = None
        """Error of a push whose handle was done."""

    # --- requests --------------------------------------------------------------------------------------------

    def push(
        self, operation: UserCall, entry: NameEntry, value: Tensor, rule: int, data: bytes | None, alpha: float
    ) -> None:
        """Push flat `value`. A small value on the host is copied now, otherwise the push owns it until the end.

        `data` is a copy of a small value, or None.
        """
        number = self._wait(next(self._queue.numbers), entry, operation, value.nbytes)
        fetch = None
        if not value.is_cpu:
            value, fetch = self._context.staged(value)
        if self._codes.feedback is not None and self._codes.takes(entry):
            if self._queue.waits and value.nbytes <= self._context.coalescer.inline_bytes:
                value = value.clone()  # the user may change it after the call
            encode = partial(self._codes.encode, entry, value, self._context.rules[rule], alpha)
            self._encode(number, entry, value.nbytes, encode, rule, fetch)
            return
        whole = len(entry.spans) == 1  # the one span of an object does not have the length of its code
        if whole and self._log is None and fetch is None:
            self._queue.issue_one(self._entry(number, entry, entry.servers[0], value, rule, alpha, False, data))
            return
        blocks = [value] if whole else [value[start:stop] for _, start, stop in entry.spans]
        plain = [(block, False) for block in blocks]
        if fetch is None:
            self._queue.issue((self._put, *self._made(number, entry, plain, rule, alpha)))
        else:
            self._encode(number, entry, value.nbytes, lambda: (plain, alpha), rule, fetch)

    def push_rows(
        self, operation: UserCall, entry: NameEntry, nbytes: int, pack: Callable[[], Sequence[Tensor]], rule: int
    ) -> None:
        """Push `nbytes` of rows of a table. `pack` returns each server's block, in order, in any thread."""
        number = self._wait(next(self._queue.numbers), entry, operation, nbytes)
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
        """Send the blocks that `encode` returns with their alpha, after `fetch` has brought the values to the host.

        Small values are encoded inline, others in the service thread, and later requests wait.
        """
        found: list[tuple[_Blocks, float]] = []

        def work() -> None:
            found.append(encode())

        def over(error: BaseException | None) -> None:
            if error is not None:
                self.refuse(number, error)
            elif number in self._parts:
                blocks, alpha = found[0]
                self._put(*self._made(number, entry, blocks, rule, alpha))
                self._context.coalescer.flush()

        def begin(done: Done) -> None:
            self._context.service.run(work, done)

        def fetched(done: Done, error: BaseException | None) -> None:
            (done(error) if error is not None else begin(done))

        if fetch is not None:
            self._queue.issue_later(lambda done: fetch(partial(fetched, done)), over)
        elif nbytes > LIGHT_BYTES or self._queue.waits:
            self._queue.issue_later(begin, over)
        elif (error := error_of(work)) is not None:
            self._queue.issue((self.refuse, number, error))
        else:
            self._queue.issue((self._put, *self._made(number, entry, found[0][0], rule, found[0][1])))

    def _made(
        self, number: int, entry: NameEntry, blocks: _Blocks, rule: int, alpha: float
    ) -> tuple[NameEntry, list[Entry], LoggedPush | None]:
        """Return the arguments of `_put` for a push of all blocks."""
        entries = [
            self._entry(number, entry, rank, block, rule, alpha, coded)
            for rank, (block, coded) in zip(entry.servers, blocks, strict=True)
        ]
        if self._log is None:
            return entry, entries, None
        with torch.inference_mode(False):
            kept = [
                (block if coded else block.clone(), span.stop - span.start if coded else None)
                for span, (block, coded) in zip(entry.spans, blocks, strict=True)
            ]
        return entry, entries, LoggedPush(number, rule, alpha, kept)

    def _put(self, entry: NameEntry, entries: Sequence[Entry], logged: LoggedPush | None) -> None:
        if logged is not None and self._log is not None:
            self._log.add(entry.name, logged)
        self._queue.put(entries)

    def again(self, entry: NameEntry, push: LoggedPush, blocks: Sequence[Tensor]) -> None:
        """Repeat a push that may not have counted. The next sync raises its error."""
        self._wait(push.number, entry, Reported(self._note_late), None)
        plain = [(block, False) for block in blocks]
        _, entries, _ = self._made(push.number, entry, plain, push.rule, push.alpha)
        self._queue.issue((self._queue.put, entries))

    def _note_late(self, error: BaseException | None) -> None:
        self._late_error = self._late_error or error

    def _wait(self, number: int, entry: NameEntry, operation: Ends, nbytes: int | None) -> int:
        """Let a push wait for the servers of `entry`, and return its number. A repeated push has no `nbytes`."""
        if nbytes is not None:
            self._context.counts["pushes"] += 1
            self._context.counts["push_bytes"] += nbytes
        accepting = set(entry.servers) if self._context.policy.accepts else None
        self._parts[number] = PushPart(operation, entry, set(entry.servers), accepting)
        self._open.add(number)
        self._line.append(number)  # in this order: a number that is only in the line has ended
        entry.open.add(number)
        self._last = number
        return number

    def _entry(
        self,
        number: int,
        entry: NameEntry,
        dst: int,
        value: Tensor,
        rule: int,
        alpha: float,
        coded: bool,
        data: bytes | None = None,
    ) -> Entry:
        nbytes, context = value.nbytes, self._context
        if nbytes <= context.coalescer.inline_bytes:
            head = wire.PUSH.pack(entry.key, rule, _INLINE, coded, number, entry.base, alpha, nbytes, 0, 0)
            made = Entry(dst, _PUSH, number, head, as_bytes(value) if data is None else data)
            way = Way.INLINE
        else:
            way, place = context.shared.way_to(dst, value)
            head = wire.PUSH.pack(entry.key, rule, way, coded, number, entry.base, alpha, nbytes, *place)
            made = Entry(dst, _PUSH, number, head, b"", value.view(torch.uint8) if way is Way.MESSAGE else None)
        if way is not Way.MEMORY and dst != context.rank and rule != FILL:
            context.counts["push_sent_bytes"] += nbytes
        return made

    def fill(self, entry: NameEntry, span: Span, value: Tensor, done: Done) -> None:
        """Send the first values of a block."""
        number = next(self._queue.numbers)
        self._parts[number] = PushPart(Reported(done), entry, {span.rank})
        self._queue.put((self._entry(number, entry, span.rank, value[span.start : span.stop], FILL, 1.0, False),))
        self._context.coalescer.flush()

    # --- answers ---------------------------------------------------------------------------------------------

    def done(self, src: int, body: memoryview) -> None:
        """Server `src` reports the stage of a push."""
        number, stage = wire.DONE.unpack_from(body)
        part = self._parts.get(number)
        if part is None:
            return
        if stage == Stage.ACCEPTED:
            if part.accepting is None:  # the server holds the push for those of other workers
                self._end(number, None, None)
            elif part.accepting:
                part.accepting.discard(src)
                if not part.accepting:
                    self._end(number, part.operation, None)
            return
        if self._log is not None and stage == Stage.DROPPED:
            self._log.forget(part.entry.name, number)
        part.applying.discard(src)
        if not part.applying:
            del self._parts[number]
            if part.accepting is None:
                self._end(number, part.operation, None)
            part.entry.part_over(number)

    def refuse(self, number: int, error: BaseException) -> bool:
        """End a push with an error, on its handle, or at the next sync if the handle is done. False: no such push."""
        part = self._parts.pop(number, None)
        if part is None:
            return False
        error = self._queue.located(error)
        if self._log is not None and not isinstance(error, PeerLost | CommunicatorError):
            self._log.forget(part.entry.name, number)  # else the push is repeated
        if part.accepting is not None and not part.accepting:
            self._note_late(error)
        else:
            self._end(number, part.operation, error)
        part.entry.part_over(number)
        return True

    def _end(self, number: int, operation: Ends | None, error: BaseException | None) -> None:
        """End a push for syncs, and a part of its call `operation`; with None, the call stays open."""
        if operation is not None and operation.part_over(error) and isinstance(operation, UserCall):
            self._context.counts["push_seconds"] += operation.seconds
        self._open.discard(number)
        while self._line and self._line[0] not in self._open:
            self._line.popleft()
        if self._syncs:
            self._check_syncs()

    # --- waits -----------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of the open requests (any thread)."""
        return list(self._parts)

    def late(self) -> dict[int, str]:
        """Return the servers for which pushes wait, each with a push."""
        return {rank: f"push of {part.entry}" for part in list(self._parts.values()) for rank in list(part.applying)}

    def waits(self) -> list[tuple[Handle[Any], set[int]]]:
        """Return the handles of pushes and syncs, each with the servers for which the handle waits (any thread)."""
        parts = list(self._parts.values())
        ends = [(each.operation, each.accepting or each.applying) for each in parts]
        calls = [(call.handle, servers) for call, servers in ends if isinstance(call, UserCall)]
        servers = {rank for each in parts for rank in list(each.applying)}
        return calls + [(handle, servers) for _, handle, _ in list(self._syncs)]

    def late_error(self) -> BaseException | None:
        """Return the error of a push whose handle was done, once; or the reason why no push is possible."""
        error, self._late_error = self._context.refusal or self._late_error, None
        return error

    def sync(self, handle: Handle[None], account: Account) -> None:
        """Resolve `handle` when servers have all pushes so far, which `account` then counts as awaited."""
        waiting = (self._last, handle, account)

        def wait() -> None:
            self._syncs.append(waiting)
            self._check_syncs()

        self._context.progress.start(wait)

    def _check_syncs(self) -> None:
        while self._syncs and not (self._line and self._line[0] <= self._syncs[0][0]):
            _, handle, account = self._syncs.popleft()
            if handle.done():
                continue
            error = self.late_error()
            self._context.progress.post(account.cover, handle.seq)
            if error is None:
                Operation.of(handle).resolve(None)
            else:
                Operation.of(handle).reject(error)

    # --- the end ---------------------------------------------------------------------------------------------

    def lose(self, rank: int, error: AiodistError) -> None:
        """End the pushes that wait for a lost server."""
        for number, part in list(self._parts.items()):
            if rank in part.applying:
                self.refuse(number, error)

    def abort(self, error: AiodistError) -> None:
        """End all pushes and syncs."""
        for number in list(self._parts):
            self.refuse(number, error)
        self._check_syncs()


class Pulls:
    """The pulls of one client. `pull` runs on the loop's thread, the rest with the transport lock held."""

    def __init__(self, queue: RequestQueue, codes: Codes) -> None:
        self._queue = queue
        self._codes = codes
        self._context = queue.context
        self._parts: dict[int, PullPart] = {}

    def pull(self, part: PullPart, reads: Reads, wants: int) -> None:
        """Read from all servers of a tensor."""
        number = next(self._queue.numbers)
        entry = part.entry
        self._parts[number] = part
        entry.open.add(number)
        counts = self._context.counts
        counts["pulls"] += 1
        counts["pull_bytes"] += part.nbytes
        head = wire.PULL.pack(entry.key, reads, number, wants)
        entries = [self._entry(number, rank, head, part.ids.get(rank)) for rank in entry.servers]
        self._queue.issue((self._queue.put, entries))

    def _entry(self, number: int, dst: int, head: bytes, ids: Tensor | None) -> Entry:
        if ids is None:
            return Entry(dst, Kind.PULL, number, head)
        way, place = self._context.shared.way_to(dst, ids)
        head += wire.IDS.pack(way, ids.nbytes, *place)
        data = as_bytes(ids) if way is Way.INLINE else b""
        return Entry(dst, Kind.PULL, number, head, data, ids if way is Way.MESSAGE else None)

    # --- answers ---------------------------------------------------------------------------------------------

    def data(self, src: int, body: memoryview) -> None:
        """Take the data of server `src`, or the place where they are."""
        data = wire.Data(*wire.DATA.unpack_from(body))
        part = self._parts.get(data.number)
        if part is None:  # aborted
            return
        counts, over = self._context.counts, partial(self.over, data.number, src)
        part.version = data.version if part.version is None else min(part.version, data.version)
        if part.place is None:
            counts["pull_bytes"] += data.nbytes
        if data.way != Way.MEMORY and src != self._context.rank:
            counts["pull_received_bytes"] += data.nbytes
        decode = None
        if data.coded:
            assert part.place is not None
            decode = self._codes.expect(part.entry, src, part.place(src), over)
        if data.way == Way.MEMORY:
            self._look(part, src, data)
        elif data.way == Way.INLINE:
            raw = wire.bytes_in(body, wire.DATA.size, data.nbytes)
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
        """Copy the data from the memory of the server."""
        found = self._context.shared.find(src, data.segment, data.offset, data.nbytes)

        def copied(error: BaseException | None) -> None:
            if src not in self._context.gone:
                self._context.coalescer.put(src, Kind.RELEASE, wire.RELEASE.pack(part.entry.key, data.number))
            self.over(data.number, src, error)

        part.copying.add(src)
        self._context.service.do(data.nbytes, partial(part.fill, src, found), copied)

    def over(self, number: int, src: int, error: BaseException | None) -> None:
        """End one server's part. The buffer is the user's again after all parts."""
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

    # --- waits, and the end ------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of the open requests (any thread)."""
        return list(self._parts)

    def late(self) -> dict[int, str]:
        """Return the servers for which pulls wait, each with a pull."""
        return {rank: f"pull of {part.entry}" for part in list(self._parts.values()) for rank in list(part.left)}

    def waits(self) -> list[tuple[Handle[Any], set[int]]]:
        """Return the handles of pulls, each with the servers for which the handle waits (any thread)."""
        return [(part.operation.handle, part.left) for part in list(self._parts.values())]

    def lose(self, rank: int, error: AiodistError) -> None:
        """End the parts of a lost server."""
        for number, part in list(self._parts.items()):
            if rank in part.left and rank not in part.copying:  # a thread still writes the buffer
                self.over(number, rank, error)

    def abort(self, error: AiodistError) -> None:
        """End all pulls."""
        parts, self._parts = self._parts, {}
        for number, part in parts.items():
            part.operation.part_over(error)
            part.entry.part_over(number)
