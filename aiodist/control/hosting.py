"""A hub on a thread of its own, for a job without a launcher: one rank's process has it."""

from __future__ import annotations

from aiodist.control.hub import Hub, HubOptions
from aiodist.control.thread import LoopThread

__all__ = ["HostedHub", "host", "open_hub"]

THREAD_NAME = "aiodist-control"


class HostedHub:
    """A hub that serves while its process computes; give it to `connect(…, hub=…)`, which closes it in the end."""

    def __init__(self, thread: LoopThread, hub: Hub) -> None:
        self.thread = thread
        self.hub = hub

    @property
    def address(self) -> str:
        """Where the other ranks connect: `tcp://host:port`."""
        return self.hub.address

    async def aclose(self) -> None:
        """Close the hub after the other ranks have left (see `HubOptions.linger`), and end the thread."""
        self.thread.check_process()
        await self.thread.aclose()


async def host(
    size: int,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    rank: int = 0,
    options: HubOptions | None = None,
) -> HostedHub:
    """Return a hub for `size` ranks on a thread of this process, which is rank `rank`.

    For when the ranks can tell each other its address in some other way, MPI for one. Raises `OSError` where it
    cannot listen at `host` and `port`. Cancelling leaves nothing.
    """
    thread = LoopThread(THREAD_NAME)
    hub = Hub(size, host=host, port=port, token=token, options=options, host_rank=rank)
    try:
        await thread.run(open_hub(thread, hub))
    except BaseException:
        await thread.aclose()
        raise
    return HostedHub(thread, hub)


async def open_hub(thread: LoopThread, hub: Hub) -> None:
    """Open the hub; it closes when the thread stops, after the other ranks have left. On the thread."""
    await thread.stack.enter_async_context(hub)
    thread.stack.push_async_callback(hub.linger)
