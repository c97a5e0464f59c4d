"""The process group: the map from the calls of c10d to those of a communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter
from sys import _getframe
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import graph
from torch.distributed.distributed_c10d import _world

from aiodist.c10d.home import Home
from aiodist.c10d.work import HandleWork
from aiodist.collectives.arithmetic import SUPPORTED
from aiodist.communicator import Communicator
from aiodist.errors import AiodistError, BackendUnavailable
from aiodist.handles import Handle
from aiodist.streams.memory import shares_memory
from aiodist.streams.writes import increment_version
from aiodist.types import ANY, Op

_Op = dist.ReduceOp.RedOpType
_OPS: Mapping[int, Op] = MappingProxyType(
    {
        _Op.SUM.value: "sum",
        _Op.AVG.value: "mean",
        _Op.PRODUCT.value: "prod",
        _Op.MIN.value: "min",
        _Op.MAX.value: "max",
        _Op.BAND.value: "band",
        _Op.BOR.value: "bor",
        _Op.BXOR.value: "bxor",
        _Op.PREMUL_SUM.value: "sum",
    }
)
"""By the numbers of torch's operators, which it compares in Python."""

_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BACKWARD = graph._engine_run_backward.__code__
_PREMULTIPLIED: int = _Op.PREMUL_SUM.value
_ON_DEVICE = attrgetter("is_cuda")
_SHORT_BYTES = 1 << 15  # what travels with its entry is copied anyway
_REDUCED = dist.AllreduceOptions()
_SCATTERED = dist.ReduceScatterOptions()

Tensors = list[Tensor]
Handles = Callable[[], list[Handle[Any]]]
Finish = Callable[[], object] | None


