"""The calls that register and free names of tensors, objects and tables, and change the settings of their rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES, Done, dtype_name
from aiodist.codecs import ObjectCodec
from aiodist.communicator.arguments import check_tensor
from aiodist.handles import Handle
from aiodist.handles.kernel import Program, together, transfer, transfers
from aiodist.ps.names import NameEntry, Names, check_settings, listed
from aiodist.ps.optimizers import OptimizerRule
from aiodist.ps.row_store import optimizer_of
from aiodist.ps.rows import Constant, Normal, TableSpec, Uniform, initial_of
from aiodist.ps.rules import RULES
from aiodist.ps.session import ParameterServerSession
from aiodist.ps.settings import STARTS, ReadMode, RuleLike, Settings, Span, Start, place, spread
from aiodist.ps.table import Table
from aiodist.streams.memory import flat
from aiodist.types import check_timeout, one_of, settings_text

_MISSING: Any = object()
_NORMAL = Normal()


class Naming:
    """The calls about names."""

    def __init__(self, session: ParameterServerSession, reads: ReadMode) -> None:
        self._session = session
        self._read_mode = reads
        self._names = Names()
        self._prefetched: dict[str, tuple[Handle[Any], Tensor]] = {}

    @property
    def _settings(self) -> Settings:
        return self._session.settings

    @property
    def names(self) -> tuple[str, ...]:
        """Names that this rank has passed to `init`, in the order of the calls."""
        return self._names.names

    def init(
        self,
        what: str | Sequence[str],
        values: Any = _MISSING,  # noqa: ANN401
        *,
        start: Start | None = None,
        rule: RuleLike | None = None,
        codec: ObjectCodec | None = None,
        timeout: float | None = None,
    ) -> Handle[None]:
        """Register tensors or objects by name, with their first values; `push` and `pull` take only these.

        Args:
            what: a name, or a list of names.
            values: the value, or a list of values: tensors of any shape, or objects if there is a `codec`.
            start: "root", "first" or "own", the origin of the first values, see `ParameterServer`; None is its `start`.
            rule: the rule of pushes; None is that of the server.
            codec: `codecs.Json()` or `codecs.Pickle()`, for Python objects.
            timeout: seconds from the call until the await raises OperationTimeout; None is the default of the server.

        Returns:
            None, when the servers have the first values.

        Raises:
            KeyError: for a name that this rank has already.
            TypeError: for integers, if the consistency takes means.
            MismatchError: on await, if ranks differ in dtype, shape, rule or start.

        Cost: a message to one server and back for each name, and the values once.
        """
        self._session.check()
        names = [what] if isinstance(what, str) else listed("names", what)
        given = [values] if isinstance(what, str) else listed("values", values)
        if len(names) != len(given):
            raise ValueError(f"{len(given)} values for {len(names)} names: expected one for each")
        chosen = self._settings.start if start is None else one_of("start", start, STARTS)
        fresh = [self._new(name, value, rule, codec, chosen) for name, value in zip(names, given, strict=True)]
        if len(set(names)) != len(names):
            raise ValueError(f"init of {names}: expected each name once")
        if codec is not None:
            given = [codec.encode(value) for value in given]  # here, so that the call raises errors of the values
        staged = [self._session.context.staged(flat(value)) for value in given]
        check_timeout(timeout)
        self._names.announce(names)
        return self._session.run("init", partial(each, self._opening, fresh, staged), timeout)

    def _new(
        self,
        name: str,
        value: Any,  # noqa: ANN401
        rule: RuleLike | None,
        codec: ObjectCodec | None,
        start: Start,
    ) -> NameEntry:
        self._names.check_new(name)
        if value is _MISSING:
            raise TypeError(f"init of {name!r}: expected a value, from which readers too learn dtype and shape")
        number, chosen = self._settings.rule("copy" if rule is None and codec is not None else rule)
        if codec is not None:
            if chosen is not RULES["copy"]:
                raise ValueError(f"rule {chosen.name} for the object {name!r}: expected copy")
            return self._placed(NameEntry(name, None, number, chosen, codec=codec, start=start))
        t = check_tensor(value, name)
        chosen.check(t.dtype)
        if self._settings.consistency.scales and not (t.dtype.is_floating_point or t.dtype.is_complex):
            raise TypeError(
                f"{name!r} holds {dtype_name(t.dtype)}: expected a floating dtype, "
                f"since {self._settings.consistency!r} takes means"
            )
        return self._placed(NameEntry(name, t, number, chosen, start=start))

    def embedding(
        self,
        name: str,
        dim: int,
        *,
        rows: int | None = None,
        init: Uniform | Normal | Constant | float = _NORMAL,
        optimizer: OptimizerRule | str | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        timeout: float | None = None,
    ) -> Handle[Table]:
        """Make a table of rows, spread over all servers; every rank that uses it calls this with the same arguments.

        Args:
            name: name of the table.
            dim: elements of a row.
            rows: ids go from 0 to below `rows`; None allows ids below 2^63.
            init: first value of a row: `Normal(mean, std)`, `Uniform(low, high)` or a number. It depends on `seed` and
                the id alone.
            optimizer: `SGD`, `Adagrad` or `Adam`, as torch's for sparse gradients: a push changes its rows and their
                state only. A str is one of the server's `rules`. None is the server's `rule`, if that is an optimizer;
                otherwise pushes are added. `configure(name, lr=...)` changes settings.
            dtype: dtype of the rows.
            seed: seed of the first values.
            timeout: seconds from the call until the await raises OperationTimeout; None is the default of the server.

        Returns:
            The `Table`.

        Raises:
            KeyError: for a name that this rank has already.
            TypeError: for an argument of a wrong type.
            ValueError: for an argument out of range.
            MismatchError: on await, if ranks disagree on the arguments.

        Cost: a message to each server and back. A million rows of 64 float32 take about 0.3 GB with their index, 0.55
        with Adagrad, 0.8 with Adam, over all servers, with room to grow.
        """
        self._session.check()
        self._names.check_new(name)
        chosen = optimizer if isinstance(optimizer, OptimizerRule) else self._settings.rule(optimizer)[1]
        if optimizer is not None and not isinstance(chosen, OptimizerRule):
            raise TypeError(f"optimizer={optimizer!r}: expected SGD, Adagrad or Adam")
        spec = TableSpec(
            dim=dim,
            rows=rows,
            dtype=dtype,
            init=initial_of(init),
            seed=seed,
            optimizer=chosen if isinstance(chosen, OptimizerRule) else None,
        )
        optimizer_of(spec)  # raises what it cannot be
        check_timeout(timeout)
        entry = self._placed(NameEntry(name, None, *self._settings.rule(None), table=spec))
        self._names.announce([name])
        return self._session.run("embedding", partial(self._making, entry), timeout)

    async def _making(self, entry: NameEntry) -> Table:
        await self._opening(entry, torch.empty(0, device="cpu"))
        return Table(self._session, self._names, entry, self._read_mode)

    async def _opening(self, entry: NameEntry, data: Tensor, fetch: Callable[[Done], None] | None = None) -> None:
        opened = None
        try:
            await self._opened(entry, data, fetch)
            opened = entry
        finally:
            self._names.settle(entry.name, opened)

    async def _opened(self, entry: NameEntry, data: Tensor | None, fetch: Callable[[Done], None] | None = None) -> None:
        """Register a name with its servers, and send the first values. After a rebind there are no data.

        `fetch` copies the data from a device.
        """
        leader = entry.spans[0].rank
        said = await self._session.client.call(
            leader,
            "open",
            name=entry.name,
            dtype=DTYPES.index(entry.dtype),
            shape=list(entry.shape),
            rule=entry.rule_number,
            start=entry.start,
            servers=entry.servers,
            codec=settings_text(entry.codec),
            table=str(entry.table),
            again=data is None,
        )
        entry.key = said["key"]
        if said["fill"]:
            if fetch is not None:
                await transfer(fetch)
            own = entry.start == "own" and data is not None
            spans = [span for span in entry.spans if not own or span.rank == self._session.coll.rank]
            if entry.codec is not None and data is not None:
                spans = [Span(spans[0].rank, spans[0].start, data.numel())]
            await self._session.client.making(entry, spans)
            if data is not None and entry.table is None:
                with suppress(KeyError):  # an error on other ranks, which `ready` raises
                    await transfers([(self._session.client.pushes.fill, entry, span, data) for span in spans])
            await self._session.client.call(leader, "ready", name=entry.name, key=entry.key)

    def _placed(self, entry: NameEntry) -> NameEntry:
        name, servers = entry.name, self._settings.servers
        if entry.table is not None:
            entry.place(spread(name, servers))
        elif entry.codec is not None:
            entry.place(place(name, 1, 1, servers, 2))
        else:
            entry.place(place(name, prod(entry.shape), entry.dtype.itemsize, servers, self._settings.split_bytes))
        return entry

    def free(self, what: object, *, timeout: float | None = None) -> Handle[None]:
        """Forget names on this rank, after its own pushes. Servers free a name when all workers have freed it.

        Raises KeyError for an unknown name. Cost: a message to one server for each name, and an answer.
        """
        self._session.check()
        entries = list(dict.fromkeys(self._names.resolve(what)[0]))
        check_timeout(timeout)
        for entry in entries:
            self._names.remove(entry)
            self._prefetched.pop(entry.name, None)
        return self._session.run("free", partial(each, self._freeing, entries, [()] * len(entries)), timeout)

    async def _freeing(self, entry: NameEntry) -> None:
        try:
            await transfer(self._session.client.when_over, entry)
            await self._session.client.call(entry.spans[0].rank, "free", name=entry.name, key=entry.key)
        finally:
            self._names.settle(entry.name, None)

    def configure(self, what: object = None, *, timeout: float | None = None, **settings: float) -> Handle[None]:
        """Change settings of server-side optimizers, such as `lr` and `weight_decay`, from the next push on.

        `what` as in `push`; None is all tensors that it was opened with. Settings change on every shard between the
        same two versions. Raises ValueError and TypeError for settings that a rule does not have or refuses. Cost: a
        message to each server of a tensor.
        """
        self._session.check()
        entries, _ = self._names.resolve(what)
        if not settings:
            raise ValueError("configure() without settings: expected some, such as lr=0.1")
        for entry in entries:
            check_settings(entry, settings)
        given = [(settings,)] * len(entries)
        return self._session.run("configure", partial(each, self._session.client.configuring, entries, given), timeout)


async def each(
    work: Callable[..., Program[None]], entries: Sequence[NameEntry], given: Sequence[Sequence[Any]]
) -> None:
    """Run `work(entry, *arguments)` for all entries to the end, and then raise the first error."""
    found = await together(*[_kept(work(entry, *args)) for entry, args in zip(entries, given, strict=True)])
    for error in found:
        if error is not None:
            raise error


async def _kept(program: Program[None]) -> Exception | None:
    """Run a program, and return its error."""
    try:
        await program
    except Exception as error:  # noqa: BLE001  - the caller raises it
        return error
    return None
