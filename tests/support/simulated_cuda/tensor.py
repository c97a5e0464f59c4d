"""Tensors of a simulated device, without their arithmetic."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch._C import _disabled_torch_function_impl, _DisableTorchDispatch

from tests.support.simulated_cuda.device import active, is_open


class DeviceTensor(torch.Tensor):
    """A CPU tensor that says that it is on a CUDA device."""

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    cuda_index: int

    @classmethod
    def over(cls, plain: torch.Tensor, index: int, requires_grad: bool = False) -> Self:
        """Return a tensor of device `index` over the storage of a plain one."""
        made = torch.Tensor._make_subclass(cls, plain, requires_grad)
        made.cuda_index = index
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.cuda_index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def on_host(self) -> torch.Tensor:
        """Wait, and return a copy on the host, also after the end of the simulation."""
        if is_open():
            return self.detach().cpu()
        with _DisableTorchDispatch():
            return torch.empty_like(torch.empty(self.shape, dtype=self.dtype)).copy_(self.detach())

    def get_device(self) -> int:
        return self.cuda_index

    def type(self, dtype: Any = None, non_blocking: bool = False, **more: Any) -> Any:
        if dtype is not None:
            return super().type(dtype, non_blocking, **more)
        return super().type().replace("torch.", "torch.cuda.", 1)

    def record_stream(self, stream: Any) -> None:
        """Let the memory not be reused before what `stream` has queued when it is freed."""
        active().memory.record(self, stream.lane)

    def share_memory_(self) -> Self:
        return self

    def is_shared(self) -> bool:
        return True

    def tolist(self) -> Any:
        return self.on_host().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.on_host().numpy()

    def __array__(self, dtype: object = None) -> Any:
        return self.numpy()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        shown = repr(self.on_host())
        extra = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
        return f"{shown.removesuffix(')')}, device='{self.device}'{extra})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        if id(self) in memo:
            return cast(torch.Tensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol at the moment"
            )
        with torch.no_grad():
            copied = self.detach().clone()
        copied.requires_grad_(self.requires_grad)
        copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = cast(DeviceTensor, self.grad).__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (type(self), self.on_host(), self.cuda_index, self.requires_grad, is_parameter)


def _rebuilt(
    kind: type[DeviceTensor], host: torch.Tensor, index: int, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    made = host.to(torch.device("cuda", index))
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)
