"""Layers with weights that are divided among ranks, and the state of nets with such layers.

Ranks that divide a layer compute the same loss of the same inputs. So, unlike in `functional`, that loss is the
objective: all ranks know the gradient of a sum that all of them use. Source: Shoeybi et
al. 2019, Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.functional import embedding, linear

from aiodist.communicator import Communicator
from aiodist.handles.calls import located
from aiodist.handles.origin import whence
from aiodist.nn.functional import Line, allgather, allreduce, check_threaded, completed


class SplitLayer(nn.Module):
    """A layer divided among the ranks of `coll`: each rank keeps a block of some parameters.

    All ranks draw the whole parameters, as torch's own layer draws them, from the same seed of torch; then each keeps
    its blocks. If blocks cannot be equal, those of the first ranks are one larger. Forward and backward wait for the
    other ranks, so they run on the compute thread of a net, or on another thread than the loop's.

    Args:
        coll: A `dup(thread=True)` of the ranks that share the layer; no other code should use it meanwhile.

    Raises:
        ValueError: If a parameter has less to divide than there are ranks.
        RuntimeError: If `coll` is an ordinary communicator; in forward and backward, on the loop's thread.

    Attributes:
        coll: The ranks that share the layer.
        splits: The divided parameters, each with the dimension along which it is cut.

    """

    splits: ClassVar[tuple[tuple[str, int], ...]]
    coll: Communicator

    def _divide(self, coll: Communicator) -> None:
        """Keep this rank's blocks of the parameters, which are whole."""
        check_threaded(coll)
        self.coll = coll
        self._wholes: dict[str, torch.Size] = {}
        for name, dim in self.splits:
            if (whole := getattr(self, name)) is not None:
                if whole.shape[dim] < coll.size:
                    raise ValueError(f"{name} has shape {list(whole.shape)}: expected {coll.size} or more along {dim}")
                self._wholes[name] = whole.shape
                setattr(self, name, nn.Parameter(_block(whole.detach(), coll, dim).clone()))

    def blocks(self) -> dict[str, tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
        """Return the whole shape of each divided parameter, and begin and end of this rank's block in each dimension.

        Checkpoints use it.
        """
        found = {}
        for name, dim in self.splits:
            if (shape := self._wholes.get(name)) is not None:
                mine = _block(torch.arange(shape[dim], device="cpu"), self.coll, 0)
                bounds = [(0, length) for length in shape]
                bounds[dim] = int(mine[0]), int(mine[-1]) + 1
                found[name] = tuple(shape), tuple(bounds)
        return found

    def extra_repr(self) -> str:
        """Return the arguments that `print` shows."""
        return f"{super().extra_repr()}, rank {self.coll.rank} of {self.coll.size}"


class ColumnLinear(SplitLayer, nn.Linear):
    """`torch.nn.Linear` divided by outputs: each rank has some columns of the transposed weight.

    All ranks give the same input `(..., in_features)` and get the output `(..., out_features)`. `SplitLayer` has the
    rules for `coll` and for threads.

    Args:
        in_features: Size of the input.
        out_features: Size of the whole output.
        coll: A `dup(thread=True)` of the ranks that share the layer.
        gather_output: False returns this rank's block of the output, as a `RowLinear` with `split_input=True` takes it.
        **options: Options of `torch.nn.Linear`.

    Example:
        ```python
        side = await coll.dup(thread=True)
        layer = nn.ColumnLinear(8, 4, side)
        output = await asyncio.to_thread(layer, torch.ones(2, 8))
        ```

    Cost: in backward an allreduce of the input's gradient; in forward an allgather of the output, if it is gathered.

    """

    splits: ClassVar[tuple[tuple[str, int], ...]] = ("weight", 0), ("bias", 0)

    def __init__(
        self, in_features: int, out_features: int, coll: Communicator, *, gather_output: bool = True, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.gather_output = gather_output
        self._divide(coll)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, whole or this rank's block."""
        same = _through(input, _same, partial(_total, self.coll))
        y = linear(same, self.weight, self.bias)
        return (
            _through(y, partial(_joined, self.coll, self.out_features), _mine(self.coll)) if self.gather_output else y
        )


class RowLinear(SplitLayer, nn.Linear):
    """`torch.nn.Linear` divided by inputs: each rank has their weights; the bias is whole on all ranks.

    All ranks give the same input `(..., in_features)`, or each its block of it, and get the whole output `(...,
    out_features)`. `SplitLayer` has the rules for `coll` and for threads.

    Args:
        in_features: Size of the whole input.
        out_features: Size of the output.
        coll: A `dup(thread=True)` of the ranks that share the layer.
        split_input: True takes this rank's block of the input.
        **options: Options of `torch.nn.Linear`.

    Example:
        ```python
        side = await coll.dup(thread=True)
        layer = nn.RowLinear(8, 4, side)
        output = await asyncio.to_thread(layer, torch.ones(2, 8))
        ```

    Cost: in forward an allreduce of the output; in backward an allgather of the input's gradient, if the input was
    whole.

    """

    splits: ClassVar[tuple[tuple[str, int], ...]] = (("weight", 1),)

    def __init__(
        self, in_features: int, out_features: int, coll: Communicator, *, split_input: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.split_input = split_input
        self._divide(coll)

    def forward(self, input: Tensor) -> Tensor:
        """Return the whole output."""
        whole = partial(_joined, self.coll, self.in_features)
        mine = input if self.split_input else _through(input, _mine(self.coll), whole)
        y = _through(linear(mine, self.weight), partial(_total, self.coll), _same)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # as under autocast


class VocabEmbedding(SplitLayer, nn.Embedding):
    """`torch.nn.Embedding` divided by rows.

    All ranks give the same indices `(...)` and get vectors `(..., embedding_dim)`. On the CPU an index that is out of
    range raises `IndexError`. `SplitLayer` has the rules for `coll` and for threads.

    Args:
        num_embeddings: Number of rows on all ranks together.
        embedding_dim: Size of a vector.
        coll: A `dup(thread=True)` of the ranks that share the layer.
        padding_idx: As in torch.
        device: As in torch.
        dtype: As in torch.

    Example:
        ```python
        side = await coll.dup(thread=True)
        layer = nn.VocabEmbedding(100, 8, side)
        vectors = await asyncio.to_thread(layer, torch.tensor([3, 99]))
        ```

    Cost: in forward an allreduce of the output.

    """

    splits: ClassVar[tuple[tuple[str, int], ...]] = (("weight", 0),)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, coll: Communicator, *, padding_idx: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._divide(coll)
        first = int(_block(torch.arange(num_embeddings, device="cpu"), coll, 0)[0])
        self._rows = range(first, first + len(self.weight))

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the indices."""
        if input.is_cpu and input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings:
            raise IndexError(f"indices {input.min()} to {input.max()}: expected 0 to {self.num_embeddings - 1}")
        rows = self._rows
        elsewhere = (input < rows[0]) | (input > rows[-1])
        padding = None if self.padding_idx is None or self.padding_idx not in rows else self.padding_idx - rows[0]
        mine = embedding((input - rows[0]).masked_fill(elsewhere, 0), self.weight, padding)
        return _through(mine.masked_fill(elsewhere.unsqueeze(-1), 0), partial(_total, self.coll), _same)


# --- inputs and outputs of divided layers -----------------------------------------------------------------------------


class _Through(Function):
    """A function and its dual, which is its backward; reports name one line for both."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, there: _Way, back: _Way, line: Line) -> Tensor:
        ctx.rest = back, there, line
        return there(t, line)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Through.apply(grads[0], *ctx.rest), None, None, None  # type: ignore[no-untyped-call]


_Way = Callable[[Tensor, Line], Tensor]


def _through(t: Tensor, there: _Way, back: _Way) -> Tensor:
    return _Through.apply(t, there, back, whence(1))  # type: ignore[no-any-return, no-untyped-call]


def _same(t: Tensor, _: Line) -> Tensor:
    return t.view_as(t)


def _total(coll: Communicator, t: Tensor, line: Line) -> Tensor:
    return completed(coll, lambda: allreduce(t, coll), line)


def _mine(coll: Communicator) -> _Way:
    return lambda t, _: _block(t, coll, -1).contiguous()


def _joined(coll: Communicator, width: int, t: Tensor, line: Line) -> Tensor:
    whole = completed(coll, lambda: allgather(t.movedim(-1, 0), coll, width), line)
    return whole.movedim(0, -1).contiguous()


def _block(whole: Tensor, coll: Communicator, dim: int) -> Tensor:
    return whole.tensor_split(coll.size, dim)[coll.rank]


# --- state ------------------------------------------------------------------------------------------------------------


@located
async def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return, on all ranks, the state dict that `module` would have with torch's own layers.

    All ranks that share divided layers call it, between two steps; it uses their communicators.

    Example:
        ```python
        module = nn.ColumnLinear(8, 4, await coll.dup(thread=True))
        state = await nn.full_state_dict(module)
        module.load_state_dict(nn.split_state_dict(module, state))
        ```

    Cost: an allgather of each divided parameter, and memory for it.

    """
    state = module.state_dict()
    # All are issued before the first await, so after a cancellation no rank waits.
    coming = [
        (key, dim, layer.coll.allgather(state[key].movedim(dim, 0).contiguous()))
        for key, layer, dim in _divided(module)
    ]
    for key, dim, blocks in coming:
        state[key] = torch.cat(await blocks).movedim(0, dim)
    return state


def split_state_dict(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's blocks of a whole `state`, for `load_state_dict` of `module` or its net.

    Nothing is sent; see `full_state_dict`.
    """
    blocks = {key: _block(state[key], layer.coll, dim) for key, layer, dim in _divided(module) if key in state}
    return {**state, **blocks}


def divided_parameters(module: nn.Module) -> dict[nn.Parameter, Communicator]:
    """Return the divided parameters, with the communicator of the ranks that share them."""
    layers = [layer for layer in module.modules() if isinstance(layer, SplitLayer)]
    blocks = ((getattr(layer, name), layer.coll) for layer in layers for name, _ in layer.splits)
    return {parameter: coll for parameter, coll in blocks if parameter is not None}


def total_over(colls: Iterable[Communicator], t: Tensor) -> Tensor:
    """Return the sum of `t` over the ranks of each of `colls`, one after the other; blocks this thread."""
    for coll in colls:
        t = completed(coll, partial(coll.allreduce, t.clone()))
    return t


def _divided(module: nn.Module) -> Iterator[tuple[str, SplitLayer, int]]:
    """Yield the key of each divided parameter in the state dict, with its layer and dimension."""
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, SplitLayer):
            for name, dim in layer.splits:
                if getattr(layer, name) is not None:
                    yield f"{prefix}.{name}".lstrip("."), layer, dim
