"""Creates torch's process groups of gloo over the control channel, and converts their errors to `BackendError`.

[Note: gloo] Properties of torch 2.13's gloo, with the consequences:

- Only `Work.wait()` detects the end of a send or receive: `is_completed()` stays False. There is no future of a send or
  receive. `abort()` ends no wait. A wait that times out closes every connection of its group, so that all other waits
  raise: `abort_group` uses this.
- A receive from any source detects neither dead peers nor closed connections.
- A message longer than its receive ends the *process* (`std::terminate` in gloo's thread). A collective with different
  sizes on the ranks does the same.
- A collective's future calls back from gloo's own thread, before `is_completed()` is True.
- A thread that returns from gloo during the exit of the interpreter ends the process (SIGABRT): `atexit` closes open
  groups.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from aiodist.backends.base import in_thread
from aiodist.control.places import is_loopback, outward_host
from aiodist.env import variables
from aiodist.errors import AiodistError, BackendError, BackendUnavailable

if TYPE_CHECKING:
    from aiodist.control import Channel

try:
    from torch._C import _distributed_c10d as c10d
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, Work
except ImportError as error:
    raise BackendUnavailable(f"this torch was built without gloo: install one from pytorch.org ({error})") from error

__all__ = ["ProcessGroup", "Work", "c10d"]

FOREVER: Final = timedelta(days=3000)  # handles have the deadlines
CLOSE_SECONDS: Final = 5.0

PIECE_BYTES = 1 << 30
SETUP_SECONDS = 60.0

FRAMES, _NEVER, PAYLOADS, LAST_PAYLOAD = 0, 1, 2, 1 << 30  # gloo's tags


def abort_group(group: ProcessGroup, others: Iterable[int]) -> None:
    """Close the connections of `group` by a wait that times out. The call blocks for milliseconds."""
    for rank in others:
        with suppress(RuntimeError):
            group.recv([empty(1)], rank, _NEVER).wait(timedelta(milliseconds=1))


def empty(nbytes: int) -> Tensor:
    """Return uninitialised memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def pieces(flat: Tensor) -> list[Tensor]:
    """Split `flat` into chunks whose counts every library can represent."""
    most = PIECE_BYTES // flat.element_size()
    return [flat[start : start + most] for start in range(0, max(1, flat.numel()), most)]


def backend_error(error: Exception, what: str = "") -> BackendError:
    """Return a `BackendError` with `what` and gloo's text without torch's stack. The cause is torch's error."""
    wrapped = BackendError(f"gloo: {what}{str(error).partition(chr(10) + 'Exception raised from')[0]}")
    wrapped.__cause__ = error.with_traceback(None)  # the frames of the error hold tensors and connections
    return wrapped


class _ChannelStore(Store):
    """A store over the control channel, for gloo's connection setup. gloo calls its methods in a thread."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._channel = channel
        self._loop = loop
        self._asking: concurrent.futures.Future[Any] | None = None
        self._aborted = False
        self.error: BaseException | None = None

    def set(self, key: str, value: Any) -> None:  # noqa: ANN401  - bytes, but the stub says str
        self._ask(self._channel.set(f"gloo/{key}", bytes(value)))

    def get(self, key: str) -> bytes:
        value: bytes = self._ask(self._channel.get(f"gloo/{key}", timeout=SETUP_SECONDS))
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def abort(self) -> None:
        """Make the waiting call raise (loop's thread)."""
        self._aborted = True
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self, question: Any) -> Any:  # noqa: ANN401
        try:
            self._asking = asyncio.run_coroutine_threadsafe(question, self._loop)
            if self._aborted:
                self._asking.cancel()
            return self._asking.result()
        except BaseException as error:
            self.error = error
            raise


class GlooRendezvous:
    """Creates process groups over the control channel."""

    def __init__(self, channel: Channel, *, one_host: bool) -> None:
        """True for `one_host` uses the loopback interface, for ranks on one host."""
        self._channel = channel
        self._one_host = one_host
        self.devices: list[Any] = []
        self.rank = channel.rank

    async def group(self, name: str, rank: int, size: int) -> ProcessGroup:
        """Return the process group `name`, which all its ranks create at the same time."""
        if not self.devices:
            self.devices = [await in_thread(_device, self._one_host, self._channel.source)]
        store = _ChannelStore(self._channel, asyncio.get_running_loop())
        try:
            return await in_thread(self._connect, PrefixStore(name, store), rank, size)
        except asyncio.CancelledError:
            store.abort()
            raise
        except Exception as error:
            if isinstance(store.error, AiodistError):
                raise store.error from error
            raise backend_error(error) from error

    def _connect(self, store: Store, rank: int, size: int) -> ProcessGroup:
        make: Any = c10d.ProcessGroupGloo  # the stub lacks most attributes of `ProcessGroup`
        options = make._Options()
        options._devices = self.devices
        options._threads = 2
        options._timeout = timedelta(seconds=SETUP_SECONDS)
        return cast(ProcessGroup, make(store, rank, size, options))

    async def part(self) -> None:
        """Wait until all ranks are about to close: the close of a connection drops data in flight."""
        with suppress(AiodistError, RuntimeError):
            if await self._channel.add("gloo/parting") == self._channel.size:
                await self._channel.set("gloo/parted", b"")
            await self._channel.get("gloo/parted", timeout=CLOSE_SECONDS)


def _device(one_host: bool, source: str) -> Any:  # noqa: ANN401
    """Return gloo's network device: of GLOO_SOCKET_IFNAME, or the address from which this host reaches the hub.

    gloo's default is the address of the host name, which is 127.0.1.1 on many hosts.
    """
    if one_host:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if "GLOO_SOCKET_IFNAME" in variables():
        return c10d.ProcessGroupGloo.create_default_device()
    known = source and not is_loopback(source)  # the rank that hosts the hub may use loopback
    return c10d.ProcessGroupGloo.create_device(hostname=source if known else outward_host())
