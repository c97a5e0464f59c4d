"""`DataParallel`: a module whose gradients are reduced over all ranks while backward goes on."""

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
from aiodist.communicator import Communicator
from aiodist.communicator.duplicate import duplicate
from aiodist.errors import CommunicatorError, DeadlockError, MismatchError, PeerError
from aiodist.handles import Handle
from aiodist.handles.calls import located
from aiodist.handles.handle import FutureWaiter
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
from aiodist.types import Stateful, check_trains, settings_text

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
"""Of buckets, where nobody says how large."""
SIZES_ON_CUDA = Sizes(32 << 20, 4 << 20)
"""The same with parameters on CUDA devices: what the host does for a bucket, it does while the devices compute."""
_BACKGROUND_BYTES = 32 << 10


@runtime_checkable
class Driver(Stateful, Protocol):
    """An optimizer that drives the whole step by itself, such as `PipelinedOptimizer`.

    One that makes one pass of all ranks in each `train` may say so with an attribute `pass_lag`: 0 where that `train`
    raises what failed on another rank, 1 where the next one does. Else `Engine` has ranks ask each other before a step.
    """

    def train(self, forward: Forward) -> object:
        """Do one step on the compute thread, with the settings of `forward`, whose result `net.step` returns."""

    async def flush(self) -> None:
        """Return when all updates are made."""

    @property
    def pending(self) -> bool:
        """Some are not."""


@runtime_checkable
class Recovering(Driver, Protocol):
    """A driver with which a net may go on on another communicator."""

    def retreat(self) -> Stateful:
        """Go back to the last step whose updates were all made, and return what ranks give one another of the state.

        The compute thread has ended. It may be called again before `resume`.
        """

    def resume(self) -> None:
        """Go on with what the net has now."""


