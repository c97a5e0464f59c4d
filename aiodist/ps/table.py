"""`Table`: rows that live on the servers, pulled and pushed by their ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.backends.inplace import copy, flat
from aiodist.communicator.claims import Claim, reading, writing
from aiodist.handles import Handle, Progress, in_flight
from aiodist.ps.arguments import check_version
from aiodist.ps.consistency import Synchronous
from aiodist.ps.names import NameEntry, Names, checked
from aiodist.ps.operation import Operation, PullPart
from aiodist.ps.rows import TableSpec
from aiodist.ps.rows.grouping import GroupedIds, grouped
from aiodist.ps.rows.packing import ID_BYTES, pack, packed_bytes
from aiodist.ps.rules import RULES
from aiodist.ps.session import ParameterServerSession
from aiodist.ps.settings import READS, ReadMode, one_of
from aiodist.ps.sharding import Span
from aiodist.ps.wire import TABLE


class Table:
    """Rows of `dim` elements by id, on all servers of a parameter server; `ps.embedding` makes it.

    ```python
    words = await ps.embedding("words", 64, optimizer=aiodist.ps.Adagrad(lr=0.1))
    rows = await words.pull(ids)                    # (*ids.shape, 64)
    await words.push(ids, gradients)                # of an id that is there twice the sum
    ```
    The first push that names a row makes it. Until then it reads as its first values, which depend on the seed and the
    id alone. So does the server that has it, on the id and the number of servers.
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
        """Its name at the parameter server."""
        return self._entry.name

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self._spec.dim

    @property
    def rows(self) -> int | None:
        """Ids are below this; None: below 2^63."""
        return self._spec.rows

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""
        return self._spec.dtype

    @property
    def in_step(self) -> bool:
        """A version is one push of each worker: the parameter server is `Synchronous`."""
        return isinstance(self._session.settings.consistency, Synchronous)

    @property
    def progress(self) -> Progress:
        """That of the loop which the calls belong to."""
        return self._session.progress

    def group(self, ids: Tensor) -> GroupedIds:
        """Return `ids`, each once, as `pull_grouped` and `push_grouped` take them; from any thread.

        Raises as `pull` does. Cost: a sort.
        """
        return grouped(ids, self._spec, len(self._entry.spans))

    # --- pulling -----------------------------------------------------------------------------------------------

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

        They hold what this rank pushed before. With "snapshot" they are of one version of the table, on all servers,
        and of `at_least` that one; with "lock-free" each server's are what is there just now. The handle's `version`
        says which. A pull makes no row.

        Raises KeyError after `free`, TypeError and ValueError for ids that are no integers, are negative or not below
        `rows`, and for another dtype or shape of `out`, BufferInFlight for one that is in use; PeerLost on await when a
        server is gone. Cost: a message to each server and back: 8 bytes for each id, and its row, once, however often
        it is there; a sort here.
        """
        self._check()
        chosen = self.group(ids)
        into = None if out is None else self._checked(out, "out", chosen)
        handle = self._session.handle("pull_rows", chosen.ids.numel() * self._spec.row_bytes, timeout)
        claims = [] if into is None else writing(flat(into))
        in_flight.acquire_all(claims, handle)
        room = self._room(chosen)
        rows = self._rows_in(room, chosen)

        def result() -> Tensor:
            with torch.inference_mode(False), torch.no_grad():
                if into is None or into.is_inference():
                    found = rows.index_select(0, chosen.places)
                else:
                    found = torch.index_select(rows, 0, chosen.places, out=flat(into).detach().view(-1, self.dim))
            self._session.context.pool.release(room)
            if into is None:
                return found.view(*chosen.shape, self.dim)
            if into.is_inference():
                copy(into, found.view_as(into))
            return into

        self._pull(handle, claims, result, chosen, rows, reads, at_least)
        return handle

    def pull_grouped(
        self, chosen: GroupedIds, *, reads: ReadMode | None = None, at_least: int = 0, timeout: float | None = None
    ) -> Handle[Tensor]:
        """Return the rows of `chosen.ids`, which `group` made: `(len(chosen.ids), dim)`. Raises and costs as `pull`."""
        self._check()
        handle = self._session.handle("pull_rows", chosen.ids.numel() * self._spec.row_bytes, timeout)
        with torch.inference_mode(False):
            rows = torch.empty(chosen.ids.numel(), self.dim, dtype=self.dtype)
        self._pull(handle, [], lambda: rows, chosen, rows, reads, at_least)
        return handle

    def _room(self, chosen: GroupedIds) -> Tensor:
        """Return a buffer of the pool with room for the rows of `chosen`."""
        return self._session.context.pool.take_room(chosen.ids.numel() * self._spec.row_bytes)

    def _rows_in(self, room: Tensor, chosen: GroupedIds) -> Tensor:
        with torch.inference_mode(False):
            rows = room[: chosen.ids.numel() * self._spec.row_bytes].view(self.dtype)
            return rows.view(-1, self.dim)

    def _pull(
        self,
        handle: Handle[Tensor],
        claims: Sequence[Claim],
        result: Callable[[], Tensor],
        chosen: GroupedIds,
        rows: Tensor,
        reads: ReadMode | None,
        at_least: int,
    ) -> None:
        mode = READS[one_of("reads", self._reads if reads is None else reads, tuple(READS))]
        pool = self._session.context.pool
        room = pool.take_room(chosen.ids.nbytes)  # servers may look at it until all is over

        def over() -> Tensor:
            pool.release(room)
            return result()

        spans, ids = [], {}
        for (rank, _, _), block in zip(self._entry.spans, chosen.blocks(), strict=True):
            spans.append(Span(rank, block.start * self.dim, block.stop * self.dim))
            ids[rank] = room[block.start * ID_BYTES : block.stop * ID_BYTES]
            ids[rank].view(torch.int64).copy_(chosen.ids[block])
        part = PullPart(Operation(handle, 1, claims, over), self._entry, rows.view(-1), None, spans, ids)
        self._session.client.pulls.pull(part, mode, check_version(at_least))

    # --- pushing -----------------------------------------------------------------------------------------------

    def push(
        self, ids: Tensor, values: Tensor, *, rule: str | None = None, alpha: float = 1.0, timeout: float | None = None
    ) -> Handle[None]:
        """Have servers apply `values`, `(*ids.shape, dim)`, to the rows of `ids`: by the table's optimizer, else added.

        With `rule` "add" or "copy" they do that instead. Values of an id that is there twice are summed, with "copy"
        the last is taken. In a step of several workers' pushes each row's are summed, with the weights of the
        consistency: a mean divides by the number of pushes, whichever rows they have. Of "copy" the last worker's
        counts. All workers should push equally often, as any tensor; without ids where they have none.

        Done as `ParameterServer.push`. `ids` and `values` are the caller's again when this returns. Raises KeyError
        after `free`, TypeError and ValueError for ids as `pull` does, for another dtype or shape of `values`, another
        rule, an `alpha` that is no number, and on a rank that is no worker; RemoteError on await for what a server
        raised, PeerLost when one is gone. Cost: a message to each server, with 8 bytes for each id and its row, once.
        """
        self._check()
        number = self._rule(rule)
        chosen = self.group(ids)
        given = self._checked(values, "values", chosen)
        with torch.inference_mode(False), torch.no_grad():
            room = self._room(chosen)
            by_id = self._rows_in(room, chosen)
            join = chosen.last if rule == "copy" else chosen.sum
            join(given.detach().reshape(-1, self.dim), by_id)
        return self._push(chosen, by_id, number, alpha, timeout, [room])

    def push_grouped(
        self,
        chosen: GroupedIds,
        values: Tensor,
        *,
        rule: str | None = None,
        alpha: float = 1.0,
        timeout: float | None = None,
    ) -> Handle[None]:
        """Push `values`, `(len(chosen.ids), dim)`, one row for each of `chosen.ids`; else as `push`.

        `values` must not be changed until it is done. Raises BufferInFlight for those that are written to just now.
        """
        self._check()
        number = self._rule(rule)
        values = checked(values, "values")
        if values.dtype is not self.dtype or values.shape != (chosen.ids.numel(), self.dim):
            raise self._unfit(values, "values", (chosen.ids.numel(), self.dim))
        return self._push(chosen, values.detach(), number, alpha, timeout, [])

    def _push(
        self,
        chosen: GroupedIds,
        values: Tensor,
        rule: int,
        alpha: float,
        timeout: float | None,
        rooms: list[Tensor],
    ) -> Handle[None]:
        """Push; `rooms` go back to the pool when it is over."""
        session = self._session
        if session.coll.rank not in session.settings.workers:
            workers = list(session.settings.workers)
            raise ValueError(f"push on rank {session.coll.rank}: expected a worker, one of {workers}")
        RULES["add"].check(self.dtype, alpha)
        handle = session.handle("push_rows", values.nbytes, timeout, depth=4)
        claims = reading(flat(values))
        in_flight.acquire_all(claims, handle)
        operation = Operation(handle, 1, claims, partial(self._release, rooms))
        packed = partial(self._packed, chosen, values, rooms)
        session.client.pushes.push_rows(operation, self._entry, values.nbytes, packed, rule, float(alpha))
        if session.context.coalescer.congested:
            session.progress.glance()
        return handle

    def _release(self, rooms: Sequence[Tensor]) -> None:
        for room in rooms:
            self._session.context.pool.release(room)

    def _packed(self, chosen: GroupedIds, values: Tensor, rooms: list[Tensor]) -> list[tuple[Tensor, bool]]:
        """Return what each server gets, in buffers that are added to `rooms`, and whether it is a code; any thread."""
        blocks: list[tuple[Tensor, bool]] = []
        with torch.inference_mode(False), torch.no_grad():
            for (rank, _, _), block in zip(self._entry.spans, chosen.blocks(), strict=True):
                rows, coded = self._encoded(values[block], rank)
                nbytes = packed_bytes(chosen.ids[block], rows)
                rooms.append(self._session.context.pool.take_room(nbytes))
                packed = rooms[-1][:nbytes]
                pack(chosen.ids[block], rows, packed)
                blocks.append((packed, coded))
        return blocks

    def _encoded(self, rows: Tensor, rank: int) -> tuple[Tensor, bool]:
        codec = self._session.settings.codec
        if codec is None or not self._spec.coded or rank == self._session.coll.rank or not rows.numel():
            return rows, False
        began = perf_counter()
        code = codec.encode(rows.reshape(-1))
        self._session.context.counts["encode_seconds"] += perf_counter() - began
        return code, True

    # --- checks ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._session.check()
        if self.name not in self._names or self._names[self.name] is not self._entry:
            raise KeyError(f"the table {self.name!r} was freed")

    def _rule(self, rule: str | None) -> int:
        if rule is None:
            return TABLE if self._spec.optimizer is not None else self._session.settings.rule("add")[0]
        return self._session.settings.rule(one_of("rule", rule, ("add", "copy")))[0]

    def _checked(self, t: Tensor, name: str, chosen: GroupedIds) -> Tensor:
        t = checked(t, name)
        expected = (*chosen.shape, self.dim)
        if t.dtype is not self.dtype or tuple(t.shape) != expected:
            raise self._unfit(t, name, expected)
        return t

    def _unfit(self, t: Tensor, name: str, expected: tuple[int, ...]) -> TypeError | ValueError:
        if t.dtype is not self.dtype:
            return TypeError(f"{name} for {self.name!r} holds {dtype_name(t.dtype)}: expected {dtype_name(self.dtype)}")
        return ValueError(f"{name} for {self.name!r} has shape {list(t.shape)}: expected {list(expected)}")

    def __repr__(self) -> str:
        rows = "any" if self.rows is None else str(self.rows)
        return f"<Table {self.name!r} of {rows} rows, {dtype_name(self.dtype)}[{self.dim}]>"
