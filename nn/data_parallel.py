"""`DataParallel`: a module whose gradients are reduced over all ranks during backward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, ParamSpec, Self, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.codecs import Codec
from aiodist.communicator import Communicator, parts_of
from aiodist.handles import Handle
from aiodist.handles.calls import located
from aiodist.nn.binding import Binding
from aiodist.nn.buckets import Bucket, Slot
from aiodist.nn.compression import Compression, Compressor
from aiodist.nn.compute import Compute, Forward, plain_step
from aiodist.nn.devices import cuda_devices
from aiodist.nn.drivers import Driver, Recovering, check_one_pass, check_recovers, shared_states
from aiodist.nn.join import join
from aiodist.nn.joiners import Expected, JoinedState
from aiodist.nn.made import MadeTogether
from aiodist.nn.module_like import ModuleLike
from aiodist.nn.opening import Arguments, open_with_others
from aiodist.nn.per_rank import Shared, as_list
from aiodist.nn.reducer import DataParallelStatistics, Reducer
from aiodist.nn.reduction import Reduction
from aiodist.nn.steps import Changes, StepSettings, hash_of
from aiodist.nn.synchronize import synchronize_buffers
from aiodist.nn.tensor_parallel import divided_parameters
from aiodist.types import Stateful, SumOrMean, check_trains

__all__ = [
    "DataParallel",
    "DataParallelStatistics",
    "check_optimizer",
    "check_updated",
    "compute_of",
    "expected_state",
    "reducer_of",
]

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


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

    def __init__(self, arguments: Arguments, settings: StepSettings, joined: JoinedState, binding: Binding) -> None:
        self._module = arguments.shared.module
        self._shared = arguments.shared
        self._arguments = arguments
        self._settings = settings
        self._joined = joined
        """State from the other ranks for drivers and schedulers that are still to be made."""
        self._bind(binding)

    def _bind(self, binding: Binding) -> None:
        self._binding = binding
        binding.reducer.steps.keep_own(self._settings.per_rank)

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
        if not isinstance(module, nn.Module) or not isinstance(coll, Communicator):
            given = f"{type(module).__name__}, {type(coll).__name__}"
            raise TypeError(f"create({given}): expected a module of torch, and a Communicator")
        divided, per_rank = divided_parameters(module), as_list(settings.get("per_rank"))
        shared = Shared(module, per_rank, divided)
        known = StepSettings(divided=divided).changed(shared, {**settings, "per_rank": per_rank})
        arguments = Arguments.checked(shared, op, bucket_bytes, first_bucket_bytes, compress)
        for each in state:
            if isinstance(each, type) and not (hasattr(each, "retreat") and hasattr(each, "resume")):
                raise TypeError(
                    f"create(…, {each.__name__}): a class stands for a driver that is made next, such as "
                    "PipelinedOptimizer"
                )
        kinds = [each.__name__ if isinstance(each, type) else type(each).__name__ for each in state]
        owners = [Expected(each) if isinstance(each, type) else each for each in state]
        joined = JoinedState([each for each in owners if isinstance(each, Expected)], known.stateful)
        states = shared_states("create", owners, known.per_rank)
        return cls._made(arguments, known, joined, await open_with_others(arguments, coll, states, kinds, joined, 0))

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
        before = self._binding
        before.check_loop()
        if self._settings.divided:
            raise RuntimeError(
                "rebind of a module whose layers are divided among ranks, and blocks may be lost: make a new net, and "
                "load the last checkpoint"
            )
        shared_states("rebind", state, self._settings.per_rank)
        check_recovers(state, before.optimizer, before.reducer.kept_by)
        if before.ended is None:
            if coll is before.home:
                return
            if parts_of(coll).registry.elastic is None:
                before.check_updated()
            await self.aclose()
        await before.compute.stream.aclose()  # its work may still run after an abort
        for device in cuda_devices(self._module.parameters()):
            torch.cuda.synchronize(device)  # the compute thread had a stream of its own
        shared = [each.retreat() if isinstance(each, Recovering) else each for each in state]
        states = shared_states("rebind", shared, self._settings.per_rank)
        for parameter in self._module.parameters():
            parameter.grad = None
        kinds = [type(each).__name__ for each in state]
        steps = before.reducer.steps.whole
        binding = await open_with_others(self._arguments, coll, states, kinds, self._joined, steps)
        binding.optimizer = before.optimizer
        self._bind(binding)
        for each in state:
            if isinstance(each, Recovering):
                each.resume()

    # --- the module ---------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does with these arguments, computed here, on the calling thread."""
        if not self._binding.compute.is_current():
            self._binding.reducer.watch()
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
        self._binding.check_updated()
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
        self._binding.check_loads()
        self._module.load_state_dict(state, strict=strict)
        reducer = self._binding.reducer
        reducer.steps.alike(loaded=hash_of([slot.parameter for slot in reducer.slots]))

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
            self._joined.change(self._settings.stateful)
            self._binding.reducer.steps.keep_own(self._settings.per_rank)
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
        binding, per_rank = self._binding, self._settings.per_rank
        reducer, compute = binding.reducer, binding.compute
        binding.check()
        closures = forward if isinstance(forward, Sequence) else [forward]
        known = opt is binding.optimizer is not None  # isinstance(opt, Driver) takes 20 us
        if not closures or not all(map(callable, closures)) or not (known or isinstance(opt, (Optimizer, Driver))):
            given = f"{type(forward).__name__} and {type(opt).__name__}"
            raise TypeError(
                f"step({given}): expected a function that returns the loss, as `lambda: loss_fn(net(x), y)`, or a list "
                "of such functions; and an optimizer"
            )
        binding.check_reduces("step", opt)
        binding.check_kept()
        if not known:
            binding.check_updated()
            self._joined.check()
            check_optimizer(self, opt)
            binding.optimizer = opt
        if per_rank and (reducer.joining or binding.elastic):
            shared_states("join" if reducer.joining else "rebind", [opt], per_rank)
        if isinstance(opt, Optimizer):
            reducer.steps.check_known(opt)
        elif (check := getattr(opt, "_check_parameters", None)) is not None:
            check()
        reducer.devices.lend((args, kwargs))
        runs = [partial(each, *args, **kwargs) for each in closures]
        work = Forward(runs, self._settings, compute, opt, several=isinstance(forward, Sequence))
        if isinstance(opt, Optimizer):
            return await binding.finish(compute.submit(plain_step, work, opt, compute))
        await binding.finish(compute.submit(opt.train, work))
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
        binding = self._binding
        binding.check()
        binding.reducer.devices.lend((args, kwargs))
        if any(isinstance(x, Optimizer) for x in (getattr(fn, "__self__", None), *args)):
            return binding.note(binding.compute.submit(binding.reducer.steps.blamed(fn), *args, **kwargs))
        return binding.compute.submit(fn, *args, **kwargs)

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
        binding = self._binding
        binding.check()
        how: dict[str, Any] = {"gradient": gradient, "retain_graph": retain_graph, "inputs": inputs}
        if binding.reducer.local:
            await binding.finish(binding.compute.submit(binding.compute.keep, loss, how))
            return
        binding.check_reduces("backward")
        await binding.finish(binding.compute.submit(binding.compute.reduce_all, lambda: loss, **how))

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
        binding = self._binding
        binding.check()
        binding.check_reduces("backward_iter")
        arrivals: asyncio.Queue[Bucket | None] = asyncio.Queue()
        work = binding.compute.submit(binding.compute.reduce, lambda: loss, on_arrival=arrivals.put_nowait)
        late: list[Slot] = []
        # It continues if the caller leaves early, and asyncio reports its error then.
        ended = asyncio.ensure_future(_ended(work, arrivals))
        binding.passes.add(ended)
        ended.add_done_callback(binding.passes.discard)
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
        with self._binding.reducer.apart():
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
        self._binding.check()
        async with join(self._binding, optimizers, self._settings):
            yield

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
        self._binding.check()
        return synchronize_buffers(self._shared, self._binding.side, how=how, root=root)

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
        reducer = self._binding.reducer
        return reducer.stopped_before if getattr(self._binding.optimizer, "pass_lag", 0) else reducer.stopped

    @property
    def coll(self) -> Communicator:
        """A duplicate of the communicator, for collectives of all ranks between two steps; it ends with the net."""
        return self._binding.side

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of the gradients, or None; its `state_dict` holds this rank's residuals, for a checkpoint."""
        hook = self._binding.reducer.hook
        return hook if isinstance(hook, Compressor) else None

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps that the parameters have seen since the net was made, or a state was loaded.

        It continues with `rebind`. A step that a scaler skipped does not count.
        """
        return self._binding.reducer.steps.total

    def statistics(self) -> DataParallelStatistics:
        """Return the cost of the reductions of gradients so far, on this rank; nothing is sent."""
        return self._binding.reducer.statistics

    @property
    def closed(self) -> bool:
        """True once the net was closed, by itself or with its communicator."""
        return self._binding.ended is not None

    # --- the end ------------------------------------------------------------------------------------------------

    @located
    async def aclose(self) -> None:
        """Finish all work, remove the hooks, end the compute thread, and close the net's communicators.

        All ranks call it; more calls do nothing. Parameters and `.grad` stay as they are, and the module may be wrapped
        again.
        """
        self._binding.check_loop()
        await self._binding.coll.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if error[0] is None:
            await self.aclose()

    def __repr__(self) -> str:
        return repr(self._binding)


def reducer_of(net: DataParallel) -> Reducer:
    """Return what reduces the gradients of `net`; it changes with `rebind`."""
    return net._binding.reducer


def compute_of(net: DataParallel) -> Compute:
    """Return the compute thread of `net`; it changes with `rebind`."""
    return net._binding.compute


def check_updated(net: DataParallel) -> None:
    """Raise RuntimeError while the optimizer of the last step has pending updates."""
    net._binding.check_updated()


def expected_state(net: DataParallel, driver: Recovering, load: Callable[[Any], None]) -> Any:
    """Return the state that the other ranks have for a new `driver`, or None; `load` loads it."""
    return net._joined.take(driver, load)


def check_optimizer(net: DataParallel, opt: Optimizer | Driver) -> None:
    """Raise TypeError for one that runs backward itself, ValueError for one of another net."""
    if isinstance(opt, Optimizer):
        check_one_pass(opt)
        reducer = net._binding.reducer
        # Of parameters that were put into the module later the step itself tells.
        check_trains(opt, chain((slot.parameter for slot in reducer.slots), net.module.parameters()), "this net")
        reducer.steps.check_known(opt)
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
