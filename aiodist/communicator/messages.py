"""Calls between two ranks, which send and receive tensors, and iterate over messages of tensors and objects."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from aiodist.collectives.cuda.on_device import DeviceWork, attach, on_devices
from aiodist.collectives.messages import Arrived, MessageKind
from aiodist.collectives.metadata import overlaps
from aiodist.communicator.arguments import check_list, check_out, check_rank, check_tag, check_tensor, tensors_of
from aiodist.communicator.base import Base
from aiodist.communicator.claims import reading, writing
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.messenger import Receiving, Reception
from aiodist.communicator.operation import CommunicatorOperation, Peer
from aiodist.communicator.pickling import unpack
from aiodist.handles import Handle, Operation, gather, in_flight, internals
from aiodist.handles.kernel import Program, resume, together
from aiodist.streams.writes import check_writable
from aiodist.types import ANY, check_timeout

_SEND, _RECV, _SENDRECV, _MESSAGES = map(Fingerprint, ("send", "recv", "sendrecv", "messages"))


class Message(NamedTuple):
    """A message of `Communicator.messages`."""

    source: int
    """The sending rank."""
    tag: int
    data: Any
    """The received tensor, in new memory, or the object."""


class PointToPoint(Base):
    """`send`, `recv`, `sendrecv` and `messages`."""

    def send(
        self,
        t: Tensor | list[Tensor],
        dst: int,
        tag: int = 0,
        *,
        synchronous: bool = False,
        timeout: float | None = None,
    ) -> Handle[None]:
        """Send a tensor to one rank.

        The handle is done when `t` may be changed again, possibly before the message is received. The receiver calls
        `recv` or `messages`.

        Args:
            t: a tensor of any shape, which `recv()` restores, or a list, which is sent as one message for each tensor.
            dst: the rank that receives, possibly this one.
            tag: a number from 0 that the receiver can select by.
            synchronous: True waits until a receive has matched the message, by an answer of some 60 bytes.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.

        Returns:
            None.

        Raises:
            ValueError: if `dst` is no rank, or `tag` is out of range.
            PeerLost: on await, if `dst` is lost.

        Example:
            ```python
            sending = coll.send(torch.ones(3), (coll.rank + 1) % coll.size, tag=7)
            t = await coll.recv(torch.empty(3), (coll.rank - 1) % coll.size, tag=7)
            await sending
            ```

        Cost: one message up to about 800 bytes, two above.
        """
        dst, tag = check_rank(dst, self.size, "dst"), check_tag(tag)
        ts = tensors_of(t)
        return self._send(_SEND, ts, dst, tag, MessageKind.TENSOR, timeout, synchronous)

    def recv(
        self, t: Tensor | list[Tensor] | None = None, src: int = ANY, tag: int = ANY, *, timeout: float | None = None
    ) -> Handle[Any]:
        """Receive a tensor from one rank.

        Receives match messages in the order of their calls. `cancel()` of the handle withdraws a receive that has not
        matched, without loss of a message.

        Args:
            t: a tensor to fill, of any shape. A shorter message fills the front of `t`. None returns a new tensor of
                the sender's shape and dtype. A list receives one message for each tensor, and `cancel()` withdraws all
                or none.
            src: the rank that sent. `ANY` takes messages of all ranks.
            tag: the number that the sender gave. `ANY` takes all.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
                The operations continue after the timeout.

        Returns:
            `t`, or the new tensor. The handle's `source`, `tag` and `nbytes` are those of the message.

        Raises:
            ValueError: if `src` is no rank, or `tag` is out of range.
            RuntimeError: if `t` requires grad, in grad mode.
            TypeError: on await, if the message has another dtype. The message is consumed.
            BackendError: on await, if the message is longer than `t`. The message is consumed.
            PeerLost: on await, if `src` is lost.

        Example:
            ```python
            sending = coll.send(torch.arange(5), coll.rank)
            receiving = coll.recv()
            t = await receiving
            await sending
            print(receiving.source, t.shape)  # the rank, and torch.Size([5])
            ```

        Cost: that of `send`.
        """
        src, tag = check_rank(src, self.size, "src", any_rank=True), check_tag(tag, any_tag=True)
        if isinstance(t, list):
            return self._receive_list(check_list(t, None, "t"), src, tag, timeout)
        into = None if t is None else check_tensor(t)
        return self._receive(into, src, tag, timeout)[0]

    def _receive(self, into: Tensor | None, src: int, tag: int, timeout: float | None) -> tuple[Handle[Any], Receiving]:
        nbytes, claims = (0, []) if into is None else (into.nbytes, writing(into))
        later = self._work_later() if into is None else None
        work = None if into is not None and into.is_cpu else self._work_for
        asked = Reception(Peer(src, None, tag), MessageKind.TENSOR, into, claims, work, into, later, nbytes=nbytes)
        return self._messenger.receive(_RECV, asked, timeout)

    def _receive_list(self, ts: list[Tensor], src: int, tag: int, timeout: float | None) -> Handle[list[Tensor]]:
        """Issue all or none, and withdraw all or none."""
        self._dispatcher.check_on_loop("recv() of a list")
        check_timeout(timeout)
        claims = writing(*ts)
        for i, t in enumerate(ts):
            check_writable(t, "recv of a list", f"t[{i}]")
        in_flight.acquire_all(claims, "recv of a list")
        in_flight.release_all(claims)
        for t in ts:  # each raises its error now
            for work in self._work_for(t):
                work.cancel()
        issued = [self._receive(t, src, tag, timeout) for t in ts]
        together = gather(*[handle for handle, _ in issued])
        receives = [receiving for _, receiving in issued]
        Operation.of(together).set_canceller(lambda: self._messenger.cancel_all(receives, together))
        return together

    def _work_later(self) -> Callable[[], DeviceWork] | None:
        """Return a factory of the work of a message that may come from a device, or None if there are no devices."""
        accelerator = self._resources.accelerator
        if accelerator is None or not self._repertoire.on_cuda:
            return None
        return partial(accelerator.work, self.name, self.device)

    def _work_for(self, t: Tensor | None) -> list[DeviceWork]:
        """Return the work of a message on the device of `t`, or without `t` of one that may come from a device."""
        if t is None:
            return self._work_expected(None)
        return [] if t.is_cpu else self._work_on([t.device], None)

    def sendrecv(
        self,
        t: Tensor,
        dst: int,
        src: int,
        out: Tensor | None = None,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> Handle[Tensor]:
        """Send `t` to `dst` while receiving from `src`, and return the received tensor, in `out` or in new memory.

        Sizes and shapes are those of `send` and `recv`. Raises ValueError if `out` overlaps `t`. Cost: that of both.
        """
        dst, src, tag = check_rank(dst, self.size, "dst"), check_rank(src, self.size, "src"), check_tag(tag)
        t = check_tensor(t)
        into = None if out is None else check_out(out, t, numel=0)
        if into is not None and overlaps(into, t):
            raise ValueError("out overlaps the input: expected other memory, since both are in flight at once")
        claims = [] if into is None else writing(into)
        works = self._work_for(t)
        like, peer, sent = t if into is None and t.is_cuda else into, Peer(src, dst, tag), reading(t)
        asked = Reception(peer, MessageKind.TENSOR, into, claims, self._work_for, like, nbytes=t.nbytes, sent=sent)
        try:
            handle, receiving = self._messenger.receive(_SENDRECV, asked, timeout)
        except BaseException:
            for one in works:
                one.cancel()
            raise
        line = ("sendrecv", handle.seq, *internals.issued_at(handle))
        send = on_devices(self._messenger.mailbox.send(t, dst, tag, MessageKind.TENSOR, line), works, [t])
        assert receiving.sending is not None
        program = _sent_half(receiving, send)
        self._dispatcher.start(t.nbytes, self._dispatcher.settlement.begin, receiving.sending, program)
        attach(handle, [*works, *receiving.works])
        return handle

    def messages(
        self, src: int = ANY, tag: int = ANY, *, timeout: float | None = None
    ) -> AsyncGenerator[Message, None]:
        """Iterate over the messages from `src` with `tag`, as they come: `async for message in coll.messages(): ...`.

        The iterator yields tensors (of `send`) and objects (of `send_object`), each as a `Message` with source, tag and
        data. Each turn posts one receive, and receives match in the order of their calls. So a `recv()` issued before
        the turn gets the next message, and a `recv()` in the loop's body gets a message that comes meanwhile. Leaving
        or cancelling the loop loses no message. The loop ends only when left or cancelled, or by an error.

        Raises ValueError at the call if `src` is no rank or `tag` is out of range. The loop raises the errors of
        `recv`: OperationTimeout if no message comes for `timeout` seconds, PeerLost if `src` is lost. Unpickling an
        object runs code of the sender's choice. Cost: that of `recv`.
        """
        self._dispatcher.check_on_loop("messages()")
        src, tag = check_rank(src, self.size, "src", any_rank=True), check_tag(tag, any_tag=True)
        return self._messages(src, tag, timeout)

    async def _messages(self, src: int, tag: int, timeout: float | None) -> AsyncGenerator[Message, None]:
        while True:
            peer = Peer(src, None, tag)
            asked = Reception(peer, ANY, None, [], later=self._work_later())
            arrived: Arrived = await self._messenger.receive(_MESSAGES, asked, timeout)[0]
            of_object = arrived.kind == MessageKind.OBJECT
            yield Message(arrived.source, arrived.tag, unpack(arrived.data) if of_object else arrived.data)

    def _send(
        self,
        what: Fingerprint,
        ts: list[Tensor],
        dst: int,
        tag: int,
        kind: int,
        timeout: float | None,
        synchronous: bool,
    ) -> Handle[None]:
        nbytes = sum(t.nbytes for t in ts)
        where = dict.fromkeys(t.device for t in ts if not t.is_cpu)
        work = self._work_on(where, None) if where else []
        single = len(ts) == 1
        kept = single and not synchronous and self._dispatcher.mailbox.keeps(ts[0], dst)
        peer = Peer(None, dst, tag, answered=synchronous and single, kept=kept)

        def make(operation: CommunicatorOperation) -> Program[None]:
            assert operation.handle is not None
            line = (what.kind, operation.handle.seq, *internals.issued_at(operation.handle))
            sends = [self._dispatcher.mailbox.send(t, dst, tag, kind, line, synchronous=synchronous) for t in ts]
            send: Program[Any] = sends[0] if single else together(*sends)
            return on_devices(send, work, ts) if work else send

        operation = CommunicatorOperation(claims=reading(*ts), meets=peer)
        try:
            handle = self._dispatcher.issue(operation, what, make, nbytes=nbytes, timeout=timeout)
        except BaseException:
            for one in work:
                one.cancel()
            raise
        if work:
            attach(handle, work)
        return handle


async def _sent_half(receiving: Receiving, program: Program[None]) -> None:
    """Send a message, then notify the receive of the same `sendrecv`."""
    try:
        await resume(program)
    except BaseException as error:
        receiving.sent(error)
        raise
    receiving.sent(None)
