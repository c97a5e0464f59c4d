"""Serve predictions during training; all ranks stop together.

aiodist run -n 2 examples/service.py --port 8000     then, in another terminal:
curl -d "$(python -c 'print([0.5] * 64)')" localhost:8000/predict     answers, for instance, {"digit": 3, "step": 1200}
curl -X POST localhost:8000/stop                      or send SIGTERM to any rank

Rank 0 answers requests on the event loop that trains. A prediction is computed between two steps, so all of its weights
belong to one step.
"""

import argparse

import torch
import torch.nn.functional as F
from aiohttp import web
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel


class Service:
    """The HTTP service of rank 0."""

    def __init__(self, coll: aiodist.Communicator, net: DataParallel) -> None:
        self.coll, self.net, self.steps = coll, net, 0

    async def predict(self, request: web.Request) -> web.Response:
        try:
            image = torch.tensor(await request.json(), dtype=torch.float64).reshape(64)  # from 0 to 1
        except (TypeError, ValueError, RuntimeError):
            raise web.HTTPBadRequest(text="expected 64 numbers from 0 to 1\n") from None

        def classify() -> int:
            with torch.no_grad():
                return int(self.net.module(image).argmax())

        return web.json_response({"digit": await self.net.submit(classify), "step": self.steps})

    async def stop(self, request: web.Request) -> web.Response:
        self.coll.request_stop()  # seen by all ranks at the same step
        return web.json_response({"stopping": True})

    async def start(self, port: int) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.post("/predict", self.predict), web.post("/stop", self.stop)])
        runner = web.AppRunner(app, handle_signals=False)  # `init` handles signals
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        print(f"serving on {site.name}", flush=True)
        return runner


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init(stop_on_signal=True) as coll:
        net = await DataParallel.create(build(), coll)
        opt = optimizer(net.parameters())
        service = Service(coll, net)
        runner = await service.start(port) if coll.rank == 0 else None
        while not net.stop_requested:  # until a request to stop
            for mine in batches(coll.rank, coll.size):  # (120 / size,)
                await net.step(lambda mine=mine: F.cross_entropy(net(images[mine]), labels[mine]), opt)
                service.steps += 1
                if net.stop_requested:  # on all ranks after the same step
                    break
        if runner is not None:
            await runner.cleanup()  # answers pending requests first
            report(net.module, images, labels)
        print(f"rank {coll.rank} stops after {service.steps} steps")


if __name__ == "__main__":
    aiodist.run(main)
