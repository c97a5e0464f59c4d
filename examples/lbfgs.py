"""LBFGS on several ranks: an optimizer that evaluates the loss several times per step.

aiodist run -n 2 examples/lbfgs.py prints on rank 0 `53 evaluations, loss 0.02025`, like any other number of ranks

`opt.step` runs in a thread. Its closure asks the event loop for each evaluation. Gradients and loss are means over all
ranks, so the line search makes the same decisions on every rank.
"""

import asyncio

import torch
import torch.nn.functional as F

import aiodist
from aiodist.nn import DataParallel


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    x = torch.randn(240, 8, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True)  # (240, 1)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    async with aiodist.init() as coll:
        mine = slice(coll.rank, None, coll.size)
        net = await DataParallel.create(module, coll)
        opt = torch.optim.LBFGS(net.parameters(), max_iter=50, line_search_fn="strong_wolfe")
        evaluations = 0

        async def evaluate() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            opt.zero_grad()
            loss = await net.submit(lambda: F.mse_loss(net(x[mine]), y[mine]))
            await net.backward(loss)  # every .grad is the mean over all ranks
            return await coll.allreduce(loss.detach().clone(), op="mean")

        loop = asyncio.get_running_loop()

        def closure() -> torch.Tensor:
            return asyncio.run_coroutine_threadsafe(evaluate(), loop).result()

        await asyncio.to_thread(opt.step, closure)
        loss = await coll.allreduce(F.mse_loss(net(x[mine]), y[mine]).detach(), op="mean")
        if coll.rank == 0:
            print(f"{evaluations} evaluations, loss {loss.item():.4g}")


if __name__ == "__main__":
    aiodist.run(main)
