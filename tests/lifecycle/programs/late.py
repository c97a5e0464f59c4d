"""Rank 1 is late: `late.py SECONDS HOW REPORT`, where it is asleep or busy, and REPORT "default" gives `init` none."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import torch

import aiodist


async def main(seconds: float, how: str, **report: Any) -> None:
    async with aiodist.init(**report) as coll:
        await coll.barrier()  # the last one in time
        if coll.rank != 1:
            total = await coll.allreduce(torch.ones(3))  # the one that waits
        else:
            if how == "busy":
                time.sleep(seconds)  # noqa: ASYNC251  # a promise of seconds: W10, where it is busy
            else:
                await asyncio.sleep(seconds)  # a promise of seconds: W10, where it is asleep
            total = await coll.allreduce(torch.ones(3))
        assert total.tolist() == [coll.size] * 3


if __name__ == "__main__":
    asked = sys.argv[3]
    given = {} if asked == "default" else {"report_after": None if asked == "none" else float(asked)}
    aiodist.run(main(float(sys.argv[1]), sys.argv[2], **given))
