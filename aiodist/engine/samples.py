"""A sample on its way through network and criterion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Split = Callable[[Any], tuple[Any, Any]]
"""Returns input and target of a sample."""


class WithCriterion(nn.Module):
    """A network and a criterion that has parameters too: one module, so that one net trains both.

    ```python
    net = await DataParallel.create(WithCriterion(network, criterion), coll)
    engine = aiodist.Engine(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ```
    `net(x)` is what `network(x)` returns. Names of parameters begin with `network.` and `criterion.`.
    """

    def __init__(self, network: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.criterion = criterion

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the output of the network."""
        return self.network(*args, **kwargs)


def pair(sample: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return input and target of a sample that is such a pair; raise TypeError for another one."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        what = f"{type(sample).__name__} of {len(sample)}" if hasattr(sample, "__len__") else type(sample).__name__
        raise TypeError(f"the sample is a {what}: expected a pair of input and target, or `split=` of the engine")
    return sample[0], sample[1]


def whole(sample: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return a sample that is all input, where no criterion wants a target."""
    return sample, None


def applied(network: Callable[..., Any], given: Any) -> Any:  # noqa: ANN401
    """Return the output: a tuple or list is the arguments, a mapping the keywords."""
    if isinstance(given, (tuple, list)):
        return network(*given)
    if isinstance(given, Mapping):
        return network(**given)
    return network(given)


def weight_of(sample: Any) -> float:  # noqa: ANN401
    """Return how many samples there are in a batch: the first dimension of its first tensor, 1 without one.

    >>> weight_of({"x": [Tensor(3, 2)], "y": Tensor(5)})
    3.0
    """
    first = next(_tensors(sample), None)
    return float(first.shape[0]) if first is not None and first.ndim else 1.0


def _tensors(sample: Any) -> Iterator[Tensor]:  # noqa: ANN401
    if isinstance(sample, Tensor):
        yield sample
    elif isinstance(sample, Mapping):
        for value in sample.values():
            yield from _tensors(value)
    elif isinstance(sample, (tuple, list)):
        for value in sample:
            yield from _tensors(value)
