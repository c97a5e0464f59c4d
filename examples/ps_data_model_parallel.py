"""A parameter server, data-parallel groups and model parallelism in one program.

aiodist run -n 8 examples/ps_data_model_parallel.py has two groups of two models of two ranks each

Two ranks share a model. The models of a group average their gradients in every step. Each group trains separately and
moves towards a common centre every eighth step; a parameter server holds the centre. The ranks that have the same part
of a model share a communicator: they average that part and serve its centre.
"""

import torch
import torch.nn.functional as F
from model_parallel import build
from torch import Tensor
from train_sequential import batches, load, optimizer, report
from train_sequential import build as build_whole

import aiodist
from aiodist.nn import DataParallel, full_state_dict
from aiodist.ps import EASGD, ParameterServer, elastic_alpha

SHARE, GROUP, TAU = 2, 2, 8  # ranks of a model, models of a group, steps


async def train(net: DataParallel, client: EASGD, mine: list[Tensor], images: Tensor, labels: Tensor) -> None:
    for chosen in mine:  # (120 / models,)
        net.zero_grad()
        loss = await net.submit(lambda: F.cross_entropy(net(images[chosen]), labels[chosen]))
        await net.backward(loss)  # the mean over the group
        await client.step()  # the optimizer's step; every eighth time group and centre move closer


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        share = 1 if coll.size % SHARE else SHARE
        sharing = await coll.split(coll.rank // share)
        part = await coll.split(coll.rank % share)  # the ranks with the same part, one per model
        module = build(await sharing.dup(thread=True))
        # Both ranks of a model have the whole last bias, and two servers would update it differently: it stays fixed.
        module[2].bias.requires_grad_(False)
        async with ParameterServer(part, module) as ps:
            group = await part.split(part.rank // GROUP)
            net = await DataParallel.create(module, group)
            opt = optimizer(net.parameters())
            alpha = elastic_alpha(0.9, -(-part.size // GROUP))  # for this number of groups
            async with EASGD(ps, module, opt, tau=TAU, alpha=alpha, group=group, run=net.submit) as client:
                await train(net, client, list(batches(part.rank, part.size)), images, labels)
            await ps.sync()
            await ps.barrier()
            await ps.pull(module)  # the centre
        whole = build_whole()
        whole.load_state_dict(await full_state_dict(module))
        if coll.rank == 0:
            report(whole, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
