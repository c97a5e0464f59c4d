"""`listen` and `connect`: two jobs meet by a name or an address."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any, Final, Self

from aiodist.bridges.bridge import Bridge
from aiodist.bridges.job import JobRanks
from aiodist.bridges.place import MeetingPlace
from aiodist.bridges.union import Meeting, Union
from aiodist.bridges.versions import Versions
from aiodist.communicator import Communicator, parts_of
from aiodist.control import HostedHub, host
from aiodist.control.link import Link, Listener, dial
from aiodist.control.notice import Notice
from aiodist.control.places import is_loopback, outward_host, tcp_address
from aiodist.control.places import listen as listen_at
from aiodist.control.thread import LoopThread
from aiodist.errors import AiodistError, CommunicatorClosed, ConfigError, OperationTimeout
from aiodist.handles.calls import located
from aiodist.handshake import Hello, Refused
from aiodist.types import check_timeout
from aiodist.world.runtime import current_world

_MEETING_SECONDS: Final = 30.0
"""Longest wait of a listening job for all ranks of a job that has come."""
_HUB_LINGER_SECONDS: Final = 2.0
"""Longest wait of a closed bridge's hub for ranks that have not left, such as those of a stopped job."""
_PAUSE: Final = 0.05


def _world(coll: Communicator | None) -> Communicator:
    """Return `coll`, or the open world of this task."""
    coll = current_world() if coll is None else coll
    if coll is None:
        raise ConfigError(
            "no world is open in this task: expected aiodist.init() before, or the communicator as `coll`"
        )
    life = parts_of(coll).registry.elastic
    return coll if life is None else life.current


