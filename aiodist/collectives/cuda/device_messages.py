"""Messages of CUDA tensors, staged through the host in pinned chunks.

Each chunk is copied to the host while the previous chunk is sent. The first chunks are copied on the operation's
stream, after its earlier work. When the host knows the end of this work, chunks use the streams for copies (see
`aiodist.streams.staging`). On the operation's stream, these chunks would wait for work that was queued later.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport, ignore
from aiodist.errors import BackendError
from aiodist.streams import OnStream, Staging
from aiodist.streams.memory import bytes_of

_Way = tuple[bool, Transport, int, int]  # True for a send, transport, the other rank, tag
_MOST_IN_FLIGHT = 3  # chunks of one message: one is copied while another is sent


class StagedMessages:
    """See `DeviceMessages` (transport lock held).

    Tensors are contiguous, and sent and received in chunks of `staging.piece_bytes`. `done` is called with the caller's
    stream as the current one.

    Messages with the same peer, direction and tag run one after another. The tensors of a list share a tag. Their
    chunks become ready in an order that depends on the devices, and so differs between the ranks.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._queues: dict[_Way, deque[tuple[torch.cuda.Stream, Tensor, Done]]] = {}

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        self._enqueue((True, transport, dst, tag), t, done)

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        self._enqueue((False, transport, src, tag), t, done)

    def _enqueue(self, way: _Way, t: Tensor, done: Done) -> None:
        queue = self._queues.setdefault(way, deque())
        queue.append((torch.cuda.current_stream(t.device), t, done))
        if len(queue) == 1:
            self._begin_first(way)

    def _begin_first(self, way: _Way) -> None:
        """Begin the first message of a queue."""
        stream, t, _ = self._queues[way][0]
        with OnStream(stream):
            self._begin(*way, t, partial(self._begin_next, way))

    def _begin_next(self, way: _Way, error: BaseException | None) -> None:
        """Remove the first message of a queue, which has ended, and begin the next message."""
        _, _, done = self._queues[way].popleft()
        if self._queues[way]:
            self._begin_first(way)
        else:
            del self._queues[way]
        done(error)

    def _begin(self, sends: bool, transport: Transport, peer: int, tag: int, t: Tensor, done: Done) -> None:
        (_Sending if sends else _Receiving)(self._staging, transport, t, peer, tag, done).advance()

    def fetch(self, host: Tensor, t: Tensor, done: Done) -> None:
        self._staging.copy(host, t, torch.cuda.current_stream(t.device), ignore, done)

    def put(self, host: Tensor, t: Tensor, done: Done) -> None:
        if t.numel():
            self._staging.copies([(t, host)], torch.cuda.current_stream(t.device), ignore, done)
        else:
            done(None)

    def cut(self, t: Tensor) -> list[Tensor]:
        return list(t.split(self._staging.piece_bytes)) or [t]


class DirectMessages(StagedMessages):
    """Messages over a transport that supports device memory, without staging."""

    def cut(self, t: Tensor) -> list[Tensor]:
        return [t]

    def _begin(self, sends: bool, transport: Transport, peer: int, tag: int, t: Tensor, done: Done) -> None:
        """Begin after all queued work on `t`, since the transport does not use streams."""
        begin = transport.isend if sends else transport.irecv
        stream = torch.cuda.current_stream(t.device)

        def finish(error: BaseException | None) -> None:
            with OnStream(stream):  # the program continues in this call
                done(error)

        def transfer(error: BaseException | None) -> None:
            if error is not None:
                finish(error)
            else:
                with OnStream(stream):
                    begin(t, peer, tag, finish)

        try:
            self._staging.events.watch(stream, transfer)
        except RuntimeError as error:  # the device is lost
            done(BackendError(f"the CUDA device failed: {error}"))


class _Message:
    """A message in flight, in chunks. Each chunk has a buffer of the host until its end."""

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
        self._device_busy = True
        """True if earlier work of the stream may not have finished."""

    def advance(self) -> None:
        """Begin as many chunks as may be in flight, or end the message if all have ended."""
        while self._error is None and self._begun < len(self._cuts) and self._out < _MOST_IN_FLIGHT:
            i, self._begun = self._begun, self._begun + 1
            self._out += 1
            first, last = self._cuts[i]
            self._begin_chunk(i, self._flat[first:last], self._staging.buffer(last - first))
        if self._out == 0:
            self._end(self._error)

    def _begin_chunk(self, i: int, chunk: Tensor, buffer: Tensor) -> None:
        """Begin chunk number `i`."""
        raise NotImplementedError

    def _chunk_done(self, buffer: Tensor, error: BaseException | None) -> None:
        self._error = self._error or error
        self._out -= 1
        self.advance()

    def _end(self, error: BaseException | None) -> None:
        done, self._done = self._done, ignore
        # The program continues in this call, with its work on the current stream.
        with OnStream(self._current):
            done(error)


class _Sending(_Message):
    """A message from the device over the host to the peer, in order."""

    def __init__(self, staging: Staging, transport: Transport, t: Tensor, peer: int, tag: int, done: Done) -> None:
        super().__init__(staging, transport, t, peer, tag, done)
        self._copied: dict[int, Tensor] = {}
        self._sent = 0

    def _begin_chunk(self, i: int, chunk: Tensor, buffer: Tensor) -> None:
        stream = self._current if self._device_busy else self._staging.to_host(chunk.device)
        self._staging.copies([(buffer, chunk)], stream, ignore, partial(self._arrived, i, buffer))

    def _arrived(self, i: int, buffer: Tensor, error: BaseException | None) -> None:
        self._error = self._error or error
        self._device_busy = False
        self._copied[i] = buffer
        if self._error is not None:
            for unsent in [self._copied.pop(j) for j in list(self._copied)]:
                self._chunk_done(unsent, None)
            return
        # A copy through pageable memory may end after the next one.
        while (ready := self._copied.pop(self._sent, None)) is not None:
            self._sent += 1
            self._transport.isend(ready, self._peer, self._tag, partial(self._chunk_done, ready))


class _Receiving(_Message):
    """A message from the peer over the host to the device."""

    def __init__(self, staging: Staging, transport: Transport, t: Tensor, peer: int, tag: int, done: Done) -> None:
        super().__init__(staging, transport, t, peer, tag, done)
        self._queued = 0

    def _begin_chunk(self, i: int, chunk: Tensor, buffer: Tensor) -> None:
        self._transport.irecv(buffer, self._peer, self._tag, partial(self._arrived, chunk, buffer))

    def _arrived(self, chunk: Tensor, buffer: Tensor, error: BaseException | None) -> None:
        if error is not None or self._error is not None:
            self._chunk_done(buffer, error)
        else:
            stream = self._current if self._device_busy else self._staging.to_device(chunk.device)
            self._staging.copies([(chunk, buffer)], stream, self._copy_queued, partial(self._copied, buffer))

    def _copied(self, buffer: Tensor, error: BaseException | None) -> None:
        self._device_busy = False
        self._chunk_done(buffer, error)

    def _copy_queued(self, _: torch.cuda.Event) -> None:
        self._queued += 1
        if self._queued == len(self._cuts) and self._error is None:
            try:
                self._staging.order(self._current, self._staging.to_device(self._flat.device))
            except RuntimeError as error:  # the device is lost
                self._error = error
            else:
                self._end(None)
