"""The life of a parameter server on one rank: opened with all ranks, rebound, closed or aborted."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.duplicate import duplicate
from aiodist.communicator.lifetime import Lifetime
from aiodist.communicator.resources import Resources
from aiodist.control import disagreement
from aiodist.errors import (
    AiodistError,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    MismatchError,
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
from aiodist.ps.leaving import leave
from aiodist.ps.log import PushLog
from aiodist.ps.pool import Pool
from aiodist.ps.server import Server
from aiodist.ps.service import Service
from aiodist.ps.settings import Roles, ServerMember, Settings, roles_among
from aiodist.ps.sharing import SharedMemory
from aiodist.ps.watching import ServerWatch
from aiodist.types import check_timeout
from aiodist.world.agree import agree

Rebind = Callable[[Communicator], Awaitable[None]]
_FIRST = 1
"""Number of the first request."""


class ParameterServerSession:
    """One rank of a parameter server, over a duplicate of the communicator (loop's thread)."""

    def __init__(self, coll: Communicator, settings: Settings, timeout: float | None) -> None:
        self.uid = token_hex(8)
        self.log = PushLog() if settings.checkpoints else None
        self.parent = coll
        self.settings = settings
        self._timeout = check_timeout(timeout)
        self.timeout = self._timeout
        """Default timeout of calls, in seconds, or None: by default that of the communicator."""
        self.refusal: AiodistError | RuntimeError | None = RuntimeError(
            "the parameter server is not open: use `async with`"
        )
        """Error that every call raises, or None while calls are accepted."""
        self._opened = False
        self.coll: Communicator
        self.progress: Progress
        self.account: Account
        self.context: Context
        self.server: Server
        self.client: Client
        self._watch: ServerWatch
        self._counts: defaultdict[str, Any] = defaultdict(int)
        self._seq = 0

    # --- opening -------------------------------------------------------------------------------------------------

    async def open(self, begin: Callable[[], Awaitable[None]], join: Callable[[], Awaitable[None]]) -> None:
        """Open with all ranks. `begin` makes the first calls, on ranks that join a running one after `join`."""
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
                await self.coll.barrier()  # no rank changes the first values of another
        except BaseException as error:
            await self.exit(error)
            raise

    async def rebind(self, coll: Communicator, roles: Roles | None) -> list[ServerMember]:
        """Continue on another communicator, with its ranks and new shards. Pending calls fail."""
        old, settings = self.context, self.settings
        place = settings.servers.index(old.rank) if old.rank in settings.servers else None
        worked = old.rank in settings.workers
        me = ServerMember(self.uid, old.size, len(settings.servers), place, worked, roles, old.saved)
        name = self.coll.name
        self._abort(CommunicatorAborted(f"parameter server {name!r} continues with other ranks", comm=name))
        self._resources.tallies.pop(name, None)  # the counts continue in the next ones
        if self._lifetime.refusal is None:
            self.coll.abort("its parameter server continues with other ranks")
        self.parent = coll
        return await self._bind(coll, me)

    async def _bind(self, coll: Communicator, me: ServerMember) -> list[ServerMember]:
        """Duplicate `coll`, compare the settings of all ranks, and return the ranks."""
        self.coll = await duplicate(coll)
        self.timeout = coll.timeout if self._timeout is None else self._timeout
        alike = False
        try:
            facts = await self.exchange({"settings": self.settings.described(), "me": asdict(me)})
            alike = True  # every rank raises the next error
            members = self._agreed(facts)
            alike = False
            self._open(members)
        except BaseException as error:
            if not alike and self._lifetime.refusal is None:
                self.coll.abort(f"rank {coll.rank} has not opened its parameter server: {error!r}")
            await self.coll.aclose()
            raise
        return members

    async def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the values of all ranks."""
        return await agree(self.coll, f"parameter server {self.coll.name!r}", mine)

    def _agreed(self, facts: Sequence[dict[str, Any]]) -> list[ServerMember]:
        """Return the ranks, and set the roles. Raises MismatchError if ranks have other settings."""
        members = [ServerMember(**each["me"]) for each in facts]
        free = {"servers", "workers"} if any(member.size for member in members) else set()
        for what, first in facts[0]["settings"].items():
            texts = [str(each["settings"][what]) for each in facts]
            if what not in free and any(text != first for text in texts):
                raise MismatchError(disagreement(f"{what} of parameter server {self.coll.name!r}", texts))
        servers, workers = roles_among(members, (self.settings.servers, self.settings.workers))
        if not free and len(workers) < (n := getattr(self.settings.consistency, "n", 1)):
            raise ValueError(f"a quorum of {n} of workers {list(workers)}: expected at least {n} workers")
        self.settings = replace(self.settings, servers=servers, workers=workers)
        return members

    def _open(self, members: Sequence[ServerMember]) -> None:
        progress = self.progress = Progress.current()
        self.account = Account(progress.loop)
        self.account.strict = parts_of(self.coll).dispatcher.account.strict
        self.context = self._context(members)
        first = next(self.client.queue.numbers) if hasattr(self, "client") else _FIRST
        self.server = Server(self.context)
        self.client = Client(self.context, first)
        self.server.open(self.client)
        self._lifetime.on_lost.append(self._lost)
        self._lifetime.on_abort.append(self._aborted)
        parts_of(self.coll).dispatcher.watchdog.serves = True
        parts_of(self.coll).registry.members.admit(self.coll, _ServerGuest(self, self.coll))
        self._resources.tallies[self.coll.name] = self._tally
        self.refusal = None
        dispatcher, aborted = parts_of(self.coll).dispatcher, self.abort_everywhere
        self._watch = ServerWatch(
            self.context, self.client, self.server, dispatcher.watchdog, dispatcher.ranks, self.run, aborted
        )
        with transport_lock:
            self.context.coalescer.open(self.server.handlers | self.client.handlers)
        if self._lifetime.refusal is not None:  # a rank was lost meanwhile
            self._aborted(CommunicatorAborted(str(self._lifetime.refusal)))

    def _context(self, members: Sequence[ServerMember]) -> Context:
        parts, name, rank = parts_of(self.coll), self.coll.name, self.coll.rank
        near = parts.registry.resources.near
        coalescer = Coalescer(parts.transport, self.progress, self._failed)
        shared = SharedMemory(rank, parts.dispatcher.ranks, near, coalescer.inline_bytes)
        coalescer.ring = None if near is None else shared.ring
        return Context(
            name=name,
            rank=rank,
            size=self.coll.size,
            servers=self.settings.servers,
            workers=self.settings.workers,
            uids=[member.uid for member in members],
            log=self.log,
            rules=tuple(self.settings.rules.values()),
            policy=self.settings.consistency,
            codec=self.settings.codec,
            pull_codec=self.settings.pull_codec,
            progress=self.progress,
            service=Service(self.progress, f"aiodist-ps-{name}", coalescer.flush),
            pool=Pool(self._buffer),
            coalescer=coalescer,
            shared=shared,
            counts=self._counts,
            saved=max((member.saved for member in members if member.saved is not None), default=None),
        )

    def _buffer(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return self.coll.arena_empty(nbytes, torch.uint8)

    def _tally(self) -> dict[str, float]:
        """Return the numbers of this rank for metrics (any thread)."""
        return self.server.statistics().as_metrics()

    @property
    def _resources(self) -> Resources:
        resources: Resources = parts_of(self.coll).registry.resources
        return resources

    @property
    def _lifetime(self) -> Lifetime:
        return parts_of(self.coll).dispatcher.lifetime

    # --- the end -------------------------------------------------------------------------------------------------

    async def exit(self, error: BaseException | None, rebind: Rebind | None = None) -> None:
        """Close with all ranks, or abort after an `error`.

        If the ranks of an elastic world regroup meanwhile, this rank follows by `rebind`, and closes there.
        """
        self.check_loop()
        try:
            if error is None:
                await self._leave(rebind)
                self._close(CommunicatorClosed(f"parameter server {self.coll.name!r} is closed", comm=self.coll.name))
                self.account.judge()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None:
                self.abort_everywhere(error)
            await self.context.service.ended()  # the thread uses memory of the caller
            try:
                await self.coll.aclose()
            except PeerLost as lost:
                if lost.lost not in self.context.gone:  # else the others have left without the lost rank
                    raise

    async def _leave(self, rebind: Rebind | None) -> None:
        """Leave, over the last communicator if the ranks of an elastic world regroup meanwhile."""
        while True:
            try:
                self._check_refusal()
                await leave(self.context, self.client, self.run)
                return self._check_refusal()
            except (PeerLost, CommunicatorError) as error:
                if rebind is None or not self._superseded(error):
                    raise
            await self._regroup(rebind)

    def _check_refusal(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def _regroup(self, rebind: Rebind) -> None:
        while True:
            coll = await self.parent.shrink()  # the error of a failed shrink ends the session
            try:
                return await rebind(coll)
            except (PeerLost, CommunicatorError) as error:
                if self.parent is not coll or not self._superseded(error):
                    raise

    def _superseded(self, error: AiodistError) -> bool:
        """Return True if the ranks of the elastic world regroup, which may be the cause of `error`."""
        parts = parts_of(self.parent)
        if parts.registry.elastic is None or isinstance(parts.dispatcher.lifetime.refusal, CommunicatorClosed):
            return False
        return parts.dispatcher.lifetime.refusal is not None or (isinstance(error, PeerLost) and error.lost >= 0)

    def _close(self, refusal: AiodistError) -> None:
        """Refuse calls, and receive nothing more."""
        self.refusal = self.refusal or refusal
        self._resources.end_tally(self.coll.name)
        self._watch.close()
        with transport_lock:
            self.context.coalescer.abort()
            self.context.service.close()
            self.server.saving.close()
        if self._lost in self._lifetime.on_lost:
            self._lifetime.on_lost.remove(self._lost)
        if self._aborted in self._lifetime.on_abort:
            self._lifetime.on_abort.remove(self._aborted)

    def abort_everywhere(self, error: BaseException) -> None:
        """Abort on all ranks, unless closed."""
        if isinstance(self.refusal, CommunicatorClosed):
            return
        self._abort(CommunicatorAborted(f"the parameter server was aborted: {error!r}", rank=self.coll.rank))
        if self._lifetime.refusal is None:
            self.coll.abort(f"rank {self.coll.rank} aborted its parameter server: {error!r}")

    def _abort(self, error: AiodistError) -> None:
        """Reject pending calls, and refuse later ones, on this rank."""
        if self.refusal is not None:
            return
        self._close(error)
        with transport_lock:
            self.client.abort(error)
        with suppress(Warning):  # a warning that is an error must not hide the cause
            self.account.judge()

    def ended(self, coll: Communicator) -> None:
        """Abort after the end of a communicator, if this session uses the communicator."""
        if coll is self.coll:
            why = f"parameter server {coll.name!r} was aborted: its communicator ended"
            self._abort(CommunicatorAborted(why, comm=coll.name))

    # --- callbacks -----------------------------------------------------------------------------------------------

    def _lost(self, rank: int, error: AiodistError) -> None:
        """Continue without a lost rank, or abort without the hub (-1)."""
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

    def _aborted(self, error: AiodistError) -> None:
        if not isinstance(error, PeerLost):
            self._abort(error)

    def _failed(self, error: BaseException) -> None:
        """Abort on all ranks, since this rank can receive nothing more (any thread)."""
        self.progress.post(self.abort_everywhere, error)

    # --- calls ---------------------------------------------------------------------------------------------------

    def check(self, worker_call: str = "") -> None:
        """Raise if the parameter server refuses calls, or if the calling thread or loop is wrong.

        With the name of a call for workers, raises ValueError unless this rank is a worker.
        """
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        if _get_running_loop() is not self.progress.loop:
            self.check_loop()
        if worker_call and self.context.rank not in self.context.workers:
            workers = list(self.context.workers)
            raise ValueError(f"{worker_call} on rank {self.context.rank}: expected a worker, one of {workers}")

    def check_loop(self) -> None:
        """Raise RuntimeError unless the calling thread runs the loop of this session."""
        self.progress.check_here(f"parameter server {self.coll.name!r}")

    def handle(self, op: str, nbytes: int, timeout: float | None, depth: int = 3) -> Handle[Any]:
        """Return the handle of a call that is made `depth` frames up."""
        if timeout is not None:
            check_timeout(timeout)
        handle: Handle[Any] = Handle(self.progress, op, self._seq, nbytes, whence(depth), self.account)
        self._seq += 1
        seconds = self.timeout if timeout is None else timeout
        if seconds is not None and seconds < inf:
            Operation.of(handle).set_deadline(seconds, self._watch.late)
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
            if not operation.is_pending:
                return
            if error is None:
                operation.resolve(result)
            elif isinstance(error.__cause__, Freed):  # the kernel wraps a KeyError
                operation.reject(error.__cause__)
            else:
                operation.reject(self.client.queue.located(error))

        def begin() -> None:
            run(make(), finish)

        if now:
            self.progress.start(begin)
        else:
            self.client.queue.issue((begin,))
        return handle


@dataclass(frozen=True, eq=False)
class _ServerGuest:
    """The session, as a dependent of one of its communicators."""

    session: ParameterServerSession
    coll: Communicator

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.session.ended(self.coll)
