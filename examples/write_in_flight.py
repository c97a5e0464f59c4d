"""A tensor that changes while an allreduce uses it: a warning with the line, or an error with strict=True.

aiodist run -n 2 examples/write_in_flight.py prints

    a write to another row: [3.0, 3.0, 3.0]
    by default: RuntimeWarning in line 32, used a tensor, float32[2000], that the program changed
    strict: BufferInFlight
"""

import warnings

import torch

import aiodist


async def right(coll: aiodist.Communicator) -> None:
    t = torch.full((2, 3), coll.rank + 1.0)
    handle = coll.allreduce(t[0])
    t[1].zero_()  # right: the operation uses the other row
    await handle
    coll.print("a write to another row:", t[0].tolist())
    t.zero_()  # right: the operation is finished


async def wrong(coll: aiodist.Communicator) -> None:
    t = torch.full((2000,), coll.rank + 1.0)
    if coll.rank > 0:
        await coll.recv_object(0)  # rank 0 calls first, so its operation is in flight when the tensor changes
        await coll.allreduce(t)
        return
    handle = coll.allreduce(t)
    t.zero_()  # wrong: the operation uses the tensor
    await coll.send_object("called", 1)
    await handle


async def main() -> None:
    async with aiodist.init() as coll:
        await right(coll)
        with warnings.catch_warnings(record=True, action="always") as seen:
            await wrong(coll)
        for warning in seen:
            what = str(warning.message)
            said = what[what.index("used") : what.index(" before")]
            print(f"by default: {warning.category.__name__} in line {warning.lineno}, {said}")
    async with aiodist.init(strict=True) as coll:
        try:
            await wrong(coll)
        except aiodist.BufferInFlight as error:
            print("strict:", type(error).__name__)


if __name__ == "__main__":
    aiodist.run(main)
