"""State that the calls of a communicator share, and how an operation is built and issued."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np
import torch
from torch import Tensor

from aiodist.backends.base import Transport, Wanted, key_of, tag_of
from aiodist.collectives.arithmetic import wire_op
from aiodist.collectives.choice.availability import ONE_FORM, Availability
from aiodist.collectives.choice.selector import Selector, compared
from aiodist.collectives.choice.table import COMPARED_BYTES, Edit, LimitEdit
from aiodist.collectives.cuda.on_device import DeviceWork, attach, on_devices
from aiodist.collectives.cuda.queued import Queue
from aiodist.collectives.endpoint import Endpoint
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.wrappers import alike_lists, each, nothing
from aiodist.communicator.arguments import Terms, check_across, check_list, check_name, check_tensor, is_number
from aiodist.communicator.claims import Claim
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.fingerprint import Fingerprint, described
from aiodist.communicator.levels import Levels
from aiodist.communicator.messenger import Messenger
from aiodist.communicator.names import Named
from aiodist.communicator.operation import When
from aiodist.communicator.plans import NoPlans, Plans, Signature
from aiodist.communicator.resources import Resources
from aiodist.control.generations import Generation
from aiodist.handles import Handle
from aiodist.handles.kernel import Program, prepare
from aiodist.streams import check_not_capturing
from aiodist.topology import Topology
from aiodist.types import OPERATIONS, ReduceOp

_CPU = torch.device("cpu")
_ANYWHERE = ONE_FORM.keys() - {"alltoall_single"}
"""Operations that ranks may run on any of their devices: messages carry them if NCCL cannot."""


CAUSE = 0.8
"""Share of all waits for which a rank is called the cause."""


@dataclass(frozen=True)
class WaitingCall:
    """Waits of the ranks for one another.

    In a collective the ranks wait for the last one, each from its own arrival; waits shorter than the error of the
    clocks do not count. A receive from one rank, not from `ANY`, waits for that rank from the call until the message
    has arrived; waits below a millisecond do not count.
    """

    seconds: tuple[float, ...]
    """Sum of the waits for each rank, in seconds."""
    by_operation: Mapping[str, tuple[float, ...]]
    """The same sums by operation, such as "allreduce"."""
    compared: int
    """Number of compared collectives; at more than some thousand per second only the last ones are compared."""
    clock_error: float
    """Largest error of the difference of two clocks, in seconds."""

    @property
    def cause(self) -> int | None:
        """Rank that caused at least 80 % of the waits; None if no rank did."""
        most = CAUSE * sum(self.seconds)
        return next((rank for rank, waited in enumerate(self.seconds) if waited >= most > 0), None)


@dataclass(frozen=True)
class CommunicatorStatistics:
    """Numbers of a communicator, on this rank."""

    collectives: int
    """Number of collectives issued without a name; equal on all ranks."""
    pending: int
    """Number of unfinished operations: collectives and messages."""
    arena_bytes: int
    """Bytes of tensors in the arena that this rank gave to collectives in the host's shared memory."""
    ordinary_bytes: int
    """Bytes of other tensors, and of tensors up to 32 KiB: they were copied for the other ranks."""
    named: int
    """Number of collectives issued with `name=`, which are not in `collectives`."""
    waited: WaitingCall | None = None
    """Waits of the ranks for one another, up to a second ago; None without `init(stragglers=True)`."""


class Parts(NamedTuple):
    """The layers below the calls of a communicator, for other packages of aiodist; get them from `parts_of`."""

    dispatcher: Dispatcher
    messenger: Messenger
    transport: Transport
    registry: Any
    """The `Registry` that made it."""
    repertoire: Repertoire
    comparing: Callable[[Fingerprint], Any]
    """Returns the communicator for one call, in which the ranks compare this fingerprint instead of the call's own.

    It is for interfaces whose calls require more of the ranks, such as equal counts.
    """


