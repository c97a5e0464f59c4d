"""A rank's resources for CUDA tensors: streams, staging, mapped memory of neighbours, NCCL."""

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
from aiodist.collectives.cuda.queued import Alone, NcclReductions, Queue
from aiodist.collectives.cuda.staging import Staged
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.hierarchical import Hierarchical
from aiodist.collectives.implementations import Kit, Primitives, Repertoire
from aiodist.env import Environment, variables
from aiodist.errors import AiodistError, BackendUnavailable
from aiodist.handles import Progress
from aiodist.streams import Events, Staging
from aiodist.topology import Means, Topology
from aiodist.types import ReduceOp

if TYPE_CHECKING:
    from aiodist.control import Channel

_MOST_STREAMS = 16  # for operations on one device, of torch's 32
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_CHECK_SECONDS = 0.05  # between two checks of NCCL for asynchronous errors


def visible_devices(environment: Environment) -> list[str]:
    """Return the visible CUDA devices, by names that are the same in all processes of a host.

    The devices are counted but not opened, since an open device takes memory.
    """
    count = torch.cuda.device_count()
    named = environment.visible_devices
    return list(named[:count]) if named is not None and len(named) >= count else [str(i) for i in range(count)]


def means_here(*, nccl_shares: bool) -> Means:
    """Return the `Means` of this rank's device. True for `nccl_shares` means that NCCL lets ranks share a device."""
    no_ipc = ""
    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        no_ipc = f"torch allocates with {allocator}, whose memory no other process can map"
    elif name := next((name for name in _ALLOCATOR_VARIABLES if _EXPANDABLE in variables().get(name, "")), None):
        no_ipc = f"{name} has {_EXPANDABLE}: to map such memory a process needs the right to trace the owner"
    return Means(*_nccl_here(), nccl_shares, no_ipc)


def _nccl_here() -> tuple[tuple[int, ...], str]:
    """Return NCCL's version and "", or () and the reason why NCCL is missing.

    The call loads NCCL, so that all ranks learn of a failure.

    The first call takes some 0.3 s and opens no device.
    """
    if (why := nccl.missing()) is not None:
        return (), why
    try:
        return nccl.load().version(), ""
    except BackendUnavailable as error:
        return (), str(error)


