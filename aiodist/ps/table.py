"""`Table`: rows that live on the servers, pulled and pushed by their ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aiodist.backends.arithmetic import writable
from aiodist.backends.base import dtype_name
from aiodist.communicator.claims import Claim, acquire, reading, writing
from aiodist.handles import Handle, Progress
from aiodist.ps.names import NameEntry, Names, checked_as
from aiodist.ps.requests import PullPart, UserCall
from aiodist.ps.rows import ID_BYTES, GroupedIds, TableSpec, grouped, packed_rows
from aiodist.ps.session import ParameterServerSession
from aiodist.ps.settings import READS, ReadMode, Synchronous, check_int, one_of
from aiodist.ps.wire import TABLE
from aiodist.streams.memory import flat
from aiodist.streams.writes import check_writable


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
        with torch.inference_mode(False):
            given = torch.empty(*chosen.shape, self.dim, dtype=self.dtype, device="cpu") if out is None else out
        check_writable(given, f"pull of {self.name!r}", "out")
        into = flat(self._checked(given, "out", chosen)).detach().view(-1, self.dim)

        def spread(rows: Tensor) -> Tensor:
            with writable(given), torch.no_grad():
                torch.index_select(rows, 0, chosen.places, out=into)
            return given

        return self._pull(chosen, spread, writing(into), reads, at_least, timeout)

    def pull_grouped(
        self, chosen: GroupedIds, *, reads: ReadMode | None = None, at_least: int = 0, timeout: float | None = None
    ) -> Handle[Tensor]:
        """Return the rows of `chosen.ids`, which `group` made: `(len(chosen.ids), dim)`. Raises and costs as `pull`."""
        self._check()
        return self._pull(chosen, None, (), reads, at_least, timeout)

    def _pull(
        self,
        chosen: GroupedIds,
        spread: Callable[[Tensor], Tensor] | None,
        claims: Sequence[Claim],
        reads: ReadMode | None,
        at_least: int,
        timeout: float | None,
    ) -> Handle[Tensor]:
        """Pull each row once, and return the handle of them: of what `spread` makes of them, if that is given."""
        mode = READS[one_of("reads", self._reads if reads is None else reads, tuple(READS))]
        version = check_int("at_least", at_least, 0, (1 << 63) - 1)
        nbytes = chosen.ids.numel() * self._spec.row_bytes
        handle = self._session.handle("pull_rows", nbytes, timeout, depth=4)
        acquire(claims, handle)
        pool = self._session.context.pool
        room = pool.take_room(chosen.ids.nbytes)  # servers may look at it until all is over
        room[: chosen.ids.nbytes].view(torch.int64).copy_(chosen.ids)
        with torch.inference_mode(False):
            # What does not stay is of the pool: fresh memory costs as much as all the copying.
            came = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if spread is None else pool.take_room(nbytes)
            rows = came[:nbytes].view(self.dtype).view(-1, self.dim)
        blocks = dict(zip((span.rank for span in self._entry.spans), chosen.blocks(), strict=True))
        ids = {rank: room[block.start * ID_BYTES : block.stop * ID_BYTES] for rank, block in blocks.items()}

        def over() -> Tensor:
            pool.release(room)
            if spread is None:
                return rows
            result = spread(rows)
            pool.release(came)
            return result

        operation = UserCall(handle, 1, claims, over)
        part = PullPart(operation, self._entry, nbytes, lambda rank: rows[blocks[rank]].view(-1), ids)
        self._session.client.pulls.pull(part, mode, version)
        return handle

    def push(
        self, ids: Tensor, values: Tensor, *, rule: str | None = None, timeout: float | None = None
    ) -> Handle[None]:
        """Have servers apply `values`, `(*ids.shape, dim)`, to the rows of `ids`: by the table's optimizer, else added.

        Values of an id that is there twice are summed. In a step of several workers' pushes each row's are summed, with
        the weights of the consistency: a mean divides by the number of pushes, whichever rows they have. All workers
        should push equally often, as any tensor; without ids where they have none. With `rule` "copy" the values
        replace the rows, before what is summed: of an id that is there twice the last, of workers the last one's.

        Done as `ParameterServer.push`. `ids` and `values` are the caller's again when this returns. Raises KeyError
        after `free`, TypeError and ValueError for ids as `pull` does, for another dtype or shape of `values`, another
        rule, and on a rank that is no worker; RemoteError on await for what a server raised, PeerLost when one is gone.
        Cost: a message to each server, with 8 bytes for each id and its row, once.
        """
        self._check()
        self._session.check_worker("push")
        if rule is not None:
            one_of("rule", rule, ("copy",))
        chosen = self.group(ids)
        given = self._checked(values, "values", chosen).detach().reshape(-1, self.dim)
        with torch.inference_mode(False), torch.no_grad():
            rows = chosen.summed(given) if rule is None else chosen.last(given)
            return self._push(chosen, rows, (), timeout, rule)

    def push_grouped(self, chosen: GroupedIds, values: Tensor, *, timeout: float | None = None) -> Handle[None]:
        """Push `values`, `(len(chosen.ids), dim)`, one row for each of `chosen.ids`; else as `push`.

        `values` must not be changed until it is done. Raises BufferInFlight for those that are written to just now.
        """
        self._check()
        self._session.check_worker("push")
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

    def _check(self) -> None:
        self._session.check()
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
