"""Serve predictions with the newest weights of another job, examples/two_jobs_train.py, which may come and go.

aiodist run -n 2 examples/two_jobs_serve.py --port 8000      then, in another terminal:
curl -d "$(python -c 'print([0.5] * 64)')" localhost:8000/predict     answers, for instance, {"digit": 3, "step": 1200}

Rank r listens at port 8000 + r. All ranks have the weights of the same step, up to the time of one copy.
"""

import argparse
import asyncio

import torch
from aiohttp import web
from train_sequential import build

import aiodist


class Service:
    """The HTTP service of one rank."""

    def __init__(self) -> None:
        self.net, self.step = build(), 0

    async def predict(self, request: web.Request) -> web.Response:
        try:
            image = torch.tensor(await request.json(), dtype=torch.float64).reshape(64)  # from 0 to 1
        except (TypeError, ValueError, RuntimeError):
            raise web.HTTPBadRequest(text="expected 64 numbers from 0 to 1\n") from None
        with torch.no_grad():
            return web.json_response({"digit": int(self.net(image).argmax()), "step": self.step})

    async def start(self, port: int) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.post("/predict", self.predict)])
        runner = web.AppRunner(app, handle_signals=False)  # `init` handles signals
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        print(f"serving on {site.name}", flush=True)
        return runner

    async def follow(self, folder: str | None) -> None:
        """Load each version of the other job, and wait for that job when it ends."""
        while True:
            try:
                async with aiodist.connect("weights", timeout=None, folder=folder) as bridge:
                    async for _, state in bridge.subscribe():
                        self.net.load_state_dict(state["model"])
                        self.step = state["step"]
                print("the training has ended", flush=True)
            except (aiodist.PeerLost, aiodist.RemoteError) as error:
                print(f"the training was lost: {error}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--folder", help="a folder that both jobs see, on several hosts")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores
    async with aiodist.init(stop_on_signal=True) as coll:
        service = Service()
        runner = await service.start(args.port and args.port + coll.rank)
        following = asyncio.create_task(service.follow(args.folder))
        while not await coll.stopping():
            await asyncio.wait([following], timeout=0.2)
        following.cancel()
        await asyncio.wait([following])
        await runner.cleanup()  # answers pending requests first


if __name__ == "__main__":
    aiodist.run(main)
