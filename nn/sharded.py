"""`ShardedOptimizer`: each rank has the optimizer's state of a part of all parameters, and steps that part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from aiodist.handles import internals
from aiodist.handles.calls import located
from aiodist.handles.tracing import span
from aiodist.nn.buckets import Bucket, Slot
from aiodist.nn.compute import Forward, called
from aiodist.nn.data_parallel import DataParallel, check_updated, expected_state, reducer_of
from aiodist.nn.drivers import check_one_pass
from aiodist.nn.next_forward import UpdatedAhead
from aiodist.nn.passes import Pass
from aiodist.nn.shards import BucketMemory, BucketShard, ReduceScatter, ShardBucket, ShardGroup, ShardState
from aiodist.nn.steps import StepSettings, check_only
from aiodist.streams.memory import dtype_name
from aiodist.types import Stateful

MakeOptimizer = Callable[[Any], Optimizer]
"""Takes a list of parameter groups."""

_WHOLE = ("Adafactor", "Muon", "SparseAdam")
"""Optimizers of torch that look at more of a tensor than one element at a time."""


class ShardedOptimizer(UpdatedAhead[BucketShard]):
    """An optimizer that divides its state, gradients and updates among the ranks (ZeRO-2).

    ```python
    opt = await nn.ShardedOptimizer.create(net, lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    for x, y in batches:
        loss = await net.step(lambda: loss_fn(net(x), y), opt)
    await opt.flush()
    ```
    Each of p ranks owns one of p equal blocks of every bucket of parameters. Backward reduces each bucket as soon as it
    is full, and a rank gets only the gradient of its block; gradients of whole parameters are dropped, so every `.grad`
    is None after a step. The optimizer steps the blocks of this rank. All ranks gather the parameters afterwards, and
    in the next forward each layer waits for its own. Results equal those of a plain loop, to rounding; those of the
    last step once `flush` has returned.

    Learning rates are set in `param_groups`, and schedulers take `optimizer`. `net.configure`, `net.join`, `(loss,
    aux)` and lists of functions work as with a plain optimizer: norms include all ranks, and a scaler skips a step on
    all ranks.

    Memory on each rank, in addition to the parameters: 1/p of the state and gradients, gradients of full buckets that
    are not reduced yet, and one more bucket. The first step, which learns the order, holds all gradients.

    Cost of a step: n bytes of parameters are reduced and gathered, n (p-1)/p sent and received each, as an allreduce of
    n bytes does. With clip_norm or a scaler, a sum of one number each.

    Source: Rajbhandari et al. 2020, ZeRO, doi:10.1109/SC41405.2020.00024.
    """

    pass_lag = 0

    @classmethod
    @located
    async def create(
        cls, net: DataParallel, make_optimizer: MakeOptimizer, params: Iterable[Any] | None = None
    ) -> Self:
        """Return an optimizer of `net` that divides its state among the ranks.

        All ranks call it with the same arguments, between two steps; it sends nothing. Parameters move to other memory,
        as with `coll.to_arena_`: views and addresses from before become invalid. From now on only this optimizer may
        step the net, until `close`.

        Args:
            net: The net to train.
            make_optimizer: A function that takes parameter groups and returns an optimizer of torch that works element
                by element. Each group holds this rank's blocks, as tensors of one dimension, or none. It is called
                again, with a few tensors of three elements, when state is saved in pieces.
            params: Parameters, or groups of them, as a plain optimizer takes. The default is one group of all
                parameters.

        Raises:
            TypeError: If an argument has the wrong type, for an optimizer that needs whole tensors, and for parameters
                on CUDA devices or with sparse gradients.
            ValueError: For parameters that are not the net's or are given twice, and for a net that compresses
                gradients.
            RuntimeError: While updates are pending, or if the net has another such optimizer.

        Example:
            ```python
            opt = await nn.ShardedOptimizer.create(net, torch.optim.Adam)
            ```

        """
        return cls._made(net, make_optimizer, params)

    def __init__(self, net: DataParallel, make_optimizer: MakeOptimizer, params: Iterable[Any] | None) -> None:
        super().__init__(net, make_optimizer)
        _check_net(net)
        self._make = make_optimizer
        self._given = _given_groups(net, params)
        groups = self._divide()
        self.optimizer = make_optimizer(_own_groups(groups))
        """The one that `make_optimizer` made: schedulers are made of it."""
        _check_optimizer(self.optimizer, groups)
        self._take_over(groups)
        shared = _Used(self)
        self.used = self._lost = bool(expected_state(net, self, shared.load_state_dict))
        """True if the state may differ from that of a new optimizer; a rank that joins gets it from the others."""

    def _divide(self) -> list[ShardGroup]:
        """Cut the parameters in blocks, and return the groups of this rank's blocks."""
        net = self._net
        data = reducer_of(net).data
        slot_of = {slot.parameter: slot for slot in reducer_of(net).slots}
        self._shards = [BucketShard(slots, data) for slots in reducer_of(net).keep_buckets(urgent=False, by=self)]
        self._shard_of = {slot.index: shard for shard in self._shards for slot in shard.slots}
        sections = {index: section for shard in self._shards for index, section in shard.sections.items()}
        given = [([slot_of[p] for p in parameters], options) for parameters, options in self._given]
        return [
            ShardGroup(slots, {slot.index: sections[slot.index] for slot in slots if slot.index in sections}, options)
            for slots, options in given
        ]

    def _take_over(self, groups: Sequence[ShardGroup]) -> None:
        """Direct the net's gradients to the blocks."""
        data = self._reducer.data
        self._state = ShardState(self.optimizer, self._make, groups)
        self._memory = BucketMemory(data.arena_empty)
        self._guard(self._shards)
        self._gathering = ReduceScatter(data, self._reducer.consensus.op)
        self._hook = self._reducer.hand_to(self, self._gathering, self._bucket)
        """Hook of the net, which is restored at the end."""

    def _bucket(self, slots: Sequence[Slot]) -> Bucket:
        return ShardBucket(self._shard_of[slots[0].index], slots, self._memory)

    def __repr__(self) -> str:
        return f"<ShardedOptimizer of {type(self.optimizer).__name__} on {self._net!r}>"

    # --- for the user -------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of `optimizer`, with the blocks of this rank."""
        return self.optimizer.param_groups

    @property
    def optimizers(self) -> list[Optimizer]:
        """List of the one `optimizer`."""
        return [self.optimizer]

    @property
    def pending(self) -> bool:
        """True while parameters are being gathered: `await flush()` before you look at them."""
        return not all(handle.done() for handle in list(self._left.values()))

    @property
    def lost(self) -> bool:
        """True if the net has other ranks now, and the state of the shards is lost.

        This happens after `net.rebind`, and on a rank that joins. Steps raise `RuntimeError` until `aiodist.load` or
        `load_state_dict` has loaded a state.
        """
        return self._lost

    def close(self) -> None:
        """Release the net, on all ranks between the same steps: other optimizers may step it, and gradients are whole.

        Parameters keep their values and their memory, and `optimizer` keeps its state. The optimizer ends with the net
        too.

        Raises:
            RuntimeError: While updates are pending: `await flush()` first.

        """
        if self.pending:
            raise RuntimeError("parameters are still being gathered: `await opt.flush()` first")
        self._guards.remove()
        self._reducer.release_buckets(self)
        if self._reducer.owner is self:
            self._reducer.hand_to(None, self._hook, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shard, for `load_state_dict` on the same rank of the same number.

        For another number of ranks use `aiodist.save`, or `pieces`.
        """
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Load a state of `state_dict`; raise `ValueError` if it has other shards, of other ranks or buckets."""
        self._state.load_state_dict(state)
        self.used, self._lost = True, False

    # --- on another communicator: see `net.rebind` --------------------------------------------------------------

    def retreat(self) -> Stateful:
        """Keep the parameters as they are, complete or not; other ranks have no use for this rank's state."""
        self._left.clear()
        self._unasked.clear()
        self._failed = self._reducer.steps.mishap = None  # all of it is to be loaded
        return _Used(self)

    def resume(self) -> None:
        """Divide the parameters among the new ranks, with a new state, which is to be loaded."""
        self._guards.remove()
        groups = self._divide()
        new = self._make(_own_groups(groups))
        for mine, fresh in zip(self.optimizer.param_groups, new.param_groups, strict=True):
            mine["params"] = fresh["params"]
        self.optimizer.state.clear()
        self.optimizer.state.update(new.state)
        self._take_over(groups)
        self._lost = self.used

    # --- for checkpoints, see `InPieces` ------------------------------------------------------------------------

    @property
    def checkpoint_kind(self) -> str:
        """Class of the optimizer: a plain optimizer of that class may load its pieces."""
        return type(self.optimizer).__name__

    def pieces(self) -> dict[str, Any]:
        """Return the state dict of a plain optimizer, with this rank's `Piece` in place of each tensor.

        Pieces are flat, and hold the tensors in use. For parameters with another order of dimensions (channels_last),
        `dims` has that order. Counts are pieces of one element, on the rank that owns the first element of the
        parameter. `names` are those of the parameters, by group.

        Raises:
            TypeError: For state that is neither a number nor as long as its parameter.

        """
        return self._state.pieces()

    def divided(self, state: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the part of a plain optimizer's whole `state` that `load_state_dict` takes on this rank.

        Nothing is changed.

        Raises:
            ValueError: If the state has other parameter groups, or tensors of other shapes.

        """
        return self._state.divided(state)

    # --- on the compute thread ----------------------------------------------------------------------------------

    @called("net.step")
    def train(self, forward: Forward) -> None:
        """Do one step, and leave the gathering of parameters in flight; `net.step` calls it."""
        given = {id(mine.parameter) for shard in self._shards for mine in shard.sections.values()}
        check_only(self.optimizer, given, "what make_optimizer was given")
        if self._lost:
            raise RuntimeError(
                "the net has other ranks, with which shards of the optimizer's state have gone: expected "
                "`await aiodist.load(folder, net, opt)` first, the last checkpoint, with the parameters of then"
            )
        if forward.settings.scaler is not None and any(s.dtype is torch.float16 for s in self._reducer.slots):
            raise ValueError("a scaler unscales no gradients of float16: expected parameters of float32, and autocast")

        def prepare() -> Tensor:
            for slot in self._reducer.slots:
                slot.parameter.grad = None
            return self._run(forward)

        reduction = self._reduce(prepare)
        self._compute.use(reduction)
        self._memory.end_pass()
        self._update(reduction, forward.settings)
        self._raise_failed()

    @called("net.join")
    def follow(self, reduction: Pass) -> None:
        """Step the shard of this rank with the gradients of other ranks; `net.join` calls it."""
        self._finish()
        settings = self._net.configure()
        if settings.scaler is not None:
            settings.scaler.scale(torch.zeros((), device="cpu"))  # the first time it makes what it counts with
        self._update(reduction, settings)
        self._raise_failed()

    def _update(self, reduction: Pass, settings: StepSettings) -> None:
        """Step this rank's shards, and have all ranks gather the parameters."""
        reducer, begun = self._reducer, False
        settings = self._of_shards(settings)

        def step() -> None:
            nonlocal begun
            begun = self.used = True
            self.optimizer.step()

        try:
            with span("optimizer"), reducer.steps.making():
                made = settings.update(self.optimizer.param_groups, step, self._total)
        except BaseException as error:
            if not begun:  # the others wait for a sum
                reducer.consensus.refuse(error)
            raise
        finally:
            for shard in self._shards:
                shard.forget()
            if begun:  # also if the step has raised, since the others gather
                self._gather(reduction)
        if made:
            reducer.steps.note(self)
            settings.advance()

    def _of_shards(self, settings: StepSettings) -> StepSettings:
        """Return `settings` with the sections that this rank owns of divided layers."""
        divided = settings.divided
        blocks = {
            section.parameter: divided[parameter]
            for shard in self._shards
            for section in shard.sections.values()
            if (parameter := cast(nn.Parameter, section.slot.parameter)) in divided
        }
        return replace(settings, divided={**divided, **blocks})

    def _total(self, figures: Tensor) -> Tensor:
        """Return the sum over all ranks, in place."""
        reducer = self._reducer
        self._compute.wait(reducer.issue("norm of the gradients", partial(reducer.data.allreduce, figures)))
        return figures

    def _gather(self, reduction: Pass) -> None:
        """Gather the updated blocks on all ranks, in the order of the next forward."""
        reducer = self._reducer
        for bucket in reversed(reduction.buckets):
            assert isinstance(bucket, ShardBucket)
            self._state.stepped.update(bucket.names)
            if bucket.names and not bucket.shard.alone:
                gather = partial(self._gathering.gather, bucket.shard)
                self._left[bucket.shard] = reducer.issue("parameters", gather)

    def _use(self, shards: Sequence[BucketShard]) -> None:
        """Wait until the parameters of `shards` are those of all ranks."""
        for shard in shards:
            handle = self._left.get(shard)
            if handle is not None:
                self._compute.block(handle)
                self._failed = self._failed or internals.error_of(handle)
                del self._left[shard]
                increment_version([slot.parameter for slot in shard.slots])


def _check_net(net: DataParallel) -> None:
    """Raise ValueError or TypeError if the gradients of `net` cannot be scattered."""
    if net.compressor is not None:
        raise ValueError("the net compresses its gradients, and codes are no gradients of blocks: leave out compress=")
    check_updated(net)
    for slot in reducer_of(net).slots:
        if slot.parameter.is_cuda:
            raise TypeError(f"parameter {slot.name!r} is on {slot.parameter.device}: expected all on the CPU")
        if slot.by_rows:
            raise TypeError(f"parameter {slot.name!r} has sparse gradients, rows, not blocks: expected sparse=False")


class _Used:
    """The state of a `ShardedOptimizer` that ranks share: True if states of shards can be lost with a rank.

    No update is made before all ranks have reduced a gradient. So if the furthest rank has made no step and loaded no
    state, the state of a new optimizer is right.
    """

    def __init__(self, opt: ShardedOptimizer) -> None:
        self._opt = opt

    def state_dict(self) -> bool:
        return self._opt.used

    def load_state_dict(self, state: bool) -> None:
        self._opt.used = state


def _own_groups(groups: Sequence[ShardGroup]) -> list[dict[str, Any]]:
    """Return the argument of `make_optimizer`."""
    return [{**group.options, "params": [mine.parameter for mine in group.sections.values()]} for group in groups]


def _given_groups(net: DataParallel, params: Iterable[Any] | None) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """Return the parameters and options of each group; by default one group of all parameters."""
    given = list(net.shared.parameters() if params is None else params)
    if not given or not isinstance(given[0], Mapping):
        given = [{"params": given}]
    groups = []
    known = {slot.parameter for slot in reducer_of(net).slots}
    seen: set[Tensor] = set()
    for group in given:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        members = [member[1] if isinstance(member, tuple) else member for member in members]
        for member in members:
            if member not in known:
                raise ValueError(f"params has {_described(member)}: expected parameters of the net")
            if member in seen:
                raise ValueError(f"params has {_described(member)} twice: expected each once")
            seen.add(member)
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append((members, options))
    return groups


def _described(x: object) -> str:
    return f"a {dtype_name(x.dtype)}{list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _check_optimizer(opt: Optimizer, groups: Sequence[ShardGroup]) -> None:
    if not isinstance(opt, Optimizer):
        raise TypeError(f"make_optimizer returned {type(opt).__name__}: expected an optimizer")
    check_one_pass(opt)
    if type(opt).__name__ in _WHOLE:
        raise TypeError(f"{type(opt).__name__} looks at whole tensors: expected one that works element by element")
    ours = {section.parameter for group in groups for section in group.sections.values()}
    theirs = {parameter for group in opt.param_groups for parameter in group["params"]}
    if ours != theirs or len(opt.param_groups) != len(groups):
        raise ValueError(
            f"make_optimizer made an optimizer of {len(theirs)} tensors in {len(opt.param_groups)} groups: expected "
            f"the {len(ours)} in {len(groups)} groups that it was given, as `lambda groups: torch.optim.Adam(groups)`"
        )
