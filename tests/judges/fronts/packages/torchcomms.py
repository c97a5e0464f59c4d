"""A front with the interface of torchcomms, for its own tests: its groups are aiodist's, or torch's gloo groups.

FRONT_GROUP names the group, `aiodist` or `gloo`; FRONT_SOURCE the folder of torchcomms' Python files in a checkout,
whose tests and pure modules are found below this module; FRONT_PORT the port of a store for communicators without one.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

GROUP = os.environ["FRONT_GROUP"]
__path__ = [os.environ["FRONT_SOURCE"]]  # makes this module a package
_MINUTES = timedelta(minutes=10)
Hints = dict[str, str] | None


class RedOpType(Enum):
    """Kinds of operators."""

    SUM = auto()
    PRODUCT = auto()
    MIN = auto()
    MAX = auto()
    BAND = auto()
    BOR = auto()
    BXOR = auto()
    PREMUL_SUM = auto()
    AVG = auto()


@dataclass(frozen=True)
class ReduceOp:
    """An operator."""

    type: RedOpType
    factor: Any = None

    @staticmethod
    def PREMUL_SUM(factor: Any) -> ReduceOp:
        return ReduceOp(RedOpType.PREMUL_SUM, factor)

    @property
    def torchs(self) -> Any:
        """The operator of torch."""
        if self.type is RedOpType.PREMUL_SUM:
            return c10d._make_nccl_premul_sum(self.factor)
        return getattr(dist.ReduceOp, self.type.name)


for _kind in RedOpType:
    if _kind is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _kind.name, ReduceOp(_kind))


class TorchWork:
    """Result of a call."""

    def __init__(self, works: Sequence[Any] = (), after: Callable[[], object] | None = None) -> None:
        self._works = list(works)
        self._after = after

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        after, self._after = self._after, None
        if after is not None:
            after()

    def wait_blocking(self) -> None:
        raise RuntimeError("waitBlocking not implemented for this backend")

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@dataclass
class CommOptions:
    """Options of `new_comm`."""

    abort_process_on_timeout_or_error: bool = True
    timeout: timedelta = _MINUTES
    store: Any = None
    name: str = ""
    enable_reconfigure: bool = False
    hints: dict[str, str] = field(default_factory=dict)


class TorchComm:
    """A communicator."""

    def __init__(self, backend: str, device: torch.device, group: Any, store: Any, options: CommOptions) -> None:
        self.group = group
        self._backend = backend
        self._device = torch.device(device)
        self._store = store
        self._options = options
        self._splits = 0

    def get_rank(self) -> int:
        return int(self.group.rank())

    def get_size(self) -> int:
        return int(self.group.size())

    def get_name(self) -> str:
        return self._options.name

    def get_options(self) -> CommOptions:
        return self._options

    def get_device(self) -> torch.device:
        return self._device

    def get_backend(self) -> str:
        return self._backend

    def finalize(self) -> None:
        group, self.group = self.group, None
        if group is None:
            raise RuntimeError(f"TorchComm {self.get_name()!r} is finalized already")
        if GROUP == "aiodist":
            group.shutdown()

    def split(self, ranks: list[int], name: str, **more: Any) -> Any:
        self._splits += 1
        if not ranks:
            return None
        if len(set(ranks)) < len(ranks) or self.get_rank() not in ranks:
            raise RuntimeError(f"split of {ranks} on rank {self.get_rank()}: expected this rank, and each rank once")
        store = c10d.PrefixStore(f"{name}.{self._splits}.{ranks}", self._store)
        options = CommOptions(timeout=more.get("timeout") or self._options.timeout, name=name)
        group = make_group(store, ranks.index(self.get_rank()), len(ranks), options.timeout)
        return TorchComm(self._backend, self._device, group, store, options)

    # --- collectives -----------------------------------------------------------------------------------------

    def _options_of(self, kind: Any, more: dict[str, Any], op: ReduceOp | None = None, root: int = 0) -> Any:
        options = kind()
        options.timeout = more.get("timeout") or self._options.timeout
        if op is not None:
            options.reduceOp = op.torchs
        if hasattr(options, "rootRank"):
            options.rootRank = root
        return options

    def _started(self, work: Any, async_op: bool, after: Callable[[], object] | None = None) -> TorchWork:
        started = TorchWork([work], after)
        if not async_op:
            started.wait()
        return started

    def _premultiplied(self, ts: list[Tensor], op: ReduceOp) -> tuple[list[Tensor], ReduceOp]:
        """Return tensors and an operator that gloo knows."""
        if GROUP == "aiodist" or op.type is not RedOpType.PREMUL_SUM:
            return ts, op
        return [t * op.factor for t in ts], ReduceOp(RedOpType.SUM)

    def _in_place(
        self, tensor: Tensor, op: ReduceOp, call: Callable[[Tensor, ReduceOp], Any], async_op: bool
    ) -> TorchWork:
        (t,), op = self._premultiplied([tensor], op)
        return self._started(call(t, op), async_op, None if t is tensor else lambda: tensor.copy_(t))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, **more: Any) -> TorchWork:
        def call(t: Tensor, op: ReduceOp) -> Any:
            return self.group.allreduce([t], self._options_of(c10d.AllreduceOptions, more, op))

        return self._in_place(tensor, op, call, async_op)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp, async_op: bool, **more: Any) -> TorchWork:
        def call(t: Tensor, op: ReduceOp) -> Any:
            return self.group.reduce([t], self._options_of(c10d.ReduceOptions, more, op, root))

        return self._in_place(tensor, op, call, async_op)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool, **more: Any) -> TorchWork:
        options = self._options_of(c10d.BroadcastOptions, more, root=root)
        return self._started(self.group.broadcast([tensor], options), async_op)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool, **more: Any) -> TorchWork:
        options = self._options_of(c10d.AllgatherOptions, more)
        return self._started(self.group.allgather([tensor_list], [tensor], options), async_op)

    def all_gather_single(self, output: Tensor, input: Tensor, async_op: bool, **more: Any) -> TorchWork:
        options = self._options_of(c10d.AllgatherOptions, more)
        return self._started(self.group._allgather_base(output, input, options), async_op)

    def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], op: ReduceOp, async_op: bool, **more: Any
    ) -> TorchWork:
        ts, op = self._premultiplied(input_list, op)
        options = self._options_of(c10d.ReduceScatterOptions, more, op)
        return self._started(self.group.reduce_scatter([output], [ts], options), async_op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, op: ReduceOp, async_op: bool, **more: Any
    ) -> TorchWork:
        (t,), op = self._premultiplied([input], op)
        options = self._options_of(c10d.ReduceScatterOptions, more, op)
        return self._started(self.group._reduce_scatter_base(output, t, options), async_op)

    def reduce_scatter_v(
        self, output: Tensor, input_list: list[Tensor], op: ReduceOp, async_op: bool, **more: Any
    ) -> TorchWork:
        """Reduce each tensor to its rank, since torch's groups have no reduce_scatter of different sizes."""
        own = [t.clone() for t in input_list]
        works = [self.reduce(t, root, op, async_op, **more) for root, t in enumerate(own)]
        started = TorchWork(works, lambda: output.copy_(own[self.get_rank()]))
        if not async_op:
            started.wait()
        return started

    def all_to_all_single(self, output: Tensor, input: Tensor, async_op: bool, **more: Any) -> TorchWork:
        return self.all_to_all_v_single(output, input, [], [], async_op, **more)

    def all_to_all_v_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        async_op: bool,
        **more: Any,
    ) -> TorchWork:
        options = self._options_of(c10d.AllToAllOptions, more)
        work = self.group.alltoall_base(output, input, output_split_sizes, input_split_sizes, options)
        return self._started(work, async_op)

    def all_to_all(
        self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], async_op: bool, **more: Any
    ) -> TorchWork:
        options = self._options_of(c10d.AllToAllOptions, more)
        return self._started(self.group.alltoall(output_tensor_list, input_tensor_list, options), async_op)

    def barrier(self, async_op: bool, **more: Any) -> TorchWork:
        return self._started(self.group.barrier(self._options_of(c10d.BarrierOptions, more)), async_op)

    def scatter(
        self, output_tensor: Tensor, input_tensor_list: list[Tensor], root: int, async_op: bool, **more: Any
    ) -> TorchWork:
        options = self._options_of(c10d.ScatterOptions, more, root=root)
        inputs = [input_tensor_list] if self.get_rank() == root else []
        return self._started(self.group.scatter([output_tensor], inputs, options), async_op)

    def gather(
        self, output_tensor_list: list[Tensor], input_tensor: Tensor, root: int, async_op: bool, **more: Any
    ) -> TorchWork:
        options = self._options_of(c10d.GatherOptions, more, root=root)
        outputs = [output_tensor_list] if self.get_rank() == root else []
        return self._started(self.group.gather(outputs, [input_tensor], options), async_op)

    def gather_single(self, output: Tensor, input: Tensor, root: int, async_op: bool, **more: Any) -> TorchWork:
        rows = [*output.view(self.get_size(), *input.shape)] if self.get_rank() == root else []
        return self.gather(rows, input, root, async_op, **more)

    # --- messages --------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, async_op: bool, **more: Any) -> TorchWork:
        return self._started(self.group.send([tensor], dst, 0), async_op)

    def recv(self, tensor: Tensor, src: int, async_op: bool, **more: Any) -> TorchWork:
        return self._started(self.group.recv([tensor], src, 0), async_op)

    def batch_op_create(self) -> BatchSendRecv:
        return BatchSendRecv(self)


