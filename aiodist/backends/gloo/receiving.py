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

from aiodist.backends.base import Done
from aiodist.backends.gloo.disputes import Disputes
from aiodist.backends.gloo.library import again
from aiodist.backends.gloo.memory import as_bytes, empty
from aiodist.backends.gloo.peer import Peer
from aiodist.errors import BackendError
from aiodist.types import ANY

__all__ = ["Message", "Receiving", "Wanted"]


class Wanted(NamedTuple):
    """A receive that waits for its message."""

    src: int
    tag: int
    into: Tensor
    done: Done


class Message(NamedTuple):
    """A message that came before its receive, or that it was offered."""

    src: int
    tag: int
    nbytes: int
    data: Tensor
    offer: int
    """Its number where the data is still to be fetched, else 0."""


class Receiving:
    """Who waits for a message and what waits for a receive, in order; with the transport lock held."""

    def __init__(self, peers: Mapping[int, Peer], disputes: Disputes) -> None:
        self._peers = peers
        self._disputes = disputes
        self._wanted: list[Wanted] = []
        self._unexpected: list[Message] = []
        self._untold: BackendError | None = None
        """A loss that no receive from any source has been told of."""
        self._over: BackendError | None = None

    def take(self, wanted: Wanted) -> bool:
        """Deliver a message that came before `wanted`; return False where there is none."""
        for i, message in enumerate(self._unexpected):
            if _matches(wanted, message):
                del self._unexpected[i]
                self._deliver(message, wanted)
                return True
        return False

    def expect(self, wanted: Wanted) -> None:
        """Have `wanted` wait for its message; fail it where none will come, see [Note: lost peers]."""
        peer = self._peers.get(wanted.src)
        error = self._over or (None if peer is None else peer.error)
        if wanted.src == ANY and error is None:
            error, self._untold = self._untold, None
        if error is None:
            self._wanted.append(wanted)
        else:
            wanted.done(again(error))

    def arrived(self, message: Message) -> None:
        """Deliver `message` to the first receive that waits for it, or keep it for one."""
        for i, wanted in enumerate(self._wanted):
            if _matches(wanted, message):
                del self._wanted[i]
                self._deliver(message, wanted)
                return
        self._unexpected.append(message if message.offer else message._replace(data=message.data.clone()))

    def lost(self, rank: int, error: BackendError) -> None:
        """Fail the receives that need `rank`, see [Note: lost peers]."""
        self._unexpected = [message for message in self._unexpected if message.src != rank or not message.offer]
        failed = [wanted for wanted in self._wanted if wanted.src in (rank, ANY)]
        self._wanted = [wanted for wanted in self._wanted if wanted.src not in (rank, ANY)]
        if all(wanted.src == rank for wanted in failed):
            self._untold = error
        for wanted in failed:
            wanted.done(again(error))

    def give_up(self, error: BackendError) -> None:
        """Fail all receives, now and later."""
        self._over = error
        waiting, self._wanted = self._wanted, []
        for wanted in waiting:
            wanted.done(again(error))

    def _deliver(self, message: Message, wanted: Wanted) -> None:
        nbytes, done = message.nbytes, wanted.done
        fits = nbytes == wanted.into.nbytes
        if not fits:
            refusal = BackendError(f"a message of {nbytes} bytes met a receive of {wanted.into.nbytes}")
            done = partial(self._refuse, refusal, done)
        if not message.offer:
            if fits:
                memmove(wanted.into.data_ptr(), message.data.data_ptr(), nbytes)
            done(None)
            return
        # What does not fit is received all the same, so that its sender is rid of it.
        self._peers[message.src].fetch(message.offer, as_bytes(wanted.into) if fits else empty(nbytes), done)

    def _refuse(self, refusal: BackendError, done: Done, error: BaseException | None) -> None:
        if error is None:
            self._disputes.add(done, refusal)
        else:
            done(error)


def _matches(wanted: Wanted, message: Message) -> bool:
    return wanted.tag == message.tag and wanted.src in (ANY, message.src)
