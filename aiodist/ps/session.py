"""The life of a parameter server on one rank: opened together, served meanwhile, left together, or given up."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

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

_DRAIN_SECONDS = 1e-3
_NO_LIMIT = inf  # a rank that leaves waits for the others, however long they work
_SERVER_KINDS = frozenset({Kind.CALL, Kind.PUSH, Kind.PULL, Kind.ORDER, Kind.RELEASE})


class ParameterServerSession:
    """What the calls of a parameter server stand on; a guest of its own duplicate of the communicator."""

    def __init__(self, coll: Communicator, settings: Settings, timeout: float | None) -> None:
        self.parent = coll
        self.settings = settings
        self.timeout = check_timeout(timeout)
        """Seconds, for calls that are given none."""
        self._refusal: AiodistError | RuntimeError | None = RuntimeError(
            "the parameter server is not open: use `async with`"
        )
        self._opened = False
        self._seq = 0
        self._over = asyncio.Event()
        """There is nothing to listen for any more."""

    async def open(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Open it with all ranks; `begin` makes the first calls."""
        if self._opened:
            raise RuntimeError("a parameter server cannot be opened twice: make another")
        self._opened = True
        self.coll = await self.parent.dup()
        await self._agree()
        self._open()
        try:
            await begin()
            await self.coll.barrier()  # nobody changes what another is still to begin with
        except BaseException as error:
            self._abort_on_all_ranks(error)
            raise

    async def _agree(self) -> None:
        """Raise MismatchError unless all ranks opened it with the same settings."""
        mine = self.settings.described()
        described = Json()  # objects would be unpickled
        others = [described.decode(code) for code in await self.coll.allgather(described.encode(mine))]
        for rank, other in enumerate(others):
            different = [what for what in mine if other[what] != others[0][what]]
            if different:
                what = different[0]
                raise MismatchError(
                    f"parameter servers disagree on {what}: rank 0: {others[0][what]}; rank {rank}: {other[what]}"
                )

    def _open(self) -> None:
        progress = self.progress = Progress.current()
        dispatcher = self.coll.parts.dispatcher
        near = self.coll.parts.registry.near
        self.account = Account(progress.loop)
        self._loop = progress.loop

        def buffer(nbytes: int) -> Tensor:
            with torch.inference_mode(False):
                return self.coll.empty(nbytes, torch.uint8)

        self.context = Context(
            name=self.coll.name,
            rank=self.coll.rank,
            servers=self.settings.servers,
            workers=self.settings.workers,
            world_ranks=dispatcher.ranks,
            rules=tuple(self.settings.rules.values()),
            policy=self.settings.consistency,
            codec=self.settings.codec,
            pull_codec=self.settings.pull_codec,
            progress=progress,
            service=Service(progress, f"aiodist-ps-{self.coll.name}", lambda: self.context.coalescer.flush()),
            pool=Pool(buffer),
            near=near,
        )
        self.context.coalescer = Coalescer(self.coll.parts.transport, self._heard, self._failed, self.context.ring)
        self.server = Server(self.context)
        self.client = Client(self.context, self.server.own, self.server.shown)
        dispatcher.on_lost.append(self._lost)
        dispatcher.on_abort.append(self._aborted)
        dispatcher.waits_unseen(lambda: True)
        self.coll.admit(self)
        self._refusal = None
        with transport_lock:
            self.context.coalescer.open()
        if dispatcher.refusal is not None:  # lost in the meantime
            self._aborted(CommunicatorAborted(str(dispatcher.refusal)))

    async def exit(self, error: BaseException | None) -> None:
        """Leave it with all ranks, or give it up when `error` ended the block."""
        if error is not None:
            self._abort_on_all_ranks(error)
            return
        try:
            await self._leave()
        except BaseException as raised:
            self._abort_on_all_ranks(raised)
            raise
        await self.coll.aclose()

    async def _leave(self) -> None:
        """End in order: nothing of mine is open, all servers know that I have left, and all ranks have."""
        if self._refusal is not None:
            raise self._refusal
        await self.run("leave", self._parting(), _NO_LIMIT)
        await self._drain()
        await self.run("leave", self._leaving(), _NO_LIMIT)
        while self.client.busy:  # noqa: ASYNC110  - what ends it may be heard in any thread
            await asyncio.sleep(_DRAIN_SECONDS)
        await self.run("leave", self._goodbye(), _NO_LIMIT)
        await self._ended()
        self._close(CommunicatorClosed(f"parameter server {self.coll.name!r} is closed", comm=self.coll.name))
        self.account.judge()

    async def _drain(self) -> None:
        """Wait until no push and no call of this rank's is open; a read may wait for those that leave with us."""
        synced = self.handle("sync", 0, _NO_LIMIT)
        self.client.pushes.sync(synced, None)  # leaving covers nothing
        await synced
        while self.client.programs:  # noqa: ASYNC110  - the same
            await asyncio.sleep(_DRAIN_SECONDS)

    def _parting(self) -> Program[None]:
        """Say that nothing comes from this rank but what it has begun: nobody waits for more, as at a barrier."""
        yield [self.client.tell(rank, "part") for rank in self.settings.servers]

    def _leaving(self) -> Program[None]:
        """Leave every server that is there."""
        for rank in self.context.living():
            yield from self._asked(rank, "leave")

    def _goodbye(self) -> Program[None]:
        """Wait at the first server, or at the next where it dies, for all ranks."""
        while (living := self.context.living()) and not (yield from self._asked(living[0], "bye")):
            pass
        if not living:
            return
        others = [rank for rank in range(self.coll.size) if rank != living[0] and rank not in self.context.gone]
        if others and self.coll.rank == others[0]:
            self.context.coalescer.say_last(living[0])

    def _asked(self, rank: int, op: str) -> Program[bool]:
        """Ask server `rank`; False when it is gone."""
        try:
            yield from self.client.call(rank, op)
        except PeerLost:
            return False
        return True

    async def _ended(self) -> None:
        """Wait until nothing is listened for any more; where a rank died the transport is given up anyway."""
        if self.context.gone:
            return
        with transport_lock:
            self.context.coalescer.when_last(partial(self.progress.post, self._over.set))
        await self._over.wait()
        if self._refusal is not None:
            raise self._refusal

    def _close(self, refusal: AiodistError) -> None:
        self._refusal = self._refusal or refusal
        self._over.set()
        with transport_lock:
            self.context.coalescer.abort()
            self.context.service.close()
        dispatcher = self.coll.parts.dispatcher
        for told, mine in ((dispatcher.on_lost, self._lost), (dispatcher.on_abort, self._aborted)):
            if mine in told:
                told.remove(mine)  # type: ignore[arg-type]

    def _abort_on_all_ranks(self, error: BaseException) -> None:
        """End at once, and have the other ranks do so too."""
        if self._refusal is not None and isinstance(self._refusal, CommunicatorClosed):
            return
        self._abort(CommunicatorAborted(f"the parameter server was given up: {error!r}", rank=self.coll.rank))
        if self.coll.parts.dispatcher.refusal is None:
            self.coll.abort(f"its parameter server was given up on rank {self.coll.rank}: {error!r}")

    def _abort(self, error: AiodistError) -> None:
        if self._refusal is not None:
            return
        self._close(error)
        with transport_lock:
            self.client.abort(error)
        with suppress(Warning):  # one that is an error must not take the place of what happened
            self.account.judge()

    async def close(self) -> None:
        """End with the communicator; see `Guest`."""
        self.abort()

    def abort(self) -> None:
        """End without waiting for anything; see `Guest`."""
        name = self.coll.name
        self._abort(CommunicatorAborted(f"parameter server {name!r} was given up: its communicator ended", comm=name))

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
        text = f"parameter server {self.coll.name!r} can hear nothing more: {error}"
        self.progress.post(partial(self._abort, CommunicatorAborted(text)))

    def _heard(self, src: int, kind: int, body: memoryview) -> None:
        self.progress.liven()
        try:
            if kind in _SERVER_KINDS:
                self.server.heard(src, kind, body)
            else:
                self.client.heard(src, kind, body)
        except Exception as error:  # noqa: BLE001  - it must not end the progress of everything else
            message = f"parameter server {self.coll.name!r}: what rank {src} sent failed here"
            self.progress.report(message, error)
            self.progress.post(partial(self._abort_on_all_ranks, error))

    # --- handles ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless calls can be made, from here."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if _get_running_loop() is not self._loop:
            raise RuntimeError(
                f"parameter server {self.coll.name!r} belongs to another thread or event loop: call it on the loop it "
                "was opened on"
            )

    def handle(self, op: str, nbytes: int, timeout: float | None, depth: int = 3) -> Handle[Any]:
        """Return the handle of a call that the caller of our caller makes, or one that is so many frames up."""
        if timeout is not None:
            check_timeout(timeout)
        handle: Handle[Any] = Handle(self.progress, op, self._seq, nbytes, whence(depth), self.account)
        self._seq += 1
        seconds = self.timeout if timeout is None else timeout
        if seconds is not None and seconds < inf:
            handle.set_deadline(seconds, self.client.late)
        return handle

    def run(self, op: str, program: Program[Any], timeout: float | None) -> Handle[Any]:
        """Return the handle of a program."""
        handle = self.handle(op, 0, timeout)
        self.client.programs.add(handle)

        def finish(result: Any, error: BaseException | None) -> None:  # noqa: ANN401
            self.client.programs.discard(handle)
            if handle.done():
                return
            if error is None:
                handle.resolve(result)
            else:
                handle.reject(self.client.queue.located(error))

        self.client.queue.issue((partial(run, program, finish),))  # behind pushes that are being encoded
        return handle
