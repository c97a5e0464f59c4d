"""The rendezvous of the ranks of a job, and the hub on a thread of rank 0 if there is no launcher."""

from __future__ import annotations

import asyncio
import errno
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodist.control.client import SocketChannel
from aiodist.control.hub import Hub
from aiodist.control.link import dial
from aiodist.control.notice import Notice
from aiodist.control.places import FilePlace, Place, TcpPlace, is_loopback, parse, tcp_address
from aiodist.control.roster import HUB
from aiodist.control.texts import name_ranks
from aiodist.control.thread import LoopThread
from aiodist.errors import ConfigError, OperationTimeout, PeerLost
from aiodist.handshake import Hello, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiodist.control.channel import Channel

_THREAD_NAME = "aiodist-control"
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.5
_QUESTION_TIMEOUT = 1.0


@dataclass(frozen=True)
class HostedHub:
    """A hub that serves while its process computes. `connect(…, hub=…)` owns it, and closes it with the channel."""

    thread: LoopThread
    hub: Hub

    @property
    def address(self) -> str:
        """Address for the other ranks: `tcp://host:port`."""
        return self.hub.address

    async def aclose(self) -> None:
        """Close the hub after the other ranks have left (for `linger` seconds at most), and end the thread."""
        self.thread.owner.check()
        await self.thread.aclose()


async def host(
    size: int,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    linger: float = 5.0,
) -> HostedHub:
    """Return a hub for `size` ranks on a thread of this process, which is rank 0.

    It is for ranks that can exchange its address, over MPI for example. Raises `OSError` if it cannot listen at `host`
    and `port`. Cancelling leaves no thread and no socket.
    """
    thread = LoopThread(_THREAD_NAME)
    hub = Hub(size, host=host, port=port, token=token, linger=linger, host_rank=0)
    try:
        await thread.run(_open_hub(thread, hub))
    except BaseException:
        await thread.aclose()
        raise
    return HostedHub(thread, hub)


async def _open_hub(thread: LoopThread, hub: Hub) -> None:
    """Open the hub on its thread. It closes with the thread, after the other ranks have left."""
    await thread.stack.enter_async_context(hub)
    thread.stack.push_async_callback(hub.linger)


