"""A training job under any starter; says where it ran and how it ended."""

from __future__ import annotations

import sys

import torch
from torch import nn

import aiodist
from aiodist.nn import DataParallel


async def main() -> None:
    async with aiodist.init() as coll:
        torch.manual_seed(coll.rank)
        net = await DataParallel.create(nn.Linear(4, 1), coll)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(8, 4)
            await net.step(lambda x=x: net(x).square().mean(), opt)
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
        total = await coll.allreduce(weights.clone())
        alike = bool(torch.allclose(total, weights * coll.size))
        where = f"{coll.local_rank} of {coll.local_size} on its host"
        # In one write, for several ranks write to one pipe.
        sys.stdout.write(f"rank {coll.rank} of {coll.size} over {coll.backend}, {where}: {alike}\n")
        sys.stdout.flush()
        await net.aclose()


if __name__ == "__main__":
    aiodist.run(main)