class Upkeep(NamedTuple):
    """Changes that the registry makes to a communicator; get them from `upkeep_of`."""

    apply_edits: Callable[[Sequence[Edit]], None]
    """Applies edits to the selector's table, from the next operation on."""
    compare_edit: Callable[[Edit], Handle[None]]
    """Issues the comparison of an edit among the ranks; the communicator is aborted if they differ."""
    set_levels: Callable[[Levels | None, tuple[Base, Sequence[int]] | None], None]
    """Sets the levels; None uses the levels of the parent communicator among these ranks."""


class Keeper(Protocol):
    """State shared by the communicators of one rank: the interface of the registry."""

    resources: Resources
    stop_requested: bool
    generation: Generation
    waited: dict[str, WaitingCall]

    def edit(self, comm: Any, edit: Edit) -> Handle[None]:  # noqa: ANN401
        """Edit the tables of `comm` and of its descendants; return the handle of the comparison."""


class Base:
    """A group of ranks: its properties, and the issue of operations."""

    def __init__(self, dispatcher: Dispatcher, topology: Topology | None, registry: Keeper) -> None:
        self._dispatcher = dispatcher
        self._transport = dispatcher.transport
        self._topology = topology
        bound = None if topology is None else topology.device
        self._device = _CPU if bound is None else torch.device("cuda", bound.index)
        self._levels: Levels | None = None
        self._made_of: tuple[Base, Sequence[int]] | None = None
        self._registry = registry
        self._repertoire = dispatcher.repertoire
        self._selector = Selector(
            self._repertoire, lambda edit: registry.edit(self, edit), lambda: dispatcher.large_bytes
        )
        self._messenger = Messenger(dispatcher)
        self._plans: Plans = Plans(dispatcher, self._device, self._queue_of)
        self._compared: Fingerprint | None = None

    # --- properties -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this process, from 0; -1 outside of the group."""
        return self._transport.rank

    @property
    def is_root(self) -> bool:
        """True on rank 0."""
        return self._transport.rank == 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._transport.size

    @property
    def name(self) -> str:
        """Name in error messages: "world", or a path below it."""
        return self._dispatcher.name

    @property
    def generation(self) -> int:
        """0, and a higher number after each `shrink` and `grow`; above 0 in `init` on a rank that joins."""
        return self._registry.generation.number

    @property
    def previous(self) -> tuple[int | None, ...]:
        """For each rank its rank in the world before the last `shrink` or `grow`; None for a rank that joined."""
        before = self._registry.generation.previous
        return tuple([before[rank] for rank in self._dispatcher.ranks])

    @property
    def timeout(self) -> float | None:
        """Default timeout of operations, in seconds; None is none."""
        return self._dispatcher.timeout

    @property
    def seq(self) -> int:
        """Number of collectives called on this communicator."""
        return self._dispatcher.oplog.seq

    @property
    def topology(self) -> Topology:
        """Hosts of the ranks, and connections of their GPUs; `print` shows it."""
        if self._topology is None:
            self._dispatcher.check_usable()
        assert self._topology is not None
        return self._topology

    @property
    def levels(self) -> Levels:
        """Groups of the ranks: of `init(levels=)` or of a span, by default of the hosts; `print` shows them.

        The ranks of a `dup`, `group` or `split` have the groups that they have here.
        """
        if self._levels is not None:
            return self._levels
        if self._made_of is not None:
            parent, ranks = self._made_of
            return parent.levels.among(ranks)
        return Levels(self.size, self.rank).below(self.topology.host_of)

    @property
    def local_rank(self) -> int:
        """Number of this rank among the ranks of its host, from 0."""
        return self.topology.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self.topology.local_size

    @property
    def node(self) -> int:
        """Number of this host, from 0."""
        return self.topology.node

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return len(self.topology.hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct hosts, in the order of their first ranks."""
        return self.topology.hosts

    @property
    def device(self) -> torch.device:
        """This rank's CUDA device, number `local_rank` modulo the visible ones, or the CPU."""
        return self._device

    @property
    def backend(self) -> str:
        """The transport: "mpi", "shm", "gloo" or "local"."""
        return self._transport.name

    @property
    def selector(self) -> Selector:
        """Table of implementations by operation and size: `print` shows it, `set` edits it."""
        return self._selector

    def availability(self) -> Availability:
        """Return, for each operation, implementation and device, whether it is available here, and if not, why.

        Local; `print` shows it.
        """
        return self._repertoire.availability()

    def statistics(self) -> CommunicatorStatistics:
        """Return the numbers of operations, and of bytes with and without copies; local."""
        within = self._repertoire.within
        submitted = (0, 0) if within is None else within.submitted_bytes
        return CommunicatorStatistics(
            self.seq,
            len(self._dispatcher.lifetime.pending()),
            *submitted,
            named=self._dispatcher.names.issued,
            waited=self._registry.waited.get(self.name),
        )

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: TextIO | None = None,
        flush: bool = False,
    ) -> None:
        """Print on rank 0; no-op on the other ranks. The arguments are those of Python's `print`."""
        if self.is_root:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def __repr__(self) -> str:
        return f"<Communicator {self.name!r} rank {self.rank} of {self.size} over {self.backend}>"

    # --- changes by the registry ------------------------------------------------------------------------------

    def _apply_edits(self, edits: Sequence[Edit]) -> None:
        with self._dispatcher.lifetime.undisturbed():
            self._repertoire = self._selector.repertoire = self._repertoire.edited(edits)
            self._plans.follow(self._repertoire)
            for edit in edits:
                if isinstance(edit, LimitEdit) and edit.name == "large_bytes":
                    self._dispatcher.large_bytes = edit.value

    def _compare_edit(self, edit: Edit) -> Handle[None]:
        dispatcher = self._dispatcher
        with dispatcher.lifetime.undisturbed():
            seq = self.seq
            endpoint = Endpoint(self._transport, tag_of(seq), traffic=dispatcher.traffic(), key=key_of(seq))
            program = prepare(
                compared,
                Primitives(endpoint, self._repertoire, "direct"),
                edit,
                lambda error: dispatcher.progress.post(lambda: dispatcher.lifetime.abort(error)),
            )
            handle = dispatcher.issue(Fingerprint("selector"), program)
        return handle.detach()  # need not be awaited: every later operation raises its error too

    def _set_levels(self, levels: Levels | None, made_of: tuple[Base, Sequence[int]] | None) -> None:
        self._levels, self._made_of = levels, made_of

    # --- issuing --------------------------------------------------------------------------------------------

    def _queue_of(self, call: Signature, repertoire: Repertoire) -> Queue | None:
        """Return a function that queues such an allreduce by one call on the device; None if there is none."""
        accelerator = self._registry.resources.accelerator
        if accelerator is None or not repertoire.on_cuda or call.impl not in ("auto", "nccl") or call.op is None:
            return None
        if self.size == 1 and call.impl == "auto":
            return accelerator.queue_alone()
        op = ReduceOp(call.op)
        wanted = Wanted("allreduce", call.dtype, wire_op(op), call.shape.numel(), "cuda")
        if repertoire.pick(wanted, call.impl).name != "nccl":
            return None
        return accelerator.queue_by_nccl(self.name, torch.device("cuda", call.device), call.dtype, op)

    def _comparing(self, what: Fingerprint) -> Base:
        other = object.__new__(type(self))
        vars(other).update(vars(self), _compared=what, _plans=NoPlans())
        return other

    def _issue(
        self,
        what: Fingerprint,
        program: Program[Any],
        claims: Sequence[Claim],
        ts: Sequence[Tensor],
        terms: Terms,
        convert: Callable[[Any], Any] | None = None,
        *,
        outs: Sequence[Tensor | None] = (),
        expects: bool = False,
    ) -> Handle[Any]:
        """`expects`: results may be on this rank's device, although no tensor of the call is."""
        nbytes = sum(t.nbytes for t in ts)
        # In the order of the tensors, which is the same on all ranks.
        where = dict.fromkeys(t.device for t in (*ts, *outs) if t is not None and not t.is_cpu)
        if terms.name is not None:
            if where:
                why = "expected the CPU, since a device takes operations in one order"
                raise ValueError(f"name= with a tensor on {next(iter(where))}: {why}")
            return self._dispatcher.issue(
                what, program, claims, nbytes=nbytes, timeout=terms.timeout, convert=convert, when=self._named(terms)
            )
        tag = tag_of(self._dispatcher.oplog.seq)
        work = self._work_on(where, tag) if where else self._work_expected(tag) if expects else []
        if work:
            program = on_devices(program, work)
            assert self._registry.resources.accelerator is not None
            if what.kind not in _ANYWHERE and (places := self._registry.resources.accelerator.places(self.name, ts)):
                what = replace(what, dtype=f"{what.dtype}{places}")
        # NCCL queues immediately; other work on a device begins as on the host.
        when = When.NOW if where and "nccl" in self._repertoire.on_cuda else When.HOST
        if when is When.HOST and nbytes >= COMPARED_BYTES and what.kind not in OPERATIONS:
            when = When.ALL  # it sends messages of its own
        what = self._compared or what
        try:
            handle: Handle[Any] = self._dispatcher.issue(
                what,
                program,
                claims,
                nbytes=nbytes,
                timeout=terms.timeout,
                convert=convert,
                when=when,
                queues=bool(work),
            )
        except BaseException:
            program.close()  # not later, if the caller keeps the error: the launch order of the device waits for it
            raise
        if work:
            attach(handle, work, (ts, outs, claims))
        if work and self._dispatcher.pending_more:
            self._dispatcher.progress.try_poll()  # the device has work while this thread issues many in a row
        return handle

    def _named(self, terms: Terms) -> Named:
        """Return the next use of the name; raise if it cannot be issued."""
        self._dispatcher.check_usable()
        self._repertoire.check_named(terms.impl)
        use = self._dispatcher.names.next(check_name(terms.name))
        use.edition = self._repertoire.edition
        return use

    def _issue_across(
        self,
        what: Fingerprint,
        ts: list[Tensor],
        make: Callable[[Primitives], Program[Any]],
        claims: Sequence[Claim],
        terms: Terms,
        *,
        empty: object,
    ) -> Handle[Any]:
        """Issue the program of `make` over the list and the ranks; for an empty list the result is `empty`.

        It begins after the ranks have compared the lengths of their lists.
        """
        if not ts:
            return self._issue(what, prepare(nothing, empty), [], ts, terms)
        check_across(ts)
        program = prepare(alike_lists, self._primitives(terms), ts, make)
        return self._issue(what, program, claims, ts, terms)

    def _work_on(self, devices: Collection[torch.device], tag: int | None) -> list[DeviceWork]:
        """Return the work on `devices` of the next operation, a collective of `tag` or a message.

        Raises ValueError if this communicator has no such device, RuntimeError while a CUDA graph is captured.
        """
        if not devices:
            return []
        self._dispatcher.check_on_loop("an operation on CUDA tensors")
        if not self._repertoire.on_cuda:
            why = self._repertoire.why_no_cuda
            raise ValueError(f"t is on {next(iter(devices))}: expected a device of this communicator (cpu): {why}")
        assert self._registry.resources.accelerator is not None
        check_not_capturing(*(device.index for device in devices))
        return [self._registry.resources.accelerator.work(self.name, device, tag) for device in devices]

    def _work_expected(self, tag: int | None) -> list[DeviceWork]:
        """Return the work that the next operation may have on this rank's device, or an empty list.

        It is empty before the process uses a device, and on other threads, which cannot issue work on devices.
        """
        accelerator = self._registry.resources.accelerator
        if self._device.type == "cpu" or not self._repertoire.on_cuda or not torch.cuda.is_initialized():
            return []
        if not self._dispatcher.progress.owns_thread():
            return []
        assert accelerator is not None
        self._dispatcher.check_usable()
        check_not_capturing(self._device.index)
        return [accelerator.work(self.name, self._device, tag, expected=True)]

    def _each(
        self,
        work: Callable[..., Program[Sequence[Any]]],
        ts: Sequence[Tensor],
        given: object,
        terms: Terms,
        convert: Callable[[Any], Any] | None = None,
        **arguments: object,
    ) -> Program[Any]:
        """Return the program that runs `work(p, ts, **arguments)` on one tensor or a list, and converts its result.

        It uses the present memory of the tensors, even if user code replaces it later by `t.data = ...` or
        `module.half()`.
        """
        p = self._primitives(terms)
        listed = not isinstance(given, Tensor)
        return prepare(each, p, work, [t.detach() for t in ts], convert, arguments, listed=listed)

    def _primitives(self, terms: Terms) -> Primitives:
        """Return the primitives of the next operation."""
        if terms.name is not None:
            use = self._named(terms)
            ep = Endpoint(self._transport, 0, traffic=use.traffic)
            use.endpoints.append(ep)
            return Primitives(ep, self._repertoire, terms.impl, later=True, device=self._device)
        self._repertoire.check(terms.impl)
        # The tag follows from the number of the operation, which is the same on all ranks.
        accelerator = self._registry.resources.accelerator
        device_messages = None if accelerator is None else accelerator.device_messages
        seq, traffic = self._dispatcher.oplog.seq, self._dispatcher.traffic()
        ep = Endpoint(self._transport, tag_of(seq), device_messages, traffic, key_of(seq))
        return Primitives(ep, self._repertoire, terms.impl, device=self._device)