async def connect(
    address: str,
    *,
    rank: int,
    size: int,
    token: str = "",
    timeout: float | None = 60.0,
    environ: Mapping[str, str] | None = None,
    hub: HostedHub | None = None,
    there: bool = False,
) -> Channel:
    """Return the control channel of this rank after all `size` ranks have joined. Every rank calls it.

    `address` is one of

    - `tcp://host:port`, `tcp://[ipv6]:port`: a hub that runs there, or will soon;
    - `file:///path`: a file that all ranks see, in which rank 0 writes the address of its hub; it is removed at close;
    - `env://`: MASTER_ADDR and MASTER_PORT of `environ`, where rank 0 runs the hub; under torchrun at one of the eight
      ports above, under Slurm without these on the first node.

    `hub` is the result of `host`, on the rank that runs the hub only. It is closed with the channel, or if this call
    fails. True for `there` means that the hub runs: if no process listens, the call raises `PeerLost` without a wait.
    Cancelling leaves no thread, no socket and no file.

    Raises `ConfigError` for a wrong address, if this process has joined there already, and if the hub refuses this
    rank: a wrong token, another size, a rank that has joined already. Raises `PeerLost` if the hub or the job has
    ended, and `OperationTimeout` after `timeout` seconds, with the ranks that never joined in `late`.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size}: expected 0 <= rank < size")
    place = parse(address, environ)
    if SocketChannel.is_joined(place, rank):
        raise ConfigError(
            f"this process is rank {rank} of the job at {address} already, through an init() that is still open: leave "
            "that one first, or use its communicator, or `await coll.dup()` of it"
        )
    if hub is not None:
        hub.thread.owner.check()
    thread = LoopThread(_THREAD_NAME) if hub is None else hub.thread
    channel = SocketChannel(rank, size, thread, place)
    meeting = _Meeting(address, place, token, timeout, channel, thread, hub.hub if hub else None, there)
    try:
        await thread.run(meeting.join())
    except BaseException:
        await thread.aclose()
        raise
    return channel


_HubAddress = tuple[str, int, str]  # host, port and token


@dataclass
class _Meeting:
    """The rendezvous of one rank (listener thread)."""

    address: str
    place: Place
    token: str
    timeout: float | None
    channel: SocketChannel
    thread: LoopThread
    hub: Hub | None
    there: bool = False
    own_hub: _HubAddress | None = None
    last_seen: str = "nothing was tried"

    async def join(self) -> None:
        """Open the hub if this rank hosts it, join, and wait for the others."""
        try:
            async with asyncio.timeout(self.timeout):
                if self.hub is None and self.channel.rank == 0:
                    await self._host()
                await self._enter()
                await self.channel.ready
        except OperationTimeout:  # the rank with the hub had an earlier timeout, and named the missing ranks
            raise
        except TimeoutError:
            raise await self._too_late() from None

    async def _host(self) -> None:
        match self.place:
            case TcpPlace(hosted=True) as place:
                # A host name may mean a loopback address here and a real one elsewhere: listen at all of them.
                listen_at = place.host if is_loopback(place.host) else ""
                for port in place.ports:
                    try:
                        return await self._open(listen_at, port, self.token + place.secret)
                    except OSError as error:
                        if error.errno != errno.EADDRINUSE or port == place.ports[-1]:
                            why = f"rank 0 cannot listen at port {port}: {error}"
                            raise ConfigError(f"{self.address}: {why}") from error
            case FilePlace() as place:
                nonce = secrets.token_hex(16)
                await self._open("", 0, f"{self.token}\n{nonce}")
                assert self.hub is not None
                notice = Notice.of(self.hub.port, nonce)
                try:
                    notice.write(place.path)
                except OSError as error:
                    raise ConfigError(f"{self.address}: rank 0 cannot write {place.path}: {error.strerror}") from error
                self.thread.stack.callback(notice.remove, place.path)

    async def _open(self, host: str, port: int, token: str) -> None:
        hub = Hub(self.channel.size, host=host, port=port, token=token, host_rank=0)
        await _open_hub(self.thread, hub)
        self.hub = hub
        self.own_hub = host or "127.0.0.1", hub.port, token

    async def _enter(self) -> None:
        """Ask until a hub accepts this rank."""
        pause = _FIRST_PAUSE
        while True:
            for where in self._hub_addresses():
                if await self._ask(where):
                    return
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)

    async def _ask(self, where: _HubAddress) -> bool:
        host, port, token = where
        hello = Hello(self.channel.rank, self.channel.size, token)
        try:
            await dial(host, port, hello, self.channel.welcomed)
        except Refused as refusal:
            if not self._may_change(refusal.code):
                message = f"{self.address}: {refusal}"
                raise (PeerLost(message, lost=0) if refusal.code == "failed" else ConfigError(message)) from None
            self.last_seen = str(refusal)
        except OSError as error:
            why = "nobody listens there" if isinstance(error, ConnectionRefusedError) else str(error) or "no answer"
            self.last_seen = f"{tcp_address(host, port)}: {why}"
            if self.there:
                raise PeerLost(f"the hub is gone: {self.last_seen}", lost=HUB) from error
        else:
            return True
        return False

    def _may_change(self, code: str) -> bool:
        """Return True if a later hub there may accept this rank."""
        match self.place:
            case FilePlace():
                return code in ("left", "failed", "token")
            case TcpPlace(hosted=hosted, ports=ports):
                return code == "left" or (hosted and code == "failed") or (len(ports) > 1 and code == "token")

    def _hub_addresses(self) -> list[_HubAddress]:
        if self.own_hub:
            return [self.own_hub]
        match self.place:
            case TcpPlace(host=host, ports=ports, secret=secret):
                return [(host, port, self.token + secret) for port in ports]
            case FilePlace(path=path):
                try:
                    notice = Notice.read(path)
                except (OSError, ValueError) as error:
                    self.last_seen = str(error)
                    return []
                return [(host, notice.port, f"{self.token}\n{notice.nonce}") for host in notice.likely_hosts]

    async def _too_late(self) -> OperationTimeout:
        """Return the error that names the missing ranks, if they are known."""
        rank, size = self.channel.rank, self.channel.size
        late: dict[int, str] = {}
        if not self.channel.is_welcome:
            if isinstance(self.place, FilePlace) or self.place.hosted:
                late[0] = "it is to host the hub, and never came"
            message = f"no hub let this rank in at {self.address} within {self.timeout:g} s; last: {self.last_seen}"
            return OperationTimeout(message, late=late, rank=rank, op="connect")
        try:
            async with asyncio.timeout(_QUESTION_TIMEOUT):
                late = dict(await self.channel.request("missing"))
        except (TimeoutError, ConnectionError) as error:
            late[0] = f"the hub does not answer: {error}"
        gave_up = f"rank {rank} gave up after {self.timeout:g} s"
        if self.hub is not None:
            self.thread.stack.push_async_callback(self.hub.aclose, gave_up)
        else:
            self.channel.abort(gave_up)
        details = "; ".join(f"rank {late_rank}: {where}" for late_rank, where in sorted(late.items())[:8])
        message = f"{name_ranks(late)} of {size} had not joined {self.address} after {self.timeout:g} s ({details})"
        return OperationTimeout(message, late=late, rank=rank, op="connect")
