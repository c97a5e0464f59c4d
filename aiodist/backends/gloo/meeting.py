"""How process groups are made: over the control channel."""

from __future__ import annotations

import asyncio
import concurrent.futures
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from aiodist.backends.gloo.library import CLOSE_SECONDS, PrefixStore, ProcessGroup, Store, backend_error, c10d
from aiodist.backends.threads import in_thread
from aiodist.errors import AiodistError

if TYPE_CHECKING:
    from aiodist.control import Channel

_SETUP_SECONDS = 60.0


class _ChannelStore(Store):
    """What gloo asks while its ranks connect, answered by the control channel; gloo calls it in a thread."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._channel = channel
        self._loop = loop
        self._asking: concurrent.futures.Future[Any] | None = None
        self._given_up = False
        self.error: BaseException | None = None

    def set(self, key: str, value: Any) -> None:  # noqa: ANN401  - bytes, where the stub says str
        self._ask(self._channel.set(f"gloo/{key}", bytes(value)))

    def get(self, key: str) -> bytes:
        value: bytes = self._ask(self._channel.get(f"gloo/{key}", timeout=_SETUP_SECONDS))
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def abort(self) -> None:
        """Have what waits raise, from the loop's thread."""
        self._given_up = True
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self, question: Any) -> Any:  # noqa: ANN401
        try:
            self._asking = asyncio.run_coroutine_threadsafe(question, self._loop)
            if self._given_up:
                self._asking.cancel()
            return self._asking.result()
        except BaseException as error:
            self.error = error
            raise


class GlooRendezvous:
    """How process groups are made: over the control channel."""

    def __init__(self, channel: Channel, *, one_host: bool) -> None:
        """`one_host`: all ranks are, so that they can use the loopback interface."""
        self._channel = channel
        self._one_host = one_host
        self.devices: list[Any] = []
        self.rank = channel.rank

    async def group(self, name: str, rank: int, size: int) -> ProcessGroup:
        """Return the process group `name`, which all its ranks make at the same time."""
        if not self.devices:
            self.devices = [await in_thread(partial(_device, self._one_host))]
        store = _ChannelStore(self._channel, asyncio.get_running_loop())
        try:
            return await in_thread(partial(self._connect, PrefixStore(name, store), rank, size))
        except asyncio.CancelledError:
            store.abort()
            raise
        except Exception as error:
            if isinstance(store.error, AiodistError):
                raise store.error from error
            raise backend_error(error) from error

    def _connect(self, store: Store, rank: int, size: int) -> ProcessGroup:
        make: Any = c10d.ProcessGroupGloo  # its stub lacks most of what `ProcessGroup` has
        options = make._Options()
        options._devices = self.devices
        options._threads = 2
        options._timeout = timedelta(seconds=_SETUP_SECONDS)
        return cast(ProcessGroup, make(store, rank, size, options))

    async def part(self) -> None:
        """Wait until all ranks are about to close: a connection that is closed takes what is under way with it."""
        with suppress(AiodistError, RuntimeError):
            if await self._channel.add("gloo/parting") == self._channel.size:
                await self._channel.set("gloo/parted", b"")
            await self._channel.get("gloo/parted", timeout=CLOSE_SECONDS)


def _device(one_host: bool) -> Any:  # noqa: ANN401
    if one_host:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return c10d.ProcessGroupGloo.create_default_device()
