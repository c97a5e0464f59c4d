"""The facts and services that client and server of one rank share."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Done, ignore
from aiodist.codecs import Codec
from aiodist.errors import AiodistError, PeerLost
from aiodist.handles import Progress
from aiodist.ps.coalescer import Coalescer
from aiodist.ps.log import PushLog
from aiodist.ps.policies import Policy
from aiodist.ps.pool import Pool
from aiodist.ps.rules import Rule
from aiodist.ps.service import Service
from aiodist.ps.sharing import SharedMemory
from aiodist.ps.wire import Kind
from aiodist.streams import Staging


@dataclass(eq=False)
class Context:
    """One rank of a parameter server."""

    name: str
    rank: int
    size: int
    """Number of ranks."""
    servers: tuple[int, ...]
    """Ranks, in order."""
    workers: tuple[int, ...]
    uids: Sequence[str]
    """Permanent name of each rank's client."""
    log: PushLog | None
    """Pushes of this rank, for servers that are lost, or None without `checkpoints`."""
    rules: Sequence[Rule]
    """Rules by number, the same on all ranks."""
    policy: Policy
    codec: Codec | None
    pull_codec: Codec | None
    progress: Progress
    service: Service
    pool: Pool
    coalescer: Coalescer
    shared: SharedMemory
    counts: defaultdict[str, Any] = field(default_factory=lambda: defaultdict(int))
    """Counts of `ParameterServerStatistics` that are kept as events happen."""
    saved: tuple[int, str] | None = None
    """Number of checkpoints, and the folder of the last one."""
    gone: dict[int, AiodistError] = field(default_factory=dict)
    """Lost ranks, with their errors."""
    refusal: AiodistError | None = None
    """Error of all requests after an abort."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a count."""
        began = perf_counter()
        try:
            yield
        finally:
            self.counts[name] += perf_counter() - began

    def decoded(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the values of a client's code, flat (any thread). Raises ValueError without a codec."""
        if self.codec is None:
            raise ValueError("a code, and no codec: expected plain data")
        with self.timed("decode_seconds"):
            return self.codec.decode(code, dtype, numel)

    def staged(self, t: Tensor) -> tuple[Tensor, Callable[[Done], None] | None]:
        """Return `t` itself on the host, else host memory and the call that copies `t` there.

        The copy waits for the work that the current stream has at that call.
        """
        if t.is_cpu:
            return t, None
        host, staging = self.host_for(t), Staging.of(self.progress)
        return host, partial(staging.copies, [(host, t)], torch.cuda.current_stream(t.device), ignore)

    def landing(self, host: Tensor, t: Tensor) -> Callable[[Done], None]:
        """Return the call that copies `host` to `t` on its device, as in `staged`."""
        return partial(Staging.of(self.progress).copies, [(t, host)], torch.cuda.current_stream(t.device), ignore)

    def host_for(self, t: Tensor) -> Tensor:
        """Return `t` itself on the host, else host memory for its values."""
        return t if t.is_cpu else Staging.of(self.progress).buffer(t.nbytes).view(t.dtype)

    def put_json(self, rank: int, kind: Kind, said: dict[str, Any], *, request: bool = False) -> None:
        """Send a rank that is not lost an entry in JSON, with the next `flush`. `request` is as in `Coalescer.put`."""
        if rank not in self.gone:
            self.coalescer.put(rank, kind, json.dumps(said).encode(), request=request)

    def living(self) -> list[int]:
        """Return the servers that are not lost."""
        return [rank for rank in self.servers if rank not in self.gone]

    def lost(self, rank: int) -> AiodistError:
        """Return the error of a request to a lost server."""
        known = self.gone.get(rank)
        text = f"server {rank} of parameter server {self.name!r} is gone"
        return PeerLost(f"{text}: {known.args[0] if known else 'nothing is known of it'}", lost=rank, rank=self.rank)