class Door:
    """The listening end of bridges, as `async with aiodist.listen(…) as door` gives it."""

    def __init__(self, place: MeetingPlace, coll: Communicator) -> None:
        self.name = place.name
        """Name or address at which the door listens."""
        self._place = place
        self._versions = Versions(coll)
        self._job = JobRanks(coll)
        self._entrance: _Entrance | None = None
        self._opening: dict[int, asyncio.Task[Bridge | None]] = {}
        """Bridges, by number, that rank 0 has not opened yet."""
        self._tasks: set[asyncio.Task[Bridge | None]] = set()
        self._bridges: list[Bridge] = []
        self._accepted: asyncio.Queue[asyncio.Task[Bridge | None] | None] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[Bridge | None] | None = None
        self._failure: AiodistError = CommunicatorClosed(f"door {place.name!r} is closed")
        self._task: asyncio.Task[None]
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, place: MeetingPlace, coll: Communicator) -> Self:
        """Return an open door, on all ranks. Raises the error of rank 0 on all of them."""
        door = cls(place, coll)
        try:
            if coll.rank == 0:
                door._entrance = await _Entrance.open(place, door._job)
            match await door._job.heard():
                case ["refused", str(why)]:
                    raise ConfigError(why)
        except BaseException as error:
            if coll.rank == 0 and door._entrance is None:
                door._job.tell("refused", str(error) or f"rank 0 did not listen: {error!r}")
            await door._release()
            raise
        door._task = asyncio.create_task(door._serve(), name=f"door {place.name}")
        return door

    @located
    async def accept(self) -> Bridge:
        """Return the bridge to the next job that connects.

        Every rank calls it, and gets the bridge to the same job.

        Returns:
            The bridge, which is closed with the door at the latest. If the other job is lost while it connects, the
            first call of the bridge raises the loss.

        Raises:
            CommunicatorClosed: if the door is closed.
            PeerLost: if a rank of this job is lost.

        Example:
            ```python
            bridge = await door.accept()
            print(bridge.size)
            ```

        Cost: none; jobs are let in while no rank accepts, too.
        """
        async with self._turn:
            while self._closing is None:
                if self._next is None:  # else a cancelled call has left it
                    self._next = await self._accepted.get()
                if self._next is None:
                    self._accepted.put_nowait(None)
                    break
                await asyncio.wait([self._next])
                opened, self._next = self._next, None
                if not opened.cancelled() and (bridge := opened.result()) is not None:
                    return bridge
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[Bridge]:
        """Iterate over bridges as `accept` returns them, until the door is closed."""
        with suppress(CommunicatorClosed):
            while True:
                yield await self.accept()

    @located
    async def publish(self, state: Any, *, version: int | None = None) -> int:  # noqa: ANN401
        """Publish a state to every job at this door, also to jobs that connect later.

        As `Bridge.publish`, but it needs no bridge, and the loss of another job does not raise.
        """
        if self._closing is not None:
            raise self._failure
        return await self._versions.publish(state, version)

    @located
    async def aclose(self) -> None:
        """Close the door and its bridges. Every rank does so; a second call is a no-op."""
        await self._close(None)

    async def _close(self, error: BaseException | None) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._end(error), name=f"the close of door {self.name}")
        await asyncio.shield(self._closing)

    async def _end(self, error: BaseException | None) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        tasks = set(self._tasks)
        for opening in tasks:
            opening.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._accepted.put_nowait(None)
        try:
            ends = [bridge.aclose() if error is None else bridge.fail(error) for bridge in self._bridges]
            await asyncio.gather(*ends)
        finally:
            await self._release()

    async def _release(self) -> None:
        if self._entrance is not None:
            await self._entrance.close()
        await self._versions.close()
        self._job.close()

    async def _serve(self) -> None:
        """Carry out the decisions of rank 0."""
        try:
            while True:
                match await self._job.heard():
                    case ["meet", int(number), str(address), str(token), int(size)]:
                        opening = self._open(number, address, token, size)
                        self._opening[number] = task = asyncio.create_task(opening, name=f"bridge {self.name}")
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                    case ["opened", int(number)]:
                        self._accepted.put_nowait(self._opening.pop(number))
                    case ["failed", int(number)]:
                        self._opening.pop(number).cancel()
        except AiodistError as error:
            self._failure = error
            self._accepted.put_nowait(None)

    async def _open(self, number: int, address: str, token: str, size: int) -> Bridge | None:
        """Open a bridge; return None if the other job does not come in time or is lost."""
        hub = None if self._entrance is None else self._entrance.hubs.pop(number)
        listening = self._job.size
        meeting = Meeting(self.name, address, token, self._job.rank, listening, listening + size, _MEETING_SECONDS, hub)
        try:
            bridge = Bridge(meeting, await Union.of(meeting), self._versions, number)
        except Exception as error:  # noqa: BLE001 - it ends this bridge, and no other one
            if self._job.rank == 0:
                logging.getLogger("aiodist").warning("a job did not reach bridge %r: %s", self.name, error)
                self._job.tell("failed", number)
            return None
        self._bridges = [*(one for one in self._bridges if not one.is_released), bridge]
        if self._job.rank == 0:
            self._job.tell("opened", number)
        return bridge


