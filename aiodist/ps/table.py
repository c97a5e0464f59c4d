"""`Table`: rows that live on the servers, pulled and pushed by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.backends.inplace import flat, writable
from aiodist.codecs import Codec
from aiodist.communicator.claims import Claim, reading, writing
from aiodist.handles import Handle, Progress, in_flight
from aiodist.ps.arguments import check_version
from aiodist.ps.consistency import Synchronous
from aiodist.ps.names import NameEntry, Names, checked
from aiodist.ps.operation import Operation, PullPart
from aiodist.ps.rows import TableSpec
from aiodist.ps.rows.grouping import GroupedIds, grouped
from aiodist.ps.rows.packing import COUNT_BYTES, ID_BYTES, pack_head
from aiodist.ps.rules import RULES
from aiodist.ps.session import ParameterServerSession
from aiodist.ps.settings import READS, ReadMode, one_of
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
    def _ranks(self) -> list[int]:
        return [span.rank for span in self._entry.spans]

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
        with torch.inference_mode(False):
            given = torch.empty(*chosen.shape, self.dim, dtype=self.dtype) if out is None else out
        into = self._checked(given, "out", chosen)
        rows = flat(into).detach().view(-1, self.dim)
        pool, rooms = self._session.context.pool, list[Tensor]()

        def place(rank: int) -> Tensor:
            """Return where a server's rows come to that cannot be looked at where they are."""
            count = chosen.counts[self._ranks.index(rank)]
            rooms.append(pool.take_room(count * self._spec.row_bytes))
            return rooms[-1][: count * self._spec.row_bytes]

        def take(rank: int, came: Tensor) -> None:
            with writable(into), torch.no_grad():
                chosen.scatter(self._ranks.index(rank), came.view(self.dtype).view(-1, self.dim), rows)

        def result() -> Tensor:
            self._release(rooms)
            with writable(into), torch.no_grad():
                chosen.repeat(rows)
            return into

        return self._pull(chosen, writing(rows), result, (place, take), reads, at_least, timeout)

    def pull_grouped(
        self, chosen: GroupedIds, *, reads: ReadMode | None = None, at_least: int = 0, timeout: float | None = None
    ) -> Handle[Tensor]:
        """Return the rows of `chosen.ids`, which `group` made: `(len(chosen.ids), dim)`. Raises and costs as `pull`."""
        self._check()
        with torch.inference_mode(False):
            rows = torch.empty(chosen.ids.numel(), self.dim, dtype=self.dtype)
        blocks = {rank: rows[block].view(-1) for rank, block in zip(self._ranks, chosen.blocks(), strict=True)}
        return self._pull(chosen, [], lambda: rows, (blocks.__getitem__, None), reads, at_least, timeout)

    def _pull(
        self,
        chosen: GroupedIds,
        claims: Sequence[Claim],
        result: Callable[[], Tensor],
        landing: tuple[Callable[[int], Tensor], Callable[[int, Tensor], None] | None],
        reads: ReadMode | None,
        at_least: int,
        timeout: float | None,
    ) -> Handle[Tensor]:
        mode = READS[one_of("reads", self._reads if reads is None else reads, tuple(READS))]
        version = check_version(at_least)
        nbytes = chosen.ids.numel() * self._spec.row_bytes
        handle = self._session.handle("pull_rows", nbytes, timeout, depth=4)
        in_flight.acquire_all(claims, handle)
        room = self._session.context.pool.take_room(chosen.ids.nbytes)  # servers may look at it until all is over
        room[: chosen.ids.nbytes].view(torch.int64).copy_(chosen.ids)
        ids = {
            rank: room[block.start * ID_BYTES : block.stop * ID_BYTES]
            for rank, block in zip(self._ranks, chosen.blocks(), strict=True)
        }

        def over() -> Tensor:
            self._release([room])
            return result()

        part = PullPart(Operation(handle, 1, claims, over), self._entry, nbytes, *landing, ids)
        self._session.client.pulls.pull(part, mode, version)
        return handle

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
        number = self._how(rule, alpha)
        chosen = self.group(ids)
        given = self._checked(values, "values", chosen).detach().reshape(-1, self.dim)
        fill, rooms = partial(chosen.gather, given, last=rule == "copy"), list[Tensor]()
        if self._codec is None:
            packed = self._packed(chosen, fill, rooms)
            return self._push(chosen, lambda: packed, [], (number, alpha), timeout, rooms, later=False)
        with torch.inference_mode(False), torch.no_grad():  # a code is made in the service thread
            rows = torch.empty(chosen.ids.numel(), self.dim, dtype=self.dtype)
            fill([rows[block] for block in chosen.blocks()])
        pack = partial(self._packed, chosen, partial(_copy_blocks, chosen, rows), rooms)
        return self._push(chosen, pack, [], (number, alpha), timeout, rooms)

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
        number = self._how(rule, alpha)
        rows = self._checked(values, "values", chosen.ids).detach()
        rooms: list[Tensor] = []
        pack = partial(self._packed, chosen, partial(_copy_blocks, chosen, rows), rooms)
        return self._push(chosen, pack, reading(flat(rows)), (number, alpha), timeout, rooms)

    def _push(
        self,
        chosen: GroupedIds,
        pack: Callable[[], Sequence[tuple[Tensor, bool]]],
        claims: Sequence[Claim],
        how: tuple[int, float],
        timeout: float | None,
        rooms: list[Tensor],
        *,
        later: bool = True,
    ) -> Handle[None]:
        """Push what `pack` returns, by that rule and alpha; `rooms` go back to the pool when it is over."""
        session = self._session
        nbytes = chosen.ids.numel() * self._spec.row_bytes
        handle = session.handle("push_rows", nbytes, timeout, depth=4)
        in_flight.acquire_all(claims, handle)
        operation = Operation(handle, 1, claims, partial(self._release, rooms))
        session.client.pushes.push_rows(operation, self._entry, nbytes, pack, how, later=later)
        if session.context.coalescer.congested:
            session.progress.glance()
        return handle

    def _release(self, rooms: Iterable[Tensor]) -> None:
        for room in rooms:
            self._session.context.pool.release(room)

    def _packed(
        self, chosen: GroupedIds, fill: Callable[[list[Tensor]], None], rooms: list[Tensor]
    ) -> list[tuple[Tensor, bool]]:
        """Return what each server gets, and whether it is a code; any thread.

        `fill` writes the rows of each server where it is told. Buffers of the pool are added to `rooms`.
        """
        blocks = [chosen.ids[block] for block in chosen.blocks()]
        with torch.inference_mode(False), torch.no_grad():
            plain = [self._room(ids, ids.numel() * self._spec.row_bytes, rooms) for ids in blocks]
            fill([rows.view(self.dtype).view(-1, self.dim) for _, rows in plain])
            return [
                self._coded(ids, rows, rooms) if self._encodes(rank, ids) else (packed, False)
                for rank, ids, (packed, rows) in zip(self._ranks, blocks, plain, strict=True)
            ]

    def _room(self, ids: Tensor, nbytes: int, rooms: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return a buffer of the pool that begins with `ids`, and the `nbytes` behind these."""
        packed_bytes = COUNT_BYTES + ids.nbytes + nbytes
        rooms.append(self._session.context.pool.take_room(packed_bytes))
        packed = rooms[-1][:packed_bytes]
        return packed, pack_head(ids, packed)

    @property
    def _codec(self) -> Codec | None:
        return self._session.settings.codec if self._spec.coded else None

    def _encodes(self, rank: int, ids: Tensor) -> bool:
        return self._codec is not None and rank != self._session.coll.rank and bool(ids.numel())

    def _coded(self, ids: Tensor, rows: Tensor, rooms: list[Tensor]) -> tuple[Tensor, bool]:
        assert self._codec is not None
        with self._session.context.timed("encode_seconds"):
            code = self._codec.encode(rows.view(self.dtype))
        packed, rest = self._room(ids, code.nbytes, rooms)
        rest.copy_(code.view(torch.uint8))
        return packed, True

    # --- checks ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._session.check()
        if self.name not in self._names or self._names[self.name] is not self._entry:
            raise KeyError(f"the table {self.name!r} was freed")

    def _how(self, rule: str | None, alpha: float) -> int:
        """Return the number of the rule by which to push; raise unless this rank may push so."""
        session = self._session
        if session.coll.rank not in session.settings.workers:
            workers = list(session.settings.workers)
            raise ValueError(f"push on rank {session.coll.rank}: expected a worker, one of {workers}")
        RULES["add"].check(self.dtype, alpha)
        if rule is None:
            return TABLE if self._spec.optimizer is not None else session.settings.rule("add")[0]
        return session.settings.rule(one_of("rule", rule, ("add", "copy")))[0]

    def _checked(self, t: Tensor, name: str, ids: Tensor | GroupedIds) -> Tensor:
        t = checked(t, name)
        expected = (*ids.shape, self.dim)
        if t.dtype is not self.dtype:
            raise TypeError(f"{name} for {self.name!r} holds {dtype_name(t.dtype)}: expected {dtype_name(self.dtype)}")
        if t.shape != expected:
            raise ValueError(f"{name} for {self.name!r} has shape {list(t.shape)}: expected {list(expected)}")
        return t

    def __repr__(self) -> str:
        rows = "any" if self.rows is None else str(self.rows)
        return f"<Table {self.name!r} of {rows} rows, {dtype_name(self.dtype)}[{self.dim}]>"


def _copy_blocks(chosen: GroupedIds, rows: Tensor, into: list[Tensor]) -> None:
    """Copy the rows of each group of ids."""
    for block, t in zip(chosen.blocks(), into, strict=True):
        t.copy_(rows[block])
