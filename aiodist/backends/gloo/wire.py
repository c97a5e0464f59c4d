"""Frames between the ranks of the world, for all communicators."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from aiodist.backends.gloo.frames import Frame
from aiodist.backends.gloo.library import CLOSE_SECONDS, ProcessGroup, cut
from aiodist.backends.gloo.native import GlooNative
from aiodist.backends.gloo.peer import Peer
from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.handles.progress import transport_lock

__all__ = ["Member", "Wire"]


class Member(Protocol):
    """A communicator, as frames see it; called with the transport lock held, with ranks of the world."""

    def came(self, src: int, frame: Frame) -> None:
        """Take a frame from `src`."""

    def lost(self, world_rank: int, error: BackendError) -> None:
        """Hear that `world_rank` cannot be reached."""


class Wire:
    """Frames between the ranks of the world, for all communicators; with the transport lock held."""

    def __init__(self, group: ProcessGroup, rank: int, size: int, progress: Progress) -> None:
        self.group = group
        self.progress = progress
        self.capacity = max(4096, (1 << 20) // size)
        """The longest data that travels in a frame, in bytes."""
        self._open: dict[int, Member] = {}
        self._closed: set[int] = set()
        self._early: dict[int, list[tuple[int, Frame]]] = {}
        """Frames for communicators that this rank has not made yet."""
        self._closing = False
        self.natives: set[GlooNative] = set()
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self.peers = {other: Peer(self, other) for other in range(size) if other != rank}

    def join(self, comm: int, member: Member) -> None:
        """Deliver the frames of `comm` to `member`."""
        self._open[comm] = member
        for src, frame in self._early.pop(comm, ()):
            member.came(src, frame)
        for peer in self.peers.values():
            if peer.error is not None:
                member.lost(peer.rank, peer.error)

    def leave(self, comm: int) -> None:
        """Throw the frames of `comm` away."""
        self._open.pop(comm, None)
        self._early.pop(comm, None)
        self._closed.add(comm)

    def tell(self, fn: Callable[[], None]) -> None:
        """Call `fn`, which may complete operations, from a thread of ours: it takes the lock."""
        with transport_lock:
            try:
                fn()
            except Exception as error:  # noqa: BLE001  - it must not end the thread
                self.progress.report("what a frame completed failed", error)
            self.progress.called()
            self.progress.attend()

    def came(self, src: int, frame: Frame) -> None:
        """Deliver `frame`."""
        member = self._open.get(frame.comm)
        if member is not None:
            member.came(src, frame)
        elif frame.comm not in self._closed:
            self._early.setdefault(frame.comm, []).append((src, frame.kept()))

    def lost(self, rank: int, error: BackendError) -> None:
        """Tell every communicator that `rank` cannot be reached."""
        if not self._closing:
            for member in list(self._open.values()):
                member.lost(rank, error)

    def abort(self, error: BackendError) -> None:
        """Nothing is sent or received any more."""
        self._closing = True
        for peer in self.peers.values():
            peer.error = peer.error or error
            peer.abort(error)

    def _at_exit(self) -> None:
        """Nobody closed it. A thread that comes back from gloo while the interpreter ends would end the process."""
        if os.getpid() == self._pid:
            self.close()

    def close(self) -> None:
        """End the threads and close the connections; without the lock, blocks for `CLOSE_SECONDS` at most."""
        atexit.unregister(self._at_exit)
        for native in list(self.natives):
            native.close()
        cut(self.group, self.peers)
        until = monotonic() + CLOSE_SECONDS
        if all([peer.join(until) for peer in self.peers.values()]):  # noqa: C419  - each is to be joined
            del self.group
