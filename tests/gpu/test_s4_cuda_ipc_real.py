"""CUDA IPC on a real device: ranks in processes of their own, on all GPUs, most of them sharing one (S4).

`python -m pytest -m gpu tests/gpu/test_s4_cuda_ipc_real.py`. Rank r works on GPU r modulo their number. Results are
compared with the CPU's in float64, inputs are random in each round, outputs are poisoned before.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.collectives.cuda import fused
from aiodist.collectives.cuda.ipc import reduce
from aiodist.types import ReduceOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ranks = pytest.mark.ranks(2, 4, backend=("shm", "gloo"))
IPC: Final = "cuda_ipc"
NUMELS = (1, 7, 1000, 100_003, 20_000_001)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def device_of(coll: Communicator) -> torch.device:
    device = torch.device("cuda", coll.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def brought(coll: Communicator, numel: int, kind: torch.dtype, seed: int) -> list[Tensor]:
    """Return what each rank brings, on the CPU; all ranks know it from the seed."""
    made = torch.Generator().manual_seed(seed)
    if kind.is_floating_point:
        return [torch.randn(numel, generator=made).to(kind) for _ in range(coll.size)]
    return [torch.randint(0, 9, (numel,), generator=made).to(kind) for _ in range(coll.size)]


def poisoned(numel: int, kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((numel,), math.nan if kind.is_floating_point else 113, dtype=kind, device=device)


def check(t: Tensor, exact: Tensor, ranks: int) -> None:
    """Assert that `t` is `exact`, of float64, but for the rounding of sums over `ranks`."""
    found = t.cpu().double()
    if t.dtype.is_floating_point:
        torch.testing.assert_close(found, exact, rtol=TOLERANCE[t.dtype], atol=TOLERANCE[t.dtype] * ranks)
    else:
        assert torch.equal(found, exact)


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


@ranks
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int32], ids=str)
async def test_s4_allreduce(coll: Communicator, kind: torch.dtype) -> None:
    device = device_of(coll)
    for numel in NUMELS:
        parts = brought(coll, numel, kind, numel)
        t = parts[coll.rank].to(device)
        assert await coll.allreduce(t, impl=IPC) is t
        check(t, total(parts), coll.size)
        bits = await coll.allgather(t.cpu()[:100_000].view(torch.uint8))
        assert all(torch.equal(theirs, bits[0]) for theirs in bits), "ranks differ"
        if kind.is_floating_point:
            t = parts[coll.rank].to(device)
            await coll.allreduce(t, op="mean", impl=IPC)
            check(t, total(parts) / coll.size, coll.size)
        t = parts[coll.rank].to(device)
        await coll.allreduce(t, op="max", impl=IPC)
        assert torch.equal(t.cpu(), torch.stack(parts).amax(0))


@ranks
async def test_s4_the_other_operations(coll: Communicator) -> None:
    device = device_of(coll)
    for numel, kind in ((7, torch.float64), (300_001, torch.float32), (300_001, torch.bfloat16)):
        parts = brought(coll, numel * coll.size, kind, numel)
        exact = total(parts)
        for root in range(coll.size):
            t = parts[coll.rank].to(device)
            await coll.reduce(t, root=root, impl=IPC)
            check(t, exact if coll.rank == root else parts[coll.rank].double(), coll.size)
            t = parts[root].to(device) if coll.rank == root else poisoned(numel * coll.size, kind, device)
            await coll.broadcast(t, root, impl=IPC)
            check(t, parts[root].double(), 1)
        out = poisoned(numel, kind, device)
        await coll.reduce_scatter(parts[coll.rank].to(device), out=out, impl=IPC)
        check(out, exact.chunk(coll.size)[coll.rank], coll.size)
        out = poisoned(numel * coll.size, kind, device)
        await coll.allgather(parts[coll.rank][:numel].to(device), out=out, impl=IPC)
        check(out, torch.cat([part[:numel] for part in parts]).double(), 1)
        t = parts[coll.rank].to(device)
        await coll.scan(t, impl=IPC)
        check(t, total(parts[: coll.rank + 1]), coll.size)


@ranks
async def test_s4_memory_that_is_freed_and_made_again(coll: Communicator) -> None:
    """Addresses and allocations come again, in other sizes: no rank sees the former content."""
    device = device_of(coll)
    for i in range(60):
        numel = (1000, 300_000, 5_000_000, 77)[i % 4] + i
        parts = brought(coll, numel, torch.float32, i)
        t = parts[coll.rank].to(device)
        await coll.allreduce(t, impl=IPC)
        check(t, total(parts), coll.size)
        del t
        if i % 7 == 0:
            torch.cuda.empty_cache()


@ranks
async def test_s4_memory_goes_back(coll: Communicator) -> None:
    """Tensors that died are kept no longer than until the next operation: 40 of 64 MiB are never there at once."""
    device = device_of(coll)
    for _ in range(40):
        t = torch.ones(16 << 20, device=device)
        await coll.allreduce(t, impl=IPC)
        assert float(t[-1]) == coll.size
        del t
    gc.collect()
    assert torch.cuda.memory_reserved(device) < 1 << 30


@ranks
async def test_s4_many_in_flight_on_parts_of_one_tensor(coll: Communicator) -> None:
    device = device_of(coll)
    parts = brought(coll, 64 * 10_000, torch.float32, 5)
    t = parts[coll.rank].to(device)
    await asyncio.wait_for(asyncio.gather(*(coll.allreduce(row, impl=IPC) for row in t.view(64, 10_000))), 60)
    check(t, total(parts), coll.size)


@ranks
async def test_s4_many_in_flight_on_different_tensors(coll: Communicator) -> None:
    """Small ones overtake large ones; in the second round they are mapped already, in the third some are new."""
    device = device_of(coll)
    kinds = (torch.float32, torch.bfloat16, torch.int32)
    numels = [(3_000_000, 1000, 100_003, 7)[i % 4] + i for i in range(24)]
    ts = [poisoned(numel, kinds[i % 3], device) for i, numel in enumerate(numels)]
    for round_ in range(3):
        for i in range(0, len(ts), 5) if round_ == 2 else ():
            ts[i] = poisoned(numels[i], kinds[i % 3], device)
        all_parts = [brought(coll, t.numel(), t.dtype, 100 * round_ + i) for i, t in enumerate(ts)]
        for t, parts in zip(ts, all_parts, strict=True):
            t.copy_(parts[coll.rank])
        await asyncio.wait_for(asyncio.gather(*(coll.allreduce(t, impl=IPC) for t in ts)), 60)
        for t, parts in zip(ts, all_parts, strict=True):
            check(t, total(parts), coll.size)


@ranks
async def test_s4_inputs_that_are_still_being_computed(coll: Communicator) -> None:
    """The queued work of the current stream comes first, however long; the result may be read immediately."""
    device = device_of(coll)
    side = torch.cuda.Stream(device=device)
    with torch.cuda.stream(side):
        a = torch.randn(4096, 4096, device=device)
    for i in range(5):
        t = poisoned(1 << 20, torch.float32, device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(side):
            for _ in range(20 * (1 + (coll.rank + i) % coll.size)):
                a = (a @ a).clamp_(-1, 1)
            t.fill_(coll.rank + i)
            handle = coll.allreduce(t, impl=IPC)
        await handle
        assert torch.equal(t, torch.full_like(t, sum(rank + i for rank in range(coll.size))))


@ranks
async def test_s4_lists_and_groups(coll: Communicator) -> None:
    device = device_of(coll)
    ts = [torch.full((n,), float(coll.rank), device=device) for n in (3, 100_000, 1)]
    await coll.allreduce(ts, impl=IPC)
    assert all(torch.equal(t, torch.full_like(t, sum(range(coll.size)))) for t in ts)
    half = await coll.split(coll.rank % 2)
    t = torch.full((1000,), float(coll.rank), device=device)
    await half.allreduce(t, impl=IPC if half.size > 1 else "auto")
    assert torch.equal(t, torch.full_like(t, sum(r for r in range(coll.size) if r % 2 == coll.rank % 2)))


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
SINGLE = [
    *((op, kind) for op in ReduceOp for kind in TOLERANCE if op not in BITWISE),
    *((op, kind) for op in ReduceOp for kind in INTEGERS if op is not ReduceOp.MEAN),
]


def same(t: Tensor, other: Tensor) -> bool:
    """Return whether they are equal, NaN where the other is."""
    if not t.is_floating_point():
        return torch.equal(t, other)
    return torch.equal(t.isnan(), other.isnan()) and torch.equal(t.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize(("op", "kind"), SINGLE, ids=str)
def test_s4_the_kernel_does_what_torch_does(op: ReduceOp, kind: torch.dtype) -> None:
    """Without other ranks: each operator and dtype, odd sizes and places, equal to the bit to torch's own way."""
    device = torch.device("cuda")
    for count in (2, 3, 4):
        for numel, starts in product((1, 7, 300_001), ((0, 0, 0, 0), (3, 3, 3, 3), (0, 1, 2, 5))):
            made = torch.Generator().manual_seed(numel + count)
            ts, rooms = [], []
            for i in range(count):
                room = torch.zeros(numel + 64, dtype=kind, device=device)
                t = room[starts[i] : starts[i] + numel]
                if kind.is_floating_point:
                    t.copy_(torch.randn(numel, generator=made))
                    t[i::1001], t[i + 5 :: 1001] = math.nan, -math.inf
                else:
                    info = torch.iinfo(kind)
                    t.copy_(torch.randint(info.min // 2, info.max // 2, (numel,), generator=made, dtype=kind))
                ts.append(t)
                rooms.append(room)
            expected, wide = ts[0].clone(), torch.stack(ts).cpu().double()
            reduce(expected, [expected, *ts[1:]], op)
            out = torch.zeros(numel, dtype=kind, device=device)
            assert fused.reduce([out], ts, op), "there is no kernel"
            assert fused.reduce(ts, ts, op)
            for t, room, start in zip(ts, rooms, starts, strict=False):
                assert same(t, expected), (op, kind, count, numel, starts)
                assert same(t, out)
                assert not room[:start].any(), "it has written before the beginning"
                assert not room[start + numel :].any(), "it has written behind the end"
            if kind.is_floating_point and op in (ReduceOp.SUM, ReduceOp.MEAN):
                exact = wide.sum(0) / (count if op is ReduceOp.MEAN else 1)
                finite = exact.isfinite()
                found = out.cpu().double()[finite]
                bound = TOLERANCE[kind] * wide.abs().sum(0)[finite] + 1e-30
                assert bool(((found - exact[finite]).abs() <= bound).all())


PROGRAM = """
import asyncio, os, signal, time
import torch, aiodist

async def main():
    async with aiodist.init() as coll:
        device = torch.device("cuda", coll.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        t = torch.ones(32 << 20, device=device)
        await coll.allreduce(t, impl="cuda_ipc")
        await coll.barrier()
        died = time.monotonic() + 0.3
        try:
            while True:
                handle = coll.allreduce(t.fill_(1), impl="cuda_ipc")
                if coll.rank == coll.size - 1 and time.monotonic() > died:
                    os.kill(os.getpid(), signal.SIGKILL)
                await handle
        except aiodist.AiodistError as error:
            print(f"TOLD after {time.monotonic() - died:.2f} s: {type(error).__name__}", flush=True)
            raise

aiodist.run(main)
"""


@pytest.mark.parametrize("size", [2, 4])
def test_s4_the_others_end_when_a_rank_is_killed(size: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "aiodist.cli", "run", "-n", str(size), str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
    assert ended.returncode != 0
    told = [line for line in ended.stdout.splitlines() if "TOLD after" in line]
    assert len(told) == size - 1, ended.stdout + ended.stderr
    assert all(float(line.split("TOLD after ")[1].split()[0]) < 5 for line in told), told