class _Entrance:
    """Rank 0's side of a door: accepts the first rank of each job that knows the token, and opens a hub for each."""

    def __init__(self, place: MeetingPlace, job: JobRanks, sock: socket.socket, token: str) -> None:
        self.hubs: dict[int, HostedHub] = {}
        """Hubs that no bridge has taken yet, by the number of the bridge."""
        self._place = place
        self._job = job
        self._token = token
        self._numbers = itertools.count()
        self._thread = LoopThread("aiodist-control")
        self._meetings: set[asyncio.Task[None]] = set()
        self._sock = sock
        self._listener: Listener | None = None

    @classmethod
    async def open(cls, place: MeetingPlace, job: JobRanks) -> Self:
        """Listen. Raises `ConfigError` if another door listens at the place."""
        with ExitStack() as stack:
            if place.folder is not None:
                stack.enter_context(place.locked())
            try:
                sock = await listen_at(place.host, place.port, backlog=128)
            except OSError as error:
                raise ConfigError(f"cannot listen at {place}: {error}") from error
            token = place.token or secrets.token_hex(16)
            entrance = cls(place, job, sock, token)
            entrance._thread.stack.push(stack.pop_all())
        try:
            await entrance._thread.run(entrance._listen())
        except BaseException:
            await entrance._thread.aclose()
            raise
        return entrance

    async def _listen(self) -> None:
        self._listener = Listener(self._sock, self._token, self._admit)
        self._thread.stack.callback(self._listener.close)
        if self._place.folder is not None:
            notice = Notice.of(self._sock.getsockname()[1], self._token)
            try:
                notice.write(self._place.file)
            except OSError as error:
                raise ConfigError(f"cannot write {self._place}: {error.strerror}") from error
            self._thread.stack.callback(notice.remove, self._place.file)
        self._job.tell("listening")

    def _admit(self, link: Link, hello: Hello, welcome: Callable[[dict[str, Any]], bytes]) -> None:
        link.on_frame = lambda _: None
        link.on_closed = lambda _: None
        meeting = self._thread.loop.create_task(self._meet(link, hello.size, welcome))
        self._meetings.add(meeting)
        meeting.add_done_callback(self._meetings.discard)

    async def _meet(self, link: Link, size: int, welcome: Callable[[dict[str, Any]], bytes]) -> None:
        """Open a hub for a job of `size` ranks, and let both jobs know."""
        nonce = secrets.token_hex(16)
        token = f"{self._token}\n{nonce}"
        listening = self._job.size
        at = "127.0.0.1" if is_loopback(self._place.host) else ""
        hub = await host(listening + size, host=at, token=token, linger=_HUB_LINGER_SECONDS)
        number = next(self._numbers)
        self.hubs[number] = hub
        near = "127.0.0.1" if self._job.one_host else outward_host()
        self._job.tell("meet", number, tcp_address(near, hub.hub.port), token, size)
        link.write(welcome({"port": hub.hub.port, "nonce": nonce, "listening": listening}))

    async def close(self) -> None:
        """Stop listening."""
        await self._thread.aclose()
        for hub in self.hubs.values():
            await hub.aclose()


@asynccontextmanager
async def listen(
    name: str,
    coll: Communicator | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    token: str | None = None,
) -> AsyncIterator[Door]:
    """Listen for other jobs, as a block: `async with aiodist.listen("weights") as door:`.

    Every rank of this job enters it. Another job enters `aiodist.connect` with the same name; each may end, and come
    back. At the end of the block all bridges are closed; if the block raises, the other jobs' calls raise
    `RemoteError`.

    Args:
        name: a name, under which a file in `folder` has the address and a secret; or host:port, to listen there.
        coll: the communicator of this job's ranks. None is the world that this task has opened.
        folder: a folder that both jobs see. None is a folder of this user on this host.
        token: for host:port, a secret text that both jobs give.

    Yields:
        The `Door`.

    Raises:
        ConfigError: for a wrong argument, if another door has the name or the port, or if no world is open.
        PeerLost: if a rank of this job is lost.

    Example:
        ```python
        async with aiodist.listen("weights") as door:
            for step in range(100):
                ...
                await door.publish(net.module.state_dict(), version=step + 1)
        ```

    Cost: a thread and a socket on rank 0, and for each bridge a thread on each rank.
    """
    door = await Door.open(MeetingPlace.of(name, folder, token), _world(coll))
    try:
        yield door
    except (asyncio.CancelledError, GeneratorExit):
        await door.aclose()
        raise
    except BaseException as error:
        await door._close(error)
        raise
    await door.aclose()


