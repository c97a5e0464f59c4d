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

from aiodist.backends.base import Done, again, guarded, tell
from aiodist.backends.gloo.library import empty
from aiodist.backends.gloo.wire import GlooPeer
from aiodist.backends.inplace import bytes_of
from aiodist.backends.matching import Matching, Receive
from aiodist.errors import BackendError
from aiodist.types import ANY


class ArrivedMessage(NamedTuple):
    """A message that came before its receive, or that it was offered."""

    src: int
    tag: int
    nbytes: int
    data: Tensor
    offer: int
    """Its number where the data is still to be fetched, else 0."""


class Receiving:
    """Who waits for a message and what waits for a receive, in order; with the transport lock held."""

    def __init__(self, peers: Mapping[int, GlooPeer]) -> None:
        self._peers = peers
        self._matching: Matching[Receive, ArrivedMessage] = Matching()
        self._untold: BackendError | None = None
        """A loss that no receive from any source has been told of."""
        self._over: BackendError | None = None

    def receive(self, wanted: Receive) -> None:
        """Deliver the message for `wanted`, now or when it comes; fail it where none will, see [Note: lost peers]."""
        message = self._matching.take(wanted.src, wanted.tag)
        if message is not None:
            self._deliver(message, wanted)
            return
        peer = self._peers.get(wanted.src)
        error = self._over or (None if peer is None else peer.error)
        if wanted.src == ANY and error is None:
            error, self._untold = self._untold, None
        if error is None:
            self._matching.expect(wanted)
        else:
            wanted.done(again(error))

    def arrived(self, message: ArrivedMessage) -> None:
        """Deliver `message` to the first receive that waits for it, or keep it for one."""
        wanted = self._matching.match(message.src, message.tag)
        if wanted is not None:
            self._deliver(message, wanted)
        else:
            data = message.data if message.offer else message.data.clone()
            self._matching.keep(ArrivedMessage(message.src, message.tag, message.nbytes, data, message.offer))

    def lost(self, rank: int, error: BackendError) -> None:
        """Fail the receives that need `rank`, see [Note: lost peers]."""
        self._matching.cancel_messages(lambda message: message.src == rank and message.offer != 0)
        failed = self._matching.cancel_receives(lambda wanted: wanted.src in (rank, ANY))
        if all(wanted.src == rank for wanted in failed):
            self._untold = error
        tell((wanted.done, again(error)) for wanted in failed)

    def abort(self, error: BackendError) -> None:
        """Fail all receives, now and later."""
        self._over = error
        tell((wanted.done, again(error)) for wanted in self._matching.cancel_receives())

    def _deliver(self, message: ArrivedMessage, wanted: Receive) -> None:
        guarded(partial(self._take, message, wanted), wanted.done)

    def _take(self, message: ArrivedMessage, wanted: Receive, done: Done) -> None:
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
