"""N ranks in one process, as tasks of one event loop, for tests, for learning, or for a single rank."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from ctypes import memmove
from dataclasses import dataclass

from torch import Tensor

from aiodist.backends.base import Capabilities, Done, Native, Transport, tell
from aiodist.backends.matching import Matching, TransportReceive, UnexpectedMessage
from aiodist.errors import BackendError
from aiodist.handles.polling import transport_lock

Address = tuple[str, int]  # communicator, rank


@dataclass(eq=False, slots=True)
class LocalMessage(UnexpectedMessage):
    """A message in flight to a rank of this process."""

    data: Tensor
    done: Done


class LocalHub:
    """Messages among the ranks of one process, matched and copied immediately, with the transport lock held."""

    def __init__(self) -> None:
        self.waiting: defaultdict[Address, Matching[TransportReceive, LocalMessage]] = defaultdict(Matching)
        """The messages and receives of each rank that have not met."""
        self._ready: deque[tuple[LocalMessage, TransportReceive]] = deque()
        self._draining = False

    def send(self, to: Address, message: LocalMessage) -> None:
        """Deliver `message` to the first matching receive, or keep the message."""
        receive = self.waiting[to].match(message.src, message.tag)
        if receive is not None:
            self.deliver(message, receive)
        else:
            self.waiting[to].keep(message)

    def post(self, at: Address, receive: TransportReceive) -> None:
        """Receive the first matching message, now or when one is sent."""
        message = self.waiting[at].post(receive)
        if message is not None:
            self.deliver(message, receive)

    def abort(self, at: Address) -> None:
        """End all operations of and with a rank that leaves. The buffers of these operations are free."""
        comm, rank = at
        error = gone(rank, comm)
        own = self.waiting.pop(at, None) or Matching()
        over: list[TransportReceive | LocalMessage] = [*own.cancel_receives(), *own.cancel_messages()]
        for (name, _), others in self.waiting.items():
            if name == comm:
                over += others.cancel_messages([message for message in others.messages if message.src == rank])
        tell((one.done, error) for one in over)

    def deliver(self, message: LocalMessage, receive: TransportReceive) -> None:
        """Copy the bytes of `message`, now or after those of earlier deliveries."""
        self._ready.append((message, receive))
        if self._draining:
            return
        # A queue, since each completion starts the next transfer: nested calls would become too deep.
        self._draining = True
        try:
            while self._ready:
                self._copy_next()
        finally:
            self._draining = False

    def _copy_next(self) -> None:
        """Copy the bytes of the next delivery."""
        message, receive = self._ready.popleft()
        nbytes, room = message.data.nbytes, receive.into.nbytes
        error: BaseException | None = None
        if nbytes > room:
            error = BackendError(f"a message of {nbytes} bytes met a receive of {room}")
        else:
            copy(receive.into, message.data)
        tell([(message.done, None), (receive.done, error)])


def copy(into: Tensor, t: Tensor) -> None:
    """Copy the bytes of `t` to the front of `into`."""
    memmove(into.data_ptr(), t.data_ptr(), t.nbytes)


def gone(rank: int, comm: str) -> BackendError:
    """Return the error of operations of and with a rank that has left."""
    return BackendError(f"rank {rank} of {comm!r} has left")


class LocalTransport:
    """One rank's end of a `LocalHub`."""

    def __init__(self, hub: LocalHub, rank: int, size: int, comm: str = "world", *, name: str = "local") -> None:
        self._hub = hub
        self.name = name
        self.rank = rank
        self.size = size
        self.native: Native | None = None
        self._comm = comm
        self._closed = False

    def capabilities(self) -> Capabilities:
        return Capabilities(short_receives=True, kept_from=0)

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send `t`. Done when the receiver has copied the message."""
        if self._closed:  # the next step of an aborted operation
            done(gone(self.rank, self._comm))
        else:
            self._hub.send((self._comm, dst), LocalMessage(self.rank, tag, t, done))

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t` the first matching message, now or when one is sent."""
        if self._closed:
            done(gone(self.rank, self._comm))
            return
        self._hub.post((self._comm, self.rank), TransportReceive(src, tag, t, done))

    async def split(self, ranks: Sequence[int], name: str) -> Transport:
        path = f"{self._comm}/{name}"
        return LocalTransport(self._hub, list(ranks).index(self.rank), len(ranks), path, name=self.name)

    async def aclose(self, *, drained: bool) -> None:
        """End the operations of this rank."""
        with transport_lock:
            self._closed = True
            self._hub.abort((self._comm, self.rank))
