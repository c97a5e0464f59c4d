"""`DataParallel`: a module whose gradients are reduced over all ranks during backward."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, ParamSpec, Self, TypeVar, Unpack, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.codecs import Codec
from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.handles.calls import located
from aiodist.nn.binding import Binding
from aiodist.nn.compression import Compression, Compressor
from aiodist.nn.compute import Compute, Forward, plain_step
from aiodist.nn.drivers import Driver, check_one_pass, shared_states
from aiodist.nn.join import join
from aiodist.nn.made import MadeTogether
from aiodist.nn.module_like import ModuleLike
from aiodist.nn.opening import open_again, open_first
from aiodist.nn.reducer import DataParallelStatistics, Reducer
from aiodist.nn.steps import Changes, StepSettings
from aiodist.nn.synchronize import synchronize_buffers
from aiodist.types import Stateful, SumOrMean, check_trains

__all__ = ["DataParallel", "DataParallelStatistics"]

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
Loss = Callable[..., Tensor] | Sequence[Callable[..., Tensor]]


class DataParallel(MadeTogether, ModuleLike):
    """A module that every rank trains on its own data, with the gradients averaged over all ranks.

    ```python
    net = await aiodist.nn.DataParallel.create(Net(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches:
        loss = await net.step(lambda: loss_fn(net(x), y), opt)
    ```
    All ranks make the same calls in the same order. Forward, backward and the optimizer run on one thread, the compute
    thread, with the current streams of the caller, so the event loop stays free. Parameters may be on the CPU and on
    several CUDA devices, the same ones on all ranks. The net ends with `aclose()`, or with its communicator.
    """

    _create = "create(module, coll)"

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    @classmethod
    @located
    async def create(
        cls,
        module: nn.Module,
        coll: Communicator,
        *state: Stateful | type[Driver],
        op: SumOrMean = "mean",
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        compress: Codec | Compression | None = None,
        **settings: Unpack[Changes],
    ) -> Self:
        """Return `module` ready to train, with rank 0's parameters and buffers on all ranks.

        Every rank calls it with the same arguments and a module of the same structure. In an elastic world a new rank
        calls `create` while the others call `rebind`, and gets their state.

        Args:
            module: A module of torch, another object on each rank. Names, shapes, dtypes and frozen parameters are the
                same on all ranks.
            coll: The ranks that train together.
            *state: Objects with a `state_dict`, such as the optimizer, which get rank 0's state. A class,
                `PipelinedOptimizer`, `LocalSGD` or `ShardedOptimizer`, stands for a driver that you make next.
            op: "mean" (or "avg") or "sum" of the gradients of all ranks.
            bucket_bytes: Bytes of gradients in one reduction: by default 4 MiB, with parameters on CUDA devices 32 MiB.
            first_bucket_bytes: Bytes of the first bucket: by default 1 MiB, with parameters on CUDA devices 4 MiB.
            compress: A codec of `aiodist.codecs`, or a `Compression`. The CPU encodes the gradients, and adds the error
                of a code to the next gradient (`compressor`). Sparse gradients are not compressed.
            **settings: The settings of `configure`. Here `per_rank` also takes submodules, parameters and buffers of
                `module`, or their names: each rank keeps its own values, and shapes may differ. Names in
                `module._ddp_params_and_buffers_to_ignore` are added.

        Raises:
            MismatchError: On all ranks, if modules or arguments differ, or two ranks give the same module object.
            ValueError: If an argument has a value that is not allowed, the module has nothing to train, or, on several
                ranks, an embedding has `max_norm` (its forward changes the weight).
            TypeError: If an argument has the wrong type, or `compress` does not support a parameter.
            RuntimeError: If a parameter belongs to another `DataParallel`.

        Example:
            ```python
            module = torch.nn.Linear(8, 1)
            net = await aiodist.nn.DataParallel.create(module, coll, clip_norm=1.0)
            ```

        All ranks may freeze and unfreeze parameters between two steps (`requires_grad`). If they differ, the next step
        raises `MismatchError` on all ranks. A trainable parameter that is added to the module later makes the next step
        raise `RuntimeError`. Sparse gradients of embeddings on the CPU (`sparse=True`) stay sparse.

        Cost: three duplicates of `coll`, two small collectives, and one broadcast of all parameters and buffers. Later,
        memory for a copy of the small gradients, and a small exchange after parameters were frozen or unfrozen.

        """
        sizes = bucket_bytes, first_bucket_bytes
        return cls._made(await open_first(module, coll, state, op, sizes, compress, settings))

    @located
    async def rebind(self, coll: Communicator, *state: Stateful) -> None:
        """Continue on another communicator, such as the world that `shrink` or `grow` returned.

        All ranks of `coll` call it with as many `state` arguments; a new rank calls `create`. All get the parameters,
        buffers, `state`, scaler, schedulers and `steps_done` of the first rank that made most steps. Gradients and the
        residuals of `compress` are dropped. If the net is on `coll` already, the call does nothing, so a loop may call
        it before each step.

        Args:
            coll: The new communicator.
            *state: The optimizer, and other objects with a `state_dict` that belong to the steps.

        Raises:
            PeerError: If another rank is lost meanwhile. The net has not changed: shrink, and call it again.
            ValueError: If the optimizer of the last step is missing, or a `PipelinedOptimizer` of the net.
            RuntimeError: While updates are pending outside of elastic worlds, for a module with divided layers, and if
                the optimizer of each rank has raised within its step.
            MismatchError: On all ranks, as `create`.

        Buckets are made again, except for a `PipelinedOptimizer`, which returns to the last step with all updates made.
        A `ShardedOptimizer` then needs its state from a checkpoint (`lost`).

        Cost: that of `create`, a broadcast of `state`, and memory for the received state until it is complete.

        """
        before, self._binding = self._binding, await open_again(self._binding, coll, state)
        for driver in state if self._binding is not before else ():
            if isinstance(driver, Driver):
                driver.resume()

    def configure(self, **changes: Unpack[Changes]) -> StepSettings:
        """Change settings of `step`, from the next step on, and return all settings.

        None switches a setting off. All ranks give the same settings, except `per_rank` and `log`.

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
          this rank alone if one of their gradients is not finite. `create` sets those of the net's module, and only
          others may change.
        - `log`: A function `log(step, values)`, called on rank 0 after each step, or each `log_every` steps. The values
          are "loss", and for a step "seconds" from one call to the next and "waited_seconds" for reductions, as means.
          The step of rank 0 raises its errors. Only rank 0 needs one.

        A setting with a value that is not allowed raises `ValueError` or `TypeError`.

        Example:
            ```python
            net.configure(clip_norm=1.0, autocast=torch.bfloat16)
            assert net.configure().clip_norm == 1.0
            ```

        """
        if changes:
            self._binding.configure(changes)
        return self._binding.settings

    @overload
    async def step(self, forward: Loss, opt: Optimizer | Driver, /, *args: Any, **kwargs: Any) -> Tensor: ...

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
        `configure`. A step ends alike on all ranks: cancelling the await does not stop it.

        Args:
            forward: A function that returns the loss, a tensor of one element, or `(loss, aux)`. aux is any object,
                such as the output for a metric; tensors in it, also in tuples, lists and dicts, are detached.
                A list of k functions accumulates gradients: k forward and backward passes and one reduction. `step`
                then returns the sum of the k losses, and a list with the aux of each function (None for a function
                without). For a mean, have each function divide its loss by k.
            opt: An optimizer of torch with parameters of this net, or a driver such as `PipelinedOptimizer`.
            *args: Arguments of `forward`.
            **kwargs: Keyword arguments of `forward`.

        Raises:
            ValueError: Before anything is computed, if `opt` has no parameter of this net.
            RuntimeError: If the step would drop gradients that `no_sync` has accumulated.
            RemoteError: If forward or backward raised on another rank (this rank's own exception is raised as it is).
                No rank has made the step, and the next step works.
            MismatchError: On all ranks, if settings, frozen parameters, numbers of steps or loaded states differ, or
                another rank closes the net (see `join`). If the optimizer raised on some ranks only, every later step
                raises until all ranks load the same state with `load_state_dict`.

        Example:
            ```python
            def forward(x, y):
                output = net(x)
                return loss_fn(output, y), output

            for x, y in batches:
                loss, output = await net.step(forward, opt, x, y)
            ```

        With parameters on CUDA devices the host waits neither for the devices nor for their reductions: later work on
        the current stream finds the updated parameters and the loss. You may drop tensors among the arguments after the
        call, from any stream. If a reduction fails later, the next step, backward or `aclose` raises the error.

        Cost: an allreduce of each bucket during backward, and one of a number for each parameter and each rank.

        """
        binding, compute, steps = self._binding, self._binding.compute, self._binding.reducer.steps
        binding.check()
        closures = forward if isinstance(forward, Sequence) else [forward]
        if not closures or not all(map(callable, closures)) or not isinstance(opt, (Optimizer, Driver)):
            given = f"{type(forward).__name__} and {type(opt).__name__}"
            raise TypeError(
                f"step({given}): expected a function that returns the loss, as `lambda: loss_fn(net(x), y)`, or a list "
                "of such functions; and an optimizer"
            )
        binding.check_reduces("step", opt)
        binding.check_kept()
        if opt is not binding.optimizer:
            binding.check_updated()
            binding.joined.check()
            check_optimizer(self, opt)
            binding.optimizer = opt
        if binding.settings.per_rank and (binding.reducer.consensus.joining or binding.elastic):
            shared_states("join" if binding.reducer.consensus.joining else "rebind", [opt], binding.settings.per_rank)
        if isinstance(opt, Optimizer):
            steps.check_known(opt)
        binding.reducer.devices.lend((args, kwargs))
        runs = [partial(each, *args, **kwargs) for each in closures]
        work = Forward(runs, binding.settings, compute, opt, several=isinstance(forward, Sequence))
        if (log := binding.step_log) is not None:
            log.begin()
        if isinstance(opt, Optimizer):
            result = await binding.finish(compute.submit(plain_step, work, opt, compute))
        else:
            await binding.finish(compute.submit(opt.train, work))
            result = work.result
        if log is not None:
            log.end(self.steps_done, result[0] if isinstance(result, tuple) else result)
        return result

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, which the compute thread calls after all earlier work.

        `fn` may be the net itself in evaluation, or `opt.step` after `backward`. With parameters on CUDA devices you
        may drop tensors among the arguments after the call. Raises `RuntimeError` if the net is closed; the await
        raises the exception of `fn`. Costs 25 to 30 us until the result is there.

        Example:
            ```python
            with torch.no_grad():
                output = await net.submit(net, torch.ones(2, 8))
            ```

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

        All ranks call it. The arguments are those of torch's `Tensor.backward`. Inside `no_sync()` nothing is sent, and
        gradients add up on this rank. A parameter that no rank used keeps its old `.grad`, mostly None; a parameter
        that some ranks used counts as zeros on the others. Cancelling the await stops neither backward nor a transfer.
        Raises and costs as `step`.

        Example:
            ```python
            for x, y in batches:
                opt.zero_grad()
                await net.backward(loss_fn(net(x), y))
                await net.submit(opt.step)
            ```

        """
        binding = self._binding
        binding.check()
        how: dict[str, Any] = {"gradient": gradient, "retain_graph": retain_graph, "inputs": inputs}
        if binding.reducer.sums.blocks:
            await binding.finish(binding.compute.submit(binding.compute.keep, loss, how))
            return
        binding.check_reduces("backward")
        await binding.finish(binding.compute.submit(binding.compute.reduce_all, lambda: loss, **how))

    def backward_iter(self, loss: Tensor) -> AsyncGenerator[tuple[nn.Parameter, Tensor], None]:
        """Run backward, and yield each parameter with its reduced gradient, which is now its `.grad`.

        Pairs arrive while backward continues, in the order of the reductions; parameters that this rank did not use
        come last. If you replace a `.grad` or set it to None as it arrives, it stays so. Leaving the loop early does
        not stop the reductions. `loss` has one element. Raises `RuntimeError` inside `no_sync`; else raises and costs
        as `step`.

        Example:
            ```python
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
            for x, y in batches:
                net.zero_grad()
                async for parameter, gradient in net.backward_iter(loss_fn(net(x), y)):
                    optimizers[parameter].step()
            ```

        """
        return self._binding.backward_iter(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank in the block; the next backward outside of it reduces the sum.

        A `step` before that backward raises `RuntimeError`, since it would drop the sum; `zero_grad()` drops it on
        purpose. Gradients that were reduced before and not zeroed count once in the sum, as with DDP. With `op="sum"`
        the first backward in the block divides them by the number of ranks. `net.step([forward, forward2], opt)` does
        the same in one call.

        Example:
            ```python
            opt.zero_grad()
            (x, y), (x2, y2), _ = batches
            with net.no_sync():
                await net.backward(loss_fn(net(x), y))
            await net.backward(loss_fn(net(x2), y2))  # reduces the sum of both
            await net.submit(opt.step)
            ```

        """
        with self._binding.reducer.sums.block():
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
        only `step` and `backward` may communicate. `optimizers` are those whose state is shared at the end; the default
        is that of the last `step`.

        Raises:
            TypeError: If an argument has no `state_dict`.
            RemoteError: If the block raised on another rank, also on ranks that have left the loop.
            MismatchError: After different numbers of steps, if ranks give different numbers of optimizers.

        If the block raises, this rank does not wait. With `op="sum"` the shares that `no_sync` made count only as far
        as their ranks still have data.

        """
        async with join(self._binding, optimizers):
            yield

    def synchronize_buffers(self, how: str = "root", root: int = 0) -> Awaitable[None]:
        """Give all ranks the buffers of `root`, such as the statistics of BatchNorm, or with `how="mean"` the mean.

        Integers and bools are those of `root` also in a mean. Raises `ValueError` for another `how` than "root" or
        "mean", and for another `root` than a rank.

        ```python
        await net.synchronize_buffers(how="mean")
        ```

        Cost: one broadcast of all buffers; for a mean, an allreduce.
        """
        self._binding.check()
        return synchronize_buffers(self.shared, self._binding.side, how=how, root=root)

    @property
    def per_rank(self) -> Sequence[Tensor]:
        """The parameters that each rank keeps for itself, of the module and others (`configure`)."""
        return self._binding.settings.per_rank

    @property
    def stop_requested(self) -> bool:
        """True if a rank was asked to stop, at the same step on all ranks.

        A signal asks a rank with `init(stop_on_signal=True)`, and so does `coll.request_stop()`. With a
        `PipelinedOptimizer` it becomes True one step later.
        """
        consensus, opt = self._binding.reducer.consensus, self._binding.optimizer
        return consensus.stopped_before if isinstance(opt, Driver) and opt.pass_lag else consensus.stopped

    @property
    def coll(self) -> Communicator:
        """A duplicate of the communicator, for collectives between two steps; it ends with the net."""
        return self._binding.side

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of the gradients, or None; its `state_dict` holds this rank's residuals, for a checkpoint."""
        hook = self._binding.reducer.hook
        return hook if isinstance(hook, Compressor) else None

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps since `create` or the last load of a state, without steps that a scaler skipped."""
        return self._binding.reducer.steps.total

    def statistics(self) -> DataParallelStatistics:
        """Return the cost of the reductions of gradients so far, on this rank; nothing is sent."""
        return self._binding.reducer.statistics

    @property
    def closed(self) -> bool:
        """True once the net was closed, by itself or with its communicator."""
        return self._binding.ended is not None

    @located
    async def aclose(self) -> None:
        """Finish all work, remove the hooks, end the compute thread, and close the net's communicators.

        All ranks call it; more calls do nothing. Parameters and `.grad` stay, and the module may be wrapped again.
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
    """Return the reducer of `net`; it changes with `rebind`."""
    return net._binding.reducer


def compute_of(net: DataParallel) -> Compute:
    """Return the compute thread of `net`; it changes with `rebind`."""
    return net._binding.compute


def check_updated(net: DataParallel) -> None:
    """Raise RuntimeError while the optimizer of the last step has pending updates."""
    net._binding.check_updated()


def expected_state(net: DataParallel, driver: Driver, load: Callable[[Any], None]) -> Any:
    """Return the state that the other ranks have for a new `driver`, or None; `load` loads it."""
    return net._binding.joined.take(driver, load)


def check_optimizer(net: DataParallel, opt: Optimizer | Driver) -> None:
    """Raise TypeError for an optimizer that runs backward itself, ValueError for one of another net."""
    if isinstance(opt, Optimizer):
        check_one_pass(opt)
        reducer = net._binding.reducer
        # Parameters that the module gained later are checked by the step.
        check_trains(opt, chain((slot.parameter for slot in reducer.slots), net.module.parameters()), "this net")
        reducer.steps.check_known(opt)
    elif opt.net is not None and opt.net is not net:
        raise ValueError(f"{type(opt).__name__} drives {opt.net!r}: expected one that was made for {net!r}")
