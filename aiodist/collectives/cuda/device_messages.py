"""Messages of CUDA tensors, staged through the host in pinned pieces.

A piece is copied to the host and sent while the one before it travels. The first pieces are copied on the operation's
stream, behind its earlier work. Once the host knows that work to be over, pieces go to the streams that are for copies
alone (see `aiodist.streams.staging`): on its own stream they would queue behind what later operations wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport, ignore
from aiodist.backends.inplace import bytes_of
from aiodist.errors import BackendError
from aiodist.streams import OnStream, Staging

_ON_THEIR_WAY = 3  # pieces of one message: one is copied while another travels


class StagedMessages:
    """See `DeviceMessages`; with the transport lock held.

    A contiguous tensor goes in pieces of `staging.piece_bytes`; `done` is called with the same stream the current one.

    The messages of one tag to a peer, or from it, go one after another: tensors of a list share a tag, and which piece
    of which is ready first, the devices that they lie on decide, and no two ranks alike.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._lines: dict[tuple[bool, Transport, int, int], deque[Callable[[], None]]] = {}

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        self._line_up((True, transport, dst, tag), t, done)

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        self._line_up((False, transport, src, tag), t, done)

    def _line_up(self, key: tuple[bool, Transport, int, int], t: Tensor, done: Done) -> None:
        stream = torch.cuda.current_stream(t.device)
        line = self._lines.setdefault(key, deque())

        def start() -> None:
            with OnStream(stream):
                self._begin(*key, t, over)

        def over(error: BaseException | None) -> None:
            line.popleft()
            if line:
                line[0]()
            else:
                del self._lines[key]
            done(error)

        line.append(start)
        if len(line) == 1:
            start()

    def _begin(self, sends: bool, transport: Transport, peer: int, tag: int, t: Tensor, done: Done) -> None:
        """Begin with a message, when it is first in its line."""
        (_Sending if sends else _Receiving)(self._staging, transport, t, peer, tag, done).advance()

    def fetch(self, t: Tensor, then: Callable[[Tensor | None, BaseException | None], None]) -> None:
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu")

        def finish(error: BaseException | None) -> None:
            then(host if error is None else None, error)

        self._staging.copy(host, t, torch.cuda.current_stream(t.device), ignore, finish)

    def put(self, host: Tensor, t: Tensor, done: Done) -> None:
        if t.numel():
            self._staging.copies([(t, host)], torch.cuda.current_stream(t.device), ignore, done)
        else:
            done(None)

    def cut(self, t: Tensor) -> list[Tensor]:
        return list(t.split(self._staging.piece_bytes)) or [t]


class DirectMessages(StagedMessages):
    """The same over a transport that takes memory of devices itself: in one piece, once the stream has come there."""

    def cut(self, t: Tensor) -> list[Tensor]:
        return [t]

    def _begin(self, sends: bool, transport: Transport, peer: int, tag: int, t: Tensor, done: Done) -> None:
        """Begin when nothing that is queued touches `t` any more: the transport knows nothing of streams."""
        begin = transport.isend if sends else transport.irecv
        stream = torch.cuda.current_stream(t.device)

        def over(error: BaseException | None) -> None:
            with OnStream(stream):  # lanes of an operation go on from here
                done(error)

        def settled(error: BaseException | None) -> None:
            if error is not None:
                over(error)
            else:
                with OnStream(stream):
                    begin(t, peer, tag, over)

        try:
            self._staging.events.watch(stream, settled)
        except RuntimeError as error:  # the device is lost
            done(BackendError(f"the CUDA device failed: {error}"))


class _Message:
    """A message on its way, in pieces, of which each holds a buffer of the host until it is over."""

    def __init__(self, staging: Staging, transport: Transport, t: Tensor, peer: int, tag: int, done: Done) -> None:
        self._staging = staging
        self._transport = transport
        self._flat = bytes_of(t)
        self._peer = peer
        self._tag = tag
        self._done = done
        self._current = torch.cuda.current_stream(t.device)
        size = staging.piece_bytes
        self._cuts = [(i, min(i + size, t.nbytes)) for i in range(0, t.nbytes, size)] or [(0, 0)]
        self._begun = 0
        self._out = 0
        self._error: BaseException | None = None
        self._behind = True
        """Other work of the device may not be over, behind which it comes."""

    def advance(self) -> None:
        """Begin with pieces, as many as may be on their way; end when all are over."""
        while self._error is None and self._begun < len(self._cuts) and self._out < _ON_THEIR_WAY:
            i, self._begun = self._begun, self._begun + 1
            self._out += 1
            first, last = self._cuts[i]
            self._send_on(i, self._flat[first:last], self._staging.buffer(last - first))
        if self._out == 0:
            self._end(self._error)

    def _send_on(self, i: int, piece: Tensor, buffer: Tensor) -> None:
        """Begin with piece number `i`."""
        raise NotImplementedError

    def _over(self, buffer: Tensor, error: BaseException | None) -> None:
        self._error = self._error or error
        self._out -= 1
        self.advance()

    def _end(self, error: BaseException | None) -> None:
        done, self._done = self._done, ignore
        # Lanes of an operation go on from here, and queue their work on the current stream.
        with OnStream(self._current):
            done(error)


class _Sending(_Message):
    """To the host, and from there to the peer, in order."""

    def __init__(self, staging: Staging, transport: Transport, t: Tensor, peer: int, tag: int, done: Done) -> None:
        super().__init__(staging, transport, t, peer, tag, done)
        self._there: dict[int, Tensor] = {}
        self._sent = 0

    def _send_on(self, i: int, piece: Tensor, buffer: Tensor) -> None:
        stream = self._current if self._behind else self._staging.to_host(piece.device)
        self._staging.copies([(buffer, piece)], stream, ignore, partial(self._arrived, i, buffer))

    def _arrived(self, i: int, buffer: Tensor, error: BaseException | None) -> None:
        self._error = self._error or error
        self._behind = False
        self._there[i] = buffer
        if self._error is not None:
            for unsent in [self._there.pop(j) for j in list(self._there)]:
                self._over(unsent, None)
            return
        # One through pageable memory may be later than the next.
        while (ready := self._there.pop(self._sent, None)) is not None:
            self._sent += 1
            self._transport.isend(ready, self._peer, self._tag, partial(self._over, ready))


class _Receiving(_Message):
    """From the peer to the host, and from there to the device."""

    def __init__(self, staging: Staging, transport: Transport, t: Tensor, peer: int, tag: int, done: Done) -> None:
        super().__init__(staging, transport, t, peer, tag, done)
        self._queued = 0

    def _send_on(self, i: int, piece: Tensor, buffer: Tensor) -> None:
        self._transport.irecv(buffer, self._peer, self._tag, partial(self._arrived, piece, buffer))

    def _arrived(self, piece: Tensor, buffer: Tensor, error: BaseException | None) -> None:
        if error is not None or self._error is not None:
            self._over(buffer, error)
        else:
            stream = self._current if self._behind else self._staging.to_device(piece.device)
            self._staging.copies([(piece, buffer)], stream, self._reached, partial(self._copied, buffer))

    def _copied(self, buffer: Tensor, error: BaseException | None) -> None:
        self._behind = False
        self._over(buffer, error)

    def _reached(self, _: torch.cuda.Event) -> None:
        self._queued += 1
        if self._queued == len(self._cuts) and self._error is None:
            try:
                self._staging.order(self._current, self._staging.to_device(self._flat.device))
            except RuntimeError as error:  # the device is lost
                self._error = error
            else:
                self._end(None)
