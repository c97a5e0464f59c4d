"""Builds and issues the operations of a communicator, and gives its parts to other packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.backends.arithmetic import wire_op
from aiodist.backends.base import Transport, Wanted, tag_of
from aiodist.collectives.choice.availability import ONE_FORM
from aiodist.collectives.choice.selector import compared
from aiodist.collectives.choice.table import COMPARED_BYTES, Edit, LimitEdit
from aiodist.collectives.cuda.on_device import DeviceWork, attach, on_devices
from aiodist.collectives.cuda.queued import Queue
from aiodist.collectives.implementations import Primitives, Repertoire
from aiodist.collectives.operations import Work, alike_lists, each, nothing
from aiodist.communicator.arguments import CallTerms, check_across, check_name
from aiodist.communicator.claims import Claim
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.group import Group
from aiodist.communicator.levels import Levels
from aiodist.communicator.messenger import Messenger
from aiodist.communicator.names import Named
from aiodist.communicator.operation import CommunicatorOperation, When
from aiodist.communicator.plans import Plans, Signature
from aiodist.communicator.resources import Resources
from aiodist.handles import Handle
from aiodist.handles.kernel import Program
from aiodist.streams import check_not_capturing
from aiodist.topology import Topology
from aiodist.types import OPERATIONS, ReduceOp

_CPU = torch.device("cpu")
_ANYWHERE = ONE_FORM.keys() - {"alltoall_single"}
"""Operations that need no agreement on devices, since messages carry the tensors unless NCCL does."""


class Parts(NamedTuple):
    """The layers below the calls of a communicator, for other packages of aiodist (see `parts_of`)."""

    dispatcher: Dispatcher
    messenger: Messenger
    transport: Transport
    registry: Any
    """The `Registry` that made the communicator."""
    repertoire: Repertoire
    comparing: Callable[[Fingerprint], Any]
    """Function that returns the communicator for one call in which the ranks compare the given fingerprint.

    For interfaces that require more of the ranks, such as equal counts.
    """


class Upkeep(NamedTuple):
    """Changes that the registry makes to a communicator (see `upkeep_of`)."""

    apply_edits: Callable[[Sequence[Edit]], None]
    """Function that applies edits to the selector's table, from the next operation on."""
    compare_edit: Callable[[Edit], Handle[None]]
    """Function that issues the comparison of an edit among the ranks. The communicator is aborted if edits differ."""
    set_levels: Callable[[Levels | None, tuple[Base, Sequence[int]] | None], None]
    """Function that sets the levels. None uses the levels of the parent communicator among these ranks."""


