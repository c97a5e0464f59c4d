"""`DataParallel`: a module whose gradients are reduced over all ranks during backward."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack, cast, overload, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.codecs import Codec
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.duplicate import duplicate
from aiodist.errors import CommunicatorError, DeadlockError, MismatchError, PeerError
from aiodist.handles import Handle, Operation, internals
from aiodist.handles.calls import located
from aiodist.handles.state import FutureWaiter
from aiodist.nn.buckets import Allreduce, Bucket, CommHook, Slot, row_parameters
from aiodist.nn.compression import Compression, Compressor, checked_compression
from aiodist.nn.compute import Compute, Forward, plain_step
from aiodist.nn.deals import Sizes
from aiodist.nn.devices import cuda_devices, placement
from aiodist.nn.hyperparameters import optimizers_of
from aiodist.nn.joiners import Expected, SettingsState, check_kinds
from aiodist.nn.layout import check_same_structure, named_state
from aiodist.nn.made import MadeTogether
from aiodist.nn.module_like import ModuleLike
from aiodist.nn.per_rank import Shared, SharedState, as_list
from aiodist.nn.reducer import DataParallelStatistics, Reducer
from aiodist.nn.reduction import Reduction
from aiodist.nn.steps import Changes, StepSettings, hash_of
from aiodist.nn.synchronize import share_furthest, share_longest, synchronize_buffers
from aiodist.nn.tensor_parallel import divided_parameters
from aiodist.streams import HostStream
from aiodist.types import Stateful, SumOrMean, check_trains, settings_text, sum_or_mean

__all__ = [
    "DataParallel",
    "DataParallelStatistics",
    "Driver",
    "check_one_pass",
    "check_optimizer",
    "check_updated",
    "compute_of",
    "expected_state",
    "reducer_of",
]

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")

SIZES = Sizes(4 << 20, 1 << 20)
"""Default sizes of buckets."""
SIZES_ON_CUDA = Sizes(32 << 20, 4 << 20)
"""Default sizes with parameters on CUDA devices: fewer buckets, each with some work of the host."""
_BACKGROUND_BYTES = 32 << 10


@runtime_checkable
class Driver(Stateful, Protocol):
    """An optimizer that drives the whole step by itself, such as `PipelinedOptimizer`.

    If each `train` makes one pass of all ranks, the attribute `pass_lag` may say so: 0 if that `train` raises an error
    of another rank, 1 if the next one does. Without it, `Engine` has ranks ask each other before a step.
    """

    def train(self, forward: Forward) -> object:
        """Do one step on the compute thread, with the settings of `forward`, whose result `net.step` returns."""

    async def flush(self) -> None:
        """Return when all updates are made."""

    @property
    def pending(self) -> bool:
        """True while some updates are still to be made."""


@runtime_checkable
class Recovering(Driver, Protocol):
    """A driver with which a net can continue on another communicator."""

    def retreat(self) -> Stateful:
        """Return to the last step whose updates were all made; return the state that ranks share.

        The compute thread has ended. It may be called again before `resume`.
        """

    def resume(self) -> None:
        """Continue with the state of the net."""


class DataParallel(MadeTogether, ModuleLike):
    """A module that every rank trains on its own data, with the gradients averaged over all ranks.

    ```python
    net = await aiodist.nn.DataParallel.create(Net(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches:
        loss = await net.step(lambda: loss_fn(net(x), y), opt)
    ```
    Forward, backward and the optimizer run on one thread, the compute thread, in the order of the calls, so the event
    loop stays free. Every rank makes the same calls in the same order. The net ends with `aclose()`, or with the
    communicator that it was made on. Parameters may be on the CPU and on several CUDA devices, if every rank uses the
    same ones. The compute thread works on the current streams of the caller.
    """

    _create = "create(module, coll)"
    _op: Literal["mean", "sum"]
    _sizes: Sizes
    _compression: Compression | None
    _settings: StepSettings
    _optimizer: Optimizer | Driver | None = None
    _work: Handle[Any] | None = None
    """The newest step or backward that was asked for."""
    _passes: set[asyncio.Future[None]]
    """Passes of `backward_iter` in flight."""
    _expected: tuple[Expected, ...] = ()
    _stateful: SettingsState
    _refuses: str | None = "is on no communicator"
    _reducer: Reducer
    """A `Driver` gets it by `reducer_of(net)`."""
    _compute: Compute
    """A `Driver` gets it by `compute_of(net)`."""

    @classmethod
    @located
    async def create(
        cls,
        module: nn.Module,
        coll: Communicator,
        *state: Stateful | type[Recovering],
        op: SumOrMean = "mean",
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        compress: Codec | Compression | None = None,
        **settings: Unpack[Changes],
    ) -> Self:
        """Return `module` ready to train, with rank 0's parameters and buffers on all ranks.

        Every rank calls it with the same arguments and a module of the same structure. In an elastic world a rank that
        joins calls `create` while the other ranks call `rebind`; it gets their state.

        Args:
            module: A module of torch. Names, shapes, dtypes and frozen parameters are the same on all ranks. Ranks that
                are threads of one process give a module each.
            coll: The ranks that train together.
            *state: Objects with a `state_dict`, such as the optimizer: all ranks get rank 0's state. A class,
                `PipelinedOptimizer`, `LocalSGD` or `ShardedOptimizer`, stands for the one that you make on this net
                next.
            op: "mean" (or "avg") or "sum" of the gradients of all ranks.
            bucket_bytes: Bytes of gradients that are reduced together. The default is 4 MiB, with parameters on CUDA
                devices 32 MiB.
            first_bucket_bytes: Bytes of the first bucket. The default is 1 MiB, with parameters on CUDA devices 4 MiB.
            compress: A codec of `aiodist.codecs`, or a `Compression`. Gradients are sent as codes, which the CPU makes;
                the error of a code is added to the next gradient (see `compressor`). Sparse gradients are sent
                uncompressed.
            **settings: The settings of `configure`. Here `per_rank` also takes submodules, parameters and buffers of
                `module`, or their names: each rank keeps its own values, and shapes may differ. The names in
                `module._ddp_params_and_buffers_to_ignore`, which torch's DistributedDataParallel ignores, are added.

        Raises:
            MismatchError: On all ranks, if modules or arguments differ; the message names the first difference. Also if
                two ranks give the same module object.
            ValueError: If `op` has another value, a size is below 1, the module has nothing to train, or, on several
                ranks, an embedding has `max_norm` (its forward changes the weight).
            TypeError: If an argument has the wrong type, or `compress` does not support a parameter.
            RuntimeError: If a parameter belongs to another `DataParallel`.

        Example:
            ```python
            module = torch.nn.Linear(8, 1)
            net = await aiodist.nn.DataParallel.create(module, coll, clip_norm=1.0)
            ```

        You may freeze and unfreeze parameters later (`requires_grad`), between two steps and on all ranks; if ranks
        differ, the next step raises `MismatchError` on all of them. A trainable parameter that is added to the module
        later makes the next step raise `RuntimeError`. Sparse gradients of embeddings on the CPU (`sparse=True`) stay
        sparse: their rows are gathered and summed.

        Cost: three duplicates of `coll`, two small collectives, and one broadcast of all parameters and buffers. Later,
        memory for one more copy of the small gradients, and one small exchange in a step after parameters were frozen
        or unfrozen.

        """
        op = sum_or_mean(op)
        if not isinstance(module, nn.Module) or not isinstance(coll, Communicator):
            given = f"{type(module).__name__}, {type(coll).__name__}"
            raise TypeError(f"create({given}): expected a module of torch, and a Communicator")
        divided, per_rank = divided_parameters(module), as_list(settings.get("per_rank"))
        shared = Shared(module, per_rank, divided)
        known = StepSettings(divided=divided).changed(shared, {**settings, "per_rank": per_rank})
        usual = SIZES_ON_CUDA if cuda_devices(module.parameters()) else SIZES
        sizes = Sizes(
            usual.bucket if bucket_bytes is None else bucket_bytes,
            usual.first if first_bucket_bytes is None else first_bucket_bytes,
        )
        Reducer.check_free(shared.named_parameters())
        compression = None if compress is None else checked_compression(compress, shared.named_parameters())
        net = cls.__new__(cls)
        net._module, net._shared, net._op, net._sizes = module, shared, op, sizes
        net._compression, net._settings = compression, known
        net._passes = set()
        for each in state:
            if isinstance(each, type) and not (hasattr(each, "retreat") and hasattr(each, "resume")):
                known_kinds = "only drivers, such as PipelinedOptimizer, stand for one that is made next"
                raise TypeError(f"create(…, {each.__name__}): {known_kinds}")
        stands = [Expected(each) if isinstance(each, type) else each for each in state]
        net._expected = tuple(each for each in stands if isinstance(each, Expected))
        net._stateful = SettingsState(known.stateful)
        await net._bind(coll, stands, _alike("create", stands, known.per_rank), 0)
        return net

    @located
    async def rebind(self, coll: Communicator, *state: Stateful) -> None:
        """Continue on another communicator, such as the world that `shrink` or `grow` returned.

        All ranks of `coll` call it with the same number of `state` arguments. A rank that joins calls `create` instead,
        with the arguments that the others used. The first of the ranks that made most steps gives its parameters,
        buffers, `state`, scaler and schedulers to all others; `steps_done` is then the same on all ranks. Gradients and
        the residuals of `compress` are dropped. If the net is on `coll` already, the call does nothing, so a loop may
        call it before each step.

        Args:
            coll: The new communicator.
            *state: The optimizer, and other objects with a `state_dict` that belong to the steps.

        Raises:
            PeerError: If another rank is lost meanwhile. Nothing has changed then: shrink, and call it again.
            TypeError: For a driver that cannot continue on other ranks.
            ValueError: If the optimizer of the last step is missing, or a `PipelinedOptimizer` of the net.
            RuntimeError: While updates are pending outside of elastic worlds, for a module with divided layers, and if
                the optimizer of each rank has raised within its step.
            MismatchError: On all ranks, as `create`.

        Buckets are made again, except for a `PipelinedOptimizer`, which returns to the last step whose updates were all
        made. A `ShardedOptimizer` needs its state from a checkpoint then: see its `lost`.

        Cost: that of `create`, a broadcast of `state`, and memory for the incoming state until all of it is there.

        """
        self._check_loop()
        self._check_state(state)
        if self._refuses is None:
            if coll is self._home:
                return
            if parts_of(coll).registry.elastic is None:
                check_updated(self)
            await self.aclose()
        await self._compute.stream.aclose()  # what was asked for may still run
        recovering = [each for each in state if isinstance(each, Recovering)]
        for device in cuda_devices(self._module.parameters()):
            torch.cuda.synchronize(device)  # the compute thread had a stream of its own
        shared = [each.retreat() if isinstance(each, Recovering) else each for each in state]
        shared = _alike("rebind", shared, self._settings.per_rank)
        for parameter in self._module.parameters():
            parameter.grad = None
        await self._bind(coll, state, shared, self._reducer.steps.whole)
        for each in recovering:
            each.resume()

    def _check_state(self, state: Sequence[Stateful]) -> None:
        """Raise if the net may not continue on other ranks with `state`."""
        if self._settings.divided:
            what = (
                "layers are divided among ranks, and blocks may be lost: make a new net, and load the last checkpoint"
            )
            raise RuntimeError(f"rebind of a module whose {what}")
        _alike("rebind", state, self._settings.per_rank)
        for each in (*state, self._optimizer):
            if isinstance(each, Driver) and not isinstance(each, Recovering | Optimizer):
                raise TypeError(
                    f"rebind with {type(each).__name__}, which has no `retreat` and `resume` for other ranks: "
                    "make a new net and optimizer, and load the last checkpoint"
                )
        for needed, why in ((self._optimizer, "made the last step"), (self._reducer.kept_by, "keeps the buckets")):
            if needed is not None and all(each is not needed for each in state):
                raise ValueError(f"rebind without {type(needed).__name__}, which {why}: expected it")

    async def _bind(
        self, coll: Communicator, owners: Sequence[Stateful], state: Sequence[Stateful], made: int | None
    ) -> None:
        """Make what the net has on `coll`; ranks give one another `state`, which is the `owners`'.

        This rank has `made` so many steps, None where it is in the midst of one.
        """
        shared, op, sizes = self._shared, self._op, self._sizes
        if coll.size > 1:
            _check_forward(shared)
        if parts_of(coll).registry.elastic is not None:
            state = (*state, self._stateful)
        own = await duplicate(coll)
        parts_of(own).dispatcher.large_bytes = _BACKGROUND_BYTES
        hook: CommHook = Allreduce(own, op)
        made_of_it: list[Communicator] = []
        try:
            made_of_it.append(side := await duplicate(own))
            made_of_it.append(status := await duplicate(own))
            frozen = ", ".join(name for name, p in shared.named_parameters() if not p.requires_grad)
            named = named_state(shared)
            rows = row_parameters(shared.module)
            sparse = ", ".join(name for name, p in shared.named_parameters() if p in rows)
            kinds = ", ".join((each.kind if isinstance(each, Expected) else type(each)).__name__ for each in owners)
            also = (
                placement(named),
                f"op={op!r}, compress={settings_text(self._compression)} "
                f"and buckets of {sizes.bucket} and {sizes.first} bytes",
                f"frozen: {frozen or 'nothing'}",
                f"sparse gradients: {sparse or 'none'}",
            )
            await check_same_structure(named, own, *also, f"state: {kinds or 'none'}")
            if self._compression is not None:
                hook = Compressor(self._compression, own, op, shared.named_parameters())
                await hook.open()
            told = await own.allgather_object(
                (made, None if self._expected else self._stateful.kinds, _place_of(shared, own))
            )
            _check_apart([place for *_, place in told])
            if self._stateful in state:
                check_kinds([kinds for _, kinds, _ in told])
            # From where it writes to `admit` nothing suspends.
            made = await share_furthest(own, shared, state, [steps for steps, *_ in told])
            reducer = Reducer(own, status, shared, op=op, sizes=sizes, hook=hook)
        except BaseException as error:
            why, given_up = f"{own.name} was given up", parts_of(own).dispatcher.lifetime.refusal is not None
            if not given_up and not isinstance(error, MismatchError):  # which all ranks find; else they wait for this
                how = "failed" if isinstance(error, Exception) else "was cancelled"
                why, given_up = f"rank {own.rank} {how} while a net was made: {error!r}", True
                own.abort(why)
            if given_up:  # a rank may lack one of these: nobody is to wait for it there
                for each in made_of_it:
                    each.abort(why)
            await hook.aclose()
            with suppress(CommunicatorError, DeadlockError, PeerError):  # it was aborted, and `error` says so
                await own.aclose()
            raise
        reducer.steps.alike(made)
        reducer.steps.keep_own(self._settings.per_rank)
        stream = HostStream(f"compute {own.name}")
        await stream.__aenter__()
        self._home, self._coll = coll, own
        self._side = side  # what the user calls while reductions may be under way
        self._reducer, self._compute = reducer, Compute(stream, reducer)
        self._refuses = None
        parts_of(status).registry.members.admit(
            status, _Guest(self)
        )  # the last that was made is the first to be closed

    # --- the module ---------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does with these arguments, computed here, on the calling thread."""
        if not self._compute.is_current():
            self._reducer.watch()
        return self._module(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the module, without a prefix: it loads into the plain module.

        It includes parameters that are `per_rank`, with this rank's values. As in torch it holds the parameters
        themselves, which later steps change, also a step in flight.

        Raises:
            RuntimeError: While updates are pending: `await opt.flush()` first.

        Example:
            ```python
            import copy

            state = await net.submit(lambda: copy.deepcopy(net.state_dict()))  # a copy between two steps
            ```

        To save a checkpoint in the background use `aiodist.save`.

        """
        check_updated(self)
        return self._module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load `state` into the module, on this rank; every rank must load the same state.

        If ranks load different states, the next step or backward raises `MismatchError` on all of them. After steps
        that only some ranks made, loading the same state on all ranks makes the next step work again.

        Args:
            state: A state dict of the net or of the plain module.
            strict: Raise `RuntimeError` if names are missing or unknown, as in torch.

        Raises:
            RuntimeError: While updates are pending (`await opt.flush()` first), or while a step or backward is in
                flight (await it first).

        Example:
            ```python
            state = torch.nn.Linear(8, 1).state_dict()
            await net.submit(net.load_state_dict, state)  # after all steps that were asked for
            ```

        """
        check_updated(self)
        if not self._compute.is_current() and (self._passes or not (self._work is None or self._work.done())):
            raise RuntimeError(
                "a step or a backward is in flight, on the compute thread, and uses the parameters: await it first, or "
                "load after it, `await net.submit(net.load_state_dict, state)`"
            )
        self._module.load_state_dict(state, strict=strict)
        self._reducer.steps.alike(loaded=hash_of([slot.parameter for slot in self._reducer.slots]))

    # --- training ---------------------------------------------------------------------------------------------

    def configure(self, **changes: Unpack[Changes]) -> StepSettings:
        """Change settings of `step`, from the next step on, and return all settings.

        Without arguments it only returns them. A setting of None is off. All ranks give the same settings, except
        `per_rank`.

        Args:
            **changes: The settings to change, by the names below.

        - `clip_norm`: Maximum global norm of the reduced gradients of the optimizer's parameters; larger ones are
          scaled down to it.
        - `scaler`: A `torch.amp.GradScaler`. It scales the loss, and unscales the reduced gradients before they are
          clipped. If a gradient is not finite on any rank, all ranks skip the step.
        - `scheduler`: A scheduler of torch, or several. Each steps after every step that was made.
        - `autocast`: A dtype or a `torch.autocast`. Forward runs under it, on the compute thread.
        - `per_rank`: Parameters, or modules with parameters, that each rank keeps for itself, such as experts. An
          optimizer may have them together with the net's. They are clipped by their own norm, and skip the update on
          this rank alone if one of their gradients is not finite. Only those outside of the net's module may change:
          `create` sets the others.

        Raises:
            ValueError: If a setting has a value that is not allowed.
            TypeError: If a setting is unknown, or its value has another type.

        Example:
            ```python
            net.configure(clip_norm=1.0, autocast=torch.bfloat16)
            assert net.configure().clip_norm == 1.0
            ```

        """
        if changes:
            self._settings = self._settings.changed(self._shared, changes)
            self._stateful.change(self._settings.stateful)
            self._reducer.steps.keep_own(self._settings.per_rank)
        return self._settings

    @overload
    async def step(
        self,
        forward: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
        opt: Optimizer | Driver,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor: ...

    @overload
    async def step(
        self, forward: Callable[..., tuple[Tensor, A]], opt: Optimizer | Driver, /, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, A]: ...

    @overload
    async def step(
        self, forward: Sequence[Callable[..., tuple[Tensor, A]]], opt: Optimizer | Driver, /, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, list[A]]: ...

    @located
    async def step(self, forward: Any, opt: Optimizer | Driver, /, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one step on this rank, detached; or `(loss, aux)` if `forward` returned a pair.

        The compute thread zeroes the gradients, calls `forward`, and runs backward, which reduces each bucket of
        gradients as soon as it is full; the optimizer then steps with the reduced gradients, by the settings of
        `configure`. A step ends on every rank alike: cancelling the await does not stop it.

        Args:
            forward: A function that returns the loss, a tensor of one element, or `(loss, aux)`. aux is any object,
                such as the output for a metric. Tensors in it, also within tuples, lists and dicts, come back detached.
                A list of k functions accumulates gradients: it makes k forward and backward passes and one reduction,
                after the last backward. `step` then returns the sum of the k losses, and a list with the aux of each
                function (None for a function without). For a mean, have each function divide its loss by k.
            opt: An optimizer of torch with parameters of this net, or a driver such as `PipelinedOptimizer`.
            *args: Arguments of `forward`.
            **kwargs: Keyword arguments of `forward`.

        Raises:
            ValueError: Before anything is computed, if `opt` has no parameter of this net.
            RuntimeError: If the step would drop gradients that `no_sync` has accumulated.
            RemoteError: If forward or backward raised on another rank. No rank has made the step, and the next step
                works.
            MismatchError: On all ranks, if ranks do different things: other settings, frozen parameters, numbers of
                steps or loaded states. If the optimizer raised on some ranks only, their parameters differ, and every
                later step raises until all ranks load the same state with `load_state_dict`. A step while another rank
                closes the net raises too: see `join`.

        An exception of `forward`, backward or the optimizer on this rank is raised here as it is.

        Example:
            ```python
            def forward(x, y):
                output = net(x)
                return loss_fn(output, y), output

            for x, y in batches:
                loss, output = await net.step(forward, opt, x, y)
            ```

        With parameters on CUDA devices the host waits neither for the devices nor for reductions on them: work that you
        queue on the current stream afterwards finds the updated parameters and the loss. You may drop tensors among the
        arguments after the call, also tensors from other streams. If a reduction fails later, the next step or backward
        raises the error, or `aclose`.

        Cost: an allreduce of each bucket during backward, and one of a number for each parameter and each rank.

        """
        self._check()
        closures = forward if isinstance(forward, Sequence) else [forward]
        known = opt is self._optimizer is not None  # looking whether it is a Driver takes 20 us
        if not closures or not all(map(callable, closures)) or not (known or isinstance(opt, (Optimizer, Driver))):
            given = f"{type(forward).__name__} and {type(opt).__name__}"
            raise TypeError(
                f"step({given}): expected a function that returns the loss, as `lambda: loss_fn(net(x), y)`, or a list "
                "of such functions; and an optimizer"
            )
        self._check_reduces("step")
        self._check_kept()
        self._check_owner(opt)
        if opt is not self._optimizer:
            check_updated(self)
            self._stateful.check()
            check_optimizer(self, opt)
            self._optimizer = opt
        if self._settings.per_rank and (self._reducer.joining or parts_of(self._coll).registry.elastic is not None):
            what = "join" if self._reducer.joining else "rebind"
            _alike(what, [opt], self._settings.per_rank)
        if isinstance(opt, Optimizer):
            self._reducer.steps.check_known(opt)
        elif (check := getattr(opt, "_check_parameters", None)) is not None:
            check()
        self._reducer.devices.lend((args, kwargs))
        runs = [partial(each, *args, **kwargs) for each in closures]
        work = Forward(runs, self._settings, self._compute, opt, several=isinstance(forward, Sequence))
        if isinstance(opt, Optimizer):
            return await self._timely(self._compute.submit(plain_step, work, opt, self._compute))
        await self._timely(self._compute.submit(opt.train, work))
        return work.result

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, which the compute thread calls after all earlier work.

        Args:
            fn: A function, such as the net itself in evaluation, or `opt.step` after `backward`.
            *args: Arguments of `fn`. With parameters on CUDA devices you may drop tensors among them after the call.
            **kwargs: Keyword arguments of `fn`.

        Raises:
            RuntimeError: If the net is closed. The await raises the exception of `fn`.

        Example:
            ```python
            with torch.no_grad():
                output = await net.submit(net, torch.ones(2, 8))
            ```

        Cost: 25 to 30 us until the result is there.

        """
        self._check()
        self._reducer.devices.lend((args, kwargs))
        if any(isinstance(x, Optimizer) for x in (getattr(fn, "__self__", None), *args)):
            self._work = handle = self._compute.submit(self._reducer.steps.blamed(fn), *args, **kwargs)
            return handle
        return self._compute.submit(fn, *args, **kwargs)

    @located
    async def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        *,
        retain_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Run backward on the compute thread; afterwards every `.grad` is reduced over all ranks.

        All ranks call it. Inside `no_sync()` nothing is sent, and gradients add up on this rank. A parameter that no
        rank used keeps its old `.grad`, mostly None; a parameter that some ranks used counts as zeros on the others.
        Cancelling the await stops neither backward nor a transfer.

        Args:
            loss: The tensor to differentiate.
            gradient: The gradient of `loss`, with its shape. A loss of one element needs none.
            retain_graph: Keep the graph for another backward.
            inputs: The parameters to compute gradients of. The default is all.

        Raises:
            RemoteError: If backward raised on another rank.
            MismatchError: As `step`.

        Example:
            ```python
            for x, y in batches:
                opt.zero_grad()
                await net.backward(loss_fn(net(x), y))
                await net.submit(opt.step)
            ```

        Cost: that of `step`.

        """
        self._check()
        how: dict[str, Any] = {"gradient": gradient, "retain_graph": retain_graph, "inputs": inputs}
        if self._reducer.local:
            await self._timely(self._compute.submit(self._compute.keep, loss, how))
            return
        self._check_owner()
        await self._timely(self._compute.submit(self._compute.reduce_all, lambda: loss, **how))

    async def backward_iter(self, loss: Tensor) -> AsyncGenerator[tuple[nn.Parameter, Tensor], None]:
        """Run backward, and yield each parameter with its reduced gradient, which is now its `.grad`.

        Pairs arrive while backward continues, in the order of the reductions; parameters that this rank did not use
        come last. If you replace a `.grad` or set it to None as it arrives, it stays so. Leaving the loop early does
        not stop the reductions.

        Args:
            loss: The tensor to differentiate, of one element.

        Yields:
            A parameter, and its reduced gradient of the same shape.

        Raises:
            RuntimeError: Inside `no_sync`. All else is raised as by `step`.

        Example:
            ```python
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
            for x, y in batches:
                net.zero_grad()
                async for parameter, gradient in net.backward_iter(loss_fn(net(x), y)):
                    optimizers[parameter].step()
            ```

        Cost: that of `step`.

        """
        self._check()
        self._check_reduces("backward_iter")
        self._check_owner()
        arrivals: asyncio.Queue[Bucket | None] = asyncio.Queue()
        work = self._compute.submit(self._compute.reduce, lambda: loss, on_arrival=arrivals.put_nowait)
        late: list[Slot] = []
        # Where the caller leaves early it goes on, and asyncio reports its error, which nobody awaits then.
        ended = asyncio.ensure_future(_ended(work, arrivals))
        self._passes.add(ended)
        ended.add_done_callback(self._passes.discard)
        while (bucket := await arrivals.get()) is not None:
            late += bucket.unused
            bucket.scale()
            for pair in _pairs([slot for slot in bucket.slots if slot not in bucket.unused]):
                yield pair
        await ended
        for pair in _pairs(late):
            yield pair

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank in the block; the next backward outside of it reduces the sum.

        A `step` before that backward raises `RuntimeError`, because it would drop the sum; `zero_grad()` drops it on
        purpose. Gradients that were reduced before and not zeroed count once in the sum, as with DDP. With `op="sum"`
        the first backward in the block divides them by the number of ranks.

        Example:
            ```python
            opt.zero_grad()
            (x, y), (x2, y2), _ = batches
            with net.no_sync():
                await net.backward(loss_fn(net(x), y))
            await net.backward(loss_fn(net(x2), y2))  # reduces the sum of both
            await net.submit(opt.step)
            ```

        `net.step([forward, forward2], opt)` does the same in one call.

        """
        with self._reducer.apart():
            yield

    @asynccontextmanager
    async def join(self, *optimizers: Stateful) -> AsyncIterator[None]:
        """Let ranks whose data end early wait at the end of the block for the other ranks.

        ```python
        async with net.join():
            for x, y in batches:                      # uneven numbers of them
                await net.step(lambda: loss_fn(net(x), y), opt)
        ```
        A rank that has left the loop contributes nothing to the reductions, and the mean counts only the others. After
        the block all ranks have the parameters, and the state of the optimizers, scaler and schedulers, of the first
        rank that trained longest. Buffers stay each rank's own, and every `.grad` is the last reduction. In the block
        only `step` and `backward` may communicate.

        Args:
            *optimizers: The optimizers whose state is shared at the end. The default is the optimizer of the last
                `step`.

        Raises:
            TypeError: If an argument has no `state_dict`.
            RemoteError: If the block raised on another rank, also on ranks that have left the loop.

        If the block raises, this rank does not wait. With `op="sum"` the shares that `no_sync` made count only as far
        as their ranks still have data.

        """
        self._check()
        if wrong := [type(each).__name__ for each in optimizers if not isinstance(each, Stateful)]:
            raise TypeError(f"join({', '.join(wrong)}): expected optimizers, as `net.join(opt)`")
        _alike("join", optimizers, self._settings.per_rank)
        finished = self.submit(self._compute.finish)  # a step that failed here may not have ended yet
        try:
            await finished
        except asyncio.CancelledError as error:  # the others may be in the block, and hear of it there alone
            finished.add_done_callback(partial(self._leave_join, error, 1))
            raise
        before = self._reducer.statistics.passes
        self._reducer.joining += 1
        try:
            yield
            last = self._optimizer or self._reducer.kept_by  # the latter where no step was made here
            drivers = optimizers or ((last,) if isinstance(last, Optimizer | Driver) else ())
            for driver in drivers:
                if isinstance(driver, Driver):
                    await driver.flush()
            if self._reducer.devices:
                await self.submit(self._compute.finish)
            mine = self._reducer.statistics.passes - before
            active = True
            while active:
                reduction = await self._compute.submit(self._compute.bring_nothing)
                await reduction.finished
                if self._reducer.owner is not None:
                    await self._compute.submit(self._compute.follow, reduction)
                active = reduction.participants > 0
        except BaseException as error:
            self._leave_join(error, 0)
            raise
        self._reducer.joining -= 1
        if self._reducer.owner is not None:  # this rank has made the others' steps
            await self._reducer.owner.flush()
            return
        alike = _alike("join", drivers, self._settings.per_rank)
        settings = [each for each in self._settings.stateful if all(each is not given for given in drivers)]
        steps = await share_longest(self._coll, (mine, self._reducer.steps.made), self._shared, alike, settings)
        self._reducer.steps.alike(steps)

    def _leave_join(self, error: BaseException, entered: int, _: object = None) -> None:
        self._reducer.joining += entered
        Operation.of(self._compute.submit(self._compute.see_out, error)).mark_retrieved()  # no code waits for it

    def synchronize_buffers(self, how: str = "root", root: int = 0) -> Awaitable[None]:
        """Give all ranks the buffers of `root`, such as the statistics of BatchNorm, or the mean of all ranks.

        Args:
            how: "root" or "mean".
            root: The rank whose buffers count; in a mean, its integers and bools.

        Raises:
            ValueError: For another `how` or `root`.

        Example:
            ```python
            await net.synchronize_buffers(how="mean")
            ```

        Cost: one broadcast of all buffers; for a mean, an allreduce.

        """
        self._check()
        return synchronize_buffers(self._shared, self._side, how=how, root=root)

    @property
    def per_rank(self) -> Sequence[Tensor]:
        """The parameters that each rank keeps for itself, of the module and others; see `configure`."""
        return self._settings.per_rank

    @property
    def stop_requested(self) -> bool:
        """True if a rank was asked to stop: it becomes true on all ranks at the same step.

        A signal asks a rank with `init(stop_on_signal=True)`, and so does `coll.request_stop()`. With a driver that
        finishes its passes after its steps (`pass_lag`), such as `PipelinedOptimizer`, it becomes true one step later.
        """
        return self._reducer.stopped_before if getattr(self._optimizer, "pass_lag", 0) else self._reducer.stopped

    @property
    def coll(self) -> Communicator:
        """A duplicate of the communicator, for collectives of all ranks between two steps; it ends with the net."""
        return self._side

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of the gradients, or None; its `state_dict` holds this rank's residuals, for a checkpoint."""
        return self._reducer.hook if isinstance(self._reducer.hook, Compressor) else None

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps that the parameters have seen since the net was made, or a state was loaded.

        It continues with `rebind`. A step that a scaler skipped does not count.
        """
        return self._reducer.steps.total

    def statistics(self) -> DataParallelStatistics:
        """Return the cost of the reductions of gradients so far, on this rank; nothing is sent."""
        return self._reducer.statistics

    # --- steps --------------------------------------------------------------------------------------------------

    async def _timely(self, work: Handle[T]) -> T:
        """Return the result of `work`; raise `OperationTimeout` when one of its reductions is late: it goes on."""
        self._work = work
        try:
            return await (work if self._coll.timeout is None else self._over(work))
        finally:
            if self._work is work and work.done():
                self._work = None

    async def _over(self, work: Handle[T]) -> T:
        over = FutureWaiter(self._reducer.progress.loop.create_future())
        self._reducer.waiting.append(over.future)
        internals.add_waiter(work, over)
        try:
            await over.future
            return work.result()
        finally:
            internals.remove_waiter(work, over)
            self._reducer.waiting.remove(over.future)

    @property
    def closed(self) -> bool:
        """True once the net was closed, by itself or with its communicator."""
        return self._refuses is not None

    # --- the end ------------------------------------------------------------------------------------------------

    @located
    async def aclose(self) -> None:
        """Finish all work, remove the hooks, end the compute thread, and close the net's communicators.

        All ranks call it; more calls do nothing. Parameters and `.grad` stay as they are, and the module may be wrapped
        again.
        """
        self._check_loop()
        await self._coll.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if error[0] is None:
            await self.aclose()

    def _check_reduces(self, call: str) -> None:
        if self._reducer.local:
            raise RuntimeError(f"net.{call} inside net.no_sync(): there, `await net.backward(loss)` adds up gradients")

    def _check_kept(self) -> None:
        if not self._reducer.kept:
            return
        gradients = [p.grad for p in self._shared.parameters() if p.grad is not None]
        if any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients):
            raise RuntimeError(
                "net.step forgets gradients before it computes new ones, also those that backwards in net.no_sync() "
                "have added up: give it all forwards as a list, `await net.step([forward, …], opt)`, or have the next "
                "backward reduce the sum, `await net.backward(loss)`, and then `await net.submit(opt.step)`. "
                "`net.zero_grad()` drops them"
            )
        self._reducer.kept = False

    def _check_owner(self, opt: object = None) -> None:
        owner = self._reducer.owner
        if owner is not None and owner is not opt:
            raise RuntimeError(
                f"the gradients of this net go to the shards of {owner!r}, and never to the parameters: expected "
                "`await net.step(forward, sharded)` with that, or its close() first"
            )

    def _check(self) -> None:
        if self._refuses is not None:
            raise RuntimeError(f"this DataParallel {self._refuses}")
        self._check_loop()

    def _check_loop(self) -> None:
        self._reducer.progress.check_here(repr(self))

    def __repr__(self) -> str:
        return f"<DataParallel of {type(self._module).__name__} on {self._coll!r}>"


class _Guest:
    """A net as its communicator sees it: it ends before that does."""

    def __init__(self, net: DataParallel) -> None:
        self._net = net

    def __repr__(self) -> str:
        return repr(self._net)

    async def close(self) -> None:
        net = self._net
        failed: Exception | None = None
        try:
            if isinstance(net._optimizer, Driver):
                await net._optimizer.flush()
            if net._reducer.devices:
                await net._compute.submit(net._compute.finish)
            with suppress(CommunicatorError, PeerError):  # it was given up: there is nobody to be waited for
                await net._compute.submit(net._compute.end)
        except Exception as error:  # noqa: BLE001  - raised at the end; cancelled, it is to give up instead
            failed = None if net._reducer.parted and isinstance(error, CommunicatorError) else error
        if isinstance(failed, DeadlockError):  # raised where each rank of it waited
            failed = None
        net._refuses = "is closed"
        await net._compute.stream.aclose()
        await net._reducer.hook.aclose()
        net._reducer.release()
        if failed is not None:
            raise failed

    def abort(self) -> None:
        net = self._net
        net._refuses = net._refuses or "was given up"  # an end that failed has closed it
        net._compute.stream.abort()
        net._reducer.hook.abort()
        net._reducer.release()


def _alike(call: str, state: Sequence[T], per_rank: Sequence[Tensor]) -> list[T | SharedState]:
    """Return the `state` that ranks give one another: that of an optimizer without parameters that are `per_rank`.

    Raises ValueError for a driver with such parameters, and an optimizer whose state is not of torch's form.
    """
    own = frozenset(map(id, per_rank))
    found: list[T | SharedState] = []
    for each in state:
        optimizers = optimizers_of(each) if own and isinstance(each, Optimizer | Driver) else []
        mixed = [opt for opt in optimizers if any(id(p) in own for group in opt.param_groups for p in group["params"])]
        if mixed and not (isinstance(each, Optimizer) and type(each).load_state_dict is Optimizer.load_state_dict):
            raise ValueError(
                f"{call}: {type(each).__name__} has parameters that each rank keeps for itself (per_rank), and {call} "
                "gives all ranks one rank's state of it. Give those parameters an optimizer of their own, and step it "
                "after `net.step` with `await net.submit(own.step)`"
            )
        found.append(SharedState(mixed[0], own) if mixed else each)
    return found


def reducer_of(net: DataParallel) -> Reducer:
    """Return what reduces the gradients of `net`; it changes with `rebind`."""
    return net._reducer


def compute_of(net: DataParallel) -> Compute:
    """Return the compute thread of `net`; it changes with `rebind`."""
    return net._compute


def check_updated(net: DataParallel) -> None:
    """Raise RuntimeError while the optimizer of the last step has pending updates."""
    if isinstance(net._optimizer, Driver) and net._optimizer.pending:
        raise RuntimeError("the last updates are still to be made: `await opt.flush()` first")


def expected_state(net: DataParallel, driver: Recovering, load: Callable[[Any], None]) -> Any:
    """Return the state that `create` received for such a driver, once, for `load`; or None."""
    found = next((each for each in net._expected if isinstance(driver, each.kind)), None)
    net._expected = tuple(each for each in net._expected if each is not found)
    if found is None or found.state is None:
        return None
    found.load = load
    net._stateful.expect(found)
    return found.state


def check_one_pass(opt: Optimizer) -> None:
    """Raise TypeError for an optimizer whose step needs a function that computes the loss, such as LBFGS."""
    _, *kinds = signature(type(opt).step).parameters.values()  # a scheduler wraps what the optimizer itself has
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in kinds):
        raise TypeError(
            f"{type(opt).__name__} runs forward and backward by itself, as often as it likes (its `closure`), and here "
            "a step runs them once, reduces, and updates with what is reduced: expected an optimizer whose step() "
            "needs no closure, or `await asyncio.to_thread(opt.step, closure)` with one that has the loop evaluate, as "
            "in examples/lbfgs.py"
        )


def _place_of(shared: Shared, coll: Communicator) -> tuple[int, int, int]:
    """Return the host, the process and the address of the first parameter that is trained."""
    return coll.node, os.getpid(), next((id(p) for p in shared.parameters() if p.requires_grad), 0)


def _check_apart(places: Sequence[tuple[int, int, int]]) -> None:
    """Raise MismatchError if two ranks have given the same module, as threads of one process can."""
    for rank, place in enumerate(places):
        if (first := places.index(place)) != rank and place[-1]:
            raise MismatchError(
                f"ranks {first} and {rank} have given the same module object: expected one for each rank. Ranks of "
                "`run_ranks` and of the pytest plugin are threads of one process, which share what a fixture returns: "
                "make the module in the test, or give `copy.deepcopy(module)`"
            )


def _check_forward(shared: Shared) -> None:
    """Raise ValueError where forward changes parameters that are trained and that all ranks have alike."""
    trained = {id(p) for p in shared.parameters() if p.requires_grad}
    embeddings = [(n, m) for n, m in shared.module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    for name, each in embeddings:
        if each.max_norm is not None and id(each.weight) in trained:
            raise ValueError(
                f"the embedding {name!r} has max_norm={each.max_norm}: its forward would scale the rows of this rank's "
                "batch alone, and ranks would come to differ; expected None, and rows that you scale behind each step"
            )


def check_optimizer(net: DataParallel, opt: Optimizer | Driver) -> None:
    """Raise TypeError for one that runs backward itself, ValueError for one of another net."""
    if isinstance(opt, Optimizer):
        check_one_pass(opt)
        # Of parameters that were put into the module later the step itself tells.
        check_trains(opt, chain((slot.parameter for slot in net._reducer.slots), net.module.parameters()), "this net")
        net._reducer.steps.check_known(opt)
    elif (other := getattr(opt, "net", net)) is not net:
        raise ValueError(f"{type(opt).__name__} drives {other!r}: expected one that was made for {net!r}")


def _pairs(slots: Iterable[Slot]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for slot in slots:
        if slot.result is not None:
            slot.parameter.grad, slot.given = slot.result, True
            yield cast(nn.Parameter, slot.parameter), slot.result


async def _ended(work: Handle[tuple[Tensor, Reduction]], arrivals: asyncio.Queue[Bucket | None]) -> None:
    """Wait for the end of a pass, and put it behind the last bucket."""
    try:
        _, reduction = await work
        await reduction.finished
    finally:
        arrivals.put_nowait(None)
