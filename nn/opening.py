"""The opening of a net with other ranks: they compare their modules and arguments, and share one state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from torch import nn

from aiodist.codecs import Codec
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.duplicate import duplicate
from aiodist.errors import CommunicatorError, DeadlockError, MismatchError, PeerError
from aiodist.nn.binding import Binding
from aiodist.nn.buckets import Allreduce, CommHook, row_parameters
from aiodist.nn.compression import Compression, Compressor, checked_compression
from aiodist.nn.deals import Sizes
from aiodist.nn.devices import cuda_devices, placement
from aiodist.nn.joiners import JoinedState, check_kinds
from aiodist.nn.layout import Named, named_state, structure
from aiodist.nn.per_rank import Shared
from aiodist.nn.reducer import Reducer
from aiodist.nn.synchronize import share_state
from aiodist.streams import HostStream
from aiodist.types import Stateful, SumOrMean, settings_text, sum_or_mean
from aiodist.world.agree import agree

SIZES = Sizes(4 << 20, 1 << 20)
"""Default sizes of buckets."""
SIZES_ON_CUDA = Sizes(32 << 20, 4 << 20)
"""Default sizes with parameters on CUDA devices: fewer buckets, since the host has some work for each."""
_BACKGROUND_BYTES = 32 << 10


@dataclass(frozen=True)
class Arguments:
    """Arguments of `DataParallel.create` that hold on every communicator of a net."""

    shared: Shared
    op: Literal["mean", "sum"]
    sizes: Sizes
    compression: Compression | None

    @classmethod
    def checked(
        cls, shared: Shared, op: SumOrMean, bucket: int | None, first: int | None, compress: Codec | Compression | None
    ) -> Self:
        """Return the arguments; raise for values that are not allowed, and for parameters of another net."""
        usual = SIZES_ON_CUDA if cuda_devices(shared.module.parameters()) else SIZES
        sizes = Sizes(usual.bucket if bucket is None else bucket, usual.first if first is None else first)
        Reducer.check_free(shared.named_parameters())
        compression = None if compress is None else checked_compression(compress, shared.named_parameters())
        return cls(shared, sum_or_mean(op), sizes, compression)

    def described(self, named: Named) -> dict[str, object]:
        """Return the values that ranks compare."""
        rows = row_parameters(self.shared.module)
        frozen = ", ".join(name for name, p in self.shared.named_parameters() if not p.requires_grad)
        sparse = ", ".join(name for name, p in self.shared.named_parameters() if p in rows)
        return {
            "place": placement(named),
            "op": self.op,
            "compress": settings_text(self.compression),
            "bytes of buckets": [self.sizes.bucket, self.sizes.first],
            "frozen parameters": frozen or "none",
            "sparse gradients": sparse or "none",
            **structure(named),
        }


async def open_with_others(
    arguments: Arguments,
    coll: Communicator,
    state: Sequence[Stateful],
    kinds: Sequence[str],
    joined: JoinedState,
    made: int | None,
) -> Binding:
    """Return the net's parts on `coll`, after all ranks have the parameters, buffers and `state` of the furthest rank.

    All ranks call it. `made` is the number of steps of this rank, or None if its optimizer raised within a step. If a
    rank fails or is cancelled alone, its duplicates are aborted, so that no other rank waits for it.
    """
    shared = arguments.shared
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
        same = {"states": ", ".join(kinds) or "none", **arguments.described(named_state(shared))}
        told = await agree(data, f"net {data.name!r}", fact, same=same)
        _check_apart([place for *_, place in told])
        if arguments.compression is not None:
            hook = Compressor(arguments.compression, data, arguments.op, shared.named_parameters())
            await hook.open()
        if parts_of(coll).registry.elastic is not None:
            state = (*state, joined)
            check_kinds([kinds for _, kinds, _ in told])
        furthest = await _share_furthest(data, shared, state, [steps for steps, *_ in told])
        # Nothing suspends from the write of the state to `admit`.
        reducer = Reducer(data, status, shared, op=arguments.op, sizes=arguments.sizes, hook=hook)
    except BaseException as error:
        await _abort(comms, hook, error)
        raise
    reducer.steps.alike(furthest)
    stream = HostStream(f"compute {data.name}")
    await stream.__aenter__()
    binding = Binding(coll, side, shared, reducer, stream)
    parts_of(status).registry.members.admit(status, binding)
    return binding


async def _share_furthest(
    coll: Communicator, shared: Shared, state: Sequence[Stateful], steps: Sequence[int | None]
) -> int:
    """Give all ranks the state of the first rank that has made most `steps`, and return that number.

    A rank that has no sound state has None for its steps.
    """
    most = max((count for count in steps if count is not None), default=None)
    if most is None:
        raise RuntimeError("the optimizer of each rank has raised within its step: load the last checkpoint first")
    await share_state(coll, steps.index(most), named_state(shared), state)
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
