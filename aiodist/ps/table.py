"""`Table`: rows that live on the servers, pulled and pushed by their ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiodist.backends.arithmetic import writable
from aiodist.backends.base import dtype_name
from aiodist.communicator.claims import Claim, acquire, reading, writing
from aiodist.handles import Handle, Progress
from aiodist.ps.names import NameEntry, Names, checked_as
from aiodist.ps.policies import Synchronous
from aiodist.ps.requests import PullPart, UserCall
from aiodist.ps.rows import ID_BYTES, GroupedIds, TableSpec, grouped, packed_rows
from aiodist.ps.session import ParameterServerSession
from aiodist.ps.settings import READS, ReadMode
from aiodist.ps.wire import TABLE
from aiodist.streams.memory import flat
from aiodist.streams.writes import check_writable
from aiodist.types import check_int, one_of


class Table:
    """Rows of `dim` elements by id, on all servers of a parameter server; `ps.embedding` makes it.

    ```python
    words = await ps.embedding("words", 64, optimizer=aiodist.ps.Adagrad(lr=0.1))
    rows = await words.pull(ids)                    # (*ids.shape, 64)
    await words.push(ids, gradients)                # the sum, for an id that occurs twice
    ```
    The first push of a row makes it. Before that a pull returns its first values, which depend on the seed and the id
    alone. The server of a row depends on the id and the number of servers alone.
    """

    def __init__(self, session: ParameterServerSession, names: Names, entry: NameEntry, reads: ReadMode) -> None:
        assert entry.table is not None
        self._session = session
        self._names = names
        self._entry = entry
        self._reads = reads
        self._spec: TableSpec = entry.table

    @property
    def name(self) -> str:
        """Name at the parameter server."""
        return self._entry.name

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self._spec.dim

    @property
    def rows(self) -> int | None:
        """Upper bound of the ids, or None for 2^63."""
        return self._spec.rows

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self._spec.dtype

    @property
    def in_step(self) -> bool:
        """True if a version is one push of each worker, as with `Synchronous`."""
        return isinstance(self._session.settings.consistency, Synchronous)

    @property
    def progress(self) -> Progress:
        """The `Progress` of the loop of the calls."""
        return self._session.progress

    def group(self, ids: Tensor) -> GroupedIds:
        """Return the distinct `ids` for `pull_grouped` and `push_grouped`; from any thread.

        Raises as `pull`. Cost: a sort.
        """
        return grouped(ids, self._spec, len(self._entry.spans))

    def pull(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        reads: ReadMode | None = None,
        at_least: int = 0,
        timeout: float | None = None,
    ) -> Handle[Tensor]:
        """Return the rows of `ids`, int64 or int32 of any shape: `(*ids.shape, dim)`, in `out` if given.

        The rows include earlier pushes of this rank. With "snapshot" they have one version of the table, on all
        servers, which is `at_least` that version; with "lock-free" they are the present rows of each server. The
        handle's `version` is the version read. A pull makes no row.

        Raises KeyError after `free`, TypeError and ValueError for ids that are no integers, are negative or not below
        `rows`, and for another dtype or shape of `out`, BufferInFlight for an `out` in use; PeerLost on await if a
        server is lost. Cost: a message to each server and back, with 8 bytes and the row for each id; for each distinct
        id if many repeat, which costs this rank a sort.
        """
        self._check()
        chosen = grouped(ids, self._spec, len(self._entry.spans), to_read=True)
        with torch.inference_mode(False):
            given = torch.empty(*chosen.shape, self.dim, dtype=self.dtype, device="cpu") if out is None else out
        check_writable(given, f"pull of {self.name!r}", "out")
        self._checked(given, "out", chosen)
        return self._pull(chosen, given, reads, at_least, timeout)

    def pull_grouped(
        self, chosen: GroupedIds, *, reads: ReadMode | None = None, at_least: int = 0, timeout: float | None = None
    ) -> Handle[Tensor]:
        """Return the rows of `chosen.ids`, which `group` made: `(len(chosen.ids), dim)`. Raises and costs as `pull`."""
        self._check()
        return self._pull(chosen, None, reads, at_least, timeout)

    def _pull(
        self,
        chosen: GroupedIds,
        out: Tensor | None,
        reads: ReadMode | None,
        at_least: int,
        timeout: float | None,
    ) -> Handle[Tensor]:
        """Pull each row once, and return the handle of these rows, or of `out` with a row for each id of the call."""
        mode = READS[one_of("reads", self._reads if reads is None else reads, tuple(READS))]
        version = check_int("at_least", at_least, 0, (1 << 63) - 1)
        nbytes = chosen.ids.numel() * self._spec.row_bytes
        handle = self._session.handle("pull_rows", nbytes, timeout, depth=4)
        into = None if out is None else flat(out).detach().view(-1, self.dim)
        claims = [] if into is None else writing(into)
        acquire(claims, handle)
        pool = self._session.context.pool
        room = pool.take_room(chosen.ids.nbytes)  # servers may read it until the end
        room[: chosen.ids.nbytes].view(torch.int64).copy_(chosen.ids)
        came: Tensor | None = None
        with torch.inference_mode(False):
            if into is None:
                rows = torch.empty(nbytes // self._spec.row_bytes, self.dim, dtype=self.dtype, device="cpu")
            elif chosen.as_called:
                rows = into
            else:  # the pool has rows to be copied, since new memory costs as much as all the copying
                came = pool.take_room(nbytes)
                rows = came[:nbytes].view(self.dtype).view(-1, self.dim)
        blocks = dict(zip(self._entry.servers, chosen.blocks(), strict=True))
        ids = {rank: room[block.start * ID_BYTES : block.stop * ID_BYTES] for rank, block in blocks.items()}

        def over() -> Tensor:
            pool.release(room)
            if out is not None and came is not None:
                with writable(out), torch.no_grad():
                    torch.index_select(rows, 0, chosen.places, out=into)
                pool.release(came)
            return rows if out is None else out

        operation = UserCall(handle, 1, claims, over)
        part = PullPart(operation, self._entry, nbytes, lambda rank: rows[blocks[rank]].view(-1), ids)
        self._session.client.pulls.pull(part, mode, version)
        return handle

    def push(
        self, ids: Tensor, values: Tensor, *, rule: str | None = None, timeout: float | None = None
    ) -> Handle[None]:
        """Apply `values`, `(*ids.shape, dim)`, to the rows of `ids`: by the table's optimizer, otherwise by addition.

        Values of an id that occurs twice are summed. A step of several workers' pushes sums the values of each row,
        with the weights of the consistency: a mean divides by the number of pushes, also of pushes without the row. All
        workers should push equally often, as with any tensor, perhaps with no ids. With `rule` "copy" the values
        replace the rows, before sums are applied: the last value of an id, and that of the last worker.

        The await ends as that of `ParameterServer.push`. You may change `ids` and `values` after this call. Raises
        KeyError after `free`, TypeError and ValueError for ids as `pull`, for another dtype or shape of `values`,
        another rule, and on a rank that is no worker; RemoteError on await for an error on a server, PeerLost if a
        server is lost. Cost: a message to each server, with 8 bytes and the row for each distinct id.
        """
        self._check("push")
        if rule is not None:
            one_of("rule", rule, ("copy",))
        chosen = self.group(ids)
        given = self._checked(values, "values", chosen).detach().reshape(-1, self.dim)
        with torch.inference_mode(False), torch.no_grad():
            rows = chosen.summed(given) if rule is None else chosen.last(given)
            return self._push(chosen, rows, (), timeout, rule)

    def push_grouped(self, chosen: GroupedIds, values: Tensor, *, timeout: float | None = None) -> Handle[None]:
        """Push `values`, `(len(chosen.ids), dim)`, one row for each of `chosen.ids`, as `push`.

        Do not change `values` before the end. Raises BufferInFlight if an operation in flight writes `values`.
        """
        self._check("push")
        rows = self._checked(values, "values", chosen.ids).detach()
        return self._push(chosen, rows, reading(flat(rows)), timeout)

    def _push(
        self, chosen: GroupedIds, rows: Tensor, claims: Sequence[Claim], timeout: float | None, rule: str | None = None
    ) -> Handle[None]:
        session, rooms = self._session, list[Tensor]()
        handle = session.handle("push_rows", rows.nbytes, timeout, depth=4)
        acquire(claims, handle)

        def room(nbytes: int) -> Tensor:
            rooms.append(session.context.pool.take_room(nbytes))
            return rooms[-1]

        def pack() -> list[Tensor]:
            with torch.inference_mode(False), torch.no_grad():
                return [packed_rows(chosen.ids[block], rows[block], room) for block in chosen.blocks()]

        def over() -> None:
            for each in rooms:
                session.context.pool.release(each)

        operation = UserCall(handle, 1, claims, over)
        own = rule is None and self._spec.optimizer is not None
        number = TABLE if own else session.settings.rule(rule or "add")[0]
        session.client.pushes.push_rows(operation, self._entry, rows.nbytes, pack, number)
        if session.context.coalescer.congested:
            session.progress.try_poll()
        return handle

    def _check(self, worker_call: str = "") -> None:
        self._session.check(worker_call)
        if self.name not in self._names or self._names[self.name] is not self._entry:
            raise KeyError(f"the table {self.name!r} was freed")

    def _checked(self, t: Tensor, name: str, ids: Tensor | GroupedIds) -> Tensor:
        rows = checked_as(t, name, self.name, self.dtype, (*ids.shape, self.dim))
        if not rows.is_cpu:
            raise ValueError(f"{name} lives on {rows.device}: a table takes rows on the CPU, see .cpu()")
        return rows

    def __repr__(self) -> str:
        rows = "any" if self.rows is None else str(self.rows)
        return f"<Table {self.name!r} of {rows} rows, {dtype_name(self.dtype)}[{self.dim}]>"
