"""A training that Prometheus can scrape, and that reports its steps to a callback.

aiodist run -n 2 --metrics 9400 examples/metrics.py serves http://localhost:9400/metrics meanwhile, and prints on rank 0

    step 10: loss 0.…, … ms, …% of it waited
"""

import torch
import torch.nn.functional as F

import aiodist


def report(step: int, values: dict[str, float]) -> None:
    """Print a line; `SummaryWriter.add_scalars("train", values, step)` would draw curves instead."""
    waited = values["waited_seconds"] / values["seconds"]
    print(f"step {step}: loss {values['loss']:.3f}, {1e3 * values['seconds']:.1f} ms, {waited:.0%} of it waited")


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    async with aiodist.init() as coll:
        module = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
        net = await aiodist.nn.DataParallel.create(module, coll, log=report, log_every=10)
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        data = torch.Generator().manual_seed(coll.rank)  # each rank has its own batches
        for _ in range(40):
            x = torch.rand(30, 20, generator=data)  # (B, 20)
            y = x.sum(1, keepdim=True) / 10  # (B, 1)
            await net.step(lambda x=x, y=y: F.mse_loss(net(x), y), opt)
        print(f"rank {coll.rank}: {net.steps_done} steps")


if __name__ == "__main__":
    aiodist.run(main)
