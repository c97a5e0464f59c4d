"""Work that is queued on the streams of simulated devices; copies between their memories and the host's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch._C import _DisableTorchDispatch

from tests.support.simulated_cuda.device import SimulatedCuda, active
from tests.support.simulated_cuda.lanes import Lane
from tests.support.simulated_cuda.memory import Allocation, poison
from tests.support.simulated_cuda.tensor import DeviceTensor


def launch(
    world: SimulatedCuda,
    lane: Lane,
    name: str,
    run: Callable[[], object],
    blocks: Sequence[Allocation],
    first: Callable[[], object] | None = None,
) -> None:
    """Queue work that uses these blocks."""
    world.check(lane.index)
    if lane is world.backward_lane(lane.index):  # what it reads was used by the forward on its own stream
        for block in blocks:
            block.users.add(lane)

    def work() -> None:
        run()
        for block in blocks:
            if block.freed:
                world.hazards.append(f"{name} on {lane} used memory that had been freed ({block.lane}'s)")

    with world.condition:
        world.launches[name] += 1
    lane.put(work, first)


def copy(into: torch.Tensor, t: torch.Tensor, non_blocking: bool = False) -> None:
    """Queue `into.copy_(t)`, one of them or both on a device; the host waits where it does for a GPU.

    That is for a copy between host and device that is not `non_blocking`, and for one to host memory that is not
    pinned. From memory that is not pinned the data is taken at once.
    """
    world = active()
    if isinstance(into, DeviceTensor) and isinstance(t, DeviceTensor):
        _on_devices(world, into, t)
    elif isinstance(into, DeviceTensor):
        _from_host(world, into, t, non_blocking)
    elif isinstance(t, DeviceTensor):
        _to_host(world, into, t, non_blocking)


def _to_host(world: SimulatedCuda, into: torch.Tensor, t: DeviceTensor, non_blocking: bool) -> None:
    lane = world.current_stream(t.cuda_index).lane
    plain, block = world.memory.alias(t)
    _launch_copy(world, lane, "d2h", into.detach(), plain, [block])
    if not non_blocking or not world.memory.is_pinned(into):
        world.wait(lane.mark(), lane.index, "implicit")


def _from_host(world: SimulatedCuda, into: DeviceTensor, t: torch.Tensor, non_blocking: bool) -> None:
    lane = world.current_stream(into.cuda_index).lane
    plain, block = world.memory.alias(into)
    pinned = world.memory.is_pinned(t)
    source = t.detach() if pinned else t.detach().clone()
    _launch_copy(world, lane, "h2d", plain, source, [block])
    if not non_blocking and t.dim():
        world.wait(lane.mark(), lane.index, "implicit")


def _on_devices(world: SimulatedCuda, into: DeviceTensor, t: DeviceTensor) -> None:
    """As torch: on the source's current stream, between all before and all after on the destination's."""
    source, target = world.current_stream(t.cuda_index).lane, world.current_stream(into.cuda_index).lane
    plain_into, block_into = world.memory.alias(into)
    plain, block = world.memory.alias(t)
    if source is not target:
        source.wait_for(target.mark())
    _launch_copy(world, source, "d2d", plain_into, plain, [block_into, block])
    if source is not target:
        target.wait_for(source.mark())
    if torch.is_grad_enabled() and (into.requires_grad or t.requires_grad):
        world.autograd_lanes.update((source, target))


def _launch_copy(
    world: SimulatedCuda, lane: Lane, way: str, into: torch.Tensor, t: torch.Tensor, blocks: list[Allocation | None]
) -> None:
    t.expand_as(into)  # raises now where it does not fit
    apart = into.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
    with world.condition:
        world.launches[f"copy_{way}"] += 1
    used = [block for block in blocks if block is not None]
    launch(world, lane, "copy_", lambda: into.copy_(t), used, functools.partial(poison, into) if apart else None)


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    """Copy each into its own."""
    for into, t in zip(targets, sources, strict=True):
        into.copy_(t, non_blocking=non_blocking)


def make_room(t: DeviceTensor, size: Sequence[int]) -> None:
    """Give a tensor that will outgrow its memory a larger memory with the same data."""
    world = active()
    offset, held = int(t.storage_offset()), t.untyped_storage().nbytes() // t.itemsize
    needed = offset + math.prod(size)
    if needed <= held:
        return
    plain = world.memory.allocate(world.current_stream(t.cuda_index).lane, (needed,), (1,), t.dtype)
    with _DisableTorchDispatch():
        before = type(t).over(t.detach().as_strided((held,), (1,), 0), t.cuda_index)
        t.set_(plain.untyped_storage(), offset, t.size(), t.stride())
    _on_devices(world, type(t).over(plain[:held], t.cuda_index), before)
