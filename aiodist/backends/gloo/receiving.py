"""The receives of one communicator, matched with the messages that come.

[Note: lost peers] A rank that cannot be reached fails what waits for it, now and later. Receives from any source are
told of each loss once: those that wait, else the next one that nothing matches. Those after it wait for the others.
What came in full before the loss is still received; what the lost rank had only announced is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import memmove
from functools import partial
from typing import NamedTuple

from torch import Tensor

from aiodist.backends.base import Done, guarded, tell
from aiodist.backends.gloo.library import again
from aiodist.backends.gloo.memory import empty
from aiodist.backends.gloo.peer import Peer
from aiodist.backends.inplace import bytes_of
from aiodist.errors import BackendError
from aiodist.types import ANY

__all__ = ["ArrivedMessage", "PostedReceive", "Receiving"]


class PostedReceive(NamedTuple):
    """A receive that waits for its message."""

    src: int
    tag: int
    into: Tensor
    done: Done


class ArrivedMessage(NamedTuple):
    """A message that came before its receive, or that it was offered."""

    src: int
    tag: int
    nbytes: int
    data: Tensor
    offer: int
    """Its number where the data is still to be fetched, else 0."""

    def kept(self) -> ArrivedMessage:
        """Return the message with its data in memory of its own."""
        return ArrivedMessage(self.src, self.tag, self.nbytes, self.data.clone(), self.offer)


class Receiving:
    """Who waits for a message and what waits for a receive, in order; with the transport lock held."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self._peers = peers
        self._wanted: list[PostedReceive] = []
        self._unexpected: list[ArrivedMessage] = []
        self._untold: BackendError | None = None
        """A loss that no receive from any source has been told of."""
        self._over: BackendError | None = None

    def take(self, wanted: PostedReceive) -> bool:
        """Deliver a message that came before `wanted`; return False where there is none."""
        for i, message in enumerate(self._unexpected):
            if _matches(wanted, message):
                del self._unexpected[i]
                self._deliver(message, wanted)
                return True
        return False

    def expect(self, wanted: PostedReceive) -> None:
        """Have `wanted` wait for its message; fail it where none will come, see [Note: lost peers]."""
        peer = self._peers.get(wanted.src)
        error = self._over or (None if peer is None else peer.error)
        if wanted.src == ANY and error is None:
            error, self._untold = self._untold, None
        if error is None:
            self._wanted.append(wanted)
        else:
            wanted.done(again(error))

    def arrived(self, message: ArrivedMessage) -> None:
        """Deliver `message` to the first receive that waits for it, or keep it for one."""
        for i, wanted in enumerate(self._wanted):
            if _matches(wanted, message):
                del self._wanted[i]
                self._deliver(message, wanted)
                return
        self._unexpected.append(message if message.offer else message.kept())

    def lost(self, rank: int, error: BackendError) -> None:
        """Fail the receives that need `rank`, see [Note: lost peers]."""
        self._unexpected = [message for message in self._unexpected if message.src != rank or not message.offer]
        failed = [wanted for wanted in self._wanted if wanted.src in (rank, ANY)]
        self._wanted = [wanted for wanted in self._wanted if wanted.src not in (rank, ANY)]
        if all(wanted.src == rank for wanted in failed):
            self._untold = error
        tell((wanted.done, again(error)) for wanted in failed)

    def give_up(self, error: BackendError) -> None:
        """Fail all receives, now and later."""
        self._over = error
        waiting, self._wanted = self._wanted, []
        tell((wanted.done, again(error)) for wanted in waiting)

    def _deliver(self, message: ArrivedMessage, wanted: PostedReceive) -> None:
        guarded(partial(self._take, message, wanted), wanted.done)

    def _take(self, message: ArrivedMessage, wanted: PostedReceive, done: Done) -> None:
        nbytes = message.nbytes
        fits = nbytes == wanted.into.nbytes
        if not fits:
            refusal = BackendError(f"a message of {nbytes} bytes met a receive of {wanted.into.nbytes}")
            done = partial(_refuse, refusal, done)
        if not message.offer:
            if fits:
                memmove(wanted.into.data_ptr(), message.data.data_ptr(), nbytes)
            done(None)
            return
        # What does not fit is received all the same, so that its sender is rid of it.
        self._peers[message.src].fetch(message.offer, bytes_of(wanted.into) if fits else empty(nbytes), done)


def _refuse(refusal: BackendError, done: Done, error: BaseException | None) -> None:
    done(error or refusal)


def _matches(wanted: PostedReceive, message: ArrivedMessage) -> bool:
    return wanted.tag == message.tag and wanted.src in (ANY, message.src)
