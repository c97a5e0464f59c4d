"""The opening of a net with other ranks: they compare their modules and arguments, and share one state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn

from aiodist.codecs import Codec
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.duplicate import duplicate
from aiodist.errors import CommunicatorError, DeadlockError, MismatchError, PeerError
from aiodist.nn.binding import Arguments, Binding
from aiodist.nn.bucket_plan import Sizes
from aiodist.nn.buckets import Allreduce, CommHook
from aiodist.nn.compression import Compression, Compressor, checked_compression
from aiodist.nn.devices import cuda_devices
from aiodist.nn.drivers import Driver, check_given, shared_states
from aiodist.nn.gradient_hooks import GradientHooks
from aiodist.nn.joiners import Expected, JoinedState, check_kinds
from aiodist.nn.layout import named_state
from aiodist.nn.per_rank import Shared, as_list
from aiodist.nn.reducer import Reducer
from aiodist.nn.steps import Changes, StepSettings
from aiodist.nn.synchronize import share_state
from aiodist.nn.tensor_parallel import divided_parameters
from aiodist.streams import HostStream
from aiodist.types import Stateful, SumOrMean, sum_or_mean
from aiodist.world.agree import agree

SIZES = Sizes(4 << 20, 1 << 20)
"""Default sizes of buckets."""
SIZES_ON_CUDA = Sizes(32 << 20, 4 << 20)
"""Default sizes with parameters on CUDA devices: fewer buckets, since the host has some work for each."""
_BACKGROUND_BYTES = 32 << 10


async def open_first(
    module: nn.Module,
    coll: Communicator,
    state: Sequence[Stateful | type[Driver]],
    op: SumOrMean,
    sizes: tuple[int | None, int | None],
    compress: Codec | Compression | None,
    changes: Changes,
) -> Binding:
    """Return the parts of a new net; the arguments are those of `DataParallel.create`."""
    if not isinstance(module, nn.Module) or not isinstance(coll, Communicator):
        given = f"{type(module).__name__}, {type(coll).__name__}"
        raise TypeError(f"create({given}): expected a module of torch, and a Communicator")
    divided, per_rank = divided_parameters(module), as_list(changes.get("per_rank"))
    shared = Shared(module, per_rank, divided)
    settings = StepSettings(divided=divided).changed(shared, {**changes, "per_rank": per_rank})
    usual = SIZES_ON_CUDA if cuda_devices(module.parameters()) else SIZES
    bucket, first = sizes
    chosen = Sizes(usual.bucket if bucket is None else bucket, usual.first if first is None else first)
    GradientHooks.check_free(shared.named_parameters())
    compression = None if compress is None else checked_compression(compress, shared.named_parameters())
    arguments = Arguments(shared, sum_or_mean(op), chosen, compression)
    for each in state:
        if isinstance(each, type) and not issubclass(each, Driver):
            raise TypeError(
                f"create(…, {each.__name__}): a class stands for a driver that is made next, such as PipelinedOptimizer"
            )
    owners = [Expected(each) if isinstance(each, type) else each for each in state]
    kinds = [each.__name__ if isinstance(each, type) else type(each).__name__ for each in state]
    joined = JoinedState([each for each in owners if isinstance(each, Expected)], settings.stateful)
    states = shared_states("create", owners, settings.per_rank)
    return await _open(coll, arguments, settings, joined, states, kinds, 0)


async def open_again(before: Binding, coll: Communicator, state: Sequence[Stateful]) -> Binding:
    """Close `before`, and return the parts of the net on another communicator, or `before` if the net is there.

    `state` are the optimizer and other objects with a state that ranks share. Drivers then have to `resume`.
    """
    before.check_loop()
    settings, module = before.settings, before.shared.module
    if settings.divided:
        raise RuntimeError(
            "rebind of a module whose layers are divided among ranks, and blocks may be lost: make a new net, and load "
            "the last checkpoint"
        )
    shared_states("rebind", state, settings.per_rank)
    check_given(state, before.optimizer, before.reducer.kept_by)
    if before.ended is None:
        if coll is before.home:
            return before
        if parts_of(coll).registry.elastic is None:
            before.check_updated()
        await before.coll.aclose()
    await before.compute.stream.aclose()  # its work may still run after an abort
    for device in cuda_devices(module.parameters()):
        torch.cuda.synchronize(device)  # the compute thread had a stream of its own
    retreated = [each.retreat() if isinstance(each, Driver) else each for each in state]
    states = shared_states("rebind", retreated, settings.per_rank)
    for parameter in module.parameters():
        parameter.grad = None
    kinds = [type(each).__name__ for each in state]
    made = before.reducer.steps.whole
    binding = await _open(coll, before.arguments, settings, before.joined, states, kinds, made)
    binding.optimizer = before.optimizer
    return binding


async def _open(
    coll: Communicator,
    arguments: Arguments,
    settings: StepSettings,
    joined: JoinedState,
    states: Sequence[Stateful],
    kinds: Sequence[str],
    made: int | None,
) -> Binding:
    """Return the net's parts on `coll`, after all ranks have the tensors and `states` of the furthest rank.

    All ranks call it. `made` is the number of steps of this rank, or None if its optimizer raised within a step. If a
    rank fails or is cancelled alone, its duplicates are aborted, so that no other rank waits for it.
    """
    shared, compression = arguments.shared, arguments.compression
    if coll.size > 1:
        _check_forward(shared)
    data = await duplicate(coll)
    parts_of(data).dispatcher.large_bytes = _BACKGROUND_BYTES
    hook: CommHook = Allreduce(data, arguments.op)
    comms = [data]
    try:
        comms.append(side := await duplicate(data))
        comms.append(status := await duplicate(data))
        fact = made, joined.known_kinds, _place_of(shared, coll)
        same = {"states": ", ".join(kinds) or "none", **arguments.described()}
        of_ranks = await agree(data, f"net {data.name!r}", fact, same=same)
        _check_apart([place for *_, place in of_ranks])
        if compression is not None:
            hook = Compressor(compression, data, arguments.op, shared.named_parameters())
            await hook.open()
        if parts_of(coll).registry.elastic is not None:
            states = (*states, joined)
            check_kinds([kinds for _, kinds, _ in of_ranks])
        furthest = await _share_furthest(data, shared, states, [steps for steps, *_ in of_ranks])
        # Nothing suspends from the write of the state to `admit`.
        reducer = Reducer(data, status, shared, op=arguments.op, sizes=arguments.sizes, hook=hook)
    except BaseException as error:
        await _abort(comms, hook, error)
        raise
    reducer.steps.alike(furthest)
    stream = HostStream(f"compute {data.name}")
    await stream.__aenter__()
    binding = Binding(coll, side, arguments, settings, joined, reducer, stream)
    parts_of(status).registry.members.admit(status, binding)
    return binding


async def _share_furthest(
    coll: Communicator, shared: Shared, states: Sequence[Stateful], steps: Sequence[int | None]
) -> int:
    """Give all ranks the state of the first rank that has made most `steps`, and return that number.

    A rank that has no sound state has None for its steps.
    """
    most = max((count for count in steps if count is not None), default=None)
    if most is None:
        raise RuntimeError("the optimizer of each rank has raised within its step: load the last checkpoint first")
    await share_state(coll, steps.index(most), named_state(shared), states)
    return most


async def _abort(comms: Sequence[Communicator], hook: CommHook, error: BaseException) -> None:
    """Close the duplicates after an opening that failed; abort them unless all ranks raise this error."""
    data = comms[0]
    if not isinstance(error, MismatchError) or parts_of(data).dispatcher.lifetime.refusal is not None:
        how = "failed" if isinstance(error, Exception) else "was cancelled"
        for comm in comms:
            if parts_of(comm).dispatcher.lifetime.refusal is None:
                comm.abort(f"rank {data.rank} {how} while a net was made: {error!r}")
    await hook.aclose()
    with suppress(CommunicatorError, DeadlockError, PeerError):  # aborted: `error` has the reason
        await data.aclose()


def _place_of(shared: Shared, coll: Communicator) -> tuple[int, int, int]:
    """Return the host, the process and the address of the first parameter that is trained."""
    return coll.node, os.getpid(), next((id(p) for p in shared.parameters() if p.requires_grad), 0)


def _check_apart(places: Sequence[tuple[int, int, int]]) -> None:
    """Raise MismatchError if two ranks have given the same module, as threads of one process can."""
    for rank, place in enumerate(places):
        if (first := places.index(place)) != rank and place[-1]:
            raise MismatchError(
                f"ranks {first} and {rank} have given the same module object: expected one for each rank. Ranks of "
                "`run_ranks` and of the pytest plugin are threads of one process, and share the value of a fixture: "
                "make the module in the test, or give `copy.deepcopy(module)`"
            )


def _check_forward(shared: Shared) -> None:
    """Raise ValueError if forward changes parameters that are trained and equal on all ranks."""
    trained = {id(p) for p in shared.parameters() if p.requires_grad}
    embeddings = [(n, m) for n, m in shared.module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    for name, each in embeddings:
        if each.max_norm is not None and id(each.weight) in trained:
            raise ValueError(
                f"the embedding {name!r} has max_norm={each.max_norm}: its forward would scale the rows of this rank's "
                "batch alone, and ranks would come to differ; expected None, and rows that you scale after each step"
            )
