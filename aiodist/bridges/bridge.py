"""`Bridge`: the other job, with messages to and from its ranks, and states that one of the two publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from torch import Tensor

from aiodist.backends.base import again
from aiodist.bridges.reading import Reading
from aiodist.bridges.union import Meeting, Union
from aiodist.bridges.versions import TOPIC, JobReaders, Versions
from aiodist.communicator import parts_of
from aiodist.control import HUB
from aiodist.errors import AiodistError, CommunicatorClosed
from aiodist.handles import Handle, internals
from aiodist.handles.calls import located
from aiodist.types import check_int
from aiodist.world.leaving import the_end

LINGER_SECONDS: Final = 5.0
"""Longest wait of a close for the other job to receive what was sent, in seconds."""

_PARTING_PAUSE: Final = 0.01


class Bridge:
    """The connection of two jobs, as `aiodist.connect` and `Door.accept` return it. It belongs to their event loop.

    Each job keeps its own world: the loss of a rank of the other job ends the bridge, and nothing else.
    """

    def __init__(self, meeting: Meeting, union: Union, versions: Versions, number: int) -> None:
        self.name = meeting.name
        """Name or address under which the jobs met."""
        self._mine, self._theirs = meeting.mine, meeting.theirs
        self._first = meeting.rank == self._mine[0]
        self._union = union
        self._versions = versions
        self._number = number
        self._readers = JobReaders(union, self._theirs)
        self._reading = Reading(union, self._theirs)
        self._subscriptions = 0
        self._sent = dict.fromkeys(self._theirs, 0)
        self._asked = dict.fromkeys(self._theirs, 0)
        """Messages that the program has asked for, by rank."""
        self._receives: dict[int, WeakSet[Handle[Any]]] = {rank: WeakSet() for rank in self._theirs}
        self._promised: dict[int, int] = {}
        """Messages that each rank of the other job has sent before its close."""
        self._parted: set[int] = set()
        """Ranks of the other job that need nothing more."""
        self._end: AiodistError | None = None
        """Reason of the end, which all calls raise."""
        self._leaving = False
        self._parting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        versions.add(number, self._readers)
        lifetime = parts_of(union.messages).dispatcher.lifetime
        lifetime.on_abort.append(self._finish)
        if isinstance(lifetime.refusal, AiodistError):
            self._finish(lifetime.refusal)
        else:
            union.channel.subscribe(TOPIC, self._hear)

    @property
    def size(self) -> int:
        """Number of ranks of the other job."""
        return len(self._theirs)

    @property
    def is_open(self) -> bool:
        """True until this job or the other one closes the bridge, or a rank of either is lost."""
        return self._end is None and not self._leaving

    @property
    def is_released(self) -> bool:
        """True after the end, once nothing is left of the bridge."""
        return self._closing is not None and self._closing.done()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed" if self._end is None else f"ended: {self._end}"
        return f"<Bridge {self.name!r} to {self.size} ranks, {state}>"

    # --- messages ----------------------------------------------------------------------------------------------

    def send(self, t: Tensor | list[Tensor], to: int, *, timeout: float | None = None) -> Handle[None]:
        """Send a tensor to a rank of the other job, as `Communicator.send` does.

        Args:
            t: a tensor of any shape, or a list, which is sent as one message for each tensor.
            to: the rank of the other job that receives.
            timeout: seconds from the call until the await raises OperationTimeout; None is none.

        Returns:
            None, when `t` may be changed again.

        Raises:
            ValueError: if `to` is no rank of the other job.
            CommunicatorClosed: if either job has closed the bridge.
            PeerLost: if a rank of the other job is lost; at the call if it is known.

        Example:
            ```python
            await bridge.send(torch.arange(3), to=0)
            ```

        Cost: that of `Communicator.send`.
        """
        rank = self._rank("to", to)
        handle = self._union.messages.send(t, rank, timeout=timeout)
        self._sent[rank] += len(t) if isinstance(t, list) else 1
        return handle

    def recv(
        self, t: Tensor | list[Tensor] | None = None, src: int = 0, *, timeout: float | None = None
    ) -> Handle[Any]:
        """Receive a tensor from a rank of the other job, as `Communicator.recv` does.

        Messages of one rank to another arrive in the order in which they were sent.

        Args:
            t: a tensor or a list of tensors to fill, or None for a new one.
            src: the rank of the other job that sends.
            timeout: seconds from the call until the await raises OperationTimeout; None is none.

        Returns:
            `t`, or the new tensor.

        Raises:
            ValueError: if `src` is no rank of the other job.
            CommunicatorClosed: if either job has closed the bridge, and no message is left.
            PeerLost: if a rank of the other job is lost; at the call if it is known.

        Example:
            ```python
            t = await bridge.recv(src=0, timeout=60)
            ```

        Cost: that of `Communicator.recv`.
        """
        rank = self._rank("src", src, receives=True)
        return self._received(
            self._union.messages.recv(t, rank, timeout=timeout), rank, len(t) if isinstance(t, list) else 1
        )

    def send_object(self, obj: object, to: int, *, timeout: float | None = None) -> Handle[None]:
        """Send a Python object to a rank of the other job; arguments, errors and cost are those of `send`.

        It is pickled at the call, and unpickling runs code of the sender's choice: each job must trust the other.
        """
        rank = self._rank("to", to)
        handle = self._union.messages.send_object(obj, rank, timeout=timeout)
        self._sent[rank] += 1
        return handle

    def recv_object(self, src: int = 0, *, timeout: float | None = None) -> Handle[Any]:
        """Receive a Python object from a rank of the other job; arguments, errors and cost are those of `recv`."""
        rank = self._rank("src", src, receives=True)
        return self._received(self._union.messages.recv_object(rank, timeout=timeout), rank, 1)

    def _received(self, handle: Handle[Any], rank: int, count: int) -> Handle[Any]:
        self._asked[rank] += count
        self._receives[rank].add(handle)
        return handle

    def _rank(self, name: str, rank: int, *, receives: bool = False) -> int:
        """Return the number of the other job's `rank` in the union, or raise the reason of the end."""
        number = check_int(name, rank, 0, self.size - 1)
        self._check()
        found = self._theirs[number]
        if found in self._promised and not (receives and self._asked[found] < self._promised[found]):
            raise self._closed_there()
        return found

    def _check(self) -> None:
        if self._end is not None:
            raise again(self._end)
        if self._leaving:
            raise self._closed_here()

    # --- states ------------------------------------------------------------------------------------------------

    @located
    async def publish(self, state: Any, *, version: int | None = None) -> int:  # noqa: ANN401
        """Publish a state, such as the `state_dict()` of a module, to the other job.

        Every rank of this job calls it. Each rank copies its part, and never waits for a reader. A reader gets the
        newest version that is complete. On a bridge of `listen`, all jobs at the door get the version, also those that
        connect later; `Door.publish` needs no bridge.

        Args:
            state: dicts, lists, tuples, numbers and text with tensors, arrays, DTensors or `checkpoints.Piece`. Tensors
                are equal on all ranks, and each rank sends its share of them; of DTensors and pieces it sends its own.
            version: a number above all versions before, such as the step; rank 0's counts. None is the time in
                milliseconds since 1970, or one more than the last version if that is more.

        Returns:
            The version.

        Raises:
            TypeError: for a value that cannot be sent; the message has its path.
            ValueError: if `version` is not above the last one.
            MismatchError: if this rank gives another `version` than rank 0.
            PeerLost: if a rank of either job is lost; the version is published nevertheless, at a door.

        Example:
            ```python
            version = await bridge.publish(net.module.state_dict(), version=step)
            ```

        Cost: a copy of size / ranks bytes on each rank, from 1 MiB on in a thread; `state` must not change meanwhile.
        Up to two more copies stay for versions in flight to each job.
        """
        if self._leaving:
            raise self._closed_here()
        # Also after a loss, since other ranks may not know of it: all ranks must publish the same number of times.
        named = await self._versions.publish(state, version)
        self._check()
        return named

    async def subscribe(self, *, after: int = 0) -> AsyncGenerator[tuple[int, Any], None]:
        """Iterate over what the other job publishes: `async for version, state in bridge.subscribe(): ...`.

        Every rank of this job iterates, and all get the same version in the same turn. A turn returns the newest
        version, and waits until there is one; versions in between are skipped. The loop ends when either job closes the
        bridge, after the last version.

        Args:
            after: the newest version that is known already, for example from an earlier bridge.

        Yields:
            The version, and the state with its tensors on the CPU, whole and in new memory.

        Raises:
            RuntimeError: if another loop waits for a version of this bridge.
            PeerLost: if a rank of the other job is lost.
            MismatchError: if the ranks of the other job publish different tensors.

        Example:
            ```python
            async for version, state in bridge.subscribe():
                model.load_state_dict(state)
            ```

        Cost: each rank receives the whole state, an equal part from each rank of the other job.
        """
        self._subscriptions += 1
        try:
            while True:
                received = None
                if self.is_open:
                    with suppress(CommunicatorClosed):
                        received = await self._reading.after(after)
                if received is None:
                    if self._end is not None and not isinstance(self._end, CommunicatorClosed):
                        raise again(self._end)
                    return
                if received[0] > after:  # an earlier loop may have asked for an older one
                    after = received[0]
                    yield received
        finally:
            self._subscriptions -= 1

    # --- the end -----------------------------------------------------------------------------------------------

    @located
    async def aclose(self) -> None:
        """Close the bridge. Every rank of this job does so; a second call is a no-op.

        Waits until the other job has received what was sent and the last version, for 5 s at most. The other job's
        `subscribe` ends then, and its other calls raise `CommunicatorClosed`.
        """
        if self.is_open:
            self._leaving = True
            self._reading.close()
            self._tell("close")
            self._readers.ending = True
            self._versions.look()
            try:
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._parting_task()
            except TimeoutError:
                pass
            finally:
                self._tell("done")
                self._finish(self._closed_here())
        await self._released()

    async def fail(self, error: BaseException) -> None:
        """End the bridge with an error of this job's program, which the other job's calls raise too."""
        if self.is_open:
            end = await the_end(error)
            self._union.channel.fail(end.cause, end.traceback, end.exitcode)
            self._finish(self._closed_here())
        await self._released()

    async def _released(self) -> None:
        if self._closing is not None:
            await asyncio.shield(self._closing)

    def _closed_here(self) -> CommunicatorClosed:
        return CommunicatorClosed(f"bridge {self.name!r} was closed by this job")

    def _closed_there(self) -> CommunicatorClosed:
        return CommunicatorClosed(f"bridge {self.name!r} was closed by the other job")

    def _finish(self, error: AiodistError) -> None:
        """End the bridge for the reason `error`, unless it has ended."""
        if self._end is not None:
            return
        self._end = error
        self._versions.discard(self._number)
        self._reading.close()
        self._union.abort(error)
        self._closing = self._loop.create_task(self._union.close(error), name=f"the end of bridge {self.name}")

    def _hear(self, src: int, message: list[Any]) -> None:
        """Hand a message of the other job to the loop (thread of the channel)."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(partial(self._handle, src, message))

    def _handle(self, src: int, message: list[Any]) -> None:
        match message:
            case ["want", int(version)]:
                self._readers.wants[src] = version
                self._versions.look()
            case ["ship", int(version)]:
                self._reading.shipped(version)
            case ["end"]:
                self._reading.shipped(None)
            case ["close", int(count)]:
                self._promised[src] = count
                self._parting_task()
            case ["done", _] if self._leaving:
                self._parted.add(src)
            case ["done", _]:
                self._finish(self._closed_there())

    def _tell(self, what: str) -> None:
        with suppress(RuntimeError):  # the channel is closed
            for rank in self._theirs:
                self._union.channel.send(rank, TOPIC, [what, self._sent[rank]])

    def _parting_task(self) -> asyncio.Task[None]:
        if self._parting is None:
            self._parting = self._loop.create_task(self._part(), name=f"the close of bridge {self.name}")
        return self._parting

    async def _part(self) -> None:
        """Wait until neither job needs anything of the other one, since one of them closes the bridge."""
        answered = False
        while self._end is None and not self._is_left():
            if not answered and self._needs_nothing():
                answered = True
                self._tell("done")
                if not self._leaving:
                    self._finish(self._closed_there())
            await asyncio.sleep(_PARTING_PAUSE)
        if not self._leaving:
            self._finish(self._closed_there())

    def _is_left(self) -> bool:
        """Return True if the other job needs nothing more, or has waited long enough."""
        exits = self._union.channel.exits()
        return HUB in exits or all(rank in exits or rank in self._parted for rank in self._theirs)

    def _needs_nothing(self) -> bool:
        """Return True if this rank needs nothing more of the other job, which closes the bridge."""
        pending = {rank: sum(map(internals.is_pending, self._receives[rank])) for rank in self._theirs}
        left = {rank: count - self._asked[rank] for rank, count in self._promised.items()}
        in_vain = {rank: min(pending[rank], max(0, -count)) for rank, count in left.items()}
        if any(in_vain.values()) and sum(in_vain.values()) == sum(pending.values()):
            return True  # the program waits only for messages that never come
        if len(self._promised) < self.size:
            return False
        if self._leaving:
            return True
        received = not any(pending.values()) and all(count <= 0 for count in left.values())
        return received and not self._subscriptions