class DataParallel(MadeTogether, ModuleLike):
    """A module that every rank trains on data of its own, with the gradients averaged over all of them.

    ```python
    net = await aiodist.nn.DataParallel.create(Net(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches:
        loss = await net.step(lambda: loss_fn(net(x), y), opt)
    ```
    Forward, backward and the optimizer run on one thread, the compute thread, in the order of the calls; the loop is
    free meanwhile. Every rank must make the same calls in the same order. It ends with `aclose()`, at the latest
    with the communicator that it was made on. Parameters may lie on CUDA devices, on several and on the CPU too, the
    same ones on every rank. The compute thread works on the caller's current streams, in the order of the calls.
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
        op: Literal["mean", "sum"] = "mean",
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        compress: Codec | Compression | None = None,
        **settings: Unpack[Changes],
    ) -> Self:
        """Return `module` ready to train: rank 0's parameters and buffers everywhere, gradients averaged.

        Every rank calls it with the same arguments and a module of the same names, shapes and dtypes, of which the same
        are frozen, else all raise `MismatchError` naming the first that differs; ranks that are threads of one process
        give a module each, else all raise it too. `op` is "mean" or "sum" of the ranks'
        gradients. These travel in buckets of `bucket_bytes`, the first of `first_bucket_bytes`, in the order in which
        the first backward had them; None are 4 and 1 MiB, with parameters on CUDA devices 32 and 4.
        Sparse gradients of embeddings (`sparse=True`, on the CPU) stay sparse: their rows are gathered and summed.
        Parameters may be frozen and thawed later (`requires_grad`), between two steps and on all ranks alike; else the
        next step raises `MismatchError` on all, with their names, and no rank makes it. It costs one small exchange
        where something has changed. What is frozen takes no part, unless it has a gradient of before. Parameters that
        come to the module later are a `RuntimeError` of the next step, unless they are frozen: nobody reduces them.
        `settings` are the arguments of `configure`. `per_rank` may also be, or have, submodules, parameters and
        buffers of `module`, or their names: each rank keeps those for itself, and they may differ in shape. The names
        that torch's DistributedDataParallel ignores, in `module._ddp_params_and_buffers_to_ignore`, count too.
        With `compress`, a codec of `aiodist.codecs` or a `Compression`, gradients travel as codes, made on the host;
        what these leave out is sent later (`compressor`). Sparse gradients go as they are.
        All ranks get rank 0's `state` too, such as the optimizer's. In an elastic world a rank that joins calls this
        where the others call `rebind`, with as much `state`, and gets what they have. `PipelinedOptimizer`, `LocalSGD`
        or `ShardedOptimizer`, the class, stands for one that you make on this net next; `configure` may come behind it.

        Raises `ValueError` for another `op`, sizes below 1, a module with nothing to train, or on several ranks an
        embedding whose forward changes its weight (`max_norm`), which would come to differ, `TypeError` for
        parameters that `compress` does not take, `RuntimeError` when a parameter belongs to a `DataParallel` already.
        Costs three duplicates of `coll`, two small collectives, and one broadcast of all parameters and buffers; later
        memory for one more copy of the small gradients.
        """
        if op not in ("mean", "sum"):
            raise ValueError(f"op={op!r}: expected 'mean' or 'sum'")
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
        """Go on on another communicator, such as the world that `shrink` or `grow` has returned.

        All ranks of `coll` call it with as much `state`: the optimizer, and what else goes with the steps. One that
        joins calls `create` instead, with the same arguments as the others once. Where the net is on `coll` already
        nothing happens, so a loop may call it before each step. The first of the ranks that have made
        most steps gives all others its parameters, buffers and `state`, those of the scaler and the schedulers of
        `configure` too; `steps_done` is then the same everywhere. Gradients are forgotten, and so is what `compress`
        had left for later. Buckets are dealt anew, but for those of a `PipelinedOptimizer`, which goes back to the last
        step whose updates were all made. Where it raises `PeerError` nothing else has changed: shrink, and call it
        again.

        A `ShardedOptimizer` has to be given a state then: see its `lost`.

        Raises at the call `TypeError` for a driver that cannot do that, `ValueError` where the optimizer of the
        last step, or one for which buckets are kept, is missing, `RuntimeError` while updates are pending outside of
        elastic worlds, `RuntimeError` for a module with divided layers; `MismatchError` on all
        ranks as `create`, and `RuntimeError` where each rank's optimizer has raised in the midst of its step.
        Cost: that of `create`, a broadcast of `state`, and memory for what comes until all of it is there.
        """
        self._check_loop()
        self._check_state(state)
        if self._refuses is None:
            if coll is self._home:
                return
            if coll.parts.registry.elastic is None:
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
        """Raise unless the net may go on elsewhere with `state`."""
        if self._settings.divided:
            what = "layers are divided among ranks, and blocks may be lost: make it anew, and load the last checkpoint"
            raise RuntimeError(f"rebind of a module whose {what}")
        _alike("rebind", state, self._settings.per_rank)
        for each in (*state, self._optimizer):
            if isinstance(each, Driver) and not isinstance(each, Recovering | Optimizer):
                raise TypeError(
                    f"rebind with {type(each).__name__}, which does not know how to go on (`retreat`, `resume`): make "
                    "net and optimizer anew, and load the last checkpoint"
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
        if coll.parts.registry.elastic is not None:
            state = (*state, self._stateful)
        own = await duplicate(coll)
        own.leave_to_thread(_BACKGROUND_BYTES)
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
            why, given_up = f"{own.name} was given up", own.parts.dispatcher.refusal is not None
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
        status.admit(_Guest(self))  # the last that was made is the first to be closed

    # --- the module ---------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does with these arguments, computed here, on the calling thread."""
        if not self._compute.is_current():
            self._reducer.watch()
        return self._module(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the module's own: no prefix, so that it loads into the plain module.

        It has parameters that are `per_rank` too, with this rank's values. As torch's it holds the parameters
        themselves, which a step changes, also one in flight: a copy of their values between two steps is
        `await net.submit(lambda: copy.deepcopy(net.state_dict()))`. Raises `RuntimeError`
        while updates are pending: `await opt.flush()` first.
        """
        check_updated(self)
        return self._module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load `state` into the module, on this rank; every rank must load the same.

        If ranks do not, the next step or backward raises `MismatchError` on all. After steps that some ranks have not
        made this is how the next step works again. Raises `RuntimeError` while updates are pending, which would be made
        to what is loaded: `await opt.flush()` first; and while a step or a backward is under way, which reads and
        writes the same: `await` it, or `await net.submit(net.load_state_dict, …)`.
        """
        check_updated(self)
        if not self._compute.is_current() and (self._passes or not (self._work is None or self._work.done())):
            raise RuntimeError(
                "a step or a backward is under way, on the compute thread, and uses the parameters: await it first, or "
                "load behind it, `await net.submit(net.load_state_dict, state)`"
            )
        self._module.load_state_dict(state, strict=strict)
        self._reducer.steps.alike(loaded=hash_of([slot.parameter for slot in self._reducer.slots]))

    # --- training ---------------------------------------------------------------------------------------------

    def configure(self, **changes: Unpack[Changes]) -> StepSettings:
        """Change how `step` works, from the next one that is asked for; return all settings, None for what is off.

        `clip_norm` is what the global norm of the reduced gradients of the optimizer's parameters is clipped to.
        `scaler`, a `torch.amp.GradScaler`, scales the loss, and unscales the reduced gradients before they are clipped;
        if one of these is not finite, all ranks leave out the step, on whichever of them it came up. `scheduler`, one
        or several of torch's, steps after each step that was made. `autocast` is a dtype or a `torch.autocast`, under
        which forward runs, on the compute thread. `per_rank` are parameters, or modules with such, that each rank keeps
        for itself, such as experts or a head of its own: an optimizer may have them with the net's. They are clipped by
        their own norm, and stay as they are if one of their gradients is not finite, on this rank alone. Those outside
        of the net's module may change; those of it are fixed by `create`. All else every rank must give alike. Raises
        ValueError and TypeError for what these do not take.
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
        """Return the loss of one step, this rank's own, detached.

        `forward(*args, **kwargs)` returns it, a tensor of one element. The compute thread forgets the gradients, calls
        `forward`, runs backward while each bucket is reduced as it becomes full, and calls `opt.step()` with the
        reduced gradients, as `configure` says. A step that was asked for ends on every rank alike: cancelling the await
        does not stop it.

        A list of k such functions makes k forward and backward passes, whose gradients add up on this rank, and one
        reduction, behind the last backward. It is as one function that returns the sum of the k losses, which `step`
        returns then, in the memory of one pass; for a mean have each function divide its loss by k.

        With parameters on CUDA devices the host waits neither for them nor for reductions that run there: what is
        queued on the caller's current stream afterwards finds the updated parameters and the loss. Tensors among the
        arguments may be dropped at once, also those made on other streams. What a reduction fails with later is
        raised by the next step or backward, at the latest by `aclose`.

        Raises ValueError, before it computes, for an optimizer that has no parameter of this net, RuntimeError if it
        would forget gradients that `no_sync` has kept. Raises what
        `forward`, backward or the optimizer raised here; `RemoteError` when another rank's forward or
        backward raised, and then no rank has made the step; what the communicator raises. The next step works,
        unless the communicator does not. Where the optimizer raised on some ranks only, their parameters differ from
        then on, as where some leave out an `opt.step()` of their own: every later step or backward raises
        `MismatchError` on all ranks, until all have loaded the same state, `net.load_state_dict`.
        So does a step of one rank when another closes the net: see `join`. Cost: an allreduce
        of each bucket while backward goes on, and one of a number for each parameter and each rank.
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
        if self._settings.per_rank and (self._reducer.joining or self._coll.parts.registry.elastic is not None):
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
        """Return a handle of `fn(*args, **kwargs)`, which runs on the compute thread behind what was asked earlier.

        With parameters on CUDA devices tensors among the arguments may be dropped at once, as in `step`. Raises
        RuntimeError once the net is closed, on await what `fn` raises. Cost: 25 to 30 us until the result is there.
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
        """Run backward on the compute thread; when it returns, every `.grad` is the reduction over all ranks.

        Arguments as those of `torch.Tensor.backward`: `gradient` has the shape of `loss`, None where that has one
        element. Inside `no_sync()` nothing is sent and gradients add up here. A parameter that no rank used keeps the
        `.grad` that it had, None mostly; one that some used counts as zeros on the others. Cancelling the await stops
        neither backward nor a transfer. Raises and costs as `step`.
        """
        self._check()
        how: dict[str, Any] = {"gradient": gradient, "retain_graph": retain_graph, "inputs": inputs}
        if self._reducer.local:
            await self._timely(self._compute.submit(self._compute.keep, loss, how))
            return
        self._check_owner()
        await self._timely(self._compute.submit(self._compute.reduce_all, lambda: loss, **how))

    async def backward_iter(self, loss: Tensor) -> AsyncGenerator[tuple[nn.Parameter, Tensor], None]:
        """Yield each parameter with its reduced gradient, now its `.grad`, as they arrive, while backward goes on.

        `loss` has one element, a gradient the shape of its parameter. Parameters that this rank did not use come last.
        A `.grad` that you replace or forget as it arrives stays so. Leaving early does not stop the reductions. Raises
        and costs as `step`.
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
        """Have each backward in the block add up gradients on this rank; the next one outside reduces the sum.

        `step` raises RuntimeError until that backward, or until `zero_grad()` has dropped the sum.
        What was reduced before, and not forgotten, counts once in that, as with DDP: a mean stays what it is. With
        `op="sum"` the first backward in the block makes of it this rank's share, 1/size of it.
        """
        with self._reducer.apart():
            yield

    @asynccontextmanager
    async def join(self, *optimizers: Stateful) -> AsyncIterator[None]:
        """Let ranks whose data end early wait at the end of the block for those that go on.

        ```python
        async with net.join():
            for x, y in batches:                      # uneven numbers of them
                await net.step(lambda: loss_fn(net(x), y), opt)
        ```
        A rank that has left the loop brings nothing to the others' reductions, and does not count in the mean. In
        the end all ranks have the parameters, and the state of `optimizers` (unless given, the one of the last
        `step`) and of the scaler and the schedulers of `configure`, of a rank that went on longest; buffers stay each
        rank's own. Every `.grad` is then the last reduction. With `op="sum"` what `no_sync` made shares of counts as
        far as the ranks that hold them go on. In the block only `step` and `backward` may communicate. When the block
        raises, this rank does not wait; the others get a `RemoteError`, those that have come to the end too.
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
        self._compute.submit(self._compute.see_out, error).outcome_error()  # nobody waits for it

    def synchronize_buffers(self, how: str = "root", root: int = 0) -> Awaitable[None]:
        """Give all ranks the buffers (BatchNorm's statistics) of `root`, or with `how="mean"` their mean.

        Collective, and to be awaited. Raises ValueError for another `how` or `root`. Cost: one
        broadcast of all buffers, for a mean an allreduce.
        """
        self._check()
        return synchronize_buffers(self._shared, self._side, how=how, root=root)

    @property
    def per_rank(self) -> Sequence[Tensor]:
        """The parameters that each rank keeps for itself, of the module and of others; see `configure`."""
        return self._settings.per_rank

    @property
    def stop_requested(self) -> bool:
        """Whether some rank was asked to stop, which ranks tell each other in each pass: true on all at the same step.

        A signal does that with `init(stop_on_signal=True)`, or `coll.request_stop()`. With a driver whose passes go on
        behind its steps (`pass_lag`), such as `PipelinedOptimizer`, it is true one pass later.
        """
        return self._reducer.stopped_before if getattr(self._optimizer, "pass_lag", 0) else self._reducer.stopped

    @property
    def coll(self) -> Communicator:
        """A duplicate of the communicator, for what all ranks do between two steps; it ends with the net."""
        return self._side

    @property
    def compressor(self) -> Compressor | None:
        """What compresses the gradients, None where nothing does; its `state_dict` is this rank's, for a checkpoint."""
        return self._reducer.hook if isinstance(self._reducer.hook, Compressor) else None

    @property
    def steps_done(self) -> int:
        """How many steps of optimizers the parameters have seen since the net was made, or a state was loaded.

        It goes on with `rebind`. A step that a scaler left out does not count.
        """
        return self._reducer.steps.total

    def statistics(self) -> DataParallelStatistics:
        """Return what the reductions of gradients have cost so far on this rank; local, at once."""
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
        work.add_waiter(over)
        try:
            await over.future
            return work.result()
        finally:
            work.remove_waiter(over)
            self._reducer.waiting.remove(over.future)

    @property
    def closed(self) -> bool:
        """True once the net was closed, by itself or with its communicator."""
        return self._refuses is not None

    # --- the end ------------------------------------------------------------------------------------------------

    @located
    async def aclose(self) -> None:
        """Take the hooks off, end the compute thread, once what was asked is done, and close its communicators.

        Collective; idempotent. `.grad` and parameters stay as they are, and the module may be wrapped anew.
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
    """Return the state that `create` was given for such a driver, once, to be given to `load`; None for none."""
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
