"""`torch.distributed` over aiodist and over gloo: all-reduces, steps of DDP and of FSDP2, in one job.

torchrun --nproc-per-node 2 -m benchmarks.c10d

Both backends have a process group of the same ranks, and take turns. Each line has the median of the calls, on the
slowest rank. The first call of a turn is not timed: it synchronises the ranks, and fills the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from aiodist import c10d
from aiodist.bench.timing import OVERWRITTEN_BYTES
from benchmarks import models

Way = tuple[Callable[[], object], Callable[[], object]]
"""The timed call, and the preparation of each."""

_SIZES = {"4 B": (4, 100), "64 KiB": (64 << 10, 50), "1 MiB": (1 << 20, 20), "64 MiB": (64 << 20, 2)}
"""Bytes, and calls in a turn."""
_STEPS = (("mlp", 32), ("conv", 32), ("transformer", 4))
_RATE = 1e-6  # so small that the gradients stay as they are
_WARMUPS = 3
_TURNS = 15


def main() -> None:
    """Measure on the ranks of this job; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("aiodist")
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(ours, c10d.AiodistProcessGroup)
    assert isinstance(gloo, dist.ProcessGroup)
    for name, calls, ways in _cases(ours, gloo):
        seconds = _interleaved(ways, calls, gloo)
        if dist.get_rank() == 0:
            for way, took in seconds.items():
                print(f"{name:24} {way:14} {took * 1e6:11.1f} us  {took / seconds['gloo']:6.3f} of gloo")  # noqa: T201
    dist.destroy_process_group()


def _cases(ours: c10d.AiodistProcessGroup, gloo: dist.ProcessGroup) -> Iterator[tuple[str, int, dict[str, Way]]]:
    for name, (nbytes, calls) in _SIZES.items():
        ways = {
            "gloo": _reducing(gloo, torch.zeros(nbytes // 4)),
            "aiodist": _reducing(ours, torch.zeros(nbytes // 4)),
            "aiodist arena": _reducing(ours, ours.coll.to_arena_(torch.zeros(nbytes // 4))),
        }
        yield f"all_reduce {name}", calls, ways
    for name, samples in _STEPS:
        steps = {
            "gloo": _step(name, samples, partial(DistributedDataParallel, process_group=gloo)),
            "aiodist": _step(name, samples, partial(DistributedDataParallel, process_group=ours)),
            "aiodist hook": _step(name, samples, partial(_hooked, ours)),
        }
        yield f"DDP {name} {samples}", 2, steps
    groups = {"gloo": gloo, "aiodist": ours}
    sharded = {way: _step("transformer", 4, partial(_sharded, group)) for way, group in groups.items()}
    yield "FSDP2 transformer 4", 2, sharded


def _reducing(group: dist.ProcessGroup, t: Tensor) -> Way:
    return partial(dist.all_reduce, t, group=group), partial(t.fill_, 1) if t.nbytes >= OVERWRITTEN_BYTES else _nothing


def _nothing() -> None: ...


def _step(name: str, samples: int, parallel: Callable[[nn.Module], nn.Module]) -> Way:
    model = models.build(name)
    x, y = models.batch(name, model, samples, dist.get_rank())
    net = parallel(model)
    optimizer = torch.optim.SGD(net.parameters(), _RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    return step, _nothing


def _hooked(group: dist.ProcessGroup, model: nn.Module) -> nn.Module:
    net = DistributedDataParallel(model, process_group=group)
    c10d.ddp_hook(net)
    return net


def _sharded(group: dist.ProcessGroup, model: nn.Module) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers if isinstance(model, nn.TransformerEncoder) else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _interleaved(ways: dict[str, Way], calls: int, beside: dist.ProcessGroup) -> dict[str, float]:
    """Return the median of the calls of each backend on the slowest rank."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(_WARMUPS + _TURNS):
        for way, (call, overwrite) in ways.items() if turn % 2 else reversed(ways.items()):
            dist.barrier(beside)
            for timed in range(calls):
                overwrite()
                began = perf_counter()
                call()
                if timed and turn >= _WARMUPS:
                    times[way].append(perf_counter() - began)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)  # (ways, calls)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=beside)
    return {way: median(row.tolist()) for way, row in zip(times, slowest, strict=True)}


if __name__ == "__main__":
    main()
