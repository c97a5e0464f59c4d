"""`BlockSequential`: layers in contiguous blocks, with a backward for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph


class BlockSequential(nn.Module):
    """Layers that run one after another, in `blocks` contiguous blocks of similar size in bytes.

    ```python
    net = await nn.DataParallel.create(nn.BlockSequential(layers, blocks=7), coll)
    ```
    Outputs, gradients and names in the state dict are those of `torch.nn.Sequential(*layers)`. Backward runs block by
    block, from the last one: as soon as the backward of a block ends, its gradients are final and its graph is freed. A
    `DataParallel` reduces the parameters of a block together, in one bucket for each dtype and device, while the
    backward of the next block runs.

    Args:
        layers: Modules, or a `torch.nn.Sequential`, whose names are kept. A layer without parameters belongs to the
            block of the layer before it. Between blocks a tensor or a tuple of tensors is passed.
        blocks: Number of blocks. Cuts are chosen so that the sum of the squared sizes is least.

    Raises:
        ValueError: Unless 1 <= `blocks` <= number of layers with parameters.

    Backward raises `RuntimeError` for `create_graph`, `inputs=` and `torch.autograd.grad`, which cannot cross blocks;
    for the last two, parameters of blocks count as unused.

    Cost: about 50 us for each block and step.

    Source: TorchMPI's class of this name (Facebook, 2017).

    """

    def __init__(self, layers: Iterable[nn.Module], blocks: int) -> None:
        super().__init__()
        sequential = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
        for name, layer in sequential._modules.items():  # named_children() omits repeated layers
            self.add_module(name, layer)
        sizes = [sum(p.nbytes for p in layer.parameters()) for layer in sequential]
        starts = [i for i, size in enumerate(sizes) if size]
        if not 1 <= blocks <= len(starts):
            raise ValueError(f"blocks={blocks}: expected 1 to {len(starts)}, the number of layers that have parameters")
        cuts = [starts[i] for i in balanced([sizes[i] for i in starts], blocks)]
        self._bounds = list(pairwise([0, *cuts, len(sizes)]))

    @property
    def blocks(self) -> list[list[nn.Module]]:
        """The layers of each block."""
        layers: list[Any] = list(self._modules.values())
        return [layers[start:end] for start, end in self._bounds]

    def forward(self, x: Any) -> Any:
        """Return the output of the last layer for the input `x`, a tensor or a tuple."""
        for block in self.blocks:
            x = _run_block(block, x)
        return x


def balanced(sizes: Sequence[int], blocks: int) -> list[int]:
    """Return the cuts of `sizes` into this number of nonempty blocks, with the least sum of squared sizes.

    >>> balanced([1, 1, 1, 1, 4], 2), balanced([10] * 31, 7)
    ([4], [4, 8, 12, 16, 21, 26])
    """
    ends = list(accumulate(sizes, initial=0))
    best: list[tuple[float, list[int]]] = [(end * end if i else inf, []) for i, end in enumerate(ends)]
    for _ in range(blocks - 1):  # `best[i]` has the sum and the cuts of the first i sizes
        best = [
            min(((best[cut][0] + (end - ends[cut]) ** 2, [*best[cut][1], cut]) for cut in range(i)), default=(inf, []))
            for i, end in enumerate(ends)
        ]
    return best[-1][1]


def block_numbers(module: nn.Module) -> dict[nn.Parameter, int]:
    """Return the parameters in blocks of all `BlockSequential` in `module`, each with the number of its block.

    A parameter of several blocks belongs to the first of them, whose backward comes last.
    """
    blocks = [block for found in module.modules() if isinstance(found, BlockSequential) for block in found.blocks]
    numbers: dict[nn.Parameter, int] = {}
    for number, block in enumerate(blocks):
        for parameter in nn.ModuleList(block).parameters():
            numbers.setdefault(parameter, number)
    return numbers


def _run_block(layers: Sequence[nn.Module], x: Any) -> Any:
    def run(*inputs: Any) -> Any:
        y: Any = inputs if isinstance(x, tuple) else inputs[0]
        for layer in layers:
            y = layer(y)
        return y

    inputs = x if isinstance(x, tuple) else (x,)
    trained = any(p.requires_grad for layer in layers for p in layer.parameters())
    moving = any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
    if not torch.is_grad_enabled() or not (trained or moving) or torch.compiler.is_compiling():
        return run(*inputs)
    # The empty tensor needs a gradient, so that backward reaches a block without inputs that do.
    return _Block.apply(run, torch.empty(0, requires_grad=True, device="cpu"), *inputs)  # type: ignore[no-untyped-call]


class _Writable(torch.autograd.Function):
    """Makes the input of a block writable for the block (`nn.ReLU(inplace=True)`), unlike a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _writable(x: Tensor) -> Tensor:
    return _Writable.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class _Block(torch.autograd.Function):
    """Runs a block on inputs that are detached from the graph, with a separate backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], _: Tensor, *inputs: Any) -> Any:
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        with torch.enable_grad():
            made = run(*(_writable(x) if isinstance(x, Tensor) and x.requires_grad else x for x in ctx.inputs))
        ctx.block_outputs = made if isinstance(made, tuple) else (made,)
        cut = tuple(y.detach() if isinstance(y, Tensor) else y for y in ctx.block_outputs)
        moving = [isinstance(y, Tensor) and y.requires_grad for y in ctx.block_outputs]
        ctx.mark_non_differentiable(
            *(y for y, moves in zip(cut, moving, strict=True) if isinstance(y, Tensor) and not moves)
        )
        ctx.set_materialize_grads(False)
        return cut if isinstance(made, tuple) else cut[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled() or not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "backward runs block by block, which leaves gradients in `.grad` alone: expected neither create_graph, "
                "inputs= nor torch.autograd.grad"
            )
        moving = [x for x in ctx.inputs if isinstance(x, Tensor) and x.requires_grad]
        for x in moving:  # gradients of an earlier backward that kept the graph
            x.grad = None
        pairs = [(y, grad) for y, grad in zip(ctx.block_outputs, grads, strict=True) if grad is not None]
        torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs], retain_graph=_keeps_graph())
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in ctx.inputs)
