"""One process and plain torch, on scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels.

python examples/train_sequential.py

The other `train_*.py` do the same on any number of ranks, each in its own way. They import the data, the model and the
order of the batches from here. Programs that take the same steps end with the same weights.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

EPOCHS, RATE, MOMENTUM, HELD_OUT = 15, 0.2, 0.9, 360
BATCH = 120  # divides evenly among 1 to 6 ranks
STEPS = (1797 - HELD_OUT) // BATCH  # per epoch


def load() -> tuple[Tensor, Tensor]:
    """Return all images and their labels, in random order; the last 360 are held out."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data)[order] / 16  # (1797, 64), float64 from 0 to 1
    return images, torch.tensor(digits.target)[order]  # (1797,), from 0 to 9


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def batches(rank: int = 0, size: int = 1) -> Iterator[Tensor]:
    """Yield the indices of this rank's images for each step: every `size`-th image of the batch."""
    random = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        order = torch.randperm(STEPS * BATCH, generator=random)  # the same on every rank
        for batch in order.split(BATCH):  # (120,)
            yield batch[rank::size]  # (120 / size,)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def report(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Print a number that identifies the weights, and their accuracy on the held-out images."""
    print(f"norm of the weights {sum(float(p.detach().norm()) for p in net.parameters()):.9f}")
    with torch.no_grad():
        right = net(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]  # (360,)
    print(f"test accuracy {right.double().mean():.4f}")


def main() -> None:
    torch.set_num_threads(1)  # these matrices are small
    images, labels = load()
    net = build()
    opt = optimizer(net.parameters())
    for mine in batches():
        opt.zero_grad()
        loss = F.cross_entropy(net(images[mine]), labels[mine])
        loss.backward()
        opt.step()
    report(net, images, labels)


if __name__ == "__main__":
    main()
