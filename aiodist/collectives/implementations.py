"""All implementations of one communicator, the choice among them, and the steps that run the chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

import torch

from aiodist.backends.arithmetic import CONVERTED, INEXACT, from_wire, to_wire, wire_op
from aiodist.backends.base import Begin, Done, Exchange, Native, Primitive, Transport, Wanted
from aiodist.backends.shm import ShmNative
from aiodist.collectives.choice.availability import (
    EVERY_OPERATION,
    EXCHANGES,
    ONE_FORM,
    Availability,
    Offer,
    OfferState,
    missing_library,
    state_of,
)
from aiodist.collectives.choice.table import (
    COMPARED_BYTES,
    DEVICES,
    IMPLEMENTATIONS,
    NAMES,
    ON_CUDA,
    Edit,
    LimitEdit,
    RangeEdit,
    Table,
    last_resorts,
    ordered_resorts,
)
from aiodist.collectives.endpoint import Endpoint, Exchanger, Implementation, Traffic
from aiodist.collectives.hierarchical import Hierarchical
from aiodist.collectives.scheduled import Scheduled
from aiodist.errors import BackendError, BackendUnavailable
from aiodist.handles.kernel import Transfer, transfers
from aiodist.schedules import SCHEDULES
from aiodist.types import REDUCTIONS, ReduceOp

_SCHEDULES = tuple(dict.fromkeys(name for names in SCHEDULES.values() for name in names))
_MOST_PICKED = 10_000
_CPU = torch.device("cpu")
_FINISHED = ("allreduce", "reduce_scatter")
_EXCLUDES = "init(reproducible=True) excludes sums whose order depends on more than the number of ranks"


class NativeCollectives(Implementation):
    """Native collectives of the library that carries the communicator, or of shared memory."""

    def __init__(self, name: str, native: Native) -> None:
        self.name = name
        self.finishes, self.in_order, self.recallable = native.finishes, native.in_order, native.recallable
        self._native = native

    def lacks(self, wanted: Wanted) -> str | None:
        return None if self._native.supports(wanted) else f"{self.name} has no {wanted}"

    def in_fixed_order(self, operation: str, ranks: int) -> bool:
        return self.name == "shm"

    def plan_allreduce(self, kind: torch.dtype, numel: int, op: ReduceOp) -> Begin | None:
        """Return a function that starts an allreduce by one native call, or None if a conversion is necessary."""
        short = kind.is_floating_point and kind.itemsize < 4  # summed in float32
        if (short and not self.finishes) or not self._native.supports(Wanted("allreduce", kind, op, numel)):
            return None
        return self._native.plan_allreduce(kind, numel, op)

    async def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        start = _InOrder(self._native).start if self.in_order and len(primitives) > 1 else self._native.start
        await transfers([(start, o, ep.key) for o in primitives])


@dataclass(eq=False)
class _InOrder:
    """Calls of a library that matches the calls of the ranks by their order.

    No call follows a failed call, since the library would match this rank's next call with the call of another rank
    that corresponds to the failed one.
    """

    _native: Native
    _failed: bool = False

    def start(self, operation: Primitive, key: int, done: Done) -> None:
        if self._failed:
            raise BackendError("an earlier call of this operation failed")
        try:
            self._native.start(operation, key, done)
        except Exception:
            self._failed = True
            raise


class Kit(NamedTuple):
    """The implementations for tensors on CUDA devices."""

    implementations: Sequence[Implementation] = ()
    missing: Mapping[str, str] = MappingProxyType({})
    """Reason for each missing implementation, by name."""
    exchanger: Exchanger | None = None


class Repertoire:
    """The implementations and the selector table of a communicator, equal on all ranks.

    A repertoire is immutable, so an edit makes another one. So an operation issued before an edit uses the old table on
    every rank, whenever that rank starts the operation.
    """

    def __init__(
        self,
        transport: Transport,
        table: Table | None = None,
        *,
        hosts: Sequence[Sequence[int]] = (),
        within: ShmNative | None = None,
        alone: str = "",
        cuda: Callable[[Repertoire], Kit] | str = "there is no CUDA device here",
        reproducible: bool = False,
    ) -> None:
        """`hosts` are the ranks of each host.

        `within` is the shared memory of this host, or None for the reason `alone`. `cuda` makes the implementations for
        CUDA devices, or is the reason why there are none. True for `reproducible` excludes implementations whose sums
        of floats depend on more than the number of ranks.
        """
        self._transport = transport
        self._hosts = hosts
        self._alone = alone
        self._cuda = cuda
        self.within = within
        self.reproducible = reproducible
        library = None if transport.native is None else NativeCollectives(transport.name, transport.native)
        near = None if within is None else NativeCollectives("shm", within)
        self._shares = within is not None and within.size == transport.size
        """True if all ranks share memory."""
        self.edition = 0 if table is None else table.fingerprint
        """Fingerprint of the given table, or 0 for the default table."""
        self.table = table or Table.usual(None if library is None else library.name, shares=self._shares)
        if not isinstance(cuda, str):  # a given table may lack the rows for devices
            self.table = self.table.on_cuda()
        limits = self.table.limits
        several = len(hosts) > 1
        here = next((len(ranks) for ranks in hosts if transport.rank in ranks), 0)
        whole = near if within is not None and within.size == here else None
        kit = Kit() if isinstance(cuda, str) else cuda(self)
        self._missing_on_cuda = kit.missing
        self.exchanger = kit.exchanger
        """Implementation that exchanges tensors on CUDA devices without messages, or None."""
        found = [one for one in (library, near if self._shares else None) if one is not None]
        levels = Hierarchical.forms(hosts, transport.rank, whole, limits) if several else []
        schedules = [Scheduled(name, None, limits) for name in _SCHEDULES]
        self.all = {one.name: one for one in [*found, *levels, *schedules]}
        """Implementations for the CPU, by name."""
        on_cuda = [] if isinstance(cuda, str) else [*kit.implementations, *schedules]
        self.on_cuda = {one.name: one for one in on_cuda}
        """Implementations for CUDA devices, by name (empty without such devices)."""
        self._known: dict[str, dict[str, Implementation]] = {"cpu": self.all, "cuda": self.on_cuda}
        self.hosts = "several" if several else "one"
        """Hosts of this communicator, as in the rows of the table: "one" or "several"."""
        self._picked: dict[tuple[Wanted, str, bool, bool], Implementation] = {}

    @property
    def carrier(self) -> str:
        return self._transport.name

    @property
    def why_no_cuda(self) -> str:
        """Reason why there is no implementation for CUDA devices (empty if there are some)."""
        return self._cuda if isinstance(self._cuda, str) else ""

    # --- choosing -------------------------------------------------------------------------------------------

    def check(self, impl: str, operation: str = "") -> None:
        """Raise BackendUnavailable unless this communicator has `impl`, ValueError if it is not reproducible enough."""
        if impl != "auto" and impl not in (*self.all, *self.on_cuda):
            raise BackendUnavailable(
                f"impl={impl!r}: this communicator has auto, {', '.join(self.all)}{self._because(impl)}"
            )

        if self.reproducible and self.varies(impl, operation):
            known = [name for name in NAMES[operation] if name in (*self.all, *self.on_cuda)]
            kept = ", ".join(name for name in known if not self.varies(name, operation))
            raise ValueError(f"impl={impl!r} of {operation}: {_EXCLUDES}: expected auto, {kept}")

    def varies(self, impl: str, operation: str) -> bool:
        """Return True if sums of floats by `impl` depend on more than the number of ranks."""
        ranks, found = self._transport.size, self.all.get(impl) or self.on_cuda.get(impl)
        if found is None or operation not in REDUCTIONS or ranks <= 2:
            return False
        return not found.in_fixed_order(operation, ranks)

    def check_named(self, impl: str, operation: str = "") -> None:
        """Raise ValueError if `impl` cannot run named operations, which ranks may issue in different orders."""
        self.check(impl, operation)
        able = [name for name, one in self.all.items() if not one.in_order]
        if impl != "auto" and impl not in able:
            why = "a library matches operations by the order of its calls" if impl in self.all else "it is for devices"
            raise ValueError(f"impl={impl!r} with name=: {why}: expected auto, {', '.join(able)}")

    def choice(self, operation: str, nbytes: int, device: str = "cpu", *, ordered: bool | None = None) -> str:
        """Return the name of the table's implementation of `operation` on `nbytes`, or of the best substitute here.

        True for `ordered` requires the fixed order; None does if the communicator is reproducible.
        """
        if device == "cuda" and self._transport.size == 1:
            return "direct"  # no data leaves the device
        name = self.table.choice(device, self.hosts, operation, nbytes)
        available = self._known[device].keys() & NAMES[operation]
        resorts = last_resorts(operation, nbytes, device, shares=self._shares)
        if self.reproducible if ordered is None else ordered:
            available = {one for one in available if not self.varies(one, operation)}
            resorts = ordered_resorts(operation, nbytes, resorts)
        return next(one for one in (name, *resorts) if one in available)

    def every(self, operation: str) -> set[str]:
        """Return the names of the table's implementations of `operation` on the CPU, for all sizes."""
        return {name for _, name in self.table.rows["cpu", self.hosts, operation]}

    def pick(self, wanted: Wanted, impl: str = "auto", *, later: bool = False, ordered: bool = False) -> Implementation:
        """Return the implementation `impl` of an operation, or the table's for "auto", or the best substitute.

        `later` excludes implementations that match operations by the order of the calls, `ordered` those that do not
        sum in the fixed order, as in a reproducible communicator.
        """
        key = (wanted, impl, later, ordered)
        found = self._picked.get(key)
        if found is not None:
            return found
        known = self._known[wanted.device]
        operation, nbytes, device = wanted.operation, wanted.nbytes, wanted.device
        if operation in ONE_FORM:
            exchanges = impl == "auto" and self._transport.size > 1
            names: tuple[str, ...] = ("nccl" if exchanges else impl, ONE_FORM[operation])
        else:
            ordered = (ordered or self.reproducible) and wanted.kind in INEXACT
            name = self.choice(operation, nbytes, device, ordered=ordered) if impl == "auto" else impl
            names = (name, *last_resorts(operation, nbytes, device, shares=self._shares))
            names = ordered_resorts(operation, nbytes, names) if ordered else names
        ranked = [known[one] for one in names if one in known and not (ordered and self.varies(one, operation))]
        if len(self._picked) >= _MOST_PICKED:
            self._picked.clear()
        found = next(one for one in ranked if not (later and one.in_order) and one.lacks(wanted) is None)
        self._picked[key] = found
        return found

    # --- editing --------------------------------------------------------------------------------------------

    def unavailable(self, edit: Edit) -> str | None:
        """Return the reason why the implementation of `edit` is not available, or None.

        Rows for another number of hosts are for splits of this communicator, which check these rows.
        """
        if isinstance(edit, LimitEdit) or (edit.key in self.table.rows and edit.hosts != self.hosts):
            return None
        offer = self.availability().of(edit.operation, edit.impl, edit.device)
        return None if offer.state is OfferState.AVAILABLE else f"{edit.impl} is {offer.state}: {offer.reason}"

    def edited(self, edits: Sequence[Edit]) -> Repertoire:
        table = self.table
        for edit in edits:
            if not isinstance(edit, RangeEdit) or edit.key in table.rows:  # else for devices, which do not exist here
                table = table.edited(edit)
        return Repertoire(
            self._transport,
            table,
            hosts=self._hosts,
            within=self.within,
            alone=self._alone,
            cuda=self._cuda,
            reproducible=self.reproducible,
        )

    # --- availability ---------------------------------------------------------------------------------------

    def availability(self) -> Availability:
        """Return the state of each implementation, with the reasons of missing ones."""
        return Availability(
            [
                Offer(operation, impl, device, *self._state(operation, impl, device))
                for device in DEVICES
                for impl in IMPLEMENTATIONS
                for operation in EVERY_OPERATION
            ]
        )

    def _state(self, operation: str, impl: str, device: str) -> tuple[OfferState, str]:
        found = self._known[device].get(impl)
        if found is None:
            return self._missing(impl, device)
        if (only := ONE_FORM.get(operation)) is not None:
            exchanges = found is self.exchanger and operation in EXCHANGES
            has_it = impl == only or exchanges
            return (OfferState.AVAILABLE, "") if has_it else (OfferState.NOT_IMPLEMENTED, "it has one form")
        example = Wanted(operation, torch.float32, ReduceOp.SUM if operation in REDUCTIONS else None, 1, device)
        if (lacking := found.lacks(example)) is not None:
            return OfferState.NOT_IMPLEMENTED, "there is no such schedule of it" if impl in _SCHEDULES else lacking
        if self.reproducible and self.varies(impl, operation):
            return OfferState.NOT_HERE, _EXCLUDES
        if operation == "allgather" and found.in_order:
            return OfferState.AVAILABLE, "for the sizes, which are sent first; the next best one gathers the data"
        return OfferState.AVAILABLE, ""

    def _missing(self, impl: str, device: str = "cpu") -> tuple[OfferState, str]:
        if device == "cuda":
            if isinstance(self._cuda, str):
                return OfferState.NOT_HERE, self._cuda
            if (why := self._missing_on_cuda.get(impl)) is not None:
                return state_of(why), why
            if impl in ("shm", "mpi", "gloo"):
                return (
                    OfferState.NOT_HERE,
                    f"tensors on a device are staged through the host: staged, which may use {impl}",
                )
        if impl == "shm":
            return OfferState.NOT_HERE, self._why_no_memory()
        if impl in ("hierarchical", "leaders"):
            alike = "the hosts have different numbers of ranks: leaders" if len(self._hosts) > 1 else ""
            return OfferState.NOT_HERE, alike or "all ranks are on one host"
        return missing_library(impl, self._transport.name)

    def _why_no_memory(self) -> str:
        if self._transport.size == 1:
            return "there is one rank"
        if len(self._hosts) > 1:
            return f"the ranks are on {len(self._hosts)} hosts"
        return self._alone or "its ranks share no memory"

    def _because(self, impl: str) -> str:
        """Return the reason why `impl` is missing (empty if `impl` is no known implementation)."""
        if impl not in (*IMPLEMENTATIONS,):
            return ""
        device = "cuda" if impl in ON_CUDA and self.on_cuda else "cpu"
        return f" ({impl}: {self._missing(impl, device)[1]})"