class Accelerator:
    """CUDA resources of one rank, shared by all communicators of the world (loop's thread)."""

    def __init__(
        self, progress: Progress, channel: Channel, failed: Callable[[str, AiodistError], None], *, direct: bool
    ) -> None:
        """`failed` is called on the loop with the name of a communicator whose NCCL has failed and the error.

        True for `direct` means that the host's transports support device memory.
        """
        self._progress = progress
        self._staging = Staging.of(progress)
        self._direct = direct
        self.device_messages = (DirectMessages if direct else StagedMessages)(self._staging)
        """Messages of CUDA tensors over the host's transports."""
        self.mappings = Mappings()
        self._release_notices = ReleaseNotices(self.mappings, progress, channel)
        self._failed = failed
        self.streams: dict[torch.device, list[_Stream]] = {}
        self._groups: nccl.NcclGroups | None = None
        self._slots: dict[str, Slots] = {}
        """Slots by name of a communicator that has NCCL."""
        self._checking = False

    # --- operations -----------------------------------------------------------------------------------------

    def work(self, name: str, device: torch.device, tag: int | None = None, *, expected: bool = False) -> DeviceWork:
        """Return the work of an operation of the communicator `name` on `device`.

        A collective has a `tag`. True for `expected` means that the operation might not use the device.

        [Note: whose stream] Each operation has its own stream while the operation queues work. The second step of an
        operation with steps on the host must not wait for later work of the caller, such as the rest of backward.
        NCCL's kernels wait for one another, so each NCCL communicator has a further stream for its kernels alone.
        """
        stream = self._take_stream(device)
        slots = None if tag is None else self._slots.get(name)
        release = None if slots is None or tag is None else slots.take(tag, device, expected=expected)
        if release is None:
            return DeviceWork(self._progress, stream.stream, stream.users.pop)
        self._start_checks()
        return DeviceWork(self._progress, stream.stream, stream.users.pop, release)

    def _take_stream(self, device: torch.device) -> _Stream:
        """Return a stream without users, or the one with the fewest users if there are `_MOST_STREAMS` streams."""
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
        """Return a text with the indices of the devices of `ts` among the used devices of this communicator.

        All ranks must agree on the result, since the k-th devices form a group. The result is empty without NCCL and
        for the first device.
        """
        slots = self._slots.get(name)
        return "" if slots is None else slots.places(ts)

    def _group(self, name: str, ranks: Sequence[int], rank: int, number: int, device: torch.device) -> nccl.NcclGroup:
        if self._groups is None:
            self._groups = nccl.NcclGroups(nccl.load(), self._progress)
        return self._groups.of(f"{name} #{number}", ranks, rank, device)

    # --- implementations ------------------------------------------------------------------------------------

    def kit(self, name: str, ranks: Sequence[int], topology: Topology | None) -> Callable[[Repertoire], Kit] | str:
        """Return a function that creates the implementations for these ranks, or the reason why there are none."""
        if topology is None or None in topology.devices:
            blind = "this rank" if topology is None else f"rank {topology.devices.index(None)}"
            return f"{blind} has no CUDA device"
        slots = _no_nccl(topology) or Slots(self._progress, partial(self._group, name, ranks, topology.rank))
        if isinstance(slots, Slots):
            self._slots[name] = slots
        return partial(self._make, ranks, topology, slots)

    def _make(self, ranks: Sequence[int], topology: Topology, slots: Slots | str, repertoire: Repertoire) -> Kit:
        """`slots` are the launch slots of NCCL, or the reason why NCCL is missing."""
        no_ipc = _missing_on(topology, lambda means: means.no_ipc)
        hosts = [topology.ranks_on(host) for host in topology.hosts]
        places = [device.physical for device in topology.devices if device is not None]
        limits = repertoire.table.limits
        exchanger = NcclCollectives(slots, repertoire) if isinstance(slots, Slots) else None

        def host(ep: Endpoint) -> Primitives:  # implementations for tensors on the CPU
            return Primitives(ep, repertoire, later=True, ordered=True)

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
            missing["staged"] = "the transport supports device memory: messages send it directly"
        if no_ipc or len(hosts) > 1:
            missing["cuda_ipc"] = f"the ranks are on {len(hosts)} hosts" if len(hosts) > 1 else no_ipc
        if isinstance(slots, str):
            missing["nccl"] = slots
        return Kit(made, missing, exchanger)

    # --- queued reductions --------------------------------------------------------------------------------------

    def queue_by_nccl(self, name: str, device: torch.device, kind: torch.dtype, op: ReduceOp) -> Queue | None:
        """Return a function that queues reductions of the communicator `name` by NCCL, or None before the first use."""
        slots = self._slots.get(name)
        group = None if slots is None else slots.first_group(device)
        if group is None or not group.opened:
            return None
        reductions = NcclReductions(self._progress, group, kind, op, self._start_checks)

        return reductions.queue

    def queue_alone(self) -> Queue:
        """Return a function that queues reductions of a communicator with one rank."""
        return partial(Alone, self._progress)

    # --- failures and the end -------------------------------------------------------------------------------

    def _start_checks(self) -> None:
        if not self._checking:
            self._checking = True
            self._progress.loop.call_later(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        """Check NCCL for errors while operations are in flight, and once afterwards."""
        if self._groups is None:
            self._checking = False
            return
        self._checking = any(slots.taken for slots in self._slots.values()) or self._progress.pending()
        self._progress.start(self._check_groups, self._groups)
        if self._checking:
            self._progress.loop.call_later(_CHECK_SECONDS, self._check)

    def _check_groups(self, groups: nccl.NcclGroups) -> None:
        for group in groups:
            if isinstance(error := group.poll_error(), AiodistError):
                self._progress.post(self._failed, group.name.rpartition(" #")[0], error)

    def abort(self, name: str, error: AiodistError) -> None:
        """Abort the NCCL groups of the communicator `name` (loop's thread)."""
        for group in self.groups_of(name):
            self._progress.start(group.abort, error)

    def groups_of(self, name: str) -> list[nccl.NcclGroup]:
        """Return the NCCL groups of the communicator `name`."""
        return [] if self._groups is None else [g for g in self._groups if g.name.rpartition(" #")[0] == name]

    async def release(self, name: str, *, drained: bool) -> None:
        """Release the NCCL groups of the communicator `name`.

        `drained` must be True only if all its ranks make this call.
        """
        self._slots.pop(name, None)
        for group in self.groups_of(name):
            assert self._groups is not None
            await self._groups.release(group, drained=drained)

    async def aclose(self) -> None:
        """Close the mappings and NCCL, after every communicator was closed or aborted."""
        if self._groups is not None:
            await self._groups.aclose(drained=False)
        await self._release_notices.aclose()


class _Stream(NamedTuple):
    """A stream and its users, one list entry each: added on the loop's thread, removed on any thread (atomic `pop`)."""

    stream: torch.cuda.Stream
    users: list[None]


def _no_nccl(topology: Topology) -> str | None:
    """Return the reason why NCCL cannot connect these ranks, or None.

    Either all ranks get a reason, or no rank does.
    """
    if missing := _missing_on(topology, lambda means: means.no_nccl):
        return missing
    devices = [device for device in topology.devices if device is not None]
    places = [(host, device.physical) for host, device in zip(topology.host_of, devices, strict=True)]
    oldest = min(device.means.nccl for device in devices)
    return nccl.unconnectable(places, oldest, shared=all(device.means.nccl_shares for device in devices))


def _missing_on(topology: Topology, why: Callable[[Means], str]) -> str:
    """Return the reason of this rank, else of the first other rank with one, else an empty text."""
    reasons = {rank: why(device.means) for rank, device in enumerate(topology.devices) if device is not None}
    if mine := reasons.get(topology.rank):
        return mine
    return next((f"rank {rank}: {reason}" for rank, reason in reasons.items() if reason), "")
