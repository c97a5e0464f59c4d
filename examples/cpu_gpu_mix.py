"""Four stages at the same time: prepare a batch on a CPU thread, copy it to the GPU, compute, reduce over the ranks.

aiodist run -n 2 examples/cpu_gpu_mix.py runs on any number of ranks. One rank on two cores without a GPU prints about

    alone: prepare 0.19 s, copy 0.01 s, compute 0.36 s, reduce 0.01 s
    together 0.37 s: share hidden 96%
    the sums are those of plain torch

Two ranks keep both cores busy and hide a third. The program sums the products of any two pixels over the images of all
ranks. Each turn awaits four handles: a thread unpacks and normalises batch k, batch k-1 is copied to the device, the
products of batch k-2 are computed, and the sum of batch k-3 is reduced. Without a GPU, the copy goes to other host
memory, and threads copy and compute. The hidden share is the part of the shorter stages that ran during the longest.
"""

import asyncio
import zlib
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

import aiodist
from aiodist.streams import CudaStream, HostStream

STEPS, IMAGES, PIXELS = 12, 1024, 1024
Stage = Callable[[int], aiodist.Handle[Tensor]]


def load(rank: int, k: int) -> bytes:
    """Return batch k of a rank as a compressed file: IMAGES times PIXELS numbers from 0 to 15."""
    random = torch.Generator().manual_seed(STEPS * rank + k)
    pixels = torch.randint(16, (IMAGES, PIXELS), generator=random, dtype=torch.uint8)
    return zlib.compress(pixels.numpy().tobytes(), level=1)


def prepare(file: bytes, into: Tensor) -> Tensor:
    """Unpack a batch, and normalise each pixel to mean 0 and variance 1."""
    pixels = torch.frombuffer(bytearray(zlib.decompress(file)), dtype=torch.uint8).view(IMAGES, PIXELS).float()
    variance, mean = torch.var_mean(pixels, dim=0)  # (PIXELS,) each
    return torch.mul(pixels.sub_(mean), variance.rsqrt(), out=into)


def products(x: Tensor, into: Tensor) -> Tensor:
    return torch.mm(x.T, x, out=into)  # (PIXELS, PIXELS)


def pipeline(
    coll: aiodist.Communicator, files: list[bytes], cpu: HostStream, copies: HostStream, math: HostStream
) -> tuple[list[Stage], list[Tensor]]:
    """Return the stages, each a function of the number of a batch, and the tensors of the sums."""
    device = coll.device
    here = [torch.empty(IMAGES, PIXELS, pin_memory=device.type == "cuda") for _ in range(2)]  # batches take turns
    there = [torch.empty(IMAGES, PIXELS, device=device) for _ in range(2)]
    sums = [torch.empty(PIXELS, PIXELS, device=device) for _ in range(STEPS)]

    def copied(k: int) -> aiodist.Handle[Tensor]:
        if device.type == "cuda":
            return CudaStream.of("to-device", device).copy(there[k % 2], here[k % 2])
        return copies.submit(there[k % 2].copy_, here[k % 2])

    def computed(k: int) -> aiodist.Handle[Tensor]:
        stream = CudaStream.of("compute", device) if device.type == "cuda" else math
        return stream.submit(products, there[k % 2], sums[k])

    def prepared(k: int) -> aiodist.Handle[Tensor]:
        return cpu.submit(prepare, files[k], here[k % 2])

    return [prepared, copied, computed, lambda k: coll.allreduce(sums[k])], sums


async def alone(stages: list[Stage], steps: int) -> list[float]:
    """Run the stages one after the other; return the seconds of each stage."""
    seconds = [0.0] * len(stages)
    for k in range(steps):
        for i, stage in enumerate(stages):
            began = perf_counter()
            await stage(k)
            seconds[i] += perf_counter() - began
    return seconds


async def together(stages: list[Stage]) -> float:
    """Run all stages at the same time, each one batch later than the stage before it; return the seconds."""
    began = perf_counter()
    for turn in range(STEPS + len(stages) - 1):
        batches = [(stage, turn - i) for i, stage in enumerate(stages)]
        await asyncio.gather(*[stage(k) for stage, k in batches if 0 <= k < STEPS])
    return perf_counter() - began


async def main() -> None:
    torch.set_num_threads(1)  # the stages and the ranks share the cores
    async with (
        aiodist.init() as coll,
        HostStream("prepare") as cpu,
        HostStream("copy") as copies,
        HostStream("compute") as math,
    ):
        files = [load(coll.rank, k) for k in range(STEPS)]
        stages, _ = pipeline(coll, files, cpu, copies, math)
        await alone(stages, 1)  # warm up
        each = await alone(stages, STEPS)
        stages, sums = pipeline(coll, files, cpu, copies, math)
        seconds = await together(stages)

        for k, found in enumerate(sums):
            mine = [prepare(load(rank, k), torch.empty(IMAGES, PIXELS)) for rank in range(coll.size)]
            torch.testing.assert_close(found.cpu(), sum(x.T @ x for x in mine), rtol=1e-4, atol=1e-2)
        if coll.rank == 0:
            names = ("prepare", "copy", "compute", "reduce")
            print("alone:", ", ".join(f"{name} {took:.2f} s" for name, took in zip(names, each, strict=True)))
            hidden = (sum(each) - seconds) / (sum(each) - max(each))
            print(f"together {seconds:.2f} s: share hidden {min(max(hidden, 0.0), 1.0):.0%}")
            print("the sums are those of plain torch")


if __name__ == "__main__":
    aiodist.run(main)
