"""How tensors lie in memory, and texts by which ranks compare their tensors.

What travels is flat memory. A dense tensor is that already, with its dimensions in any order (channels_last,
transposed), so it is sent where it lies; the ranks must then have the same order, which is compared with names,
shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import _foreach_copy_ as copy_each
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from aiodist.backends.base import dtype_name

WHOLE_BYTES = 1 << 16
"""From here on a tensor travels from where it lies; smaller ones are copied together, to save messages."""

Named = Sequence[tuple[str, Tensor]]


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_order(t: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions that are not 1, from the outermost in memory to the innermost; None where `t` has gaps.

    >>> memory_order(torch.empty(2, 3, 4)), memory_order(torch.empty(2, 3).t()), memory_order(torch.empty(4, 4)[:, :2])
    ((0, 1, 2), (1, 0), None)
    """
    if t.layout is not torch.strided or t.is_conj() or t.is_neg():
        return None
    shape, strides = t.shape, t.stride()
    dims = [d for d, size in enumerate(shape) if size != 1]
    if t.is_contiguous():
        return tuple(dims)
    dims.sort(key=strides.__getitem__, reverse=True)
    expected = 1
    for d in reversed(dims):
        if strides[d] != expected:
            return None
        expected *= shape[d]
    return tuple(dims)


def dims_in_memory(t: Tensor) -> tuple[int, ...]:
    """Return all dimensions of a dense `t` from the outermost in memory to the innermost; in order where it is.

    >>> dims_in_memory(torch.empty(1, 2, 3).transpose(1, 2)), dims_in_memory(torch.empty(2, 1))
    ((0, 2, 1), (0, 1))
    """
    order = memory_order(t)
    if order is None or t.is_contiguous():
        return tuple(range(t.dim()))
    return tuple(d for d in range(t.dim()) if t.shape[d] == 1) + order


def memory_shape(t: Tensor) -> tuple[int, ...]:
    """Return the shape of `t` in the order of its memory, the outermost dimension first, without those of 1.

    >>> memory_shape(torch.empty(2, 1, 3)), memory_shape(torch.empty(2, 3).t()), memory_shape(torch.empty(4, 4)[:, :2])
    ((2, 3), (2, 3), (4, 2))
    """
    order = memory_order(t)
    return tuple(t.shape if order is None else (t.shape[d] for d in order))


def flat_view(t: Tensor) -> Tensor | None:
    """Return the memory of `t` as a detached tensor of one dimension, or None if `t` has gaps."""
    return None if memory_order(t) is None else t.detach().as_strided((t.numel(),), (1,))


def view_like(flat: Tensor, t: Tensor) -> Tensor:
    """Return `flat` as a view with the shape of `t` and, where `t` is dense, its strides; else it is contiguous."""
    return flat.view(t.shape) if memory_order(t) is None else flat.as_strided(t.shape, t.stride())


