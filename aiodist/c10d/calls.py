"""The process group: each call of c10d as calls of a communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter
from sys import _getframe
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Backend
from torch.autograd import graph
from torch.distributed.distributed_c10d import _world

from aiodist.c10d.home import Home
from aiodist.c10d.lines import Tensors, blocks_of, check_apart, flat, flat_all, joined, movable, rooms_of, summand
from aiodist.c10d.signatures import signatures
from aiodist.c10d.work import HandleWork, backend_error
from aiodist.communicator import Communicator, parts_of
from aiodist.errors import AiodistError, BackendUnavailable
from aiodist.handles import Handle
from aiodist.streams.memory import shares_memory
from aiodist.types import ANY

_Op = dist.ReduceOp.RedOpType
_BACKWARD = graph._engine_run_backward.__code__
_ON_DEVICE = attrgetter("is_cuda")
_SHORT_BYTES = 1 << 15  # shorter messages travel with their entries, and are copied anyway

_ABORTED = "torch.distributed aborted the process group"

Handles = Callable[[], list[Handle[Any]]]


class AiodistProcessGroup(dist.ProcessGroup):
    """A process group of `torch.distributed` over a communicator.

    The communicator gets flat tensors, so ranks compare numbers of elements: callers of c10d may pass any shape. Any
    thread may call. Calls of several threads take turns. The loop issues calls with CUDA tensors, on the caller's
    current stream.
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
        self._issued = self._splits = 0

    # --- reductions -------------------------------------------------------------------------------------------------

    @signatures(dist.AllreduceOptions, "tensors* opts", "tensors* op timeout", "tensor op timeout")
    def allreduce(self, tensors: Tensors, opts: Any) -> HandleWork:
        t = tensors[0]
        if t.is_sparse:
            return self._allreduce_sparse(tensors, opts)
        short = t.nbytes <= _SHORT_BYTES and t.dtype is not torch.float16
        compressed = not short and _called_by_reducer() and self.adopt(t)
        work = self._allreduce(tensors, opts)
        work.blocks = compressed
        return work

    @signatures(dist.AllreduceCoalescedOptions, "tensors* opts")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> HandleWork:
        return self._allreduce(tensors, opts)

    def _allreduce(self, tensors: Tensors, opts: Any) -> HandleWork:
        lines, finish = flat_all(tensors, opts, self.coll)
        return self._work(lambda: [self.coll.allreduce(*summand(line, opts)) for line in lines], tensors, finish, opts)

    def adopt(self, bucket: Tensor) -> bool:
        """Move a bucket of DDP into the arena if possible. Only the reducer has the address of the bucket.

        Return True for 16-bit floats that torch's hook in C++ made of a bucket for this call, which have no views.
        """
        if not shares_memory(bucket):
            return bucket.dtype is torch.float16
        if bucket.is_cpu and bucket.nbytes > _SHORT_BYTES:
            with suppress(ValueError, BackendUnavailable, MemoryError):
                self.coll.to_arena_(bucket)
        return False

    @signatures(dist.ReduceOptions, "tensors* opts", "tensor root op timeout")
    def reduce(self, tensors: Tensors, opts: Any) -> HandleWork:
        root = opts.rootRank
        lines, finish = flat_all(tensors, opts, self.coll)
        kept = self.coll.rank != root  # only the root's tensor is written
        issue: Handles = lambda: [self.coll.reduce(*summand(line, opts, kept=kept), root) for line in lines]  # noqa: E731
        return self._work(issue, tensors, None if kept else finish, opts)

    @signatures(dist.ReduceScatterOptions, "output_tensors* input_tensors** opts", "output input* op timeout")
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> HandleWork:
        for out, ts in zip(outputs, inputs, strict=True):
            self._check_blocks(ts, out, "inputs", "output")
        lines, finish = flat_all(outputs, opts, self.coll)

        def issue() -> list[Handle[Any]]:
            return [self._scatter_reduced(out, joined(ts), opts, ts) for out, ts in zip(lines, inputs, strict=True)]

        return self._work(issue, outputs, finish, opts)

    @signatures(dist.ReduceScatterOptions, "outputTensor inputTensor opts")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> HandleWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @signatures(dist.ReduceScatterOptions, "outputs* inputs* opts")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> HandleWork:
        for out, t in zip(outputs, inputs, strict=True):
            self._check_whole(t, out, "input", "output")
        check_apart(outputs, inputs)
        lines, finish = flat_all(outputs, opts, self.coll)
        pairs = list(zip(lines, map(flat, inputs), strict=True))
        return self._work(lambda: [self._scatter_reduced(out, t, opts) for out, t in pairs], outputs, finish, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- movement ---------------------------------------------------------------------------------------------------

    @signatures(dist.BroadcastOptions, "tensors* opts", "tensor root timeout")
    def broadcast(self, tensors: Tensors, opts: Any) -> HandleWork:
        lines, finish = flat_all(tensors)
        return self._work(
            lambda: [self.coll.broadcast(movable(t), opts.rootRank) for t in lines], tensors, finish, opts
        )

    @signatures(AllgatherOptions, "output_tensors** input_tensors* opts", "output_tensors* input_tensor timeout")
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> HandleWork:
        for ts, t in zip(outputs, inputs, strict=True):
            self._check_blocks(ts, t, "outputs", "input")
        rooms, deal = rooms_of(outputs)

        def issue() -> list[Handle[Any]]:
            return [self.coll.allgather(movable(t), out=room) for room, t in zip(rooms, inputs, strict=True)]

        return self._work(issue, [t for ts in outputs for t in ts], deal, opts)

    @signatures(AllgatherOptions, "output_lists** input_list* opts")
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> HandleWork:
        return self.allgather([list(ts) for ts in zip(*outputs, strict=True)], inputs, opts)

    @signatures(AllgatherOptions, "output input opts")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> HandleWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    @signatures(AllgatherOptions, "outputs* inputs* opts")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> HandleWork:
        for out, t in zip(outputs, inputs, strict=True):
            self._check_whole(out, t, "output", "input")
        check_apart(outputs, inputs)
        lines, finish = flat_all(outputs)
        pairs = list(zip(lines, inputs, strict=True))
        return self._work(
            lambda: [self.coll.allgather(movable(t), out=movable(out)) for out, t in pairs], outputs, finish, opts
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @signatures(dist.GatherOptions, "output_tensors** input_tensors* opts", "output_tensors* input_tensor root timeout")
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> HandleWork:
        for ts, t in zip(outputs, inputs, strict=False):
            self._check_blocks(ts, t, "outputs", "input")
        rooms, deal = rooms_of(outputs)  # empty except on the root

        def issue() -> list[Handle[Any]]:
            outs = rooms or [None] * len(inputs)
            return [self.coll.gather(movable(t), opts.rootRank, out=out) for t, out in zip(inputs, outs, strict=True)]

        return self._work(issue, [t for ts in outputs for t in ts], deal, opts)

    @signatures(
        dist.ScatterOptions, "output_tensors* input_tensors** opts", "output_tensor input_tensors* root timeout"
    )
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> HandleWork:
        for ts, out in zip(inputs, outputs, strict=False):
            self._check_blocks(ts, out, "inputs", "output")
        lines, finish = flat_all(outputs)

        def issue() -> list[Handle[Any]]:
            sent = [list(map(movable, ts)) for ts in inputs] or [None] * len(outputs)
            return [self.coll.scatter(ts, opts.rootRank, out=movable(out)) for ts, out in zip(sent, lines, strict=True)]

        return self._work(issue, outputs, finish, opts)

    @signatures(dist.AllToAllOptions, "output_tensors* input_tensors* opts")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> HandleWork:
        self._check_blocks(outputs, inputs[self.coll.rank], "outputs", "input for this rank")
        lines, finish = flat_all(outputs)
        sent, came = list(map(movable, inputs)), list(map(movable, lines))
        return self._work(lambda: [self.coll.alltoall(sent, out=came)], outputs, finish, opts)

    @signatures(
        dist.AllToAllOptions,
        "output input output_split_sizes+ input_split_sizes+ opts",
        "output input output_split_sizes+ input_split_sizes+ timeout",
    )
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any
    ) -> HandleWork:
        [line], finish = flat_all([output])
        if not output_sizes and not input_sizes:
            if output.numel() != input.numel():
                raise ValueError(f"output has {output.numel()} elements: expected the {input.numel()} of input")
            issue: Handles = lambda: [self.coll.alltoall_single(movable(input), out=movable(line))]  # noqa: E731
            return self._work(issue, [output], finish, opts)
        sent = blocks_of(input, input.shape[0], input_sizes, self.coll.size)
        came = blocks_of(line, output.shape[0], output_sizes, self.coll.size)
        return self._work(lambda: [self.coll.alltoall(sent, out=came)], [output], finish, opts)

    alltoall_base = all_to_all_single

    def _check_blocks(self, blocks: Tensors, mine: Tensor, many: str, one: str) -> None:
        """Raise ValueError unless each rank has a block, and this rank's is as large as `mine`."""
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

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> HandleWork:
        return self._work(lambda: [self.coll.send(movable(t.contiguous()), dstRank, tag) for t in tensors], tensors)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> HandleWork:
        lines, finish = flat_all(tensors)
        return self._work(lambda: [self.coll.recv(movable(t), srcRank, tag) for t in lines], tensors, finish)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> HandleWork:
        return self.recv(tensors, ANY, tag)

    @signatures(dist.BarrierOptions, "opts", "timeout")
    def barrier(self, opts: Any) -> HandleWork:
        return self._work(lambda: [self.coll.barrier()], [], None, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called this method, or raise with the late ranks and the place of each.

        The error begins with gloo's words, which programs search for: rank 0 names the first late rank, or all late
        ranks for `wait_all_ranks`. The rest of the error names all late ranks, on every rank.
        """
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        issue: Handles = lambda: [self.coll.barrier(timeout=seconds)]  # noqa: E731  - the timeout asks for late ranks
        try:
            self._work(issue, []).wait(timedelta(seconds=seconds))
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

    # --- names, options and the end -------------------------------------------------------------------------------

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
        """Types of the group's devices, or none while torch makes the group.

        From 2.15 on, torch then adds its recorder to each backend of a device, which must be in C++.
        """
        if self not in _world.pg_map:
            return []
        return [torch.device(kind) for kind in ("cpu", "cuda")[: 2 if self.coll.device.type == "cuda" else 1]]

    def _get_backend(self, device: torch.device) -> AiodistProcessGroup:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: each group begins at 0."""

    @property
    def options(self) -> Backend.Options:
        """Options of a backend in C++: name, timeout, and the group's name and global ranks."""
        options = Backend.Options("aiodist", timedelta(seconds=self._timeout))
        options.group_name = self._name
        options.global_ranks_in_group = list(parts_of(self.coll).dispatcher.ranks)
        return options

    use_pg_for_symm_mem_rendezvous = False

    def _has_hooks(self) -> bool:
        return False

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> AiodistProcessGroup | None:
        """Return a group of some ranks of this group, or None on other ranks. Only these ranks call."""
        chosen = sorted(ranks)
        if self.rank() not in chosen:
            return None
        self._splits += 1
        name = group_name or f"{self._name}:split:{self._splits}"
        coll = self.home.group(f"{name}-{self._splits}", chosen, self.coll)
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        made = AiodistProcessGroup(coll, self.home, dist.PrefixStore(name, self._store), timedelta(seconds=seconds))
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self._desc}:split:{self._splits}")
        return made

    def merge_remote_group(self, *_: object, **__: object) -> AiodistProcessGroup:
        raise RuntimeError("aiodist does not merge groups: make one of all ranks over a store, by init_process_group")

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        if self.coll is self.home.world:
            self.home.abort(_ABORTED)
        else:
            self.coll.abort(_ABORTED)

    def shutdown(self) -> None:
        if self.coll is self.home.world:
            try:
                self.home.close()
            except BaseException:
                if self in _world.pg_map:  # torch would keep the closed group
                    dist.destroy_process_group()
                raise
        else:
            self.home.release(self.coll)

    # --- issuing ------------------------------------------------------------------------------------------------------

    def _work(
        self, issue: Handles, tensors: Tensors, finish: Callable[[], object] | None = None, opts: Any = None
    ) -> HandleWork:
        seconds = -1.0 if opts is None else opts.timeout.total_seconds()
        check_apart(tensors)
        try:
            with self._turn:
                self._issued += 1
                handles = self._on_loop(issue) if any(map(_ON_DEVICE, tensors)) else issue()
        except AiodistError as error:
            raise backend_error(error) from error
        work = HandleWork(handles, tensors, seconds if seconds > 0 else self._timeout, finish)
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
        return self.coll.reduce_scatter(*summand(t, opts, kept=True), sizes, out=out)

    def _allreduce_sparse(self, tensors: Tensors, opts: Any) -> HandleWork:
        """Sum sparse tensors. Each rank gets all entries of all ranks."""
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

        return self._work(issue, tensors, finish, opts)


def _called_by_reducer() -> bool:
    """Return True if torch's reducer calls the process group, without a frame of Python between it and `backward()`.

    On a device's thread of autograd no frame of Python calls the reducer.
    """
    caller = _getframe(2).f_back  # the caller of `allreduce` and of the wrapper with its signatures
    return caller is None or caller.f_code is _BACKWARD


# --- creation by torch ------------------------------------------------------------------------------------------------


def create(options: Any, communicator: object = None) -> AiodistProcessGroup:
    """Return a process group for torch, of the `communicator` of an asyncio program if given: see `wrap`."""
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