class BatchSendRecv:
    """Messages that are issued together."""

    def __init__(self, comm: TorchComm) -> None:
        self._comm = comm
        self._calls: list[Callable[[], TorchWork]] = []

    def send(self, tensor: Tensor, dst: int) -> None:
        self._calls.append(lambda: self._comm.send(tensor, dst, True))

    def recv(self, tensor: Tensor, src: int) -> None:
        self._calls.append(lambda: self._comm.recv(tensor, src, True))

    def issue(self, async_op: bool, options: Any = None) -> TorchWork:
        issued = TorchWork([call() for call in self._calls])
        if not async_op:
            issued.wait()
        return issued


# --- groups --------------------------------------------------------------------------------------------------


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group of torch's interface."""
    if GROUP == "aiodist":
        from aiodist.c10d import AiodistProcessGroup, Home

        home = Home.open(store, rank, size, timeout.total_seconds())
        return AiodistProcessGroup(home.world, home, store, timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


_stores: list[Any] = []


def new_comm(
    backend: str,
    device: Any,
    abort_process_on_timeout_or_error: bool | None = True,
    timeout: timedelta | None = None,
    store: Any = None,
    name: str | None = None,
    enable_reconfigure: bool = False,
    hints: Hints = None,
) -> TorchComm:
    """Open a communicator over all ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        if not _stores:
            _stores.append(c10d.TCPStore("localhost", int(os.environ["FRONT_PORT"]), is_master=rank == 0))
        store = _stores[0]
    options = CommOptions(
        abort_process_on_timeout_or_error is not False,
        timeout or _MINUTES,
        store,
        name or "",
        enable_reconfigure,
        hints or {},
    )
    place = c10d.PrefixStore(f"front.{name}", store)
    return TorchComm(backend, device, make_group(place, rank, size, options.timeout), place, options)


_BackendWrapper = None
sys.modules["torchcomms._comms"] = sys.modules[__name__]
importlib.import_module("torchcomms.objcol")  # of the checkout, as an attribute too