class AiodistProcessGroup(dist.ProcessGroup):
    """A process group of `torch.distributed` over a communicator.

    Tensors are given flat to the communicator, since callers of c10d pass shapes of their own: ranks compare numbers
    of elements. Any thread may call, and calls of several threads take turns. CUDA tensors are issued by the loop, on
    the caller's current stream.
    """

    def __init__(self, coll: Communicator, home: Home, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(coll.rank, coll.size)
        self._store = store
        self._name = self._desc = ""
        self.coll = coll
        self.home = home
        self._timeout = timeout.total_seconds()
        self._turn = threading.RLock()
        self._batch: list[HandleWork] | None = None

    # --- reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = _REDUCED) -> HandleWork:
        t = tensors[0]
        if t.is_sparse:
            return self._allreduce_sparse(tensors, opts)
        short = t.nbytes <= _SHORT_BYTES and t.dtype is not torch.float16
        compressed = not short and _called_by_reducer() and self.adopt(t)
        lines, finish = _lines(tensors, opts, self.coll)
        work = self._work(lambda: [self.coll.allreduce(*_summand(line, opts)) for line in lines], tensors, finish)
        work.blocks = compressed
        return work

    allreduce_coalesced = allreduce

    def adopt(self, bucket: Tensor) -> bool:
        """Move a bucket of DDP's into the arena, where that can be: the reducer keeps it, and nobody has its address.

        Return whether it is none, but 16-bit floats that torch's hook in C++ made of one for this call: without views.
        """
        if not shares_memory(bucket):
            return bucket.dtype is torch.float16
        if bucket.is_cpu and bucket.nbytes > _SHORT_BYTES:
            with suppress(ValueError, BackendUnavailable, MemoryError):
                self.coll.share_(bucket)
        return False

    def reduce(self, tensors: Tensors, opts: Any) -> HandleWork:
        root = opts.rootRank
        lines, finish = _lines(tensors, opts, self.coll)
        kept = self.coll.rank != root  # only the root's is written
        issue: Handles = lambda: [self.coll.reduce(*_summand(line, opts, kept=kept), root) for line in lines]  # noqa: E731
        return self._work(issue, tensors, None if kept else finish)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = _SCATTERED) -> HandleWork:
        for out, ts in zip(outputs, inputs, strict=True):
            self._check_blocks(ts, out, "inputs", "output")
        lines, finish = _lines(outputs, opts, self.coll)

        def issue() -> list[Handle[Any]]:
            return [self._scatter_reduced(out, _joined(ts), opts, ts) for out, ts in zip(lines, inputs, strict=True)]

        return self._work(issue, outputs, finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _SCATTERED) -> HandleWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = _SCATTERED) -> HandleWork:
        for out, t in zip(outputs, inputs, strict=True):
            self._check_whole(t, out, "input", "output")
        lines, finish = _lines(outputs, opts, self.coll)
        pairs = list(zip(lines, map(_line, inputs), strict=True))
        return self._work(lambda: [self._scatter_reduced(out, t, opts) for out, t in pairs], outputs, finish)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- movement ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> HandleWork:
        lines, finish = _lines(tensors)
        return self._work(lambda: [self.coll.broadcast(_movable(t), opts.rootRank) for t in lines], tensors, finish)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> HandleWork:
        for ts, t in zip(outputs, inputs, strict=True):
            self._check_blocks(ts, t, "outputs", "input")
        rooms, deal = _rooms(outputs)

        def issue() -> list[Handle[Any]]:
            return [self.coll.allgather(_movable(t), out=room) for room, t in zip(rooms, inputs, strict=True)]

        return self._work(issue, [t for ts in outputs for t in ts], deal)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> HandleWork:
        return self.allgather([list(ts) for ts in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> HandleWork:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HandleWork:
        for out, t in zip(outputs, inputs, strict=True):
            self._check_whole(out, t, "output", "input")
        lines, finish = _lines(outputs)
        pairs = list(zip(lines, inputs, strict=True))
        return self._work(
            lambda: [self.coll.allgather(_movable(t), out=_movable(out)) for out, t in pairs], outputs, finish
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> HandleWork:
        for ts, t in zip(outputs, inputs, strict=False):
            self._check_blocks(ts, t, "outputs", "input")
        rooms, deal = _rooms(outputs)  # none but on the root

        def issue() -> list[Handle[Any]]:
            outs = rooms or [None] * len(inputs)
            return [self.coll.gather(_movable(t), opts.rootRank, out=out) for t, out in zip(inputs, outs, strict=True)]

        return self._work(issue, [t for ts in outputs for t in ts], deal)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> HandleWork:
        for ts, out in zip(inputs, outputs, strict=False):
            self._check_blocks(ts, out, "inputs", "output")
        lines, finish = _lines(outputs)

        def issue() -> list[Handle[Any]]:
            sent = [list(map(_movable, ts)) for ts in inputs] or [None] * len(outputs)
            return [
                self.coll.scatter(ts, opts.rootRank, out=_movable(out)) for ts, out in zip(sent, lines, strict=True)
            ]

        return self._work(issue, outputs, finish)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HandleWork:
        self._check_blocks(outputs, inputs[self.coll.rank], "outputs", "input for this rank")
        lines, finish = _lines(outputs)
        sent, came = list(map(_movable, inputs)), list(map(_movable, lines))
        return self._work(lambda: [self.coll.alltoall(sent, out=came)], outputs, finish)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> HandleWork:
        [line], finish = _lines([output])
        if not output_sizes and not input_sizes:
            if output.numel() != input.numel():
                raise ValueError(f"output has {output.numel()} elements: expected the {input.numel()} of input")
            return self._work(
                lambda: [self.coll.alltoall_single(_movable(input), out=_movable(line))], [output], finish
            )
        sent = _blocks(input, input.shape[0], input_sizes, self.coll.size)
        came = _blocks(line, output.shape[0], output_sizes, self.coll.size)
        return self._work(lambda: [self.coll.alltoall(sent, out=came)], [output], finish)

    alltoall_base = all_to_all_single

    def _check_blocks(self, blocks: Tensors, mine: Tensor, many: str, one: str) -> None:
        """Raise ValueError unless there is a block for each rank, this one's as large as `mine`."""
        if len(blocks) != self.coll.size:
            raise ValueError(f"there are {len(blocks)} {many}: expected {self.coll.size}, one for each rank")
        if (seen := blocks[self.coll.rank].numel()) != mine.numel():
            raise ValueError(f"this rank's of the {many} has {seen} elements: expected the {mine.numel()} of its {one}")

    def _check_whole(self, whole: Tensor, block: Tensor, much: str, one: str) -> None:
        """Raise ValueError unless `whole` has as many elements as all ranks' blocks."""
        if whole.numel() != (expected := block.numel() * self.coll.size):
            raise ValueError(
                f"{much} has {whole.numel()} elements: expected {expected}, {self.coll.size} times those of {one}"
            )

    # --- messages and meetings ---------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> HandleWork:
        return self._work(lambda: [self.coll.send(_movable(t.contiguous()), dst, tag) for t in tensors], tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> HandleWork:
        lines, finish = _lines(tensors)
        return self._work(lambda: [self.coll.recv(_movable(t), src, tag) for t in lines], tensors, finish)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> HandleWork:
        return self.recv(tensors, ANY, tag)

    def barrier(self, opts: Any = None) -> HandleWork:
        seconds = -1.0 if opts is None else opts.timeout.total_seconds()
        return self._work(lambda: [self.coll.barrier()], [], seconds=seconds if seconds > 0 else None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it; raise with the ranks that are late, and where each of them is.

        The error begins with the words of gloo, which programs look for: there rank 0 names the first rank that is
        late, or with `wait_all_ranks` all. What follows names all of them, on every rank.
        """
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        issue: Handles = lambda: [self.coll.barrier(timeout=seconds)]  # noqa: E731  - it asks in time who is late
        try:
            self._work(issue, [], seconds=seconds).wait()
        except dist.DistBackendError as error:
            late = sorted(getattr(error.__cause__, "late", ()))
            raise dist.DistBackendError(f"{self._unmet(late, wait_all_ranks)}: {error}") from error.__cause__

    def _unmet(self, late: list[int], every: bool) -> str:
        if self.rank():
            reached = f"Rank {self.rank()} successfully reached monitoredBarrier"
            return f"{reached}, but received errors while waiting for send/recv from rank 0"
        said = "Rank 0 timed out in monitoredBarrier"
        if not late:
            return said
        ranks = f"Ranks {', '.join(map(str, late))}" if every and len(late) > 1 else f"Rank {late[0]}"
        return f"{said}: {ranks} failed to pass monitoredBarrier"

    # --- coalescing -------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> HandleWork:
        works, self._batch = self._batch or [], None
        return HandleWork.of(works, self._timeout)

    # --- who it is, and its end -----------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "aiodist"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_name, group_name = setGroupName, property(getGroupName)
    _set_group_desc, group_desc = setGroupDesc, property(getGroupDesc)

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """None while torch makes the group: from 2.15 on it would hang its recorder on a backend in C++ if there were.

        Calls of a group in Python do not pass where that recorder listens.
        """
        if self not in _world.pg_map:
            return []
        return [torch.device(kind) for kind in ("cpu", "cuda")[: 2 if self.coll.device.type == "cuda" else 1]]

    def _get_backend(self, device: torch.device) -> AiodistProcessGroup:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def abort(self) -> None:
        self.coll.abort("torch.distributed aborted the process group")

    def shutdown(self) -> None:
        if self.coll is self.home.world:
            try:
                self.home.close()
            except BaseException:
                dist.destroy_process_group()  # torch, which calls us, would keep what is closed; now that does no more
                raise
        else:
            self.home.release(self.coll)

    # --- issuing ------------------------------------------------------------------------------------------------------

    def _work(
        self, issue: Handles, tensors: Tensors, finish: Callable[[], object] | None = None, seconds: float | None = None
    ) -> HandleWork:
        try:
            with self._turn:
                handles = self._on_loop(issue) if any(map(_ON_DEVICE, tensors)) else issue()
        except AiodistError as error:
            raise dist.DistBackendError(str(error)) from error
        work = HandleWork(handles, tensors, self._timeout if seconds is None else seconds, finish)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _on_loop(self, issue: Handles) -> list[Handle[Any]]:
        stream = torch.cuda.current_stream()

        async def issue_there() -> list[Handle[Any]]:
            with torch.cuda.stream(stream):
                return issue()

        return self.home.call(issue_there)

    def _scatter_reduced(self, out: Tensor, t: Tensor, opts: Any, parts: Tensors | None = None) -> Handle[Any]:
        sizes = None if parts is None or len({p.numel() for p in parts}) == 1 else [p.numel() for p in parts]
        return self.coll.reduce_scatter(*_summand(t, opts, kept=True), sizes, out=out)

    def _allreduce_sparse(self, tensors: Tensors, opts: Any) -> HandleWork:
        """Sum sparse tensors, each rank's of its own entries: all get all entries."""
        if opts.reduceOp.op != _Op.SUM:
            raise ValueError(f"a sparse tensor and {opts.reduceOp.op}: expected SUM")
        [t] = tensors
        t = t.coalesce()
        indices, values = t.indices().t().contiguous(), t.values()
        works: list[Handle[Any]] = []

        def issue() -> list[Handle[Any]]:
            works[:] = [self.coll.allgather(indices), self.coll.allgather(values)]
            return works

        def finish() -> None:
            entries = torch.cat(works[0].result()).t(), torch.cat(works[1].result())
            total = torch.sparse_coo_tensor(*entries, t.shape, device=t.device).coalesce()
            tensors[0].copy_(total)

        return self._work(issue, tensors, finish)


def _called_by_reducer() -> bool:
    """Return whether torch's reducer calls the process group: no Python lies between that and `backward()`.

    Nor above it where gradients are made on a device, which has a thread of autograd's own.
    """
    caller = _getframe(1).f_back
    return caller is None or caller.f_code is _BACKWARD


def _summand(line: Tensor, opts: Any, *, kept: bool = False) -> tuple[Tensor, Op]:
    """Return flat `line` and the operator, as a communicator takes them; `kept`: it is the user's, and only read."""
    op = opts.reduceOp
    number = op.op.value
    name = _OPS[number]
    if number == _PREMULTIPLIED:
        factor = op.__getstate__()[1]
        line = line * factor if kept else line.mul_(factor)
    return line, "sum" if name == "mean" and line.dtype in _WHOLE else name


def _lines(ts: Tensors, opts: Any = None, coll: Communicator | None = None) -> tuple[Tensors, Finish]:
    """Return tensors that are written, flat, in the order of their dimensions, and what is to be done in the end.

    That is to copy what lies in another order back to where it belongs; and with `opts` to make of sums of integers the
    means that NCCL has, without the rest, where means were asked for.
    """
    lines = list(map(_line, ts))
    apart = [(t, line) for t, line in zip(ts, lines, strict=True) if not t.is_contiguous()]
    ranks = 1 if coll is None else coll.size
    whole = [line for line in lines if line.dtype in _WHOLE] if opts is not None else []
    if whole and opts.reduceOp.op != _Op.AVG:
        whole = []
    if not apart and not whole:
        return lines, None

    def finish() -> None:
        for line in whole:
            line.div_(ranks, rounding_mode="trunc")
        for t, line in apart:
            t.detach().copy_(line.view(t.shape))

    return lines, finish


def _rooms(outputs: list[Tensors]) -> tuple[list[Tensor], Callable[[], object] | None]:
    """Return a flat tensor for what is to end in each list, and what copies it there; None: it lies there already."""
    lying = [_together(ts) for ts in outputs]
    rooms = [
        ts[0].new_empty(sum(t.numel() for t in ts)) if line is None else line
        for ts, line in zip(outputs, lying, strict=True)
    ]
    apart = [(room, ts) for room, ts, line in zip(rooms, outputs, lying, strict=True) if line is None]
    dealt = [ts for ts, line in zip(outputs, lying, strict=True) if line is not None]
    written = [t for ts in dealt for t in ts[1:] if t._base is None or t._base is not ts[0]._base]
    increment_version(written)  # those that do not share the version of the first, which the communicator writes

    def deal() -> None:
        for room, ts in apart:
            for t, part in zip(ts, room.split([t.numel() for t in ts]), strict=True):
                t.detach().copy_(part.view(t.shape))
        increment_version(written)

    return list(map(_movable, rooms)), deal if apart or written else None


# --- tensors as communicators take them: flat, dense, of dtypes that both know ----------------------------------------


def _line(t: Tensor) -> Tensor:
    """Return the elements of `t` in the order of its dimensions, flat; a copy where memory has another order.

    Raises ValueError where memory has gaps.
    """
    t = t.detach() if t.requires_grad else t
    if t.is_contiguous():
        return t if t.dim() == 1 else t.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(t):
        return t.contiguous().view(-1)
    raise ValueError(f"a tensor of shape {list(t.shape)} has strides {t.stride()}: expected contiguous memory")


def _movable(t: Tensor) -> Tensor:
    """Return `t` flat, as bytes where its dtype is none that communicators know: for what only moves it."""
    t = _line(t)
    return t if t.dtype in SUPPORTED else t.view(torch.uint8)


def _together(ts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are alike and lie one behind the other in one storage as one flat tensor, else None."""
    first = ts[0]
    start, nbytes, storage = first.data_ptr(), first.nbytes, first.untyped_storage().data_ptr()
    for i, t in enumerate(ts):
        if t.data_ptr() != start + i * nbytes or t.nbytes != nbytes or t.dtype is not first.dtype:
            return None
        if t.untyped_storage().data_ptr() != storage or not t.is_contiguous():
            return None
    return first.detach().as_strided((len(ts) * first.numel(),), (1,))


def _joined(ts: Sequence[Tensor]) -> Tensor:
    """Return the elements of all `ts` in one flat tensor, which is a copy only where they do not lie so already."""
    lying = _together(ts)
    return torch.cat([t.detach().reshape(-1) for t in ts]) if lying is None else lying


def _blocks(t: Tensor, rows: int, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """Return the flat blocks of `t` for each rank: `sizes` of its `rows`, or even blocks where there are none."""
    line = _movable(t)
    if not sizes:
        return list(line.split(line.numel() // ranks)) if line.numel() else [line] * ranks
    if sum(sizes) != rows:
        raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}: expected the {rows} rows of dim 0")
    row = line.numel() // max(1, rows)
    return list(line.split([size * row for size in sizes]))


# --- what torch asks for ----------------------------------------------------------------------------------------------


def create(options: Any, communicator: object = None) -> AiodistProcessGroup:
    """Return the process group that torch asks for; `communicator` is that of an asyncio program, see `wrap`."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    default = dist.group.WORLD
    if isinstance(communicator, Communicator):
        home = Home(communicator)
    elif isinstance(default, AiodistProcessGroup) and options.global_ranks_in_group:
        coll = default.home.group(options.group_id, options.global_ranks_in_group)
        return AiodistProcessGroup(coll, default.home, store, timeout)
    else:
        home = Home.open(store, rank, size, timeout.total_seconds())
    return AiodistProcessGroup(home.world, home, store, timeout)
