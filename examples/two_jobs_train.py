"""Train, and publish the weights to another job, which may come and go: examples/two_jobs_serve.py.

aiodist run -n 2 examples/two_jobs_train.py                  in one terminal, and in another one
aiodist run -n 2 examples/two_jobs_serve.py --port 8000      which asks for predictions there

Publishing copies each rank's part of the weights. Training never waits for the other job, and continues without it.
"""

import argparse

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--folder", help="a folder that both jobs see, on several hosts")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with (
        aiodist.init(stop_on_signal=True) as coll,
        aiodist.listen("weights", folder=args.folder) as door,
    ):
        net = await DataParallel.create(build(), coll)
        opt = optimizer(net.parameters())
        coll.print("training", flush=True)
        repeated = (mine for _ in range(args.repeats) for mine in batches(coll.rank, coll.size))
        for step, mine in enumerate(repeated, 1):  # (120 / size,)
            await net.step(lambda mine=mine: F.cross_entropy(net(images[mine]), labels[mine]), opt)
            if step % 5 == 0:
                await door.publish({"model": net.module.state_dict(), "step": step}, version=step)
            if net.stop_requested:  # on all ranks after the same step
                break
        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
