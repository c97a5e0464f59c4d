"""The life of a parameter server on one rank: opened together, served meanwhile, left together, or given up."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from contextlib import suppress
from functools import partial
from math import inf
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from aiodist.codecs import Json
from aiodist.collectives.program import Program, run
from aiodist.communicator import Communicator
from aiodist.errors import AiodistError, CommunicatorAborted, CommunicatorClosed, MismatchError, PeerLost
from aiodist.handles import Account, Handle, Progress
from aiodist.handles.origin import whence
from aiodist.handles.progress import transport_lock
from aiodist.ps.arguments import check_timeout
from aiodist.ps.client import Client
from aiodist.ps.coalescer import Coalescer
from aiodist.ps.context import Context
from aiodist.ps.pool import Pool
from aiodist.ps.server import Server
from aiodist.ps.service import Service
from aiodist.ps.settings import Settings
from aiodist.ps.wire import Kind

__all__ = ["ParameterServerSession"]

_DRAIN_SECONDS = 1e-3
_NO_LIMIT = inf  # a rank that leaves waits for the others, however long they work
_SERVER_KINDS = frozenset({Kind.CALL, Kind.PUSH, Kind.PULL, Kind.ORDER, Kind.RELEASE})


class ParameterServerSession:
    """What the calls of a parameter server stand on."""

    def __init__(self, coll: Communicator, settings: Settings, timeout: float | None) -> None:
        self._parent = coll
        self._settings = settings
        self.timeout = check_timeout(timeout)
        """Seconds, for calls that are given none."""
        self._refusal: AiodistError | RuntimeError | None = RuntimeError(
            "the parameter server is not open: use `async with`"
        )
        self._opened = False
        self._seq = 0
        self._over: asyncio.Future[None] | None = None
        """Done when there is nothing to listen for any more."""

    async def __aenter__(self) -> Self:
        if self._opened:
            raise RuntimeError("a parameter server cannot be opened twice: make another")
        self._opened = True
        self._coll = await self._parent.dup()
        await self._agree()
        self._open()
        try:
            await self._begin()
            await self._coll.barrier()  # nobody changes what another is still to begin with
        except BaseException as error:
            self._abandon(error)
            raise
        return self

    async def _begin(self) -> None:
        """Do what comes first."""

    async def _agree(self) -> None:
        """Raise MismatchError unless all ranks opened it with the same settings."""
        mine = self._settings.described()
        described = Json()  # objects would be unpickled
        others = [described.decode(code) for code in await self._coll.allgather(described.encode(mine))]
        for rank, other in enumerate(others):
            different = [what for what in mine if other[what] != others[0][what]]
            if different:
                what = different[0]
                raise MismatchError(
                    f"parameter servers disagree on {what}: rank 0: {others[0][what]}; rank {rank}: {other[what]}"
                )

    def _open(self) -> None:
        progress = self._progress = Progress.current()
        dispatcher = self._coll.parts.dispatcher
        near = self._coll.parts.registry.near
        self._account = Account(progress.loop)
        self._loop = progress.loop

        def buffer(nbytes: int) -> Tensor:
            with torch.inference_mode(False):
                return self._coll.empty(nbytes, torch.uint8)

        self._context = Context(
            name=self._coll.name,
            rank=self._coll.rank,
            servers=self._settings.servers,
            workers=self._settings.workers,
            world_ranks=dispatcher.ranks,
            rules=tuple(self._settings.rules.values()),
            policy=self._settings.consistency,
            codec=self._settings.codec,
            pull_codec=self._settings.pull_codec,
            progress=progress,
            service=Service(progress, f"aiodist-ps-{self._coll.name}"),
            pool=Pool(buffer),
            near=near,
        )
        self._context.coalescer = Coalescer(self._coll.parts.transport, self._heard, self._failed, self._context.ring)
        self._server = Server(self._context)
        self._client = Client(self._context, self._server.own, self._server.shown)
        dispatcher.on_lost.append(self._lost)
        dispatcher.on_abort.append(self._aborted)
        self._coll.admit(self)
        self._refusal = None
        with transport_lock:
            self._context.coalescer.open()
        if dispatcher.refusal is not None:  # lost in the meantime
            self._aborted(CommunicatorAborted(str(dispatcher.refusal)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(error)
            return
        try:
            await self._leave()
        except BaseException as raised:
            self._abandon(raised)
            raise
        await self._coll.aclose()

    async def _leave(self) -> None:
        """End in order: nothing of mine is open, all servers know that I have left, and all ranks have."""
        if self._refusal is not None:
            raise self._refusal
        await self._run("leave", self._parting(), _NO_LIMIT)
        await self._drain()
        await self._run("leave", self._leaving(), _NO_LIMIT)
        while self._client.busy:  # noqa: ASYNC110  - what ends it may be heard in any thread
            await asyncio.sleep(_DRAIN_SECONDS)
        await self._run("leave", self._goodbye(), _NO_LIMIT)
        await self._ended()
        self._close(CommunicatorClosed(f"parameter server {self._coll.name!r} is closed", comm=self._coll.name))
        self._account.judge()

    async def _drain(self) -> None:
        """Wait until no push and no call of this rank's is open; a read may wait for those that leave with us."""
        synced = self._handle("sync", 0, _NO_LIMIT)
        self._client.pushes.sync(synced, None)  # leaving covers nothing
        await synced
        while self._client.programs:  # noqa: ASYNC110  - the same
            await asyncio.sleep(_DRAIN_SECONDS)

    def _parting(self) -> Program[None]:
        """Say that nothing comes from this rank but what it has begun: nobody waits for more, as at a barrier."""
        yield [self._client.calls.tell(rank, "part") for rank in self._settings.servers]

    def _leaving(self) -> Program[None]:
        """Leave every server that is there."""
        for rank in self._living():
            yield from self._asked(rank, "leave")

    def _goodbye(self) -> Program[None]:
        """Wait at the first server, or at the next where it dies, for all ranks."""
        while (living := self._living()) and not (yield from self._asked(living[0], "bye")):
            pass
        if not living:
            return
        others = [rank for rank in range(self._coll.size) if rank != living[0] and rank not in self._context.gone]
        if others and self._coll.rank == others[0]:
            self._context.coalescer.say_last(living[0])

    def _living(self) -> list[int]:
        return [rank for rank in self._settings.servers if rank not in self._context.gone]

    def _asked(self, rank: int, op: str) -> Program[bool]:
        """Ask server `rank`; False when it is gone."""
        try:
            yield from self._client.calls.call(rank, op)
        except PeerLost:
            return False
        return True

    async def _ended(self) -> None:
        """Wait until nothing is listened for any more; where a rank died the transport is given up anyway."""
        if self._context.gone:
            return
        self._over = self._loop.create_future()
        with transport_lock:
            self._context.coalescer.when_last(partial(self._progress.post, self._all_said))
        await self._over
        if self._refusal is not None:
            raise self._refusal

    def _all_said(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _close(self, refusal: AiodistError) -> None:
        self._refusal = self._refusal or refusal
        self._all_said()
        with transport_lock:
            self._context.coalescer.give_up()
            self._context.service.close()
        dispatcher = self._coll.parts.dispatcher
        for told, mine in ((dispatcher.on_lost, self._lost), (dispatcher.on_abort, self._aborted)):
            if mine in told:
                told.remove(mine)  # type: ignore[arg-type]

    def _abandon(self, error: BaseException) -> None:
        """End at once, and have the other ranks do so too."""
        if self._refusal is not None and isinstance(self._refusal, CommunicatorClosed):
            return
        self._give_up(CommunicatorAborted(f"the parameter server was given up: {error!r}", rank=self._coll.rank))
        if self._coll.parts.dispatcher.refusal is None:
            self._coll.abort(f"its parameter server was given up on rank {self._coll.rank}: {error!r}")

    def _give_up(self, error: AiodistError) -> None:
        if self._refusal is not None:
            return
        self._close(error)
        with transport_lock:
            self._client.give_up(error)
        with suppress(Warning):  # one that is an error must not take the place of what happened
            self._account.judge()

    async def release(self) -> None:
        """End with the communicator; see `Guest`."""
        self.give_up()

    def give_up(self) -> None:
        """End without waiting for anything; see `Guest`."""
        name = self._coll.name
        self._give_up(CommunicatorAborted(f"parameter server {name!r} was given up: its communicator ended", comm=name))

    # --- other ranks' fate -----------------------------------------------------------------------------------

    def _lost(self, rank: int, error: AiodistError) -> None:
        if rank < 0:
            self._give_up(error)
            return
        context = self._context
        context.gone[rank] = error
        with transport_lock:
            context.coalescer.forget(rank)
            self._server.lose(rank)
            self._client.lose(rank)
            context.coalescer.flush()
        self._all_said()  # what the dead should have said never comes

    def _aborted(self, error: AiodistError) -> None:
        if not isinstance(error, PeerLost):
            self._give_up(error)

    def _failed(self, rank: int | None, error: BaseException) -> None:
        """A message could not be sent or received: whose fault it is the control channel tells."""
        if rank is not None and rank in self._context.gone:
            return
        if rank is None:
            text = f"parameter server {self._coll.name!r} can hear nothing more: {error}"
            self._progress.post(partial(self._give_up, CommunicatorAborted(text)))

    def _heard(self, src: int, kind: int, body: memoryview) -> None:
        self._progress.liven()
        try:
            if kind in _SERVER_KINDS:
                self._server.heard(src, kind, body)
            else:
                self._client.heard(src, kind, body)
        except Exception as error:  # noqa: BLE001  - it must not end the progress of everything else
            message = f"parameter server {self._coll.name!r}: what rank {src} sent failed here"
            self._progress.report(message, error)
            self._progress.post(partial(self._abandon, error))

    # --- handles ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if _get_running_loop() is not self._loop:
            raise RuntimeError(
                f"parameter server {self._coll.name!r} belongs to another thread or event loop: call it on the loop it "
                "was opened on"
            )

    def _check_opened(self) -> None:
        if not hasattr(self, "_server"):
            raise RuntimeError("the parameter server is not open: use `async with`")

    def _handle(self, op: str, nbytes: int, timeout: float | None) -> Handle[Any]:
        if timeout is not None:
            check_timeout(timeout)
        handle: Handle[Any] = Handle(self._progress, op, self._seq, nbytes, whence(3), self._account)
        self._seq += 1
        seconds = self.timeout if timeout is None else timeout
        if seconds is not None and seconds < inf:
            handle.set_deadline(seconds, self._client.late)
        return handle

    def _run(self, op: str, program: Program[Any], timeout: float | None) -> Handle[Any]:
        """Return the handle of a program."""
        handle = self._handle(op, 0, timeout)
        self._client.programs.add(handle)

        def finish(result: Any, error: BaseException | None) -> None:  # noqa: ANN401
            self._client.programs.discard(handle)
            if handle.done():
                return
            if error is None:
                handle.resolve(None)
            else:
                handle.reject(self._client.queue.located(error))

        self._client.queue.issue((partial(run, program, finish),))  # behind pushes that are being encoded
        return handle
