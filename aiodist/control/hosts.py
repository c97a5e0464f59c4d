"""Which ranks are of one host: everything that asks for hosts has the answer from here.

A host is ranks of one kernel that can map one another's memory, and that was tried: each rank sends a segment of its
own, a memfd, over a socket to the first rank that takes it, and that rank maps it and reads what is in it. Names play
no part. A rank that no other rank can share memory with, for any reason, is a host of its own.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from aiodist.control.channel import exchange
from aiodist.machine import network

if TYPE_CHECKING:
    from aiodist.control.channel import Channel

_CREDENTIALS = struct.Struct("3i")
BACKLOG = 1024
"""Largest number of ranks that send their segments at the same time, if the kernel allows as many."""
_RETRY_SECONDS = 0.01


class _Contact(NamedTuple):
    """The introduction of a rank to all others."""

    network: str
    address: str
    """Address of the socket that receives segments, or ""."""
    proof: str
    """Content of the segment of this rank."""


async def find_hosts(channel: Channel, seconds: float = 60.0) -> tuple[int, ...]:
    """Return for each rank the first rank of its host, equal on all ranks. Every rank calls it, once for a channel.

    Cost: three rounds over the channel. Raises `OperationTimeout` if a rank does not come within `seconds`.
    """
    if channel.size == 1:
        return (0,)
    with _listening() as (address, links):
        mine = _Contact(network(), address, secrets.token_hex(16))
        told = await exchange(channel, "hosts/contact", mine, seconds)
        contacts = [_Contact(*contact) for contact in told]
        first = await _lend(contacts, channel.rank, seconds)
        firsts: list[int] = await exchange(channel, "hosts/first", first, seconds)
        mine_too = [rank for link in links() if (rank := _mapped(link, contacts)) is not None]
        mapped: list[list[int]] = await exchange(channel, "hosts/mapped", mine_too, seconds)
    hosts: list[int] = []
    for rank, first in enumerate(firsts):
        shared = first < rank and hosts[first] == first and rank in mapped[first]
        hosts.append(first if shared else rank)
    return tuple(hosts)


@contextmanager
def _listening() -> Iterator[tuple[str, Callable[[], list[socket.socket]]]]:
    """Listen for segments of other ranks. Give the address, or "" without a socket, and a function of the arrivals."""
    loop = asyncio.get_running_loop()
    links: list[socket.socket] = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.setblocking(False)

        def came() -> list[socket.socket]:
            with suppress(OSError):  # nobody else
                while True:
                    links.append(stack.enter_context(listener.accept()[0]))
            return links

        name = f"aiodist-{secrets.token_hex(8)}" if hasattr(os, "memfd_create") else ""
        try:
            listener.bind(f"\0{name}")
            listener.listen(BACKLOG)
        except OSError:
            name = ""
        if name:
            # The kernel keeps few that have not been accepted, on some systems 128.
            loop.add_reader(listener.fileno(), came)
            stack.callback(loop.remove_reader, listener.fileno())
        yield name, came


async def _lend(contacts: Sequence[_Contact], rank: int, seconds: float) -> int:
    """Send a segment of this rank, `rank`, to the first that takes it; return which does, `rank` where none."""
    mine = contacts[rank]
    for other, contact in enumerate(contacts[:rank]):
        if mine.address and contact.address and contact.network == mine.network:
            with suppress(OSError):  # it is of another host, or took too long
                async with asyncio.timeout(seconds):
                    await _send(mine.proof, rank, contact.address)
                return other
    return rank


async def _send(proof: str, rank: int, address: str) -> None:
    """Send a segment that holds `proof`; it arrives whether or not the other rank has accepted yet."""
    fd = os.memfd_create("aiodist-proof")
    try:
        os.write(fd, proof.encode())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.setblocking(False)
            while True:
                try:
                    link.connect(f"\0{address}")
                    break
                except BlockingIOError:  # too many ranks at once
                    await asyncio.sleep(_RETRY_SECONDS)
            socket.send_fds(link, [str(rank).encode()], [fd])
    finally:
        os.close(fd)


def _mapped(link: socket.socket, contacts: Sequence[_Contact]) -> int | None:
    """Map the segment from `link`. Return its rank, or None if the segment is not valid."""
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    fds: list[int] = []
    try:
        told, fds, _, _ = socket.recv_fds(link, 64, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        rank = int(told)
        with mmap.mmap(fds[0], 0, prot=mmap.PROT_READ) as segment:
            return rank if user == os.getuid() and segment[:].decode() == contacts[rank].proof else None
    except (OSError, ValueError, IndexError):
        return None
    finally:
        for fd in fds:
            os.close(fd)
