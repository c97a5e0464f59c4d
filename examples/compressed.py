"""Compressed gradients: the bytes that each codec saves, and the accuracy after training.

aiodist run -n 2 examples/compressed.py

Each rank keeps the part of a gradient that its code leaves out, and adds it to the next gradient (error feedback).
Training then ends as well as with full gradients if the steps are small: these have no momentum, and they shrink.
"""

import torch
import torch.nn.functional as F
from train_sequential import EPOCHS, HELD_OUT, STEPS, batches, build, load

import aiodist
from aiodist import codecs
from aiodist.nn import DataParallel

PASSES = 4  # over the batches of train_sequential.py
CODECS = [
    None,
    codecs.BFloat16(),
    codecs.Int8(),
    codecs.QSGD(bits=4),  # rounds at random without bias: no residual
    codecs.Sign(vote=True),  # each element has the sign that most ranks have
    codecs.TopK(0.01),  # 1 % of the elements
    codecs.PowerSGD(rank=4),  # a matrix as the product of two thin ones
]


async def train(coll: aiodist.Communicator, codec: codecs.Codec | None) -> DataParallel:
    images, labels = load()  # (1797, 64), (1797,)
    net = await DataParallel.create(build().float(), coll, compress=codec)
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    net.configure(scheduler=torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, PASSES * EPOCHS * STEPS))
    for _ in range(PASSES):
        for mine in batches(coll.rank, coll.size):  # (120 / size,)
            x, y = images[mine].float(), labels[mine]
            await net.step(lambda x=x, y=y: F.cross_entropy(net(x), y), opt)
    return net


def accuracy(net: DataParallel) -> float:
    """Return the accuracy of the net on the held-out images."""
    images, labels = load()
    with torch.no_grad():
        right = net(images[-HELD_OUT:].float()).argmax(1) == labels[-HELD_OUT:]  # (360,)
    return float(right.double().mean())


async def main() -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    async with aiodist.init() as coll:
        for codec in CODECS:
            net = await train(coll, codec)
            seen = net.statistics()
            if coll.rank == 0:
                fewer = seen.nbytes / seen.sent_nbytes
                print(f"{codec or 'plain'}: {fewer:.1f} times fewer bytes, test accuracy {accuracy(net):.4f}")
            await net.aclose()


if __name__ == "__main__":
    aiodist.run(main)
