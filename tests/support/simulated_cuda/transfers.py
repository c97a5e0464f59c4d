"""Tensors that come to a simulated device, leave it, or are made there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from tests.support.simulated_cuda.copies import copy, launch
from tests.support.simulated_cuda.device import active
from tests.support.simulated_cuda.operators import SimulatedTensor


def index_of(device: Any) -> int | None:
    """Return the index of a CUDA device, None for any other (and for None); numbers mean CUDA devices, as in torch."""
    if device is None:
        return None
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "cuda":
            return None
    return active().index(device)


def pinned(t: torch.Tensor) -> torch.Tensor:
    """Return the data of a host tensor in pinned memory; itself if it is."""
    if isinstance(t, SimulatedTensor):
        raise RuntimeError(f"cannot pin '{t.type()}' only dense CPU tensors can be pinned")
    memory = active().memory
    if memory.is_pinned(t):
        return t
    return memory.pin(t.size(), _dense(t), t.dtype).copy_(t)


def uploaded(t: torch.Tensor, index: int, *, filled: bool = True) -> SimulatedTensor:
    """Return a tensor that a kernel of the current stream fills with the data of a plain tensor, or leaves empty."""
    world = active()
    lane = world.current_stream(index).lane
    into = SimulatedTensor.over(world.memory.allocate(lane, t.size(), t.stride(), t.dtype), index)
    if filled and t.numel():
        plain, block = world.memory.alias(into)
        launch(world, lane, "fill_", lambda: plain.copy_(t), [] if block is None else [block])
    return into


def made(factory: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a factory of torch whose `device` may be a simulated one, and whose memory may be pinned."""
    index, pin = index_of(kwargs.get("device")), kwargs.pop("pin_memory", False)
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if index is None and not kwargs.get("device") and isinstance(like, SimulatedTensor) and not pin:
        return factory(*args, **kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    if isinstance(like, SimulatedTensor):  # only its shape and type are asked for
        args = (torch.empty_strided(like.size(), like.stride(), dtype=like.dtype), *args[1:])
    host = factory(*args, **({**kwargs, "device": "cpu"} if index is not None else kwargs))
    filled = "empty" not in factory.__name__
    if index is not None:
        result: torch.Tensor = uploaded(host, index, filled=filled)
    elif pin:
        result = active().memory.pin(host.size(), host.stride(), host.dtype)
        if filled:
            result.copy_(host)
    else:
        result = host
    return result.requires_grad_() if requires_grad else result


def moved(
    t: torch.Tensor,
    index: int | None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Return a copy of a tensor on another device (None: the host), through which gradients go back."""
    how = (index, dtype, non_blocking, memory_format)
    if t.requires_grad and torch.is_grad_enabled():
        return cast(torch.Tensor, _Move.apply(t, *how))  # type: ignore[no-untyped-call]
    return _moved(t, *how)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.origin = (t.cuda_index if isinstance(t, SimulatedTensor) else None, t.dtype)
        return _moved(t, *how)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return moved(grad, *ctx.origin), None, None, None, None


def _moved(
    t: torch.Tensor,
    index: int | None,
    dtype: torch.dtype | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    world = active()
    shape = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
    shape = torch.empty_like(shape, dtype=dtype or t.dtype, memory_format=memory_format)
    if index is not None:
        lane = world.current_stream(index).lane
        plain = world.memory.allocate(lane, shape.size(), shape.stride(), shape.dtype)
        into: torch.Tensor = SimulatedTensor.over(plain, index)
    elif non_blocking:  # as torch: into pinned memory, which is not there when the call returns
        into = world.memory.pin(shape.size(), shape.stride(), shape.dtype)
    else:
        into = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    copy(into, t.detach(), non_blocking)
    return into


def _dense(t: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")).stride()