@dataclass(eq=False, slots=True)
class Primitives:
    """Runs each operation by the implementation `impl`, or by the selector's choice."""

    ep: Endpoint
    _repertoire: Repertoire
    impl: str = "auto"
    _: KW_ONLY
    later: bool = False
    """True for any step but the first (see `afterwards`)."""
    ordered: bool = False
    """True for sums in the fixed order, also without init(reproducible=True)."""
    device: torch.device = _CPU
    """Device of this rank for tensors that other ranks send from devices."""

    def afterwards(self) -> Primitives:
        """Return primitives for a step that is not the first of an operation.

        Libraries match collectives by the order of the calls. All ranks begin operations in the same order, but reach
        second steps in different orders. So only implementations that match by tags run second steps.
        """
        return replace(self, later=True)

    def in_fixed_order(self, operation: str) -> Primitives | None:
        """Return primitives that combine floats in the fixed order, or None if `impl` has another one."""
        return None if self._repertoire.varies(self.impl, operation) else replace(self, ordered=True)

    async def run(self, primitives: Sequence[Primitive]) -> None:
        """Run collectives of one kind on flat tensors. An implementation runs all its collectives together.

        Partial results of 16-bit floats are in float32, so each result is rounded once. The implementations run one
        after another, in the same order on all ranks, so implementations may share tags. A library runs first, so that
        its calls have the order of the operations.
        """
        traffic = self.ep.traffic
        converted: list[tuple[Primitive, Primitive]] = []
        groups: dict[tuple[bool, bool], dict[Implementation, list[Primitive]]] = {}
        for given in primitives:
            o, chosen = given, self._repertoire.pick(given.wanted, self.impl, later=self.later, ordered=self.ordered)
            converts = o.kind in REDUCTIONS and (o.op is ReduceOp.MEAN or o.t.dtype in CONVERTED)
            if converts and not (chosen.finishes and o.kind in _FINISHED):
                o = _in_wire_dtype(given)
                converted.append((given, o))
                chosen = self._repertoire.pick(o.wanted, self.impl, later=self.later, ordered=self.ordered)
            groups.setdefault((not o.t.is_cpu, not chosen.in_order), {}).setdefault(chosen, []).append(o)
        for _, group in sorted(groups.items(), key=itemgetter(0)):
            for chosen, members in group.items():
                if traffic is None:
                    await chosen.run(self.ep, members)
                    continue
                traffic.way = chosen.name
                traffic.native += not chosen.recallable
                sizes = [max(o.t.nbytes, o.out.nbytes) for o in members]
                if chosen.in_order or (not chosen.compares and max(sizes) >= COMPARED_BYTES):
                    await traffic.agreed()
                await chosen.run(self.ep, members)
                traffic.native -= not chosen.recallable
        for given, o in converted:
            if o.kind != "reduce" or self.ep.rank == o.root:
                from_wire(o.out, given.out, given.op, self.ep.rank + 1 if o.kind == "scan" else self.ep.size)

    async def exchange(self, exchanges: Sequence[Exchange], ahead: Sequence[Transfer] = ()) -> None:
        """Send and receive tensors by messages, or by NCCL if all ranks can. The transfers `ahead` start first.

        All ranks must know which tensors are on the CPU and which on CUDA devices.
        """
        on_cpu = [o for o in exchanges if o.t.is_cpu]
        on_cuda = [o for o in exchanges if not o.t.is_cpu]
        if on_cpu or ahead:
            await transfers([*ahead, *self._messages(on_cpu)])
        exchanger = self._repertoire.exchanger
        if on_cuda and exchanger is not None and self.impl in ("auto", "nccl") and self.ep.size > 1:
            host = Primitives(self.ep, self._repertoire, "doubling", later=True)
            takes = torch.tensor([exchanger.takes(self.ep, o) for o in on_cuda], device="cpu")
            able = (await host.exchange_facts(takes)).all(0).tolist()
            native = [o for o, taken in zip(on_cuda, able, strict=True) if taken]
            on_cuda = [o for o, taken in zip(on_cuda, able, strict=True) if not taken]
            if native:
                traffic = self.ep.traffic or Traffic()
                traffic.native += 1
                await exchanger.run(self.ep, native)
                traffic.native -= 1
        if on_cuda:
            await transfers(self._messages(on_cuda))

    def _messages(self, exchanges: Sequence[Exchange]) -> list[Transfer]:
        receives = [self.ep.recv(t, rank) for o in exchanges for rank, t in o.receives]
        return receives + [self.ep.send(t, rank) for o in exchanges for rank, t in o.sends]

    def release(self) -> None:
        """Release the launch slots of an operation without exchanges on devices."""
        if self._repertoire.exchanger is not None:
            self._repertoire.exchanger.release(self.ep)

    async def exchange_facts(self, facts: torch.Tensor) -> torch.Tensor:
        """Return the small flat CPU tensor of every rank, one row each, after the ranks have compared the operation."""
        ranks, count = self.ep.size, facts.numel()
        table = torch.empty(ranks * count, dtype=facts.dtype, device="cpu")
        await self.run([Primitive("allgather", facts, table, counts=[count] * ranks)])
        await self.ep.known()
        return table.view(ranks, count)


def _in_wire_dtype(o: Primitive) -> Primitive:
    """Return the primitive of `o` on tensors in the dtype of partial results."""
    wire = to_wire(o.t)
    out = wire
    if o.out is not o.t:
        # A result in wire dtype needs no copy.
        out = to_wire(o.out) if wire.dtype.itemsize == o.t.dtype.itemsize else wire.new_empty(o.out.numel())
    return Primitive(o.kind, wire, out, op=wire_op(o.op), root=o.root, counts=o.counts)
