"""The trained models, and batches from seeds, the same for every contender."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["BUILDERS", "Tiny", "batch", "build"]

WIDTH = 2048
_TINY = 64


def build(name: str) -> nn.Module:
    """Return the model, with the same weights each time and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]()


def batch(name: str, model: nn.Module, samples: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs (samples, …) and targets of the model's output shape, different on each rank."""
    random = torch.Generator().manual_seed(1 + rank)
    x = torch.randn((samples, *INPUTS[name]), generator=random)
    with torch.no_grad():
        made: Tensor = model(x)
    return x, torch.randn(made.shape, generator=random)


def _mlp() -> nn.Module:
    """16.8 million parameters, 67 MB: heavy on communication when the batch is small."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _transformer() -> nn.Module:
    """6.3 million parameters in 96 tensors."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 8)


def _norm(channels: int) -> nn.Module:
    """A norm without running statistics: DDP broadcasts buffers in every step by default, aiodist never does."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


class _Block(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = _norm(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = _norm(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (B, inputs, H, W) -> (B, outputs, H / stride, W / stride)
        inside = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inside)) + self.around(x))


def _conv() -> nn.Module:
    """A small residual network, 1.1 million parameters in 54 tensors."""
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, 2, padding=1, bias=False),  # (B, 40, 16, 16)
        _norm(40),
        nn.ReLU(),
        *(_Block(40, 40, 1), _Block(40, 40, 1)),
        *(_Block(40, 80, 2), _Block(80, 80, 1)),  # (B, 80, 8, 8)
        *(_Block(80, 160, 2), _Block(160, 160, 1)),  # (B, 160, 4, 4)
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10)),  # (B, 10)
    )


class Tiny(nn.Module):
    """Many parameters of 64 elements, multiplied one after the other, so that their gradients come one by one."""

    def __init__(self, count: int = 1000) -> None:
        super().__init__()
        self.factors = nn.ParameterList([1 + 1e-3 * torch.randn(_TINY) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 64) for (B, 64)."""
        for factor in self.factors:
            x = x * factor
        return x


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "transformer": _transformer,
    "conv": _conv,
    "tiny1000": Tiny,
}
"""The models by name."""
INPUTS = {"mlp": (WIDTH,), "transformer": (32, 256), "conv": (3, 32, 32), "tiny1000": (_TINY,)}
