"""`Communicator`: the collectives and messages of a group of ranks, each call an awaitable handle.

A call checks its arguments and issues the operation; awaiting the handle completes it. Every rank must issue the
same collectives in the same order. This package owns no algorithm: see `aiodist.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.communicator.arguments import check_rank
from aiodist.communicator.base import CommunicatorStatistics
from aiodist.communicator.hierarchy import Hierarchy, build
from aiodist.communicator.levels import Form
from aiodist.communicator.movement import Movement
from aiodist.communicator.objects import Objects
from aiodist.communicator.reductions import Reductions
from aiodist.communicator.registry import Guest
from aiodist.errors import CommunicatorAborted
from aiodist.handles import Handle

__all__ = ["Communicator", "CommunicatorStatistics"]


class Communicator(Reductions, Movement, Objects):
    """A group of ranks that communicate; get the first from `aiodist.init`.

    It belongs to the event loop it was opened on and is called from that loop's thread alone. Tensors are dense,
    contiguous, and on the CPU or a CUDA device; any shape goes unless a call names one, 0 elements too. Every
    collective is called by all ranks, in the same order and with the same arguments, tensors and sizes apart where the
    call says so. Every operation takes `timeout=` (seconds from issue; None is none) and most `impl=` (the name of an
    implementation, or "auto": the table of `selector` chooses).

    Every call raises TypeError or ValueError for what it cannot take, BufferInFlight for a tensor that another
    operation owns, CommunicatorClosed, CommunicatorAborted or PeerError when there is no communicator any more, and
    RuntimeError in another thread; before a byte moves, and the communicator goes on. The await raises MismatchError
    when ranks issued different operations, PeerError when a rank is lost or failed, CommunicatorAborted when it was
    given up, OperationTimeout when `timeout` has passed (the operation goes on) and BackendError for what a library
    reports. Below is only what a call adds to that.

    In the costs p is the number of ranks and n the bytes of a rank's tensor; they are those of the schedules over
    messages, per rank. Within a host shared memory takes their place, and nothing is sent; among hosts every rank, or
    the first of each host, takes part for its host (docs/algorithms.md).
    """

    # --- other communicators --------------------------------------------------------------------------------

    def dup(self) -> Handle[Communicator]:
        """Return a communicator of the same ranks whose traffic never meets this one's.

        Code that issues from a task of its own needs one: two tasks that issue on the same communicator would
        interleave differently on each rank. Collective; begins once all that is in flight here is over.
        Cost: what the library takes to make one, milliseconds.
        """
        return self._registry.derive(self, "dup", range(self.size))

    def group(self, ranks: Sequence[int]) -> Handle[Communicator]:
        """Return a communicator of `ranks`, in that order; elsewhere one of which every call raises.

        Collective over this communicator, with the same list on every rank. Made once: asking again for the same ranks
        returns the same communicator until it is closed. Raises ValueError for ranks out of range, none, or one twice.
        Cost: as `dup`.
        """
        wanted = [check_rank(rank, self.size, "ranks") for rank in ranks]
        if len(set(wanted)) != len(wanted) or not wanted:
            raise ValueError(f"ranks={wanted}: expected at least one rank, each once")
        return self._registry.derive(self, "group", wanted)

    def split(self, color: int | None = 0, key: int | None = None) -> Handle[Communicator]:
        """Return a communicator of the ranks that gave the same `color`, ordered by `key`, then by rank.

        `color=None` gives one of which every call raises. `key` is the rank unless given. Collective; made once for the
        same ranks, as `group`. Raises TypeError unless both are ints or None.
        Cost: the colors and keys of all ranks to all, then as `dup`.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} is {type(value).__name__}: expected an int or None")
        return self._registry.split(self, color, self.rank if key is None else key)

    def hierarchy(self, *keys: str, form: Form | None = None) -> Handle[Hierarchy]:
        """Return communicators of groups within groups: a level for each of `keys`, or by host (see `levels`).

        Level 0 is this communicator. Each level splits every group of the level above: equal keys form a group, keys
        sort as strings, ranks in a group by their rank here. A level has a communicator within each group and one
        across those that lie in the same group of the level above. `form` says which ranks that one links:
        "cartesian" the k-th of each with the k-th of the others, "tree" the first ranks; None is cartesian where the
        groups are of equal size, else tree. Cartesian for groups of unequal size is a tree too, with a RuntimeWarning
        on rank 0, and `Level.form` says so.

        Collective; begins once all that is in flight here is over. The communicators are made once for the same ranks,
        as those of `group`, and shared with it. All ranks give as many keys and the same `form`, else `MismatchError`
        is raised on await. A key that is no str is a TypeError. Cost: the keys of all ranks to all, then at most two
        communicators a level.
        """
        return build(self, keys, form)

    # --- the end --------------------------------------------------------------------------------------------

    def leave_to_thread(self, nbytes: int) -> None:
        """Have the progress thread drive allreduces of `nbytes` and more, while the loop does something else.

        For communicators whose operations are not awaited at once, such as those of gradients.
        """
        self._dispatcher.large_bytes = nbytes

    def admit(self, guest: Guest) -> None:
        """Have `guest` end before this communicator does, however it ends: for what is built on communicators."""
        self._registry.admit(self, guest)

    def abort(self, reason: str = "abort() was called") -> None:
        """Give this communicator up on all ranks: what is pending and every later call raise CommunicatorAborted."""
        error = CommunicatorAborted(f"communicator {self.name!r} was aborted: {reason}", comm=self.name, rank=self.rank)
        self._dispatcher.abort(error)
        self._dispatcher.disputes.tell_abort(str(error))

    async def aclose(self) -> None:
        """Close it on all ranks: wait for what is in flight, at most 30 s, then release it. Collective.

        Receives that nothing matched are withdrawn and reported as `ResourceWarning`, messages that nobody received as
        `RuntimeWarning`. Raises `OperationTimeout` naming what is still pending after that, and gives it up.
        The world that `aiodist.open` returned ends with all that belongs to it, as at the end of the block of
        `aiodist.init`.
        """
        kept = self._registry.kept
        if kept is None or self.name != "world":
            await self._registry.close(self)
        else:
            await kept.aclose()
