"""A result that depends on which message comes first, found by running the program with 20 seeds.

python examples/any_order.py prints

    first come: results[0] differs by seed
    by rank: [1, 4, 9]
    summed: 14
"""

from collections.abc import Awaitable, Callable

import torch

import aiodist
from aiodist.testing import RaceError, run_ranks


async def squares(receive: Callable[[aiodist.Communicator], Awaitable[object]]) -> object:
    """Send the square of each rank to rank 0."""
    async with aiodist.init() as coll:
        if coll.rank == 0:
            return await receive(coll)
        await coll.send(torch.tensor(coll.rank**2), 0)
        return None


async def first_come(coll: aiodist.Communicator) -> str:
    """Wrong: the order of the messages is the order of the list."""
    return str([int(await coll.recv()) for _ in range(coll.size - 1)])


async def by_rank(coll: aiodist.Communicator) -> list[int]:
    """Right: each receive names its rank."""
    return [int(await coll.recv(src=rank)) for rank in range(1, coll.size)]


async def summed(coll: aiodist.Communicator) -> int:
    """Right: a sum of integers is the same in any order."""
    return sum([int(await coll.recv()) for _ in range(coll.size - 1)])


def main() -> None:
    for receive in (first_come, by_rank, summed):
        name = receive.__name__.replace("_", " ")
        try:
            result = run_ranks(4, lambda: squares(receive), seeds=range(20))[0]
        except RaceError as error:
            result = str(error).partition("\n")[0]
        print(f"{name}: {result}")


if __name__ == "__main__":
    main()
