"""A rank's resources for CUDA tensors: streams, staging, mapped memory of its neighbours, NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from aiodist.backends import nccl
from aiodist.backends.cuda_ipc import Mappings, ReleaseNotices
from aiodist.collectives.cuda.device_messages import DirectMessages, StagedMessages
from aiodist.collectives.cuda.ipc import CudaIpc
from aiodist.collectives.cuda.nccl import Nccl as NcclCollectives
from aiodist.collectives.cuda.nccl import Slots
from aiodist.collectives.cuda.on_device import DeviceWork
from aiodist.collectives.cuda.queued import Alone, ByNccl, NcclReductions, Queue, Queued
from aiodist.collectives.cuda.staging import Staged
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.hierarchical import Hierarchical
from aiodist.collectives.implementations import Kit, Repertoire
from aiodist.collectives.primitives import Primitives
from aiodist.env import Environment, variables
from aiodist.errors import AiodistError, BackendUnavailable
from aiodist.handles import Progress
from aiodist.streams import Events, Staging
from aiodist.topology import Means, Topology
from aiodist.types import ReduceOp

if TYPE_CHECKING:
    from aiodist.control import Channel

_MOST_STREAMS = 16  # for single operations on one device: torch has 32 in all
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_LOOK_SECONDS = 0.05  # between two questions to NCCL whether what is under way has failed


def visible_devices(environment: Environment) -> list[str]:
    """Return the CUDA devices that this process sees, by names that are the same in all processes of a host.

    Takes no memory on them: they are counted, and not opened.
    """
    count = torch.cuda.device_count()
    named = environment.visible_devices
    return list(named[:count]) if named is not None and len(named) >= count else [str(i) for i in range(count)]


def means_here(*, nccl_shares: bool) -> Means:
    """Return what this rank has for its device; `nccl_shares`: NCCL was told that ranks may share one."""
    no_ipc = ""
    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        no_ipc = f"torch allocates with {allocator}, whose memory no other process can map"
    elif name := next((name for name in _ALLOCATOR_VARIABLES if _EXPANDABLE in variables().get(name, "")), None):
        no_ipc = f"{name} has {_EXPANDABLE}: mapping such memory takes the right to trace the process that lends it"
    return Means(*_nccl_here(), nccl_shares, no_ipc)


def _nccl_here() -> tuple[tuple[int, ...], str]:
    """Return NCCL's version, or why it cannot be had: what is installed but cannot be loaded is known to all in time.

    Takes some 0.3 s at the first call, and opens no device.
    """
    if (why := nccl.missing()) is not None:
        return (), why
    try:
        return nccl.load().version(), ""
    except BackendUnavailable as error:
        return (), str(error)


class Accelerator:
    """Shared by all communicators of one rank's world; belongs to its loop."""

    def __init__(
        self, progress: Progress, channel: Channel, failed: Callable[[str, AiodistError], None], *, direct: bool
    ) -> None:
        """`failed` is told, on the loop, of communicators whose NCCL has failed.

        With `direct` the host's transports take memory of devices.
        """
        self._progress = progress
        self._staging = Staging.of(progress)
        self._direct = direct
        self.device_messages = (DirectMessages if direct else StagedMessages)(self._staging)
        """Takes tensors to and from the host's transports."""
        self.mappings = Mappings()
        self._release_notices = ReleaseNotices(self.mappings, progress, channel)
        self._failed = failed
        self.streams: dict[torch.device, list[_Stream]] = {}
        self._groups: nccl.NcclGroups | None = None
        self._slots: dict[str, Slots] = {}
        """By the name of a communicator that has NCCL."""
        self._looking = False

    # --- operations -----------------------------------------------------------------------------------------

    def work(self, name: str, device: torch.device, tag: int | None = None, *, expected: bool = False) -> DeviceWork:
        """Return what an operation of the communicator called `name` does on `device`: a collective, which has a tag.

        `expected`: whether it does anything there is known later.

        [Note: whose stream] Each operation has a stream while it queues things: where the host takes part, its second
        step must not come behind what the caller has queued before the next operation, such as the rest of backward.
        NCCL's kernels wait for one another: each of its communicators has one more, which is theirs alone.
        """
        stream = self._take_stream(device)
        slots = None if tag is None else self._slots.get(name)
        release = None if slots is None or tag is None else slots.take(tag, device, expected=expected)
        if release is None:
            return DeviceWork(self._progress, stream.stream, stream.users.pop)
        self._keep_looking()

        def queued() -> None:
            stream.users.pop()
            release()

        return DeviceWork(self._progress, stream.stream, queued)

    def _take_stream(self, device: torch.device) -> _Stream:
        """Return a stream that no operation has just now; past `_MOST_STREAMS` one that few have."""
        streams = self.streams.setdefault(device, [])
        for taken in streams:
            if not taken.users:
                break
        else:
            if len(streams) < _MOST_STREAMS:
                streams.append(_Stream(torch.cuda.Stream(device=device), []))
            taken = min(reversed(streams), key=lambda one: len(one.users))
        taken.users.append(None)
        return taken

    def places(self, name: str, ts: Sequence[Tensor]) -> str:
        """Return, where there is NCCL, which of the devices that this communicator has used `ts` lie on, as words.

        All ranks must agree on it, for the k-th of each form a group. Empty where they lie on the first one.
        """
        slots = self._slots.get(name)
        return "" if slots is None else slots.places(ts)

    def _group(self, name: str, ranks: Sequence[int], rank: int, number: int, device: torch.device) -> nccl.NcclGroup:
        if self._groups is None:
            self._groups = nccl.NcclGroups(nccl.load(), self._progress)
        return self._groups.of(f"{name} #{number}", ranks, rank, device)

    # --- implementations ------------------------------------------------------------------------------------

    def kit(self, name: str, ranks: Sequence[int], topology: Topology | None) -> Callable[[Repertoire], Kit] | str:
        """Return what makes the implementations of a communicator of these world ranks, or why there are none."""
        if topology is None or None in topology.devices:
            blind = "this rank" if topology is None else f"rank {topology.devices.index(None)}"
            return f"{blind} has no CUDA device"
        slots = _no_nccl(topology) or Slots(self._progress, partial(self._group, name, ranks, topology.rank))
        if isinstance(slots, Slots):
            self._slots[name] = slots
        return partial(self._make, ranks, topology, slots)

    def _make(self, ranks: Sequence[int], topology: Topology, slots: Slots | str, repertoire: Repertoire) -> Kit:
        """`slots` are those of NCCL, or why there are none."""
        no_ipc = _told(topology, lambda means: means.no_ipc)
        hosts = [topology.ranks_on(host) for host in topology.hosts]
        places = [device.physical for device in topology.devices if device is not None]
        limits = repertoire.table.limits
        exchanger = NcclCollectives(slots, repertoire) if isinstance(slots, Slots) else None

        def host(ep: Endpoint) -> Primitives:  # chosen as for tensors on the CPU
            return Primitives(ep, repertoire, later=True)

        within = None if no_ipc else CudaIpc(self.mappings, ranks, places, Events.of(self._progress), limits)
        made: list[Implementation] = [] if self._direct else [Staged(self._staging, host, limits)]
        if len(hosts) > 1:
            made += Hierarchical.forms(hosts, topology.rank, within, limits)
        elif within is not None:
            made.append(within)
        if exchanger is not None:
            made.append(exchanger)
        missing: dict[str, str] = {}
        if self._direct:
            missing["staged"] = "the transport takes memory of devices: what is made of messages sends it directly"
        if no_ipc or len(hosts) > 1:
            missing["cuda_ipc"] = f"the ranks are on {len(hosts)} hosts" if len(hosts) > 1 else no_ipc
        if isinstance(slots, str):
            missing["nccl"] = slots
        return Kit(made, missing, exchanger)

    # --- reductions that only queue -----------------------------------------------------------------------------

    def queue_by_nccl(self, name: str, device: torch.device, kind: torch.dtype, op: ReduceOp) -> Queue | None:
        """Return how the communicator called `name` does it by one call of NCCL; None before its first operation."""
        slots = self._slots.get(name)
        group = None if slots is None else slots.first_group(device)
        if group is None or not group.opened:
            return None
        reductions = NcclReductions(self._progress, group, kind, op)

        def queue(t: Tensor, stream: torch.cuda.Stream) -> Queued:
            if not self._looking:
                self._keep_looking()
            return ByNccl(reductions, t, stream)

        return queue

    def queue_alone(self) -> Queue:
        """Return how the only rank of a communicator does it."""
        return lambda _, stream: Alone(self._progress, stream)

    # --- failures and the end -------------------------------------------------------------------------------

    def _keep_looking(self) -> None:
        if not self._looking:
            self._looking = True
            self._progress.loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Ask NCCL whether what is under way has failed, once more when nothing is: what failed at once is over."""
        if self._groups is None:
            self._looking = False
            return
        self._looking = any(slots.taken for slots in self._slots.values()) or self._progress.pending()
        self._progress.start(partial(self._ask, self._groups))
        if self._looking:
            self._progress.loop.call_later(_LOOK_SECONDS, self._look)

    def _ask(self, groups: nccl.NcclGroups) -> None:
        for group in groups:
            if isinstance(error := group.poll_error(), AiodistError):
                self._progress.post(partial(self._failed, group.name.rpartition(" #")[0], error))

    def abort(self, name: str, error: AiodistError) -> None:
        """The communicator called `name` is given up: end what its NCCL does; on the loop."""
        for group in self.groups_of(name):
            self._progress.start(partial(group.abort, error))

    def groups_of(self, name: str) -> list[nccl.NcclGroup]:
        """Return the groups in which the communicator called `name` has NCCL work so far."""
        return [] if self._groups is None else [g for g in self._groups if g.name.rpartition(" #")[0] == name]

    async def release(self, name: str, *, drained: bool) -> None:
        """Let go of what the communicator called `name` had; with `drained` all its ranks do so."""
        self._slots.pop(name, None)
        for group in self.groups_of(name):
            assert self._groups is not None
            await self._groups.release(group, drained=drained)

    async def aclose(self) -> None:
        """Let go of the neighbours' memory and of NCCL, once every communicator is closed or given up."""
        if self._groups is not None:
            await self._groups.aclose(drained=False)
        await self._release_notices.aclose()


class _Stream(NamedTuple):
    """A stream and its users, one entry each: taken on the loop's thread, given back on any, as a list's end can be."""

    stream: torch.cuda.Stream
    users: list[None]


def _no_nccl(topology: Topology) -> str | None:
    """Return why NCCL does not connect these ranks, on all of them or on none."""
    if missing := _told(topology, lambda means: means.no_nccl):
        return missing
    devices = [device for device in topology.devices if device is not None]
    places = [(host, device.physical) for host, device in zip(topology.host_of, devices, strict=True)]
    oldest = min(device.means.nccl for device in devices)
    return nccl.refuses(places, oldest, shared=all(device.means.nccl_shares for device in devices))


def _told(topology: Topology, why: Callable[[Means], str]) -> str:
    """Return what this rank says that lacks something, else the first other one that does; empty where none does."""
    told = {rank: why(device.means) for rank, device in enumerate(topology.devices) if device is not None}
    if mine := told.get(topology.rank):
        return mine
    return next((f"rank {rank}: {reason}" for rank, reason in told.items() if reason), "")