def parts_of(comm: Base) -> Parts:
    """Return the layers below the calls of a communicator."""
    return Parts(comm._dispatcher, comm._messenger, comm._transport, comm._registry, comm._repertoire, comm._comparing)


def upkeep_of(comm: Base) -> Upkeep:
    """Return the changes of a communicator by the registry."""
    return Upkeep(comm._apply_edits, comm._compare_edit, comm._set_levels)


def tensors_of(t: object) -> list[Tensor]:
    """Return one tensor or a list of tensors as a list, each checked."""
    if isinstance(t, Tensor):
        return [check_tensor(t)]
    if not isinstance(t, (list, tuple)):
        raise TypeError(
            f"t is {type(t).__name__}: expected a tensor or a list of tensors; torch.from_numpy converts an array, "
            "and calls such as allgather_object take any object"
        )
    return check_list(t, None, "t")


def lift(t: Any, op: str | None) -> tuple[Any, Callable[[Any], Any]]:  # noqa: ANN401
    """Return a number as a tensor and the inverse conversion; return other values without change."""
    if not is_number(t):
        return t, lambda result: result
    t = float(t) if isinstance(t, (float, np.floating)) else int(t)
    if isinstance(t, float) or op in ("mean", "avg"):
        return torch.tensor([t], dtype=torch.float64, device="cpu"), _number
    if op == "sum":  # two halves in 64 bits each, with room for the carry of all ranks
        return torch.tensor([t >> 32, t & 0xFFFFFFFF], device="cpu"), _joined
    whole = torch.tensor([t], device="cpu")
    return ([whole, whole.double()], product) if op in ("prod", "product") else (whole, _number)


