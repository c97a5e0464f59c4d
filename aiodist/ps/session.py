"""The life of a parameter server on one rank: opened together, served meanwhile, left together, or given up."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from aiodist.codecs import Json
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.duplicate import duplicate
from aiodist.control import disagreement
from aiodist.errors import (
    AiodistError,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    MismatchError,
    OperationTimeout,
    PeerLost,
)
from aiodist.handles import Account, Handle, Operation, Progress
from aiodist.handles.kernel import Program, run
from aiodist.handles.origin import whence
from aiodist.handles.polling import transport_lock
from aiodist.ps.answers import Freed
from aiodist.ps.client import Client
from aiodist.ps.coalescer import Coalescer
from aiodist.ps.context import Context
from aiodist.ps.log import PushLog
from aiodist.ps.pool import Pool
from aiodist.ps.server import Server
from aiodist.ps.service import Service
from aiodist.ps.settings import Roles, ServerMember, Settings, roles_among
from aiodist.ps.sharing import SharedMemory
from aiodist.types import check_timeout

_DRAIN_SECONDS = 1e-3
_PING_SECONDS = 10.0
"""Time between two pings of all servers, in seconds."""
_ANSWER_SECONDS = 60.0
"""Longest time to the answer of a ping, in seconds. A live rank answers immediately, even if its loop is busy."""
_NO_LIMIT = inf  # a rank that leaves waits for the others, however long they work


class ParameterServerSession:
    """What the calls of a parameter server stand on; a guest of its own duplicate of the communicator."""

    def __init__(self, coll: Communicator, settings: Settings, timeout: float | None) -> None:
        self.uid = token_hex(8)
        self.log = PushLog() if settings.checkpoints else None
        self.parent = coll
        self.settings = settings
        self._timeout = check_timeout(timeout)
        self.timeout = self._timeout
        """Default timeout of calls, in seconds, or None: by default that of the communicator."""
        self._refusal: AiodistError | RuntimeError | None = RuntimeError(
            "the parameter server is not open: use `async with`"
        )
        self._opened = False
        self.context: Context
        self.server: Server
        self.client: Client
        self._counts: defaultdict[str, Any] = defaultdict(int)
        self._seq = 0
        self._over = asyncio.Event()
        """There is nothing to listen for any more."""

    async def open(self, begin: Callable[[], Awaitable[None]], join: Callable[[], Awaitable[None]]) -> None:
        """Open it with all ranks; `begin` makes the first calls. Where others go on with it `join` comes before."""
        parts_of(self.parent).dispatcher.check_usable()
        if self._opened:
            raise RuntimeError("a parameter server cannot be opened twice: make another")
        self._opened = True
        members = await self._bind(self.parent, ServerMember(self.uid))
        joins = any(member.size for member in members)
        try:
            if joins:
                await join()
            await begin()
            if not joins:
                await self.coll.barrier()  # nobody changes what another is still to begin with
        except BaseException as error:
            await self.exit(error)
            raise

    async def rebind(self, coll: Communicator, roles: Roles | None) -> list[ServerMember]:
        """Go on over another communicator, with its ranks; what was under way failed. Shards have nothing yet."""
        old, settings = self.context, self.settings
        place = settings.servers.index(old.rank) if old.rank in settings.servers else None
        size, worked = old.size, old.rank in settings.workers
        me = ServerMember(self.uid, size, len(settings.servers), place, worked, roles, old.saved)
        name = self.coll.name
        self._abort(CommunicatorAborted(f"parameter server {name!r} goes on with other ranks", comm=name))
        if parts_of(self.coll).dispatcher.lifetime.refusal is None:
            self.coll.abort("its parameter server goes on with other ranks")
        self.parent = coll
        return await self._bind(coll, me)

    async def _bind(self, coll: Communicator, me: ServerMember) -> list[ServerMember]:
        """Take a duplicate of `coll`, on which all ranks agree; return who they are."""
        self.coll = await duplicate(coll)
        self.timeout = coll.timeout if self._timeout is None else self._timeout
        alike = False
        try:
            told = await self.told({"settings": self.settings.described(), "me": asdict(me)})
            alike = True  # what is wrong with it all ranks find
            members = self._agreed(told)
            alike = False
            self._open(members)
        except BaseException as error:
            if not alike and parts_of(self.coll).dispatcher.lifetime.refusal is None:
                self.coll.abort(f"its parameter server was given up on rank {coll.rank}: {error!r}")
            await self.coll.aclose()
            raise
        return members

    async def told(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        json = Json()  # objects would be unpickled
        return [json.decode(code) for code in await self.coll.allgather(json.encode(mine))]

    def _agreed(self, told: Sequence[dict[str, Any]]) -> list[ServerMember]:
        """Return who takes part, and know who serves; raise MismatchError where ranks chose other settings."""
        members = [ServerMember(**each["me"]) for each in told]
        free = {"servers", "workers"} if any(member.size for member in members) else set()
        for each in told:
            for what, mine in each["settings"].items():
                if mine != told[0]["settings"][what] and what not in free:
                    texts = [str(each["settings"][what]) for each in told]
                    raise MismatchError(disagreement(f"{what} of parameter server {self.coll.name!r}", texts))
        servers, workers = roles_among(members, (self.settings.servers, self.settings.workers))
        if not free and len(workers) < (n := getattr(self.settings.consistency, "n", 1)):
            raise ValueError(f"a quorum of {n} of workers {list(workers)}: expected at least {n} workers")
        self.settings = replace(self.settings, servers=servers, workers=workers)
        return members

    def _open(self, members: Sequence[ServerMember]) -> None:
        progress = self.progress = Progress.current()
        dispatcher = parts_of(self.coll).dispatcher
        near = parts_of(self.coll).registry.resources.near
        self.account = Account(progress.loop)

        def buffer(nbytes: int) -> Tensor:
            with torch.inference_mode(False):
                return self.coll.arena_empty(nbytes, torch.uint8)

        name, ranks = self.coll.name, parts_of(self.coll).dispatcher.ranks
        coalescer = Coalescer(parts_of(self.coll).transport, progress, self._failed)
        shared = SharedMemory(self.coll.rank, ranks, near, coalescer.inline_bytes)
        coalescer.ring = None if near is None else shared.ring
        self.context = Context(
            name=name,
            rank=self.coll.rank,
            size=self.coll.size,
            servers=self.settings.servers,
            workers=self.settings.workers,
            uids=[member.uid for member in members],
            log=self.log,
            rules=tuple(self.settings.rules.values()),
            policy=self.settings.consistency,
            codec=self.settings.codec,
            pull_codec=self.settings.pull_codec,
            progress=progress,
            service=Service(progress, f"aiodist-ps-{name}", coalescer.flush),
            pool=Pool(buffer),
            coalescer=coalescer,
            shared=shared,
            counts=self._counts,
            saved=max((member.saved for member in members if member.saved is not None), default=None),
        )
        first = self.client.queue.number() if hasattr(self, "client") else 1  # it goes on
        self.server = Server(self.context)
        self.client = Client(self.context, first)
        self.server.open(self.client)
        dispatcher.lifetime.on_lost.append(self._lost)
        dispatcher.lifetime.on_abort.append(self._aborted)
        dispatcher.watchdog.serves = True
        parts_of(self.coll).registry.members.admit(self.coll, _ServerGuest(self, self.coll))
        self._refusal = None
        self._over = asyncio.Event()
        self._pinging = asyncio.ensure_future(self._ping())
        with transport_lock:
            self.context.coalescer.open(self.server.handlers | self.client.handlers)
        if dispatcher.lifetime.refusal is not None:  # lost in the meantime
            self._aborted(CommunicatorAborted(str(dispatcher.lifetime.refusal)))

    async def exit(
        self, error: BaseException | None, rebind: Callable[[Communicator], Awaitable[None]] | None = None
    ) -> None:
        """Leave with all ranks, or after an `error` without them.

        In an elastic world whose ranks regroup meanwhile, this rank goes with them by `rebind`, and leaves there.
        """
        self.check_loop()
        try:
            if error is None:
                await self._leave_last(rebind)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None:
                self.abort_everywhere(error)
            await self.context.service.ended()  # what it works on is the caller's again
            try:
                await self.coll.aclose()
            except PeerLost as lost:
                if lost.lost not in self.context.gone:  # else the others have left without it
                    raise

    async def _leave_last(self, rebind: Callable[[Communicator], Awaitable[None]] | None) -> None:
        while True:
            try:
                return await self._leave()
            except (PeerLost, CommunicatorError) as error:
                if rebind is None or not self._superseded(error):
                    raise
            await self._regroup(rebind)

    async def _regroup(self, rebind: Callable[[Communicator], Awaitable[None]]) -> None:
        while True:
            coll = await self.parent.shrink()  # what that raises is the end
            try:
                return await rebind(coll)
            except (PeerLost, CommunicatorError) as error:
                if self.parent is not coll or not self._superseded(error):
                    raise

    def _superseded(self, error: AiodistError) -> bool:
        """Return True if the ranks of the elastic world regroup, which `error` may come of."""
        parts = parts_of(self.parent)
        if parts.registry.elastic is None or isinstance(parts.dispatcher.lifetime.refusal, CommunicatorClosed):
            return False
        return parts.dispatcher.lifetime.refusal is not None or (isinstance(error, PeerLost) and error.lost >= 0)

    async def _leave(self) -> None:
        """End in order: nobody waits for this rank any more, nothing of mine is open, and all ranks have left."""
        if self._refusal is not None:
            raise self._refusal
        await self.run("leave", partial(self._ask_all, "leave"), _NO_LIMIT)
        while self.client.busy:  # noqa: ASYNC110  - any thread may receive the end of a request
            await asyncio.sleep(_DRAIN_SECONDS)
        if (error := self.client.pushes.late_error()) is not None:
            raise error
        await self.run("leave", self._goodbye, _NO_LIMIT)
        await self._ended()
        self._close(CommunicatorClosed(f"parameter server {self.coll.name!r} is closed", comm=self.coll.name))
        self.account.judge()

    async def _ping(self) -> None:
        """Ping all servers while requests are open. Abort on all ranks if a server does not answer.

        A connection may lose messages without a report, and a rank that leaves waits without a deadline.
        """
        while True:
            await asyncio.sleep(_PING_SECONDS)
            if self.client.busy:
                try:
                    await self.run("ping", partial(self._ask_all, "ping"), _ANSWER_SECONDS, now=True)
                except AiodistError as error:
                    self.abort_everywhere(error)
                    return

    async def _ask_all(self, op: str) -> None:
        for rank in self.context.living():
            await self._asked(rank, op)

    async def _goodbye(self) -> None:
        """Wait at the first server, or at the next where it dies, for all ranks."""
        while (living := self.context.living()) and not (await self._asked(living[0], "bye")):
            pass
        if not living:
            return
        others = [rank for rank in range(self.coll.size) if rank != living[0] and rank not in self.context.gone]
        if others and self.coll.rank == others[0]:
            self.context.coalescer.put_last(living[0])

    async def _asked(self, rank: int, op: str) -> bool:
        try:
            await self.client.call(rank, op)
        except PeerLost:
            return False
        return True

    async def _ended(self) -> None:
        """Wait until nothing is listened for any more; where a rank died the transport is given up anyway."""
        if self.context.gone:
            return
        with transport_lock:
            self.context.coalescer.when_last(partial(self.progress.post, self._over.set))
        try:
            await asyncio.wait_for(self._over.wait(), _ANSWER_SECONDS)
        except TimeoutError:
            first = self.context.living()[0]
            rank = first if first != self.coll.rank else next(r for r in range(self.coll.size) if r != first)
            text = f"leave: rank {rank} has not sent its last message for {_ANSWER_SECONDS:g} s"
            raise OperationTimeout(text, late={rank: ""}) from None
        if self._refusal is not None:
            raise self._refusal

    def _close(self, refusal: AiodistError) -> None:
        self._refusal = self._refusal or refusal
        self._over.set()
        self._pinging.cancel()
        with transport_lock:
            self.context.coalescer.abort()
            self.context.service.close()
            self.server.saving.close()
        dispatcher = parts_of(self.coll).dispatcher
        for told, mine in ((dispatcher.lifetime.on_lost, self._lost), (dispatcher.lifetime.on_abort, self._aborted)):
            if mine in told:
                told.remove(mine)  # type: ignore[arg-type]

    def abort_everywhere(self, error: BaseException) -> None:
        if self._refusal is not None and isinstance(self._refusal, CommunicatorClosed):
            return
        self._abort(CommunicatorAborted(f"the parameter server was given up: {error!r}", rank=self.coll.rank))
        if parts_of(self.coll).dispatcher.lifetime.refusal is None:
            self.coll.abort(f"its parameter server was given up on rank {self.coll.rank}: {error!r}")

    def _abort(self, error: AiodistError) -> None:
        if self._refusal is not None:
            return
        self._close(error)
        with transport_lock:
            self.client.abort(error)
        with suppress(Warning):  # one that is an error must not take the place of what happened
            self.account.judge()

    def ended(self, coll: Communicator) -> None:
        """A communicator ended: end without waiting for anything, if it is the one that this goes over."""
        if coll is self.coll:
            name = coll.name
            why = f"parameter server {name!r} was given up: its communicator ended"
            self._abort(CommunicatorAborted(why, comm=name))

    # --- other ranks' fate -----------------------------------------------------------------------------------

    def _lost(self, rank: int, error: AiodistError) -> None:
        if rank < 0:
            self._abort(error)
            return
        context = self.context
        context.gone[rank] = error
        with transport_lock:
            context.coalescer.forget(rank)
            self.server.lose(rank)
            self.client.lose(rank)
            context.coalescer.flush()
        self._over.set()  # what the dead should have said never comes

    def _aborted(self, error: AiodistError) -> None:
        if not isinstance(error, PeerLost):
            self._abort(error)

    def _failed(self, error: BaseException) -> None:
        """Abort on all ranks, since this rank can receive nothing more (any thread)."""
        self.progress.post(self.abort_everywhere, error)

    # --- handles ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the parameter server refuses calls, or if the calling thread or loop is wrong."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if _get_running_loop() is not self.progress.loop:
            self.check_loop()

    def check_loop(self) -> None:
        self.progress.check_here(f"parameter server {self.coll.name!r}")

    def check_worker(self, what: str) -> None:
        if self.context.rank not in self.context.workers:
            told = list(self.settings.workers)
            raise ValueError(f"{what} on rank {self.parent.rank}: expected a worker, one of {told}")

    def handle(self, op: str, nbytes: int, timeout: float | None, depth: int = 3) -> Handle[Any]:
        """Return the handle of a call that is made `depth` frames up."""
        if timeout is not None:
            check_timeout(timeout)
        handle: Handle[Any] = Handle(self.progress, op, self._seq, nbytes, whence(depth), self.account)
        self._seq += 1
        seconds = self.timeout if timeout is None else timeout
        if seconds is not None and seconds < inf:
            Operation.of(handle).set_deadline(seconds, self.client.late)
        return handle

    def run(
        self, op: str, make: Callable[[], Program[Any]], timeout: float | None, *, now: bool = False
    ) -> Handle[Any]:
        """Return the handle of the program that `make` returns, which begins after pushes that are being encoded.

        True for `now` lets the program begin before these pushes.
        """
        handle = self.handle(op, 0, timeout)
        self.client.programs.add(handle)
        operation = Operation.of(handle)

        def finish(result: Any, error: BaseException | None) -> None:  # noqa: ANN401
            self.client.programs.discard(handle)
            if handle.done():
                return
            if error is None:
                operation.resolve(result)
            elif isinstance(error.__cause__, Freed):  # what runs programs expects none
                operation.reject(error.__cause__)
            else:
                operation.reject(self.client.queue.located(error))

        begin = self.progress.start if now else self.client.queue.issue
        begin(lambda: run(make(), finish))
        return handle


@dataclass(frozen=True, eq=False)
class _ServerGuest:
    """The session on one of its communicators."""

    session: ParameterServerSession
    coll: Communicator

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.session.ended(self.coll)
