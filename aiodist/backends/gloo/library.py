"""What is used of torch's gloo: how its groups are made over the control channel, and its errors as ours.

[Note: gloo] What was found out about torch 2.13's gloo, and what follows from it:

- Of a send or receive only `Work.wait()` learns that it is over: `is_completed()` stays False, there is no future,
  and `abort()` ends no wait. A wait that times out closes every connection of its group, so that all other waits
  raise; this is how a group is given up here.
- A receive from any source sees neither dead peers nor closed connections.
- A message longer than its receive ends the *process* (`std::terminate` in gloo's thread). So do collectives whose
  ranks disagree on a size.
- A collective's future calls back from gloo's own thread, before `is_completed()` turns True.
- A thread that returns from gloo while the interpreter ends, ends the process too (SIGABRT): `atexit` closes what is
  open.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
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

FOREVER: Final = timedelta(days=3000)  # deadlines are the handles' business
CLOSE_SECONDS: Final = 5.0

PIECE_BYTES = 1 << 30
SETUP_SECONDS = 60.0

FRAMES, _NEVER, PAYLOADS, LAST_PAYLOAD = 0, 1, 2, 1 << 30  # gloo's tags


def abort_group(group: ProcessGroup, others: Iterable[int]) -> None:
    """Close the connections of `group`: a wait that times out does that. It blocks for milliseconds."""
    for rank in others:
        with suppress(RuntimeError):
            group.recv([empty(1)], rank, _NEVER).wait(timedelta(milliseconds=1))


def empty(nbytes: int) -> Tensor:
    """Return new memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def pieces(flat: Tensor) -> list[Tensor]:
    """Return `flat` in pieces whose counts every library can hold."""
    most = PIECE_BYTES // flat.element_size()
    return [flat[start : start + most] for start in range(0, max(1, flat.numel()), most)]


def backend_error(error: Exception, what: str = "") -> BackendError:
    """Return our error with `what` and gloo's text, less torch's own stack, raised from torch's."""
    wrapped = BackendError(f"gloo: {what}{str(error).partition(chr(10) + 'Exception raised from')[0]}")
    wrapped.__cause__ = error.with_traceback(None)  # its frames hold tensors and connections
    return wrapped


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
        value: bytes = self._ask(self._channel.get(f"gloo/{key}", timeout=SETUP_SECONDS))
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
            self.devices = [await in_thread(partial(_device, self._one_host, self._channel.source))]
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
        options._timeout = timedelta(seconds=SETUP_SECONDS)
        return cast(ProcessGroup, make(store, rank, size, options))

    async def part(self) -> None:
        """Wait until all ranks are about to close: a connection that is closed takes what is under way with it."""
        with suppress(AiodistError, RuntimeError):
            if await self._channel.add("gloo/parting") == self._channel.size:
                await self._channel.set("gloo/parted", b"")
            await self._channel.get("gloo/parted", timeout=CLOSE_SECONDS)


def _device(one_host: bool, source: str) -> Any:  # noqa: ANN401
    """Return what gloo connects by: the address from which this host reaches the hub, or an interface that was named.

    By itself gloo takes what the host's name stands for, which on many hosts is 127.0.1.1.
    """
    if one_host:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if "GLOO_SOCKET_IFNAME" in variables():
        return c10d.ProcessGroupGloo.create_default_device()
    known = source and not is_loopback(source)  # the rank that hosts the hub may reach it so
    return c10d.ProcessGroupGloo.create_device(hostname=source if known else outward_host())
