"""A work queue: rank 0 hands out jobs with `async for message in coll.messages()`, and all ranks work.

aiodist run -n 3 examples/workers.py

A job is a setting of a classifier of the digits; its result is the accuracy by cross-validation. A rank requests the
next job when it has finished one, so a slow rank gets fewer. Rank 0 serves and works at the same time: its classifier
runs in a thread.
"""

import asyncio
from itertools import product

from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

import aiodist

ASK, JOB = 1, 2  # tags: to rank 0, and from rank 0


async def serve(coll: aiodist.Communicator, jobs: list[dict[str, float]]) -> list[tuple[float, dict[str, float]]]:
    """Answer each message, the result of the last job, with another job, or with None if none is left."""
    results, working = [], coll.size
    async for message in coll.messages(tag=ASK):
        if message.data is not None:
            results.append(message.data)
        job = jobs.pop() if jobs else None
        await coll.send_object(job, message.source, tag=JOB)
        working -= job is None
        if working == 0:
            break
    return results


async def work(coll: aiodist.Communicator) -> int:
    """Do jobs until none is left; return their number."""
    x, y = load_digits(return_X_y=True)  # (1797, 64), (1797,)
    x, y = x[:600], y[:600]
    result, done = None, 0
    while True:
        await coll.send_object(result, 0, tag=ASK)
        job = await coll.recv_object(0, tag=JOB)
        if job is None:
            return done
        scores = await asyncio.to_thread(cross_val_score, SVC(**job), x, y, cv=3)
        result, done = (round(scores.mean(), 3), job), done + 1


async def main() -> None:
    async with aiodist.init() as coll:
        jobs = [{"C": c, "gamma": gamma} for c, gamma in product((0.1, 1, 10), (1e-4, 1e-3, 1e-2))]
        count = len(jobs)
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work(coll))
            serving = group.create_task(serve(coll, jobs)) if coll.rank == 0 else None
        done = await coll.gather(working.result())
        if serving is not None:
            accuracy, best = max(serving.result(), key=lambda result: result[0])
            print(f"{sum(done)} of {count} jobs done; the best: {best} with accuracy {accuracy}")


if __name__ == "__main__":
    aiodist.run(main)
