"""Training from a file of records that a queue distributes among the ranks.

aiodist run -n 2 examples/records.py prints on rank 0, for each of 8 epochs, a line like

    epoch 1: 1437 records, each used once; by rank [717, 720]

Rank 0 writes scikit-learn's handwritten digits into a RecordIO file. A rank takes the next records from the queue when
its last ones are used up, so a slow or busy rank takes fewer. The loops differ in length; `net.join()` lets a rank that
has finished wait for the others.
"""

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from train_sequential import HELD_OUT, build, load, optimizer, report

import aiodist
from aiodist.data import RecordWriter, prefetch, records
from aiodist.nn import DataParallel, assert_synchronized

EPOCHS, BATCH = 8, 30
HEAD = struct.Struct("<HB")  # index and label of the image; the 64 pixels follow


def write(path: Path, images: Tensor, labels: Tensor) -> None:
    pixels = (images * 16).to(torch.uint8)  # (1437, 64), from 0 to 16
    with RecordWriter(path, compressor="gzip", chunk_bytes=4096) as writer:  # about 60 images per chunk
        for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
            writer.write(HEAD.pack(number, label) + image.numpy().tobytes())


def decode(batch: list[bytes]) -> tuple[list[int], Tensor, Tensor]:
    """Return indices, images and labels; runs on a thread of `prefetch`."""
    numbers, labels = zip(*[HEAD.unpack_from(record) for record in batch], strict=True)
    pixels = torch.frombuffer(bytearray().join(record[HEAD.size :] for record in batch), dtype=torch.uint8)
    return list(numbers), pixels.view(-1, 64).double() / 16, torch.tensor(labels)  # n, (n, 64), (n,)


@contextmanager
def folder_of(rank: int) -> Iterator[str]:
    """Yield a temporary folder that rank 0 creates and removes; an empty string on other ranks."""
    if rank:
        yield ""
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield folder


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        with folder_of(coll.rank) as folder:
            path = Path(folder, "digits.rec")
            if coll.rank == 0:
                write(path, images[:-HELD_OUT], labels[:-HELD_OUT])
            path = await coll.broadcast_object(path)  # all ranks see this disk

            net = await DataParallel.create(build(), coll)
            opt = optimizer(net.parameters())
            queue = records(path, coll, batch_size=BATCH, shuffle=True, dynamic=True)
            for epoch in range(EPOCHS):
                queue.set_epoch(epoch)
                mine: list[int] = []
                async with net.join(), prefetch(queue, transform=decode) as batches:
                    async for numbers, x, y in batches:  # up to BATCH, (BATCH, 64), (BATCH,)
                        await net.step(lambda: F.cross_entropy(net(x), y), opt)
                        mine += numbers

                used = await coll.allgather_object(mine)
                assert sorted(chain(*used)) == list(range(len(images) - HELD_OUT))
                if coll.rank == 0:
                    counts = [len(numbers) for numbers in used]
                    print(f"epoch {epoch + 1}: {sum(counts)} records, each used once; by rank {counts}")

        await assert_synchronized(net.module, coll)
        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
