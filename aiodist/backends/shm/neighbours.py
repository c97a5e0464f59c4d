"""Connections among the ranks of one host, and mappings of each other's memory.

A unix socket between each two ranks carries descriptors of segments and the places of named memory. A rank sends such a
message before it stores data that depends on the message. So a rank that finds an unknown place in shared memory reads
the socket, and then knows the place.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from aiodist import _core
from aiodist.backends.base import in_thread
from aiodist.backends.shm.memory import Arena, Place, check_segment, segment_fd
from aiodist.backends.shm.tables import HostTable, TableAddress, mapped
from aiodist.control import exchange
from aiodist.errors import BackendError
from aiodist.handles.polling import alarm

if TYPE_CHECKING:
    from aiodist.control import Channel

_MESSAGE_BYTES = 4096
_MEET_SECONDS = 30.0
_DOORBELL_AT, _ENGINE_DOORBELL_AT = 0, _core.DOORBELL_BYTES  # offsets in the first page of a rank's memory
_ENGINE_SPIN_SECONDS = 50e-6
_CREDENTIALS = struct.Struct("3i")


class Neighbour:
    """The connection to another rank of this host, with the mappings of its memory."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        link.setblocking(False)
        self.rank = rank  # in the world
        self.places: dict[str, Place] = {}  # places of named memory
        self.left: set[str] = set()  # names of memory that the neighbour no longer uses
        self._link = link
        self._unsent: deque[tuple[bytes, int | None, HostTable | None]] = deque()
        self._descriptors: dict[int, tuple[int, int]] = {}
        self._tables: dict[int, int] = {}  # descriptors of tables, by number
        self._segments: dict[int, Tensor] = {}
        self.core = _core.Memory()  # mapped segments, for the compiled core
        self._event = -1  # the eventfd of the rank's loop, which `core` owns
        self._doorbell: _core.Doorbell | None = None

    def send(self, message: dict[str, Any], fd: int | None = None, table: HostTable | None = None) -> None:
        """Send `message` as soon as the socket has room. A `table` keeps its descriptor open until then."""
        self._unsent.append((json.dumps(message).encode(), fd, table))
        self.flush()

    def offer(self, table: HostTable) -> None:
        """Send the descriptor of a table of this rank."""
        self.send({"table": table.address.number}, table.address.fd, table)

    def flush(self) -> bool:
        """Send waiting messages. Return True if none is left."""
        while self._unsent:
            data, fd, _ = self._unsent[0]
            try:
                socket.send_fds(self._link, [data], [] if fd is None else [fd])
            except BlockingIOError:
                return False
            except OSError:  # the rank has ended, which the control channel reports
                self._unsent.clear()
                break
            self._unsent.popleft()
        return True

    @property
    def is_cut(self) -> bool:
        """True if the other end of the socket is closed. The kernel closes that end when the process ends."""
        watch = select.poll()
        watch.register(self._link, 0)
        return bool(watch.poll(0))

    def listen(self) -> None:
        with suppress(OSError):  # no message, or the rank has ended
            while True:
                data, fds, _, _ = socket.recv_fds(self._link, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    return
                self._received(json.loads(data), fds)

    def _received(self, message: dict[str, Any], fds: list[int]) -> None:
        if "segment" in message:
            for fd in fds:  # empty if this process has too many open files: `mapped` raises then
                self._descriptors[message["segment"]] = (fd, message["nbytes"])
        elif "table" in message:
            for fd in fds:
                self._tables[message["table"]] = fd
        elif "event" in message:
            for fd in fds:
                self.core.set_event(fd)
                self._event = fd
        elif "left" in message:
            self.places.pop(message["left"], None)
            self.left.add(message["left"])
        elif "place" in message:
            self.places[message["place"]] = Place(*message["at"])

    def named_memory(self, name: str, nbytes: int) -> memoryview | None:
        """Return the neighbour's memory called `name`, or None before the arrival of the place."""
        if name not in self.places:
            self.listen()
        place = self.places.get(name)
        if place is None:
            return None
        return memory_of(self.memory(place, nbytes))

    def memory(self, place: Place, nbytes: int) -> Tensor:
        """Return the bytes at `place`, mapped on first use, or raise BackendError for a place outside the memory."""
        segment, end = self.mapped(place.segment), place.offset + nbytes
        if not 0 <= place.offset <= end <= segment.numel():
            seen = f"bytes {place.offset} to {end} of segment {place.segment}"
            raise BackendError(f"rank {self.rank} names {seen} of its memory: expected some of {segment.numel()}")
        return segment[place.offset : end]

    def mapped(self, number: int) -> Tensor:
        """Return a segment of the neighbour, mapped on first use, or raise BackendError without its descriptor."""
        if (segment := self._segments.get(number)) is not None:
            return segment
        if number not in self._descriptors:
            self.listen()
        if number not in self._descriptors:
            raise BackendError(f"rank {self.rank} names segment {number} of its memory, whose descriptor never came")
        fd, nbytes = self._descriptors.pop(number)
        try:
            check_segment(fd, nbytes)
            with torch.inference_mode(False):  # the caller may be in that mode
                segment = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            what = f"segment {number} of the memory of rank {self.rank} ({nbytes} bytes)"
            raise BackendError(f"{what} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._segments[number] = segment
        self.core.map(number, memory_of(segment))
        return segment

    def table(self, address: TableAddress) -> mmap.mmap:
        """Return the bytes of a table of the neighbour, or raise OSError or ValueError if the mapping fails."""
        self.listen()
        fd = self._tables.pop(address.number, None)
        if fd is None:
            raise ValueError("its descriptor never came")
        try:
            return mapped(fd, address.nbytes)
        finally:
            os.close(fd)

    @property
    def doorbell(self) -> _core.Doorbell:
        """The doorbell of the neighbour's progress thread."""
        if self._doorbell is None:
            self._doorbell = _core.Doorbell(memory_of(self.memory(Place(0, 0), mmap.PAGESIZE))[_DOORBELL_AT:])
        return self._doorbell

    @property
    def engine_doorbell(self) -> memoryview:
        """The doorbell of the neighbour's engine."""
        return memory_of(self.memory(Place(0, 0), mmap.PAGESIZE))[_ENGINE_DOORBELL_AT:]

    def ring(self) -> None:
        """Wake the neighbour's loop if the loop waits for messages, else its progress thread from a sleep."""
        self.doorbell.call(self._event)

    def close(self) -> None:
        self._link.close()
        for fd, _ in self._descriptors.values():
            os.close(fd)
        for fd in self._tables.values():
            os.close(fd)
        self._descriptors.clear()
        self._tables.clear()
        self._segments.clear()
        self._doorbell = None


class Neighbourhood:
    """The arena and the neighbours of this rank."""

    def __init__(self, rank: int, links: dict[int, socket.socket]) -> None:
        """`links` are the sockets to the other ranks."""
        self.rank = rank
        self.neighbours = {other: Neighbour(other, link) for other, link in links.items()}
        self.members = tuple(sorted([rank, *links]))
        self.arena = Arena()
        self.table_numbers = count()
        """Numbers for the tables of this rank."""
        self._leaving: dict[str, tuple[frozenset[int], object]] = {}
        self._control = self.arena.empty((mmap.PAGESIZE,), torch.uint8)
        self._control.zero_()
        self.doorbell = _core.Doorbell(memory_of(self._control)[_DOORBELL_AT:])
        self.engine = _core.Engine(memory_of(self._control)[_ENGINE_DOORBELL_AT:], _ENGINE_SPIN_SECONDS)
        """The thread that drives collectives while no Python thread does."""
        _alive.add(self)
        self.publish()
        alarm.sleep_at(self.doorbell)

    def publish(self) -> None:
        """Send the descriptors of new segments to the others."""
        known = self.arena.addresses
        while known.told < len(known):
            segment = self.arena.segments[known.told]
            known.told += 1
            for neighbour in self.neighbours.values():
                neighbour.send({"segment": segment.number, "nbytes": segment.mapped_bytes}, segment.fd)

    def wake_by(self, event: int) -> None:
        """Send the others an eventfd, by which each of them can wake this rank's loop."""
        for neighbour in self.neighbours.values():
            neighbour.send({"event": True}, event)

    def place(self, name: str, nbytes: int, others: Sequence[int]) -> Tensor:
        """Allocate `nbytes` of zeroed memory, and send name and place to `others`."""
        made = self.arena.empty((nbytes,), torch.uint8)
        made.zero_()
        where = self.locate(made)
        for rank in others:
            self.neighbours[rank].send({"place": name, "at": where})
        return made

    def leave(self, name: str, others: Sequence[int], memory: object) -> None:
        """Stop using the memory called `name`. Keep this rank's `memory` until `others` have stopped too."""
        for rank in others:
            self.neighbours[rank].send({"left": name})
        self._leaving[name] = (frozenset(others), memory)
        for neighbour in self.neighbours.values():
            neighbour.listen()
        unused = [
            left
            for left, (ranks, _) in self._leaving.items()
            if all(left in self.neighbours[rank].left for rank in ranks)
        ]
        for left in unused:
            del self._leaving[left]
            for neighbour in self.neighbours.values():
                neighbour.left.discard(left)

    def locate(self, t: Tensor) -> Place | None:
        """Return the place of `t`, published to the others, or None for private memory."""
        place = self.arena.locate(t.data_ptr(), t.nbytes)
        if place is not None and place.segment >= self.arena.addresses.told:
            self.publish()
        return place

    def close(self) -> None:
        """Unmap the others' memory. The arena lives as long as its tensors."""
        alarm.leave(self.doorbell)
        self.engine.stop()
        self.arena.close()
        for neighbour in self.neighbours.values():
            neighbour.close()


_alive: WeakSet[Neighbourhood] = WeakSet()


def _after_fork() -> None:
    for near in list(_alive):
        near.engine.forget()


os.register_at_fork(after_in_child=_after_fork)


def memory_of(t: Tensor) -> memoryview:
    """Return the bytes of a flat uint8 tensor."""
    return t.numpy().data


# --- meeting -------------------------------------------------------------------------------------------------


class Met(NamedTuple):
    """Result of `meet`."""

    near: Neighbourhood | None
    """The ranks that share memory with this one, or None if there are none."""
    reason: str = ""
    """Reason why no other rank shares memory with this one."""
    sharing: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that share memory, on all hosts."""


async def meet(channel: Channel, hosts: Sequence[int], *, allowed: bool = True, seconds: float = _MEET_SECONDS) -> Met:
    """Return this rank's neighbourhood, or the reason for its absence, with all groups of ranks that share memory.

    Every rank must make this call, with the result of `find_hosts` as `hosts`. If one rank of a host cannot share
    memory, no rank of this host does.
    """
    listener, reason = _listen() if allowed else (None, "it was turned off (AIODIST_SHM=0)")
    try:
        address = listener.getsockname()[1:].decode() if listener else ""
        contacts = await exchange(channel, "shm/contact", [address, reason], seconds)
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[channel.rank]]
        reasons = [f"rank {rank}: {contacts[rank][1]}" for rank in mine if not contacts[rank][0]]
        links: dict[int, socket.socket] = {}
        if listener is not None and not reasons and len(mine) > 1:
            try:
                links = await in_thread(_connect, listener, channel.rank, mine, contacts, seconds)
            except OSError as error:
                reasons = [f"rank {channel.rank}: {error}"]
    finally:
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends a thread that still waits for a lost rank
            listener.close()
    met = await exchange(channel, "shm/met", reasons, seconds)
    sharing = _sharing(hosts, met)
    if any(channel.rank in group for group in sharing):
        return Met(Neighbourhood(channel.rank, links), "", sharing)
    for link in links.values():
        link.close()
    reasons = list(dict.fromkeys(text for rank in mine for text in met[rank]))
    return Met(None, "; ".join(reasons) or "no other rank is on this host", sharing)


def _sharing(hosts: Sequence[int], met: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of two or more ranks that share memory. `met` lists for each rank why the rank cannot."""
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values() if len(ranks) > 1 and not any(met[rank] for rank in ranks))


def _listen() -> tuple[socket.socket | None, str]:
    """Return a listening socket for the ranks of this host, or None and the reason."""
    try:
        if not hasattr(os, "memfd_create"):
            return None, "this platform has no memfd_create"
        os.close(segment_fd("aiodist-probe", mmap.PAGESIZE))  # a container may forbid a memfd, or have no seals
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0aiodist-{secrets.token_hex(8)}")
        listener.listen(1024)
    except OSError as error:
        return None, str(error)
    return listener, ""


def _connect(
    listener: socket.socket, rank: int, mine: Sequence[int], contacts: Sequence[Any], seconds: float
) -> dict[int, socket.socket]:
    """Return a socket to each of the others. The higher rank of a pair connects to the lower."""
    links: dict[int, socket.socket] = {}
    try:
        for other in (r for r in mine if r < rank):
            link = links[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.settimeout(seconds)
            link.connect("\0" + contacts[other][0])
            link.send(str(rank).encode())
        listener.settimeout(seconds)
        while len(links) < len(mine) - 1:
            link, _ = listener.accept()
            link.settimeout(seconds)
            _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            other_rank = link.recv(_MESSAGE_BYTES).decode()
            if user != os.getuid() or not other_rank.isdecimal() or int(other_rank) not in mine:
                link.close()  # a process of another job or user
                continue
            links[int(other_rank)] = link
    except OSError:
        for link in links.values():
            link.close()
        raise
    return links
