"""All implementations of one communicator, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.backends.base import Transport
from aiodist.backends.shm import ShmNative
from aiodist.collectives.hierarchical import Hierarchical
from aiodist.collectives.implementations import Implementation, Library, Messages, SharedMemory, Wanted
from aiodist.collectives.selector import Selector
from aiodist.errors import BackendUnavailable
from aiodist.schedules import SCHEDULES

__all__ = ["Repertoire"]

_SCHEDULES = tuple(dict.fromkeys(name for names in SCHEDULES.values() for name in names))


class Repertoire:
    """What a communicator can run its collectives with; the same on all its ranks."""

    def __init__(
        self,
        transport: Transport,
        selector: Selector | None = None,
        *,
        hosts: Sequence[Sequence[int]] = (),
        within: ShmNative | None = None,
    ) -> None:
        """`hosts` are the ranks of each host, `within` the shared memory of those of this one, where there is any."""
        found: list[Implementation] = []
        if transport.native is not None:
            found.append(Library(transport.name, transport.native))
        if within is not None and within.group.size == transport.size:
            found.append(SharedMemory(within))
        several = len(hosts) > 1
        alone = Hierarchical.forms(hosts, transport.rank, within) if several else []
        together = Hierarchical.forms(hosts, transport.rank, within, 1) if several else []
        alone += [Messages(name) for name in _SCHEDULES]
        together += [Messages(name, 1) for name in _SCHEDULES]
        self.all: dict[str, Implementation] = {one.name: one for one in found + alone}
        """By name, best known first."""
        self.together: dict[str, Implementation] = {one.name: one for one in found + together}
        """The same for several tensors in one operation, whose messages share a tag: each in one piece."""
        self.within = within
        self.selector = selector or Selector(self.all, several_hosts=len(hosts) > 1)

    def check(self, impl: str) -> None:
        """Raise BackendUnavailable unless `impl` names something that this communicator has."""
        if impl != "auto" and impl not in self.all:
            raise BackendUnavailable(f"impl={impl!r}: this communicator has auto, {', '.join(self.all)}")

    def pick(
        self, wanted: Wanted, impl: str = "auto", *, later: bool = False, together: bool = False
    ) -> Implementation:
        """Return what runs an operation: what `impl` names or the selector says, unless it cannot.

        `later` leaves out what tells operations apart by the order of its calls, `together` goes with several tensors.
        """
        known = self.together if together else self.all
        name = self.selector.choose(wanted.operation, wanted.nbytes) if impl == "auto" else impl
        return next(
            one for one in (known[name], *known.values()) if not (later and one.in_order) and one.lacks(wanted) is None
        )
