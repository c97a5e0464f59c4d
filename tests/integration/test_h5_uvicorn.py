"""Handles on a loop that uvicorn started: a web application whose handler awaits a collective.

The ranks run this file as a program: each serves at a port of its own and asks itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import uvicorn

import aiodist

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(60)
def test_h5_uvicorn_handler_awaits_a_collective_with_openmpi() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "openmpi", __file__],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] asyncio: [4.0, 4.0]",
            f"[{rank}] asyncio: [6.0, 6.0]",
            f"[{rank}] uvloop: [4.0, 4.0]",
            f"[{rank}] uvloop: [6.0, 6.0]",
        ]


class Application:
    """Answers /N with the sum over the ranks of [N, N]; the world is open while it serves."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            async with aiodist.init() as self.coll:
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            t = await self.coll.allreduce(torch.full((2,), float(scope["path"][1:])))
            loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
            body = f"{loop}: {t.tolist()}".encode()
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})


def serve(loop: Literal["asyncio", "uvloop"]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(Application(), loop=loop, lifespan="on", log_level="warning"))

    def ask() -> None:
        try:
            for number in (2, 3):
                with urllib.request.urlopen(f"{address}/{number}", timeout=30) as answer:
                    print(answer.read().decode(), flush=True)
        finally:
            server.should_exit = True

    client = threading.Thread(target=ask)
    client.start()  # waits for the server in the listener's queue
    server.run([listener])
    client.join()


if __name__ == "__main__":
    serve("asyncio")
    serve("uvloop")
