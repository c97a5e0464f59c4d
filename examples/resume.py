"""Checkpoint and resume: training stops, and continues with a different number of ranks.

aiodist run -n 4 examples/resume.py 40   # stops after step 40
aiodist run -n 2 examples/resume.py      # continues with step 41

A checkpoint stores the common state once and each rank's part in a separate file, so any number of ranks can load it.
All ranks together train on the same batches as one process, so the final weights are the same, except for rounding.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel

EVERY = 10  # steps between two checkpoints


async def main(path: Path, last: int | None = None) -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        net = await DataParallel.create(build(), coll)
        opt = optimizer(net.parameters())
        done = 0  # steps
        try:
            found = await aiodist.load(path, net, opt)
        except FileNotFoundError:  # raised on all ranks
            pass
        else:
            done = found.metadata["steps"]
            if coll.rank == 0:
                print(f"{coll.size} ranks continue after step {done}, saved by {found.ranks}")

        saving: aiodist.Handle[Path] | None = None
        for mine in list(batches(coll.rank, coll.size))[done:last]:  # (120 / size,)
            await net.step(lambda mine=mine: F.cross_entropy(net(images[mine]), labels[mine]), opt)
            done += 1
            if done % EVERY == 0:
                if saving is not None:
                    await saving  # it was written during the last steps
                saving = aiodist.save(path, net, opt, metadata={"steps": done}, keep_last=2)
        if saving is not None:
            await saving
        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main, Path("digits"), int(sys.argv[1]) if sys.argv[1:] else None)