@asynccontextmanager
async def connect(
    name: str,
    coll: Communicator | None = None,
    *,
    timeout: float | None = 30.0,
    folder: str | os.PathLike[str] | None = None,
    token: str | None = None,
) -> AsyncIterator[Bridge]:
    """Connect this job to one that listens, as a block: `async with aiodist.connect("weights") as bridge:`.

    Every rank of this job enters it. The other job may start later. At the end of the block the bridge is closed; if
    the block raises, the other job's calls raise `RemoteError`.

    Args:
        name: as in `listen`.
        coll: the communicator of this job's ranks. None is the world that this task has opened.
        timeout: longest wait for all ranks of both jobs, in seconds; None is none.
        folder: a folder that both jobs see. None is a folder of this user on this host.
        token: for host:port, a secret text that both jobs give.

    Yields:
        The `Bridge`.

    Raises:
        ConfigError: for a wrong argument, another token, or if no world is open.
        OperationTimeout: after `timeout`. The message has the place and the missing ranks.
        PeerLost: if a rank of either job is lost meanwhile.

    Example:
        ```python
        async with aiodist.connect("weights", timeout=30) as bridge:
            async for version, state in bridge.subscribe():
                model.load_state_dict(state)
        ```

    Cost: about 0.1 s, and a thread on each rank.
    """
    check_timeout(timeout)
    place, coll = MeetingPlace.of(name, folder, token), _world(coll)
    job, versions = JobRanks(coll), Versions(coll)
    try:
        meeting = await _find(place, job, timeout)
        bridge = Bridge(meeting, await Union.of(meeting), versions, 0)
        try:
            yield bridge
        except (asyncio.CancelledError, GeneratorExit):
            await bridge.aclose()
            raise
        except BaseException as error:
            await bridge.fail(error)
            raise
        await bridge.aclose()
    finally:
        await versions.close()
        job.close()


async def _find(place: MeetingPlace, job: JobRanks, timeout: float | None) -> Meeting:
    """Return the meeting with the job that listens, on all ranks. Raises the error of rank 0 on all of them."""
    until = None if timeout is None else asyncio.get_running_loop().time() + timeout
    if job.rank == 0:
        try:
            async with asyncio.timeout_at(until):
                await _ask(place, job, last := ["no process was asked"])
        except TimeoutError:
            found = f"no listener let this job in at {place} within {timeout:g} s: {last[0]}"
            job.tell(
                "late", f"connect({place.name!r}): {found}; expected aiodist.listen({place.name!r}) in another job"
            )
        except BaseException as error:
            job.tell("refused", str(error) or f"rank 0 did not connect: {error!r}")
            raise
    try:
        # A little longer than rank 0, whose error names the cause.
        async with asyncio.timeout_at(None if until is None else until + 1):
            decision = await job.heard()
    except TimeoutError:
        message = f"connect({place.name!r}): rank 0 of this job did not connect within {timeout:g} s"
        raise OperationTimeout(message, late={0: "it has not called connect"}, op="connect") from None
    match decision:
        case ["meet", str(address), str(token), int(listening)]:
            left = 1e9 if until is None else max(0.1, until - asyncio.get_running_loop().time())
            return Meeting(place.name, address, token, listening + job.rank, listening, listening + job.size, left)
        case ["late", str(why)]:
            raise OperationTimeout(why, op="connect")
        case _:
            raise ConfigError(str(decision[1]))


async def _ask(place: MeetingPlace, job: JobRanks, last: list[str]) -> None:
    """Ask until a listener lets this job in; `last` gets the reason of each failure (rank 0)."""
    while True:
        try:
            notice = Notice.read(place.file) if place.folder is not None else None
            hosts = (place.host,) if notice is None else notice.likely_hosts
            port, token = (place.port, place.token) if notice is None else (notice.port, notice.nonce)
        except (OSError, ValueError) as error:
            last[0], hosts, port, token = str(error), (), 0, ""
        for each in hosts:
            settings: dict[str, Any] = {}

            def welcomed(link: Link, said: dict[str, Any], settings: dict[str, Any] = settings) -> None:
                settings.update(said)
                link.close("the listener was found")

            try:
                await dial(each, port, Hello(0, job.size, token), welcomed)
            except Refused as refusal:
                last[0] = f"{tcp_address(each, port)}: {refusal}"
                if place.folder is None:
                    raise ConfigError(f"{place}: {refusal}") from None
            except (OSError, TimeoutError) as error:
                why = "no process listens there" if isinstance(error, ConnectionRefusedError) else str(error)
                last[0] = f"{tcp_address(each, port)}: {why or 'no answer'}"
            else:
                # The loopback address of this host means another host to ranks elsewhere.
                near = outward_host() if is_loopback(each) and not job.one_host else each
                address = tcp_address(near, settings["port"])
                job.tell("meet", address, f"{token}\n{settings['nonce']}", settings["listening"])
                return
        await asyncio.sleep(_PAUSE)
