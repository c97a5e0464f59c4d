"""Training that is stopped, and goes on with another number of ranks where it was.

aiodist run -n 4 examples/resume.py 40   # ends behind step 40
aiodist run -n 2 examples/resume.py      # goes on with step 41

A checkpoint has what all ranks have alike once, each rank's share in a file of its own, so any number of ranks can load
it. All ranks together train on the same batches as one process, so the weights end the same, but for rounding.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel

EVERY = 10  # steps from one checkpoint to the next


async def main(path: Path, last: int | None = None) -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        net = await DataParallel.create(build(), coll)
        opt = optimizer(net.parameters())
        done = 0  # steps
        try:
            found = await aiodist.load(path, net, opt)
        except FileNotFoundError:  # on all ranks alike
            pass
        else:
            done = found.metadata["steps"]
            if coll.rank == 0:
                print(f"{coll.size} ranks go on behind step {done}, saved by {found.ranks}")

        saving: aiodist.Handle[Path] | None = None
        for mine in list(batches(coll.rank, coll.size))[done:last]:  # (120 / size,)
            await net.step(lambda mine=mine: F.cross_entropy(net(images[mine]), labels[mine]), opt)
            done += 1
            if done % EVERY == 0:
                if saving is not None:
                    await saving  # it was written beside the last steps
                saving = aiodist.save(path, net, opt, metadata={"steps": done}, keep_last=2)
        if saving is not None:
            await saving
        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main, Path("digits"), int(sys.argv[1]) if sys.argv[1:] else None)