class Base(Group):
    """A group of ranks that issues operations."""

    _registry: Any
    """The `Registry` that made the communicator, set by `Communicator`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        topology: Topology | None,
        resources: Resources,
        edit: Callable[[Any, Edit], Handle[None]],
    ) -> None:
        super().__init__(dispatcher, topology, resources, edit)
        self._messenger = Messenger(dispatcher)
        self._plans: Plans = Plans(dispatcher, self._device, self._queue_of)
        self._no_plans = self._plans.without_plans()
        self._issuer = dispatcher.lifetime.issuer
        """The compiled core's part of issuing, which `allreduce` calls first, or None."""
        self._compared: Fingerprint | None = None

    # --- changes by the registry ------------------------------------------------------------------------------

    def _apply_edits(self, edits: Sequence[Edit]) -> None:
        with self._dispatcher.lifetime.undisturbed():
            self._repertoire = self._selector.repertoire = self._repertoire.edited(edits)
            self._plans.follow(self._repertoire)
            for edit in edits:
                if isinstance(edit, LimitEdit) and edit.name == "large_bytes":
                    self._dispatcher.large_bytes = edit.value

    def _compare_edit(self, edit: Edit) -> Handle[None]:
        dispatcher, abort = self._dispatcher, self._dispatcher.lifetime.abort
        with dispatcher.lifetime.undisturbed():
            work = partial(compared, edit=edit, differ=lambda error: dispatcher.progress.post(abort, error))
            make = partial(self._plans.program, work, self._repertoire, "direct")
            handle = dispatcher.issue(CommunicatorOperation(), Fingerprint("selector"), make)
        return handle.detach()  # no await is needed, since every later operation raises the error too

    def _set_levels(self, levels: Levels | None, made_of: tuple[Base, Sequence[int]] | None) -> None:
        self._levels, self._made_of = levels, made_of

    # --- issuing --------------------------------------------------------------------------------------------

    def _queue_of(self, call: Signature, repertoire: Repertoire) -> Queue | None:
        """Return a function that queues the allreduce on a device by one call, or None if the device has none."""
        accelerator = self._resources.accelerator
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
        vars(other).update(vars(self), _compared=what, _plans=self._no_plans, _issuer=None)
        return other

    def _issue(
        self,
        what: Fingerprint,
        work: Callable[[Primitives], Program[Any]],
        claims: Sequence[Claim],
        ts: Sequence[Tensor],
        terms: CallTerms,
        convert: Callable[[Any], Any] | None = None,
        *,
        outs: Sequence[Tensor | None] = (),
        expects: bool = False,
    ) -> Handle[Any]:
        """Issue the program of `work`.

        With `expects`, results may be on this rank's device although no tensor of the call is there.
        """
        nbytes = sum(t.nbytes for t in ts)
        # In the order of the tensors, which is the same on all ranks.
        where = dict.fromkeys(t.device for t in (*ts, *outs) if t is not None and not t.is_cpu)
        make = partial(self._plans.program, work, self._repertoire, terms.impl)
        if terms.name is not None:
            if where:
                why = "expected the CPU, since a device takes operations in one order"
                raise ValueError(f"name= with a tensor on {next(iter(where))}: {why}")
            named = CommunicatorOperation(None, claims, convert, meets=self._named(terms, what.kind))
            return self._dispatcher.issue(named, what, make, nbytes=nbytes, timeout=terms.timeout)
        self._repertoire.check(terms.impl, what.kind)
        tag = tag_of(self.seq)
        devices = self._work_on(where, tag) if where else self._work_expected(tag) if expects else []
        if devices:
            make = partial(_on_devices, make, devices, [*ts, *outs])
            assert self._resources.accelerator is not None
            if what.kind not in _ANYWHERE and (places := self._resources.accelerator.places(self.name, ts)):
                what = replace(what, dtype=f"{what.dtype}{places}")
        # NCCL queues immediately. Other work on a device begins as on the host.
        when = When.NOW if where and "nccl" in self._repertoire.on_cuda else When.HOST
        if when is When.HOST and nbytes >= COMPARED_BYTES and what.kind not in OPERATIONS:
            when = When.ALL  # the operation itself compares metadata by messages
        operation = CommunicatorOperation(None, claims, convert, when=when)
        work_bytes = 0 if devices else nbytes
        try:
            handle = self._dispatcher.issue(
                operation, self._compared or what, make, nbytes=nbytes, timeout=terms.timeout, work_bytes=work_bytes
            )
        except BaseException:
            for one in devices:  # the device's next launch waits for this
                one.cancel()
            raise
        if devices:
            attach(handle, devices)
            if len(self._dispatcher.operations) > 1:
                self._dispatcher.progress.try_poll()  # so that the device begins before the next call of this thread
        return handle

    def _named(self, terms: CallTerms, kind: str) -> Named:
        """Return the next use of the name, or raise if the communicator refuses calls or `impl` takes no name."""
        self._dispatcher.check_usable()
        self._repertoire.check_named(terms.impl, kind)
        use = self._dispatcher.names.next(check_name(terms.name))
        use.edition = self._repertoire.edition
        return use

    def _issue_across(
        self,
        what: Fingerprint,
        ts: list[Tensor],
        make: Callable[[Primitives], Program[Any]],
        claims: Sequence[Claim],
        terms: CallTerms,
        *,
        empty: object,
    ) -> Handle[Any]:
        """Issue the program of `make` over the lists of all ranks. An empty list gives the result `empty`.

        The program begins after the ranks have compared the lengths of the lists.
        """
        if not ts:
            return self._issue(what, partial(nothing, result=empty), [], ts, terms)
        check_across(ts)
        return self._issue(what, partial(alike_lists, ts=ts, then=make), claims, ts, terms)

    def _work_on(self, devices: Collection[torch.device], tag: int | None) -> list[DeviceWork]:
        """Return the work on `devices` of the next operation, a collective of `tag` or a message.

        Raises ValueError if this communicator has no such device, RuntimeError while a CUDA graph is captured.
        """
        self._dispatcher.check_on_loop("an operation on CUDA tensors")
        if not self._repertoire.on_cuda:
            why = self._repertoire.why_no_cuda
            raise ValueError(f"t is on {next(iter(devices))}: expected a device of this communicator (cpu): {why}")
        assert self._resources.accelerator is not None
        check_not_capturing(*(device.index for device in devices))
        return [self._resources.accelerator.work(self.name, device, tag) for device in devices]

    def _work_expected(self, tag: int | None) -> list[DeviceWork]:
        """Return the work that the next operation may have on this rank's device, or an empty list.

        The list is empty before the process uses a device. The list is empty on threads other than the loop's, which
        cannot issue work on devices.
        """
        accelerator = self._resources.accelerator
        if self._device.type == "cpu" or not self._repertoire.on_cuda or not torch.cuda.is_initialized():
            return []
        if not self._dispatcher.progress.owns_thread():
            return []
        assert accelerator is not None
        self._dispatcher.check_usable()
        check_not_capturing(self._device.index)
        return [accelerator.work(self.name, self._device, tag, expected=True)]

    @staticmethod
    def _each(
        work: Work,
        ts: Sequence[Tensor],
        given: object,
        out: Tensor | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> Callable[[Primitives], Program[Any]]:
        """Return the program that runs `work` on one tensor or a list, and converts the result.

        The program uses the present memory of the tensors, even if user code replaces the memory later by
        `t.data = ...` or `module.half()`. Its writes do not count as writes of the user's code (see `Mark`).
        """
        detached = [t.data for t in ts]
        return partial(each, work=work, ts=detached, out=out, convert=convert, listed=not isinstance(given, Tensor))


def _on_devices(
    make: Callable[[CommunicatorOperation], Program[Any]],
    devices: Sequence[DeviceWork],
    given: Sequence[Tensor | None],
    operation: CommunicatorOperation,
) -> Program[Any]:
    return on_devices(make(operation), devices, given)


def parts_of(comm: Base) -> Parts:
    """Return the layers below the calls of a communicator."""
    dispatcher = comm._dispatcher
    return Parts(dispatcher, comm._messenger, dispatcher.transport, comm._registry, comm._repertoire, comm._comparing)


def upkeep_of(comm: Base) -> Upkeep:
    """Return the changes of a communicator by the registry."""
    return Upkeep(comm._apply_edits, comm._compare_edit, comm._set_levels)
