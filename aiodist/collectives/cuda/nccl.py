"""The implementation by NCCL, which its first operation opens, with calls in the order of issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Exchange, Primitive, Wanted
from aiodist.backends.nccl import LaunchSlot, NcclGroup, NcclNative, supports
from aiodist.collectives.endpoint import LANE_TAGS, Endpoint, Exchanger
from aiodist.collectives.implementations import Primitives, Repertoire
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.collectives.operations import broadcast_bytes
from aiodist.handles import Progress
from aiodist.handles.kernel import run, transfers

_ID_LANE = 1  # the id has a separate lane, next to the messages of the operation


class Slots:
    """NCCL groups and launch slots of the operations of one communicator."""

    def __init__(self, progress: Progress, group_of: Callable[[int, torch.device], NcclGroup]) -> None:
        """`group_of(k, device)` returns the group of the k-th devices of all ranks. `device` is that of this rank."""
        self._progress = progress
        self._group_of = group_of
        self._used: list[torch.device] = []
        """Devices of this rank in the order of first use. The k-th devices of all ranks form a group."""
        self.taken: dict[int, dict[torch.device, tuple[NcclGroup, LaunchSlot]]] = {}
        """Groups and slots, by tag of the operation and device."""

    def take(self, tag: int, device: torch.device, *, expected: bool) -> Callable[[], None] | None:
        """Take a slot for an operation (loop's thread). Return a function that releases the slot.

        True for `expected` means that the operation might not use the device. The call then does not count as a use,
        and returns None if another device was used first.
        """
        if not expected:
            self._use(device)
        elif self._used[:1] not in ([], [device]):
            return None
        group = self._group_of(self._used.index(device) if self._used else 0, device)
        slot = group.launch_order.take()
        self.taken.setdefault(tag, {})[device] = (group, slot)
        return partial(self._release, tag, device, slot)

    def _use(self, device: torch.device) -> None:
        if device not in self._used:
            self._used.append(device)

    def _release(self, tag: int, device: torch.device, slot: LaunchSlot) -> None:
        slots = self.taken.get(tag, {})
        if (taken := slots.get(device)) is not None and taken[1] is slot:  # else another operation has this tag now
            del slots[device]
            if not slots:
                del self.taken[tag]
        slot.release()

    def of(self, tag: int, device: torch.device) -> tuple[NcclGroup, LaunchSlot]:
        """Return the group and the slot of an operation on `device`."""
        return self.taken[tag % LANE_TAGS][device]

    def is_first(self, tag: int, device: torch.device) -> bool:
        """Return True if an operation has a slot on `device`, and no other device was used first.

        Count this as a use.
        """
        if device not in self.taken.get(tag % LANE_TAGS, {}) or self._used[:1] not in ([], [device]):
            return False
        if not self._used:
            self._progress.post(self._use, device)
        return True

    def release(self, tag: int) -> None:
        """Release the slots of an operation."""
        for _, slot in self.taken.get(tag % LANE_TAGS, {}).values():
            slot.release()

    def places(self, ts: Sequence[Tensor]) -> str:
        numbers = [self._used.index(t.device) for t in ts if t.device in self._used]
        return f" #{','.join(map(str, numbers))}" if any(numbers) else ""

    def first_group(self, device: torch.device) -> NcclGroup | None:
        """Return the group of `device`, if the communicator used that device first."""
        return self._group_of(0, device) if self._used[:1] == [device] else None


class Nccl(Exchanger):
    """See `Exchanger`. `slots` has the groups and launch slots of the operations."""

    name = "nccl"
    compares = True  # operations on devices do not wait for the agreement

    def __init__(self, slots: Slots, repertoire: Repertoire) -> None:
        """`repertoire` sends NCCL's id from rank 0 to the others."""
        self._slots = slots
        self._repertoire = repertoire

    def lacks(self, wanted: Wanted) -> str | None:
        if supports(wanted.operation, wanted.kind, wanted.op):
            return None
        return f"NCCL has no {wanted}"

    async def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        """Queue the calls in launch order, in one group of calls for each device."""
        by_device: dict[torch.device, list[Primitive]] = {}
        for o in primitives:
            by_device.setdefault(o.t.device, []).append(o)
        await transfers([(self._native(ep, device).start_all, calls) for device, calls in by_device.items()])

    def takes(self, ep: Endpoint, exchange: Exchange) -> bool:
        """See `Exchanger`: all tensors must be on the first device of this communicator, as on the other ranks."""
        tensors = (exchange.t, *(t for _, t in (*exchange.sends, *exchange.receives)))
        return len({t.device for t in tensors}) == 1 and self._slots.is_first(ep.tag, exchange.t.device)

    def release(self, ep: Endpoint) -> None:
        self._slots.release(ep.tag)

    def _native(self, ep: Endpoint, device: torch.device) -> NcclNative:
        group, slot = self._slots.of(ep.tag, device)
        if not group.opened:  # in launch order, so that the same operation sends the id on all ranks
            slot.run(group.open, partial(self._exchange, ep))
        return NcclNative(group, slot)

    def _exchange(
        self, ep: Endpoint, mine: bytes | None, then: Callable[[bytes | None, BaseException | None], None]
    ) -> None:
        """Send rank 0's message to the others, over the host."""
        run(self._of_rank_0(ep, mine), then)

    async def _of_rank_0(self, ep: Endpoint, mine: bytes | None) -> bytes:
        p = Primitives(ep.on_lane(_ID_LANE), self._repertoire, "tree")
        return as_bytes(await broadcast_bytes(p, None if mine is None else as_tensor(mine), 0))
