"""A job at a bridge: `job.py publishes|reads listen|connect PLACE DIES`.

DIES has the ranks that kill themselves after three versions. If it is "-", or after a loss, the first rank that reads
sends "stop" after three versions. If it is "s", they stop at their third version until another process continues them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import torch

import aiodist
from tests.support.programs import say

COUNT = 200_003


async def main(role: str, meets: str, place: str, dies: str) -> None:
    where: dict[str, Any] = {"token": "secret"} if ":" in place else {"folder": place}
    name = place if ":" in place else "weights"
    async with aiodist.init() as coll, AsyncExitStack() as stack:
        door = await stack.enter_async_context(aiodist.listen(name, **where)) if meets == "listen" else None
        say("ready")
        while True:
            try:
                if door is not None:
                    bridge = await door.accept()
                    await (publishes if role == "publishes" else reads)(coll, bridge, dies)
                else:
                    async with aiodist.connect(name, timeout=60, **where) as bridge:
                        await (publishes if role == "publishes" else reads)(coll, bridge, dies)
                break
            except aiodist.PeerLost as error:
                say("lost:", time.monotonic(), error.lost, error)
                dies = "-"
                assert await coll.allreduce(coll.rank) == sum(range(coll.size))  # this job's world lives on
    say("ended")


async def publishes(coll: aiodist.Communicator, bridge: Any, dies: str) -> None:
    stop = bridge.recv_object(0)
    step = 0
    while await coll.allreduce(int(not stop.done()), op="min"):
        step += 1
        with suppress(aiodist.PeerLost):  # the other ranks may not know of it yet
            await bridge.publish({"w": torch.full((COUNT,), step), "step": step})
        await asyncio.sleep(0.005)
        if step % 10 == 0:
            say("step:", time.monotonic())
        if step == 30:
            die(coll, dies)
    assert await stop == "stop"


async def reads(coll: aiodist.Communicator, bridge: Any, dies: str) -> None:
    count = 0
    async for version, state in bridge.subscribe():
        assert bool((state["w"] == state["step"]).all())
        say("version:", version)
        count += 1
        if count == 3 and dies == "s":
            say("stops:", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
            count, dies = 0, "-"
        elif count == 3:
            die(coll, dies)
            if dies == "-" and coll.rank == 0:
                for to in range(bridge.size):
                    await bridge.send_object("stop", to)


def die(coll: aiodist.Communicator, dies: str) -> None:
    if str(coll.rank) in dies:
        say("dies:", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    aiodist.run(main, *sys.argv[1:])