def write_each(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy `values` to `targets`, to those too that torch conjugates or negates as it reads them."""
    if any(t.is_conj() or t.is_neg() for t in targets):
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    else:
        copy_each(targets, values)


@dataclass
class Parcel:
    """Tensors as they travel: large ones from where they lie, the others side by side, one buffer for each dtype.

    What is in `flat`, and in which order, depends on shapes and dtypes alone, so it is the same on every rank.
    """

    flat: list[Tensor] = field(default_factory=list)
    in_place: list[Tensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    """Views of buffers in `flat`, one for each of `targets`."""
    targets: list[Tensor] = field(default_factory=list)
    written: bool = True
    """Whether what arrives is written to the tensors, or they are only read."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], likes: Sequence[Tensor] | None, *, fill: bool = True) -> Parcel:
        """Return `tensors`, each in the memory order of its like, or of its dimensions; copied in only with `fill`."""
        parcel = cls()
        small: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        seen: set[int] = set()  # where tensors begin: two gradients may be one, which travels from where it lies once
        for i, t in enumerate(tensors):
            like = torch.empty(t.shape, device="meta") if likes is None else likes[i]
            if t.nbytes < WHOLE_BYTES:
                small.setdefault((t.dtype, t.device), []).append((t, like))
            elif memory_order(t) != memory_order(like) or t.data_ptr() in seen or (flat := flat_view(t)) is None:
                parcel._copied([(t, like)])
            else:
                seen.add(t.data_ptr())
                parcel.flat.append(flat)
                parcel.in_place.append(t)
        for group in small.values():
            parcel._copied(group)
        if fill and parcel.pieces:
            copy_each(parcel.pieces, parcel.targets)
        return parcel

    def _copied(self, group: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make a buffer for the tensors of `group`, of one dtype."""
        first = group[0][0]
        sizes = [t.numel() for t, _ in group]
        with torch.inference_mode(False):  # what arrives is written in the mode that the loop is in then
            buffer = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
            places = zip(buffer.split(sizes), group, strict=True)
            self.pieces += [view_like(piece, like) for piece, (_, like) in places]
        self.flat.append(buffer)
        self.targets += [t for t, _ in group]

    def unpack(self) -> None:
        """Write what arrived to where it belongs."""
        if not self.written:
            return
        if self.pieces:
            write_each(self.targets, self.pieces)
        # No operation of torch wrote to them: graphs that saved them must find out.
        increment_version([t for t in self.in_place if not t.is_inference()])


# --- names and kinds -------------------------------------------------------------------------------------------------


class HasState(Protocol):
    """A module, or what shows a part of one."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return each parameter with its name."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return each buffer with its name."""


def named_state(module: HasState, *, parameters: bool = True, buffers: bool = True) -> list[tuple[str, Tensor]]:
    """Return the parameters and then the buffers of `module` with their names; what is shared comes once."""
    found = chain(module.named_parameters() if parameters else (), module.named_buffers() if buffers else ())
    seen: dict[object, tuple[str, Tensor]] = {}
    for name, t in found:
        seen.setdefault(_place(t), (name, t))
    return list(seen.values())


def _place(t: Tensor) -> object:
    """Return what is equal for two names of the same memory."""
    if is_lazy(t) or t.layout is not torch.strided or t.is_meta or not t.numel():
        return id(t)
    return (t.data_ptr(), t.device, t.dtype, t.shape, t.stride())


def describe(name: str, t: Tensor) -> str:
    """Return a line such as `weight float32[3, 4]`.

    >>> describe("weight", torch.ones(3, 4))
    'weight float32[3, 4]'
    """
    return f"{name} not initialised" if is_lazy(t) else f"{name} {dtype_name(t.dtype)}{list(t.shape)}"


def describe_order(name: str, t: Tensor) -> str:
    """Return a line such as `weight with dimensions (0, 2, 3, 1) from outermost to innermost`."""
    order = memory_order(t)
    if order is None:  # such a tensor travels in the order of its dimensions
        order = tuple(d for d in range(t.dim()) if t.shape[d] != 1)
    return f"{name} with dimensions {order} from outermost to innermost"


def check_memory(named: Named) -> None:
    """Raise ValueError for the first tensor that has no memory yet: a lazy one, or one on the meta device."""
    for name, t in named:
        if is_lazy(t):
            raise ValueError(f"{name!r} is not initialised yet: run a forward pass on every rank first")
        if t.is_meta:
            raise ValueError(f"{name!r} lives on the meta device: give it memory first, see torch.nn.Module.to_empty")


def structure(named: Named, *, any_order: bool = False) -> dict[str, list[str]]:
    """Return the names, shapes, dtypes and memory orders of tensors, as text that ranks compare.

    `any_order` omits the memory orders. Raises ValueError for a tensor without memory.
    """
    check_memory(named)
    orders = [] if any_order else [describe_order(name, t) for name, t in named]
    return {"tensors": [describe(name, t) for name, t in named], "orders": orders}
