# A program as others write it, without types.
# mypy: ignore-errors
"""Trains with Hugging Face Accelerate on the CPU over backend argv[1]; writes what came of it as JSON into argv[2].

On the CPU `Accelerator` takes gloo, or the process group that is there already.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(backend, folder):
    if backend == "aiodist":
        import aiodist.c10d  # noqa: F401

        dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.use_distributed
    set_seed(0)
    data = TensorDataset(torch.randn(53, 16), torch.randn(53, 4))  # an odd number: the last batch is filled up
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4))
    opt = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 3)
    loader = DataLoader(data, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1))
    net, opt, loader, scheduler = accelerator.prepare(net, opt, loader, scheduler)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                scheduler.step()
                opt.zero_grad()
            losses.append(loss.item())
    net.eval()
    seen = [accelerator.gather_for_metrics(net(x)).sum(1).tolist() for x, _ in loader]
    padded = accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1), dim=0).tolist()
    mean = accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), "mean").item()
    words = [*gather_object([accelerator.process_index]), *broadcast_object_list([accelerator.process_index])]
    at = folder / f"accelerate-{backend}"
    accelerator.save_state(str(at))
    accelerator.wait_for_everyone()
    before = [p.clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    accelerator.load_state(str(at))
    again = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    with accelerator.main_process_first():
        accelerator.wait_for_everyone()
    assert again
    found = {"losses": losses, "seen": seen, "padded": padded, "mean": mean, "words": words}
    text = json.dumps({**found, "backend": dist.get_backend(), "group": type(dist.group.WORLD).__name__})
    (folder / f"{backend}-{dist.get_rank()}.json").write_text(text)
    accelerator.end_training()  # which destroys the process group


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
