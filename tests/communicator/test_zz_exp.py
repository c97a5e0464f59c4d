"""exploration: messages, mixed mismatch unchecked, holds"""
import pytest, torch, asyncio, threading, random
from aiodist import *
import aiodist
from aiodist.testing import run_ranks, simulated_cuda
from aiodist.testing.cuda import SimulatedCuda
from contextlib import suppress

@pytest.mark.parametrize("name", ["allreduce","allgather","gather","alltoall","scatter","broadcast","reduce_scatter","scan"])
@pytest.mark.parametrize("numel", [3, 3_000_000])
@pytest.mark.parametrize("checked", [True, False])
def test_mixed(name, numel, checked):
    async def main(rank):
        async with init(checked=checked) as coll:
            t = torch.ones(numel)
            if rank: t = t.cuda()
            call = {"allreduce": lambda: coll.allreduce(t), "allgather": lambda: coll.allgather(t), "gather": lambda: coll.gather(t),
             "alltoall": lambda: coll.alltoall([t, t.clone()]), "scatter": lambda: coll.scatter([t,t.clone()], root=0, out=torch.empty(numel, device="cuda" if rank else "cpu")), "broadcast": lambda: coll.broadcast(t), "reduce_scatter": lambda: coll.reduce_scatter(t), "scan": lambda: coll.scan(t)}[name]
            try:
                x = await call()
                await coll.barrier()
                return "OK"
            except AiodistError as e:
                return f"{type(e).__name__}: {e}"[:230]
    with simulated_cuda(devices=2, delay=0):
        try:
            out = run_ranks(2, main, timeout=60)
        except BaseException as e:
            out = ["raised", repr(e)[:500]]
    print("\nMIX", name, numel, checked, *out, sep="\n   ")
    for one in out:
        assert "MismatchError" in one or "Mismatch" in one or "differ" in one or "disagree" in one

@pytest.mark.parametrize("numel", [0, 1, 100, 2_000_000])
@pytest.mark.ranks(2)
async def test_msgs(coll, numel, simulated_cuda):
    g = torch.Generator().manual_seed(coll.rank)
    k = 0
    for src in ("cpu", "cuda"):
        for dst in ("cpu", "cuda", None):
            k += 1
            t = torch.full((numel,), float(k + 10 * coll.rank)).to(src if src=="cpu" else coll.device)
            other = 1 - coll.rank
            into = None if dst is None else torch.full((numel,), -1.0, device=dst if dst == "cpu" else coll.device)
            h = coll.recv(into, other, k)
            coll.send(t, other, k)
            got = await h
            assert got.device.type == (dst or src), (src, dst)
            assert got.cpu().tolist() == [k + 10.0 * other] * numel
            # self
            h = coll.recv(into, coll.rank, k)
            coll.send(t, coll.rank, k)
            got = await h
            assert got.cpu().tolist() == [k + 10.0 * coll.rank] * numel
            out = None if dst is None else torch.full((numel,), -1.0, device=dst if dst == "cpu" else coll.device)
            got = await coll.sendrecv(t, other, other, out)
            assert got.device.type == (dst or src), (src, dst)
            assert got.cpu().tolist() == [k + 10.0 * other] * numel
            h = coll.send(t, other, 77); h2 = coll.recv(into, other, 77)
            s = torch.cuda.Stream(device=coll.device)
            if src == "cuda":
                await h2
                h.wait_stream(s)
    await coll.barrier()
