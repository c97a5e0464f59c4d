"""`FakeCommunicator`: one rank of a communicator, which knows all the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.fake_nccl import kernels
from tests.support.fake_nccl.interface import (
    IN_PROGRESS,
    INTERNAL_ERROR,
    INVALID_USAGE,
    SUCCESS,
    FakeConfig,
    NCCLError,
    NcclInvalid,
)
from tests.support.fake_nccl.kernels import Part, RedOp, Work, launch_kernel

if TYPE_CHECKING:
    from tests.support.fake_nccl.core import FakeNccl

__all__ = ["Clique", "FakeCommunicator"]

_KINDS = frozenset(
    {torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int32, torch.int64}
    | {torch.uint8, torch.bool, torch.uint32, torch.uint64}
)


class Clique:
    """The state that the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined: dict[int, FakeCommunicator] = {}
        self.collectives: list[Work] = []
        self.messages: dict[tuple[int, int], list[Work]] = {}
        self.at: dict[str, set[int]] = {}
        """The ranks that reached each collective step without data, by its name."""


class FakeCommunicator:
    """As an object of `nccl.core.Communicator`."""

    def __init__(
        self, nccl: FakeNccl, key: bytes, nranks: int, rank: int, device: int, config: FakeConfig | None
    ) -> None:
        self._nccl = nccl
        self._clique = nccl.clique(key, nranks)
        self._key = key
        self.nranks = nranks
        self.rank = rank
        self.device_id = device
        self.is_valid = True
        self.hangs = False
        self.error: int | None = None
        """The code of an error that shows up by itself."""
        self.streams: set[int] = set()
        """On which anything was launched, by their handles."""
        self._gone = threading.Event()
        self.pending: Callable[[], bool] | None = None
        self._begun = 0
        self._sent: dict[tuple[str, int, int], int] = {}
        """How many messages of each pair began here."""
        self._using: int | None = None
        nccl.communicators.append(self)
        if config is None or config.blocking is not False:
            nccl.violations.append(f"{self}: it is blocking")

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.nranks}>"

    def fail_later(self, code: int = 6) -> None:
        """From now on say that something failed after its call, by default the network."""
        self.error = code

    # --- life

    def join(self) -> None:
        """Be in progress until all ranks are there."""
        clique = self._clique
        clique.joined[self.rank] = self

        def complete() -> bool:
            if len(clique.joined) < clique.size:
                return False
            devices = [comm.device_id for comm in clique.joined.values()]
            if len(set(devices)) < len(devices) and not self._nccl.multi_rank:
                self.error = INVALID_USAGE
            return True

        self.pending = complete

    def finalize(self) -> None:
        """Be in progress until all ranks call it."""
        with self._call("finalize"):
            came = self._clique.at.setdefault("finalize", set())
            came.add(self.rank)
            self.pending = lambda: len(came) == self.nranks

    def destroy(self) -> None:
        """Be gone."""
        with self._call("destroy"):
            self.is_valid = False

    def abort(self) -> None:
        """Abort; allowed while a kernel waits, but not during another call."""
        with self._call("abort", quiet=True):
            self.pending = None
            self.is_valid = False
            self._gone.set()

    def get_async_error(self) -> int:
        """Return the code of the current state, or of an error."""
        with self._call("get_async_error", quiet=True):
            if self.error is None and self.pending is not None:
                if not self.pending():
                    return IN_PROGRESS
                self.pending = None
            return SUCCESS if self.error is None else self.error

    def get_last_error(self) -> str:
        """Return some text where something failed."""
        return "the fake's last words" if self.error is not None else ""

    @contextlib.contextmanager
    def _call(self, name: str, *, quiet: bool = False) -> Iterator[None]:
        """Check that the call may be made; `quiet`: also while the communicator is in progress."""
        thread = threading.get_ident()
        with self._nccl.lock:
            if self._using not in (None, thread):
                self._nccl.violations.append(f"{self}: {name} while another thread is in a call")
            self._using = thread
        try:
            with self._nccl.lock:
                if not self.is_valid:
                    self._nccl.violations.append(f"{self}: {name} on a communicator that is gone")
                    raise NcclInvalid(f"Cannot {name}: Communicator not initialized")
                if self.pending is not None and not quiet:
                    self._nccl.violations.append(f"{self}: {name} while it is in progress")
                    raise NCCLError(INVALID_USAGE)
                if name != "get_async_error":
                    self._nccl.calls.append(name)
                    if (current := torch.cuda.current_device()) != self.device_id:
                        self._nccl.violations.append(f"{self}: {name} while device {current} is current")
                self._nccl.check(name, self.rank)
                yield
        finally:
            self._using = None

    # --- data

    def allreduce(
        self, sendbuf: Tensor, recvbuf: Tensor, op: RedOp, *, stream: int | None = None, config: object = None
    ) -> None:
        """In place or not."""
        self._same(sendbuf, recvbuf, recvbuf.numel() >= sendbuf.numel())
        self._collective("allreduce", sendbuf, recvbuf, kernels.allreduce(op), stream, op)

    def broadcast(
        self,
        sendbuf: Any,
        recvbuf: Tensor,
        root: int,
        *,
        stream: int | None = None,
        config: object = None,
    ) -> None:
        """`sendbuf` matters on root alone."""
        given = sendbuf if root == self.rank else None
        if given is not None:
            self._same(given, recvbuf, given.numel() == recvbuf.numel())
        self._collective("broadcast", given, recvbuf, kernels.broadcast(root), stream, root, count=recvbuf.numel())

    def reduce(
        self,
        sendbuf: Tensor,
        recvbuf: Any,
        op: RedOp,
        root: int | None = None,
        *,
        stream: int | None = None,
        config: object = None,
    ) -> None:
        """`recvbuf` matters on root alone."""
        assert root is not None
        into = recvbuf if root == self.rank else None
        if into is not None:
            self._same(sendbuf, into, into.numel() >= sendbuf.numel())
        self._collective("reduce", sendbuf, into, kernels.reduce(op, root), stream, op, root)

    def allgather(self, sendbuf: Tensor, recvbuf: Tensor, *, stream: int | None = None, config: object = None) -> None:
        """Equal counts."""
        self._same(sendbuf, recvbuf, recvbuf.numel() >= self.nranks * sendbuf.numel())
        self._collective("allgather", sendbuf, recvbuf, kernels.allgather, stream)

    def reduce_scatter(
        self, sendbuf: Tensor, recvbuf: Tensor, op: RedOp, *, stream: int | None = None, config: object = None
    ) -> None:
        """Equal counts."""
        count = sendbuf.numel() // self.nranks
        self._same(sendbuf, recvbuf, 1 <= count <= recvbuf.numel())
        self._collective("reduce_scatter", sendbuf, recvbuf, kernels.reduce_scatter(op), stream, op)

    def send(self, sendbuf: Tensor, peer: int, *, stream: int | None = None) -> None:
        """To `peer`."""
        self._message("send", sendbuf, None, (self.rank, peer), stream)

    def recv(self, recvbuf: Tensor, peer: int, *, stream: int | None = None) -> None:
        """From `peer`."""
        self._message("recv", None, recvbuf, (peer, self.rank), stream)

    def _same(self, sendbuf: Tensor, recvbuf: Tensor, fits: bool) -> None:
        if sendbuf.dtype != recvbuf.dtype:
            raise NcclInvalid(f"Dtype mismatch: sendbuf has {sendbuf.dtype}, recvbuf has {recvbuf.dtype}")
        if not fits:
            raise NcclInvalid(f"Buffer count mismatch: {sendbuf.numel()} and {recvbuf.numel()}")

    def _collective(
        self,
        name: str,
        send: Tensor | None,
        recv: Tensor | None,
        move: Callable[[Mapping[int, Part]], None],
        stream: int | None,
        *what: int,
        count: int | None = None,
    ) -> None:
        with self._call(name):
            buffer = send if send is not None else recv
            assert buffer is not None
            self._check(send, recv, stream)
            signature = (name, buffer.dtype, buffer.numel() if count is None else count, *what)
            self._give(self._next(signature, move), send, recv, stream)

    def _next(self, signature: tuple[object, ...], move: Callable[[Mapping[int, Part]], None]) -> Work:
        """Return this rank's next collective, which the first rank to come makes."""
        made = self._clique.collectives
        if self._begun == len(made):
            made.append(Work(signature, move, self.nranks))
        work = made[self._begun]
        self._begun += 1
        self._matches(work, signature)
        return work

    def _message(
        self, name: str, send: Tensor | None, recv: Tensor | None, pair: tuple[int, int], stream: int | None
    ) -> None:
        with self._call(name):
            buffer = send if send is not None else recv
            assert buffer is not None
            self._check(send, recv, stream)
            signature = (pair, buffer.numel() * buffer.element_size())
            made = self._clique.messages.setdefault(pair, [])
            number = self._sent.get((name, *pair), 0)
            self._sent[name, *pair] = number + 1
            if number == len(made):
                made.append(Work(signature, kernels.message(*pair), 2))
            self._matches(made[number], signature)
            self._give(made[number], send, recv, stream)

    def _check(self, send: Tensor | None, recv: Tensor | None, stream: int | None) -> None:
        for t in (send, recv):
            if t is None:
                continue
            if t.dtype not in _KINDS:
                raise NcclInvalid(f"Unsupported torch dtype {t.dtype} has no NCCL equivalent")
            if not t.is_contiguous():
                self._nccl.violations.append(f"{self}: a tensor that is not contiguous")
            if t.is_cuda and t.device.index != self.device_id:
                raise NcclInvalid(f"a buffer is on {t.device}, but the communicator on {self.device_id}")
        if stream is None:
            self._nccl.violations.append(f"{self}: no stream was given")

    def _matches(self, work: Work, signature: tuple[object, ...]) -> None:
        if work.signature != signature:
            self._nccl.violations.append(f"{self}: {signature} meets {work.signature}")
            for comm in self._clique.joined.values():
                comm.error = INTERNAL_ERROR

    def _give(self, work: Work, send: Tensor | None, recv: Tensor | None, stream: int | None) -> None:
        item = (work, send, recv)
        if self._nccl.grouping.depth:
            self._nccl.grouping.calls.append((self, stream or 0, item))
        else:
            self.launch([item], stream or 0)

    def launch(self, works: Sequence[tuple[Work, Tensor | None, Tensor | None]], stream: int) -> None:
        """Launch these together, sooner or later."""
        self.streams.add(stream)
        self._nccl.launches.append((self.rank, len(works)))
        left = self._nccl.random.randint(0, self._nccl.dawdle)

        def launched() -> bool:
            nonlocal left
            left -= 1
            if left >= 0:
                return False
            if not self.hangs:
                launch_kernel(self.rank, works, stream, self._gone)
            return True

        if not launched():
            self.pending = launched
