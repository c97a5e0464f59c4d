"""The receives of one communicator, matched with the messages that come."""

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

    def take(self, wanted: Wanted) -> bool:
        """Deliver a message that came before `wanted`; return False where there is none."""
        for i, message in enumerate(self._unexpected):
            if _matches(wanted, message):
                del self._unexpected[i]
                self._deliver(message, wanted)
                return True
        return False

    def expect(self, wanted: Wanted) -> None:
        """Have `wanted` wait for its message."""
        self._wanted.append(wanted)

    def arrived(self, message: Message) -> None:
        """Deliver `message` to the first receive that waits for it, or keep it for one."""
        for i, wanted in enumerate(self._wanted):
            if _matches(wanted, message):
                del self._wanted[i]
                self._deliver(message, wanted)
                return
        self._unexpected.append(message if message.offer else message._replace(data=message.data.clone()))

    def lost(self, rank: int, error: BackendError) -> None:
        """Fail the receives that need `rank`."""
        waiting, self._wanted = self._wanted, []
        for wanted in waiting:
            if wanted.src in (rank, ANY):
                wanted.done(again(error))
            else:
                self._wanted.append(wanted)

    def give_up(self, error: BackendError) -> None:
        """Fail all receives."""
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
