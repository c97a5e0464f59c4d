"""The names of torch that a simulated device takes over, and gives back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import _C
from torch._C import _swap_tensor_impl
from torch._C._nn import _parse_to
from torch.autograd.graph import _engine_run_backward

from aiodist.backends import nccl
from tests.support.simulated_cuda.device import Event, SimulatedCuda, Stream, active, device_context, stream_context
from tests.support.simulated_cuda.operators import SimulatedTensor
from tests.support.simulated_cuda.transfers import index_of, made, moved, pinned

_FACTORIES: Final = [
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "zeros",
    "zeros_like",
]
_NEW: Final = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_CUDA: Final = 1  # the number of this kind of device
_FROM_DATA: Final = ("as_tensor", "asarray", "tensor")


@contextlib.contextmanager
def patched(world: SimulatedCuda) -> Iterator[None]:
    """Let torch see the simulated devices, in all threads, until the context ends."""
    import torch._dynamo  # torch does so when a result's shape is first asked for; it must see no patched names

    backward = _backward(_engine_run_backward)
    with contextlib.ExitStack() as undo:
        for owner, names in (
            (torch.cuda, _cuda(world)),
            (_C, _cuda_in_c(world)),
            (torch.accelerator, {"is_available": lambda: False}),  # as of a torch without CUDA: optimizers ask it
            (torch, _functions()),
            (torch.Tensor, _methods()),
            (torch.UntypedStorage, _sharing(world)),
            (torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
            (torch.nn.Module, {"_apply": _applying(torch.nn.Module._apply)}),
            (torch.autograd, {"_engine_run_backward": backward}),
            (torch.autograd.graph, {"_engine_run_backward": backward}),
            # Unless a stand-in took its place before.
            (nccl, {"missing": _no_nccl} if nccl.missing is nccl.library.missing else {}),
            (nccl.library, {"missing": _no_nccl}),
        ):
            for name, value in names.items():
                undo.enter_context(patch.object(owner, name, value, create=True))
        yield


def _no_nccl() -> str:
    return "NCCL needs a CUDA device, and this one is simulated"


# --- torch.cuda --------------------------------------------------------------------------------------------------


def _cuda(world: SimulatedCuda) -> dict[str, object]:
    def nothing(*_: object, **__: object) -> None:
        pass

    def name(device: object = None) -> str:
        return f"simulated CUDA device {world.index(device)}"

    def properties(device: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=name(device),
            uuid=f"simulated-{world.index(device)}",
            major=0,
            minor=0,
            total_memory=1 << 34,
            multi_processor_count=1,
            is_integrated=False,
        )

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "init": nothing,
        "_lazy_init": nothing,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "device_count": lambda: world.count,
        "current_device": lambda: world.index(),
        "set_device": world.set_index,
        "_maybe_exchange_device": world.set_index,
        "device": device_context,
        "get_allocator_backend": lambda: "native",
        "get_device_name": name,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": properties,
        "can_device_access_peer": lambda device, peer: world.index(device) != world.index(peer),
        "memory_allocated": world.allocated,
        "current_stream": world.current_stream,
        "default_stream": lambda device=None: Stream.on(world.default_lane(world.index(device))),
        "set_stream": lambda stream: None if stream is None else world.set_stream(stream),
        "stream": stream_context,
        "synchronize": world.synchronise,
        "is_current_stream_capturing": world.capturing_now,
        "Stream": Stream,
        "StreamContext": stream_context,
        "Event": Event,
    }


def _cuda_in_c(world: SimulatedCuda) -> dict[str, object]:
    """The functions of a CUDA build in C, with streams as triples of number, device and kind of device."""

    def triple(stream: Stream) -> tuple[int, int, int]:
        return stream.stream_id, stream.device_index, _CUDA

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        world.set_stream(Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

    def exchange_device(index: int) -> int:
        before = world.index()
        world.set_index(index)
        return before

    return {
        "_cuda_getDevice": world.index,
        "_cuda_setDevice": world.set_index,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_getDeviceCount": lambda: world.count,
        "_cuda_getCurrentStream": lambda index: triple(world.current_stream(index)),
        "_cuda_getDefaultStream": lambda index: triple(Stream.on(world.default_lane(index))),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": world.capturing_now,
    }


def _sharing(world: SimulatedCuda) -> dict[str, object]:
    """Let memory be shared within this process; no other process opens the handle."""

    def share(storage: torch.UntypedStorage) -> tuple[object, ...]:
        index = world.memory.index(storage)
        return index, bytes(64), storage.nbytes(), 0, b"", 0, bytes(64), False

    return {"_share_cuda_": share, "_release_ipc_counter": lambda *counter, **more: None}


# --- tensors -----------------------------------------------------------------------------------------------------


def _functions() -> dict[str, object]:
    wrapped = {name: _factory(getattr(torch, name)) for name in _FACTORIES}
    return wrapped | {name: _from_data(getattr(torch, name)) for name in _FROM_DATA}


def _factory(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and not kwargs.get("pin_memory"):
            return original(*args, **kwargs)
        return made(original, *args, **kwargs)

    return factory


def _from_data(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def from_data(
        data: object,
        *args: Any,
        device: Any = None,
        pin_memory: bool = False,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        ours = isinstance(data, SimulatedTensor)
        index = index_of(device)
        if not ours and index is None and not pin_memory:
            more = {"device": device} | ({"requires_grad": True} if requires_grad else {})
            return original(data, *args, **more, **kwargs)
        if isinstance(data, torch.Tensor):
            dtype = args[0] if args else kwargs.get("dtype")
            copies = original.__name__ == "tensor" or bool(kwargs.get("copy"))
            t = (data.detach() if original.__name__ == "tensor" else data).to(device, dtype, copy=copies)
        else:
            t = original(data, *args, **kwargs)
            t = t if index is None else t.to(torch.device("cuda", index))
        t = pinned(t) if pin_memory else t
        return t.requires_grad_() if requires_grad else t

    return from_data


def _methods() -> dict[str, object]:
    methods: dict[str, object] = {name: _factory(getattr(torch.Tensor, name)) for name in _NEW}
    base_to = torch.Tensor.to

    def to(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ours = isinstance(t, SimulatedTensor)
        other = kwargs.get("other", args[0] if args else None)
        if isinstance(other, torch.Tensor):
            if not ours and not isinstance(other, SimulatedTensor):
                return base_to(t, *args, **kwargs)
            args, kwargs = (other.device, other.dtype, *args[1:]), {k: v for k, v in kwargs.items() if k != "other"}
        args = tuple(torch.device("cuda", a) if type(a) is int else a for a in args)
        copies = kwargs.pop("copy", False)
        if len(args) > 1 and isinstance(args[-1], bool) and len(args) == (4 if _names_device(args[0]) else 3):
            *front, copies = args
            args = tuple(front)
        device, dtype, non_blocking, memory_format = _parse_to(*args, **kwargs)
        format_ = torch.preserve_format if memory_format is None else memory_format
        here = t.cuda_index if isinstance(t, SimulatedTensor) else None
        there = here if device is None else index_of(device)
        if here == there:
            return base_to(t, dtype=t.dtype if dtype is None else dtype, copy=copies, memory_format=format_)
        return moved(t, there, dtype, non_blocking, format_)

    def cuda(
        t: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        index = active().index(device)
        return to(t, torch.device("cuda", index), non_blocking=non_blocking, memory_format=memory_format)

    def cpu(t: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return to(t, "cpu", memory_format=memory_format)

    def new_tensor(t: torch.Tensor, data: object, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": t.dtype, "device": t.device, **kwargs})

    methods["to"], methods["cuda"], methods["new_tensor"] = to, cuda, new_tensor
    methods["cpu"] = cpu
    methods["pin_memory"] = lambda t, device=None: pinned(t)
    methods["is_pinned"] = lambda t, device=None: not isinstance(t, SimulatedTensor) and active().memory.is_pinned(t)
    return methods


def _names_device(value: object) -> bool:
    return isinstance(value, str | int | torch.device)


def _applying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `Module.to` move parameters: the objects stay the same, what they are changes."""

    @functools.wraps(original)
    def apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def move(t: torch.Tensor) -> torch.Tensor:
            applied = fn(t)
            if not isinstance(t, torch.nn.Parameter) or type(t) is type(applied):
                return applied
            if isinstance(t, SimulatedTensor) == isinstance(applied, SimulatedTensor):
                return applied
            grad, t.grad = t.grad, None
            _become(t, torch.nn.Parameter(applied, t.requires_grad))
            t.grad = None if grad is None else fn(grad)
            return t

        return original(module, move, recurse)

    return apply


def _become(t: torch.Tensor, other: torch.Tensor) -> None:
    """Make a parameter what another is; as `torch.utils.swap_tensors`, but it may be weakly referenced."""
    t.__class__, other.__class__ = other.__class__, t.__class__
    t.__dict__, other.__dict__ = other.__dict__, t.__dict__
    _swap_tensor_impl(t, other)


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the devices that a backward runs."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with active().backward():
            return original(*args, **kwargs)

    return run
