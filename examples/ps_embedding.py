"""An embedding with its rows at a parameter server, and a dense layer trained with data parallelism.

aiodist run -n 2 --servers 1 examples/ps_embedding.py has two workers, and a server for the rows
aiodist run -n 3 examples/ps_embedding.py has three ranks that all serve and work

Each pixel of the digits is a word: its position and its darkness. A batch uses some of the 64 x 17 words. A worker
requests only their rows, while the previous batch trains, and pushes their gradients. With `Synchronous` the result is
the same for any number of ranks and servers, except for rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_sequential import HELD_OUT, batches, load

import aiodist
from aiodist.data import prefetch
from aiodist.nn import DataParallel
from aiodist.ps import Adagrad, Embedding, Normal, ParameterServer, Synchronous

DIM = 32


class Bag(nn.Module):
    """A dense layer on the mean of the rows of an image's words."""

    def __init__(self, words: Embedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = words
        self.head = nn.Linear(DIM, 10).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))  # type: ignore[no-any-return]  # (n, 64) to (n, 64, 32) to (n, 10)


async def train(net: DataParallel, words: Embedding, mine: list[Tensor], ids: Tensor, labels: Tensor) -> None:
    opt = torch.optim.SGD(net.parameters(), lr=0.5)  # for the dense layer; the servers update the rows

    def ahead(chosen: Tensor) -> tuple[Tensor, Tensor]:
        return words.prefetch(ids[chosen]), labels[chosen]  # requests the rows in advance

    async with prefetch(mine, depth=2, transform=ahead) as ready:
        async for x, y in ready:  # (120 / workers, 64), (120 / workers,)
            await net.step(lambda: F.cross_entropy(net(x), y), opt)


async def work(coll: aiodist.Communicator, ps: ParameterServer, ids: Tensor, labels: Tensor) -> None:
    rule = Adagrad(lr=0.1)
    table = await ps.embedding("words", DIM, init=Normal(std=0.1), optimizer=rule, dtype=torch.float64)
    words = Embedding(table)
    net = await DataParallel.create(Bag(words), coll)
    await train(net, words, list(batches(coll.rank, coll.size)), ids, labels)
    await ps.barrier()  # all pushes are applied
    if coll.rank == 0:
        net.eval()  # evaluation pushes nothing
        with torch.no_grad():
            found = await net.submit(net, ids[-HELD_OUT:])  # (360, 10)
        print(f"test accuracy {(found.argmax(1) == labels[-HELD_OUT:]).double().mean():.4f}")


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    ids = torch.arange(64) * 17 + (images * 16).long()  # (1797, 64), from 0 to 1087
    async with aiodist.init() as coll:
        async with ParameterServer(coll, consistency=Synchronous("mean")) as ps:
            workers = await coll.split(0 if ps.is_worker else None)  # the ranks with a dense layer
            if ps.is_worker:
                await work(workers, ps, ids, labels)
        if ps.is_server:
            print(f"rank {ps.rank} has {ps.statistics().rows} rows")


if __name__ == "__main__":
    aiodist.run(main)
