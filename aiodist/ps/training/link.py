"""What a client needs of the server, and how a data-parallel group shares it: its rank 0 talks, the others listen."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aiodist.communicator import Communicator
from aiodist.errors import RemoteError

Key = str | Tensor
"""How the server knows a tensor: by name, or as the tensor that was registered with it."""

_NOTE_BYTES = 512


class PendingCall(Awaitable[Any], Protocol):
    """A call that is on its way; a Handle."""

    def done(self) -> bool:
        """Return whether it is over."""


class Centre(Protocol):
    """The part of `ParameterServer` that clients use."""

    def push(self, what: Any, values: Any, *, rule: str | None = None) -> PendingCall:  # noqa: ANN401
        """Send `values`, which stay untouched until it is over; `rule` None is that of each tensor."""

    def pull(self, what: Any, out: Any, *, reads: Any = None) -> PendingCall:  # noqa: ANN401
        """Fetch into `out`; it sees what this rank has pushed before."""


class CentreLink:
    """One client's traffic: at most one push and one pull in flight.

    In a group the calls are collective: every rank makes the same ones in the same order, and rank 0 alone talks to
    the server. Cancelling an await never stops a transfer, and the same call made again waits for the same one.
    """

    def __init__(self, ps: Centre, group: Communicator | None) -> None:
        if group is not None and group.rank < 0:
            raise ValueError(f"group={group!r}: expected a communicator that this rank belongs to")
        self._ps = ps
        self._group = group
        self._pushing: PendingCall | None = None
        self._pulling: PendingCall | None = None

    @property
    def talks(self) -> bool:
        """This rank is the one that talks to the server."""
        return self._group is None or self._group.rank == 0

    # --- up ---------------------------------------------------------------------------------------------------------

    def push(self, keys: Sequence[Key], values: Sequence[Tensor], rule: str | None = None) -> None:
        """Send `values`; the last push must have been settled. Rank 0 of the group alone does it."""
        if self.talks and keys:
            assert self._pushing is None, "the last push is still in flight"
            self._pushing = self._ps.push(list(keys), list(values), rule=rule)

    async def settle(self, *, wait: bool = True) -> None:
        """Return once the last push is over, and raise what it raised; with `wait=False` look only if it is."""
        if self._pushing is None or not (wait or self._pushing.done()):
            return
        pushing = self._pushing
        try:
            await pushing
        finally:
            if pushing.done():  # after a time-out, or when cancelled, it goes on
                self._pushing = None

    # --- down -------------------------------------------------------------------------------------------------------

    def ask(self, keys: Sequence[Key], out: Sequence[Tensor], reads: str | None = None) -> None:
        """Begin to fetch into `out`, unless that is under way; `receive` ends it."""
        if self.talks and self._pulling is None:
            self._pulling = self._ps.pull(list(keys), list(out), reads=reads)

    async def receive(
        self, keys: Sequence[Key], out: Sequence[Tensor], reads: str | None = None, *, settle: bool = True
    ) -> None:
        """Return once `out` has the centre, on every rank of the group: what was asked for, else what is there now.

        With `settle` the last push is over by then. Raises what that or the pull raised on the rank that talks, and
        RemoteError on the other ranks of the group.
        """
        error: Exception | None = None
        try:
            self.ask(keys, out, reads)
            if settle:
                await self.settle()
        except Exception as raised:  # noqa: BLE001 - told to the group, then raised
            error = raised
        if self._pulling is not None:
            try:
                await self._pulling
            except Exception as raised:  # noqa: BLE001 - as above
                error = error or raised
            if self._pulling.done():  # after a time-out it goes on
                self._pulling = None
        if self._group is not None and self._group.size > 1:
            await self._share(self._group, out, error)
        if error is not None:
            raise error

    async def _share(self, group: Communicator, out: Sequence[Tensor], error: Exception | None) -> None:
        """Give all ranks of the group what rank 0 has in `out`, or word of its `error`."""
        note = torch.zeros(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode()[:_NOTE_BYTES]
            note[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        await group.broadcast([note, *out], 0)
        if group.rank != 0 and note[0]:
            text = bytes(note.tolist()).rstrip(b"\0")
            said = text.decode(errors="replace")
            raise RemoteError(
                f"rank 0 of the group, which talks to the server, raised {said}",
                raised_by=0,
                comm=group.name,
                rank=group.rank,
            )

    # --- the end ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return once nothing is in flight; raise what the push raised, else what the pull did."""
        try:
            await self.settle()
        finally:
            if self._pulling is not None:
                pulling, self._pulling = self._pulling, None
                await pulling

    def forget(self) -> None:
        """Leave what is in flight to the server, which tells what became of it."""
        self._pushing = self._pulling = None
