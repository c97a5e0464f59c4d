"""NCCL for tests: `FakeNccl` stands in for the module `nccl.core` of nccl4py, among ranks of this process.

It takes tensors of simulated devices (`tests.support.simulated_cuda`) and queues its work on the stream that it is
given: a kernel ends when all ranks are at it. It checks what NCCL leaves unchecked: see `FakeNccl.violations`.

    library = aiodist.backends.nccl.Library(FakeNccl(dawdle=3))
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from tests.support.fake_nccl.communicator import Clique, FakeCommunicator
from tests.support.fake_nccl.interface import INVALID_ARGUMENT, TEXTS, FakeConfig, FakeId, NCCLError
from tests.support.fake_nccl.kernels import RedOp, Work

__all__ = ["FakeNccl"]


class _Grouping(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[tuple[FakeCommunicator, int, tuple[Work, Tensor | None, Tensor | None]]] = []


class FakeNccl:
    """One NCCL for all ranks of this process; communicators must be non-blocking.

    `violations` lists mistakes that make NCCL hang or give wrong numbers; a test checks the list at its end. Such are
    ranks that disagree, and a call on a communicator that is in progress, not made yet or gone, from two threads at
    the same time, on another device than the current one, or without a stream.

    A communicator reports `dawdle` times at most that it is in progress before it launches its calls and queues them
    on the stream. `multi_rank` allows several ranks on a device. `calls` counts native calls by name; `launches` has
    the rank and the number of calls of each launch. `refuse[name]` is the code of the error that the next call of that
    name raises, `refuse[name, rank]` the code for the next call of that rank. `unique_id_error` is the code of the
    error of `get_unique_id`. `release` is NCCL's version.
    """

    SUM, PROD, MAX, MIN, AVG = RedOp.SUM, RedOp.PROD, RedOp.MAX, RedOp.MIN, RedOp.AVG
    NCCLConfig = FakeConfig
    UniqueId = FakeId

    def __init__(self, *, seed: int = 0, dawdle: int = 0, multi_rank: bool = True) -> None:
        self.dawdle = dawdle
        self.multi_rank = multi_rank
        self.release: tuple[int, ...] = (2, 32, 3)
        self.violations: Final[list[str]] = []
        self.calls: Final[list[str]] = []
        self.launches: Final[list[tuple[int, int]]] = []
        self.refuse: Final[dict[str | tuple[str, int], int]] = {}
        self.unique_id_error: int | None = None
        self.communicators: Final[list[FakeCommunicator]] = []
        self.lock: Final = threading.RLock()
        self.grouping: Final = _Grouping()
        self.random: Final = random.Random(seed)
        self.Communicator: Final = _Class(self)
        self._ids: Final = itertools.count(1)
        self._cliques: Final[dict[bytes, Clique]] = {}

    def get_unique_id(self, empty: bool = False) -> FakeId:
        """Return a new id."""
        if self.unique_id_error is not None:
            raise NCCLError(self.unique_id_error)
        return FakeId((0 if empty else next(self._ids)).to_bytes(128, "little"))

    def get_version(self) -> Any:
        """Return what has `.libnccl.version.release`."""
        version = SimpleNamespace(release=self.release)
        return SimpleNamespace(libnccl=SimpleNamespace(version=version))

    def get_error_string(self, nccl_result: int) -> str:
        """Return the text of a code."""
        return TEXTS[int(nccl_result)]

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Launch the calls of the block together, also after an error."""
        self.grouping.depth += 1
        try:
            yield
        finally:
            self.grouping.depth -= 1
            if self.grouping.depth == 0:
                self._launch_group()

    def _launch_group(self) -> None:
        calls, self.grouping.calls = self.grouping.calls, []
        for comm in dict.fromkeys(comm for comm, _, _ in calls):
            mine = [(stream, work) for c, stream, work in calls if c is comm]
            if len({stream for stream, _ in mine}) > 1:
                self.violations.append(f"{comm}: a group on several streams")
            comm.launch([work for _, work in mine], mine[0][0])

    def check(self, name: str, rank: int) -> None:
        """Raise what a call of `rank` is to raise."""
        status = self.refuse.pop(name, None) or self.refuse.pop((name, rank), None)
        if status is not None:
            raise NCCLError(status)

    def clique(self, key: bytes, size: int) -> Clique:
        """Return what the ranks of one communicator share."""
        with self.lock:
            return self._cliques.setdefault(key, Clique(size))

    def hang(self, rank: int) -> None:
        """From now on this rank of all communicators launches nothing: it has died or lost its way."""
        for comm in self.communicators:
            if comm.rank == rank:
                comm.hangs = True


class _Class:
    """As the class `nccl.core.Communicator`."""

    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl

    def init(
        self, nranks: int, rank: int, unique_id: FakeId | Sequence[FakeId], config: FakeConfig | None = None
    ) -> FakeCommunicator:
        assert isinstance(unique_id, FakeId)
        self._nccl.calls.append("init")
        if not 0 <= rank < nranks:
            raise NCCLError(INVALID_ARGUMENT)
        self._nccl.check("init", rank)
        device = torch.cuda.current_device()
        comm = FakeCommunicator(self._nccl, bytes(unique_id), nranks, rank, device, config)
        comm.join()
        return comm
