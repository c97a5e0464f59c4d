"""`SyncBatchNorm`: batch norm over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from aiodist.communicator import Communicator
from aiodist.nn.functional import allgather, allreduce, check_threaded, completed, line_for


class SyncBatchNorm(_BatchNorm):
    """Batch norm with the mean and variance of the joined batches of all ranks of `coll`, in training.

    Input and output have a shape `(n, num_features, ...)`; each rank has its own `n`, which may be 0. Outputs, running
    statistics and the gradients of inputs are those of the joined batch. The gradients of weight and bias are this
    rank's part of them, which `DataParallel` reduces. In evaluation ranks do not communicate.

    Args:
        num_features: Number of channels.
        coll: A `dup(thread=True)` of the ranks; no other code should use it.
        **options: Options of `torch.nn.BatchNorm1d`.

    Raises:
        RuntimeError: If `coll` is an ordinary communicator; in forward and backward, on the loop's thread.
        ValueError: In forward, if all ranks together have one value per channel or none.

    Example:
        ```python
        module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        module = nn.SyncBatchNorm.convert(module, await coll.dup(thread=True))
        output = await asyncio.to_thread(module, torch.ones(2, 8))
        ```

    In training forward and backward wait for all ranks, so they run on the compute thread of a net, or on another
    thread than the loop's, on all ranks. Gradients cannot be differentiated again.

    Cost: in forward an allgather of 2 numbers for each channel; in backward an allreduce of the same size.

    Source: Chan, Golub, LeVeque 1983, doi:10.1080/00031305.1983.10483115, for the variance.

    """

    def __init__(self, num_features: int, coll: Communicator, **options: Any) -> None:
        """`options` are those of `torch.nn.BatchNorm1d`."""
        check_threaded(coll)
        super().__init__(num_features, **options)
        self.coll = coll

    @classmethod
    def convert(cls, module: nn.Module, coll: Communicator) -> nn.Module:
        """Return `module` with each batch norm replaced by one over `coll`, which has the same parameters.

        It changes `module` in place, unless that is a batch norm itself. Parameters, buffers and modes stay as they
        are.

        Args:
            module: A module of torch.
            coll: A `dup(thread=True)` of the ranks; no other code should use it.

        Raises:
            RuntimeError: If `coll` is an ordinary communicator.
            ValueError: For a lazy batch norm, which has no parameters yet.

        """
        if isinstance(module, _BatchNorm):
            if isinstance(module, nn.modules.lazy.LazyModuleMixin):
                raise ValueError(f"{type(module).__name__} has no parameters yet: expected one that ran once")
            layer = cls(module.num_features, coll, eps=module.eps, momentum=module.momentum, affine=False)
            for name in ("affine", "track_running_stats", "training", "_parameters", "_buffers"):
                setattr(layer, name, getattr(module, name))
            return layer
        for name, child in module._modules.items():  # named_children() omits repeated children
            if child is not None:
                setattr(module, name, cls.convert(child, coll))
        return module

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"input has shape {list(input.shape)}: expected (n, {self.num_features}, ...)")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, values = moments = _moments(input, self.coll)
        if self.running_mean is not None:
            self._track(mean, variance * (values / (values - 1)))
        return _Normalise.apply(input, self.weight, self.bias, moments, self.eps, self.coll)  # type: ignore[no-untyped-call,no-any-return]

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(value.to(running.dtype), share)


_Moments = tuple[Tensor, Tensor, int]
"""Mean and variance of each channel over all ranks, `(channels,)`, and the number of values."""


@torch.no_grad()
def _moments(x: Tensor, coll: Communicator) -> _Moments:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sums = x.new_zeros(3, x.shape[1], dtype=torch.float64)
    if x.numel():
        mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
        sums = torch.stack([mean.double(), variance.double(), sums[2] + x.numel() // x.shape[1]])
    means, variances, counts = completed(coll, lambda: allgather(sums, coll)).view(-1, *sums.shape).unbind(1)
    total = counts.sum(0)
    if (count := int(total[0])) <= 1:
        raise ValueError(f"all ranks together have {count} values per channel: expected more than 1 to train")
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean.to(wide.dtype), variance.to(wide.dtype), count


class _Normalise(Function):
    """Batch norm by given statistics, which depend on the inputs of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _Moments,
        eps: float,
        coll: Communicator,
    ) -> Tensor:
        mean, variance, count = moments
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.rest = count, eps, coll, line_for(coll)
        weight, bias = _as(mean, weight), _as(mean, bias)
        return batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        count, eps, coll, line = ctx.rest
        gradient, sums = x.new_empty(x.shape), [torch.zeros_like(mean)] * 2
        if x.numel():  # as in evaluation, with constant statistics
            gradient, *sums = torch.ops.aten.native_batch_norm_backward(
                grad, x, _as(mean, weight), mean, variance, None, None, False, eps, [True, True, True]
            )
        totals = completed(coll, lambda: allreduce(torch.stack(sums), coll), line) / count
        scale = (variance + eps).rsqrt()
        by_weight, by_bias = totals * (scale if weight is None else scale * weight)
        factor, term, center = (t.view(1, -1, *[1] * (x.dim() - 2)) for t in (by_weight * scale, by_bias, mean))
        gradient.sub_((x - center).mul_(factor).add_(term))
        parts = (None, None) if weight is None else (t.to(weight.dtype) for t in sums)
        return gradient, *parts, None, None, None


def _as(like: Tensor, t: Tensor | None) -> Tensor | None:
    """Return `t` in the dtype of the statistics: float32 for 16-bit parameters."""
    return None if t is None else t.to(like.dtype)
