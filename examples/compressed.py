"""Gradients that travel as codes: how many bytes each codec saves, and what the net knows in the end.

aiodist run -n 2 examples/compressed.py

What a code leaves out is kept on the rank, and sent with the next gradient (error feedback). So training goes the same
way with few bytes, if steps are small enough for what comes late: these have no momentum, and shrink towards the end.
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
    codecs.QSGD(bits=4),  # rounded at random, right in the mean: nothing is kept
    codecs.Sign(vote=True),  # each element goes the way that most ranks want
    codecs.TopK(0.01),  # one element of a hundred
    codecs.PowerSGD(rank=4),  # matrices as products of two thin ones
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
    """Return the part of the held-out images that the net knows."""
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
