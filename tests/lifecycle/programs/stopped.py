"""A worker whose process is stopped in the midst of a read, or of a push: `stopped.py reader|table|pusher|twice`."""

import os
import signal
import sys
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor

import aiodist
from aiodist.ps import Adam, ParameterServer
from aiodist.ps.requests import PullPart
from tests.support.programs import until_stopped

NUMEL = 8 << 20
PUSHES = 10
LIMIT = 60.0


def stop_in_the_midst(times: int) -> None:
    """Make this process stop itself in each of its next `times` reads, after half of the bytes."""
    fill, left = PullPart.fill, [times]

    def half(part: PullPart, src: int, t: Tensor) -> None:
        if part.place is None or t.nbytes < 4096 or not left[0]:
            fill(part, src, t)
            return
        left[0] -= 1
        into, middle = part.place(src).view(torch.uint8), t.nbytes // 2
        into[:middle].copy_(t[:middle])
        os.kill(os.getpid(), signal.SIGSTOP)
        into[middle:].copy_(t[middle:])

    PullPart.fill = half  # type: ignore[assignment, method-assign]


async def pushes_while_stopped(pid: int, push: Callable[[], Awaitable[object]]) -> None:
    """Push while process `pid` is stopped, and then let it continue."""
    until_stopped(pid)
    for _ in range(PUSHES):
        await push()
    os.kill(pid, signal.SIGCONT)


def version(t: Tensor) -> str:
    return "mixed" if bool(t.min() != t.max()) else f"{t[0].item():g}"


async def reads(coll: aiodist.Communicator, ps: ParameterServer, pids: list[int], name: str) -> None:
    """Rank 2 is stopped while it reads, and rank 1 pushes meanwhile."""
    t = torch.ones(NUMEL)
    for _ in range(2):
        await coll.barrier()
        if coll.rank == 2:
            looks = coll.backend != "gloo"  # else the data come in a message
            stop_in_the_midst(looks)
            pulled = ps.pull(name, t)
            if not looks:
                os.kill(os.getpid(), signal.SIGSTOP)
            await pulled
            print(f"{name} read: {version(t)} of version {pulled.version}", flush=True)
        if coll.rank == 1:
            await pushes_while_stopped(pids[2], lambda: ps.push(name, t, timeout=LIMIT))
        await coll.barrier()
    if coll.rank == 2:
        await ps.pull(name, t)
        print(f"{name} last: {version(t)}", flush=True)


async def rows(coll: aiodist.Communicator, ps: ParameterServer, pids: list[int]) -> None:
    table = await ps.embedding("rows", 256, init=0.0)
    ids, values = torch.arange(20_000), torch.ones(20_000, 256)
    if coll.rank == 1:
        await table.push(ids, values)
    await coll.barrier()
    if coll.rank == 2:
        stop_in_the_midst(1)
        print(f"rows read: {version((await table.pull(ids)).view(-1))}", flush=True)
    if coll.rank == 1:
        await pushes_while_stopped(pids[2], lambda: table.push(ids, values, timeout=LIMIT))
    await coll.barrier()


async def pushes(coll: aiodist.Communicator, ps: ParameterServer, pids: list[int]) -> None:
    """Rank 1 is stopped while it pushes, and rank 2 reads meanwhile."""
    t = torch.ones(NUMEL)
    await coll.barrier()
    if coll.rank == 1:
        pushed = ps.push("add", t)
        os.kill(os.getpid(), signal.SIGSTOP)
        await pushed
    if coll.rank == 2:
        until_stopped(pids[1])
        seen = []
        for _ in range(PUSHES):
            await ps.pull("add", t, timeout=LIMIT)
            seen.append(version(t))
        print(f"read: {set(seen) <= {'0', '1'}}", flush=True)
        os.kill(pids[1], signal.SIGCONT)
    await coll.barrier()


async def main() -> None:
    async with aiodist.init() as coll:
        pids = await coll.allgather_object(os.getpid())
        tensors = {"add": torch.zeros(NUMEL), "adam": torch.zeros(NUMEL), "copy": torch.zeros(NUMEL)}
        ps = ParameterServer(coll, {"add": tensors["add"]}, servers=[0], workers=[1, 2], rules={"adam": Adam(lr=1.0)})
        async with ps:
            if sys.argv[1] == "pusher":
                await pushes(coll, ps, pids)
            elif sys.argv[1] == "table":
                await rows(coll, ps, pids)
            elif sys.argv[1] == "reader":
                await ps.init("copy", tensors["copy"], rule="copy")
                await ps.init("adam", tensors["adam"], rule="adam")
                for name in ("add", "copy", "adam"):
                    await reads(coll, ps, pids, name)
            print("over", flush=True)


if __name__ == "__main__":
    aiodist.run(main)
