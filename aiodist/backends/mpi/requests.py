"""MPI requests in flight, with their start, test and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVarTuple

from torch import Tensor

from aiodist.backends.base import Done, again, ours, tell
from aiodist.backends.mpi.library import DTYPES, MPI, as_backend_error
from aiodist.errors import BackendError
from aiodist.handles import LARGE_BYTES, Handle, Origin, Progress, from_source

Ts = TypeVarTuple("Ts")

_WINDOW = 64  # requests that one poll tests
_STIR_SECONDS = 0.25  # longer than the time between two checks of a watchdog
address = MPI.buffer.fromaddress


class Requests:
    """The MPI requests in flight of one loop, polled together."""

    rings = False
    of_ranks = True

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.left: BackendError | None = None
        """Error of later calls after this process stopped using MPI, or None before."""
        self._requests: list[MPI.Request] = []
        self._done: list[Done] = []
        self.used = False
        """True after the first request, since MPI may still have data to move."""
        self._misses = 0
        self._stirred_until = 0.0
        """Time of `perf_counter` until which MPI makes progress without a request, or 0."""

    def __len__(self) -> int:
        return len(self._requests) or self._stirred_until > 0

    def stir(self, seconds: float = _STIR_SECONDS) -> None:
        """Make MPI progress for `seconds` without a request, for short messages of other ranks."""
        stirs = seconds and self.used and self.left is None
        self._stirred_until = perf_counter() + seconds if stirs else 0.0

    def track(self, request: MPI.Request, done: Done, nbytes: int) -> None:
        self.used = True
        if nbytes >= LARGE_BYTES:
            done = self.progress.counted(done, of_ranks=True)
        self._requests.append(request)
        self._done.append(done)

    def leave(self, error: BackendError) -> None:
        """Make no more MPI calls: pending requests fail.

        The memory of the requests is free, since only MPI calls move data.
        """
        self.left = error
        self.stir(0)
        ended, self._requests, self._done = self._done, [], []
        self.progress.remove_poller(self)
        tell((done, again(error)) for done in ended)

    def poll(self, until: float = 0.0) -> bool:
        requests = self._requests
        if not requests:
            return self._poll_without_request()
        if len(requests) == 1:
            test = requests[0].Test
            try:
                while not test():
                    if perf_counter() >= until:
                        return False
            except MPI.Exception as error:
                self._finish([(0, error)])
            else:
                done = self._done.pop()
                requests.clear()
                done(None)
            return True
        # Operations end roughly in the order of issue, so most polls test only the oldest. A test of a thousand costs
        # 30 us. Every eighth unsuccessful poll tests all, for requests that end out of order.
        tested = requests if len(requests) <= _WINDOW or self._misses % 8 == 7 else requests[:_WINDOW]
        try:
            indices = MPI.Request.Testsome(tested)
        except MPI.Exception:
            return self._test_each()
        if not indices:
            self._misses += 1
            return False
        self._misses = 0
        self._finish([(i, None) for i in indices])
        return True

    def _poll_without_request(self) -> bool:
        if self._stirred_until:
            with suppress(MPI.Exception):  # the next request has the error
                MPI.COMM_WORLD.Iprobe()  # MPICH makes no progress for a probe of COMM_SELF
            if perf_counter() > self._stirred_until:
                self.stir(0)
        return False

    def _test_each(self) -> bool:
        ended: list[tuple[int, MPI.Exception | None]] = []
        for i, request in enumerate(self._requests):
            try:
                # Testsome frees completed requests, failed ones too: these are null now.
                if request == MPI.REQUEST_NULL or request.Test():
                    ended.append((i, None))
            except MPI.Exception as error:
                ended.append((i, error))
        self._finish(ended)
        return bool(ended)

    def _finish(self, ended: list[tuple[int, MPI.Exception | None]]) -> None:
        calls = [(self._done[i], error) for i, error in ended]
        for i in sorted([i for i, _ in ended], reverse=True):
            del self._requests[i], self._done[i]
        tell((done, None if error is None else as_backend_error(error)) for done, error in calls)


class _RequestSource:
    """A request that the user made with mpi4py."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def poll(self) -> bool:
        return bool(self._request.Test())

    def result(self) -> None:
        return None


def request_handle(request: MPI.Request) -> Handle[None]:
    """Return a handle that completes with the user's own `request`."""
    return from_source(_RequestSource(request), "request", origin=Origin.here())


def start(requests: Requests, nbytes: int, done: Done, call: Callable[[*Ts], MPI.Request], *args: *Ts) -> None:
    """Make a native call and track the request, or pass an exception to `done`."""
    if requests.left is not None:
        done(again(requests.left))
        return
    try:
        request = call(*args)
    except MPI.Exception as error:
        done(as_backend_error(error))
    except Exception as error:  # noqa: BLE001  - as above
        done(ours(error))
    else:
        requests.track(request, done, nbytes)


def spec(t: Tensor) -> Any:  # noqa: ANN401
    """Return mpi4py's buffer of `t`: memory, count and type."""
    # A raw address costs 0.2 us, a numpy view 0.6 us, DLPack several.
    return [address(t.data_ptr(), t.nbytes), t.numel(), DTYPES[t.dtype]]