def _number(result: Any) -> Any:  # noqa: ANN401
    """Return the numbers of tensors of one element, a list for a list."""
    if isinstance(result, list):
        return [each.item() for each in result]
    return None if result is None else result.item()


def _joined(halves: Tensor | None) -> int | None:
    """Return the sum of ints from the sums of their halves."""
    if halves is None:
        return None
    high, low = halves.tolist()
    return int((high << 32) + low)


def product(results: list[Tensor | None]) -> int | None:
    """Return the product of ints; raise OverflowError unless it is near the product in floating point."""
    whole, near = results
    if whole is None or near is None:
        return None
    if abs(whole.item() - near.item()) >= 1 << 62:  # an overflow differs by 2^64, rounding by some 2^11
        raise OverflowError(f"the product, some {near.item():.3g}, does not fit into 64 bits")
    return int(whole.item())


def check_single(t: object, name: str) -> None:
    """Raise ValueError unless `t` is one tensor, as `out=` requires."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name}= requires one tensor as t: expected no {type(t).__name__}")


def check_alike(ts: list[Tensor]) -> list[Tensor]:
    """Return `ts`; raise ValueError unless they have the same dtype and number of elements."""
    if any(t.dtype is not ts[0].dtype or t.numel() != ts[0].numel() for t in ts):
        raise ValueError(f"ts are {described(ts)}: expected the same dtype and number of elements")
    return ts
