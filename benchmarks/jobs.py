"""What the two programs of `bench end2end` train: models, real data with real preparation, when to evaluate.

`jobs_aiodist` and `jobs_ddp` are the same job, written twice; this is what they share.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["JOBS", "Data", "Job", "Outcome", "save"]

_HELD_OUT = 360  # digits
_WINDOW = 32  # tokens that the transformer sees
_HELD_OUT_WINDOWS = 64
_WORDS = 1000


class Data(Dataset[tuple[Tensor, Tensor]], ABC):
    """Samples by number, each prepared when it is asked for; any thread or process may ask."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


class Outcome(NamedTuple):
    """What a job came to, the same on every rank."""

    accuracies: list[float]
    """Of each evaluation, in order."""
    checkpoints: int
    """How many this rank wrote."""


@dataclass(frozen=True)
class Job:
    """One job; both programs take all that is in it as it is."""

    model: Callable[[], nn.Module]
    data: Data
    test: tuple[Tensor, Tensor]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    batch: int
    """Samples of one rank in a step."""
    epochs: int
    every: int
    """Steps from one evaluation, and one checkpoint, to the next."""

    def build(self) -> nn.Module:
        """Return the model, with the same weights on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model()

    def loss(self, net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of one batch."""
        return F.cross_entropy(net(x).flatten(0, -2), y.flatten())

    @torch.no_grad()
    def correct(self, model: nn.Module, rank: int, size: int) -> int:
        """Return how many of this rank's share of the test are right."""
        x, y = (t[rank::size] for t in self.test)
        right = 0
        for piece in range(0, len(x), self.batch):
            answers = model(x[piece : piece + self.batch]).argmax(-1)
            right += int((answers == y[piece : piece + self.batch]).sum())
        return right

    @property
    def answers(self) -> int:
        """How many can be right."""
        return self.test[1].numel()


def save(state: dict[str, Tensor], file: Path) -> None:
    """Write a checkpoint beside `file` and put it in its place at once."""
    part = file.with_suffix(".part")
    torch.save(state, part)
    part.replace(file)


# --- digits -----------------------------------------------------------------------------------------------------------


class _Digits(Data):
    """scikit-learn's handwritten digits, each turned, scaled and moved by a little, in twice the resolution."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images  # (N, 1, 8, 8)
        self._labels = labels  # (N,)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        angle, scale, down, right = (torch.rand(4, generator=random) * 2 - 1).tolist()
        return _moved(self._images[index], 0.2 * angle, 1 + 0.1 * scale, 0.1 * down, 0.1 * right), self._labels[index]


def _moved(image: Tensor, angle: float, scale: float, down: float, right: float) -> Tensor:
    """Return (1, 16, 16) of (1, 8, 8)."""
    cos, sin = math.cos(angle) * scale, math.sin(angle) * scale
    turn = torch.tensor([[[cos, -sin, right], [sin, cos, down]]])
    grid = F.affine_grid(turn, [1, 1, 16, 16], align_corners=False)
    return F.grid_sample(image.unsqueeze(0), grid, align_corners=False).squeeze(0)


def _digits() -> Job:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(digits.target)[order]
    test = torch.stack([_moved(image, 0.0, 1.0, 0.0, 0.0) for image in images[-_HELD_OUT:]])
    return Job(
        model=_digits_model,
        data=_Digits(images[:-_HELD_OUT], labels[:-_HELD_OUT]),
        test=(test, labels[-_HELD_OUT:]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch=32,
        epochs=12,
        every=44,
    )


def _digits_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 16, 8, 8)
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 32, 4, 4)
        *(nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)),  # (B, 10)
    )


# --- transformer --------------------------------------------------------------------------------------------------


class _Text(Data):
    """Every other window of Python's own documentation, cut into words and looked up when it is asked for."""

    def __init__(self, text: str) -> None:
        counted = Counter(_WORD.findall(text)).most_common(_WORDS - 1)
        self._number = {word: number for number, (word, _) in enumerate(counted, start=1)}
        self._text = text
        found = [match.start() for match in _WORD.finditer(text)]
        self._starts = found[: -_WINDOW - 1 : 2 * _WINDOW]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = _WORD.finditer(self._text, self._starts[index])
        numbers = [self._number.get(next(words)[0], 0) for _ in range(_WINDOW + 1)]
        window = torch.tensor(numbers)
        return window[:-1], window[1:]


_WORD = re.compile(r"\w+|\s+|[^\w\s]")


class _Part(Data):
    """The samples from `start` on, up to `stop`."""

    def __init__(self, data: Data, start: int, stop: int) -> None:
        self._data = data
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._data[self._start + index]


def _transformer() -> Job:
    from pydoc_data.topics import topics

    text = _Text("\n".join(topics[name] for name in sorted(topics)))
    count = len(text) - _HELD_OUT_WINDOWS
    held_out = [text[index] for index in range(count, len(text))]
    return Job(
        model=_Transformer,
        data=_Part(text, 0, count),
        test=(torch.stack([x for x, _ in held_out]), torch.stack([y for _, y in held_out])),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=16,
        epochs=1,
        every=20,
    )


class _Transformer(nn.Module):
    """Says of each word which comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 128)
        self.places = nn.Parameter(torch.zeros(_WINDOW, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.answer = nn.Linear(128, _WORDS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(_WINDOW)  # no buffer: DDP would broadcast it

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 32, 1000) for (B, 32)."""
        seen: Tensor = self.layers(self.words(x) + self.places, mask=self.mask, is_causal=True)
        answer: Tensor = self.answer(seen)
        return answer


JOBS: dict[str, Callable[[], Job]] = {"digits": _digits, "transformer": _transformer}
