"""`Engine`: the training loop, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, cast, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints.pieces import Redivided
from aiodist.communicator import Communicator
from aiodist.engine.evaluation import evaluate
from aiodist.engine.hooks import Hook, Hooks
from aiodist.engine.meeting import Assembly
from aiodist.engine.meters import Metric, checked_metrics
from aiodist.engine.plan import Loader, LoopPlan, queue_of
from aiodist.engine.position import Position
from aiodist.engine.profiling import checked_steps
from aiodist.engine.samples import Split, WithCriterion, pair, whole
from aiodist.engine.saving import Saving
from aiodist.engine.state import Event, State
from aiodist.engine.steppers import PassStepper, Stepper, client_stepper
from aiodist.engine.training import Training
from aiodist.nn import DataParallel
from aiodist.nn.data_parallel import Driver
from aiodist.ps.training.base import TrainingClient

H = TypeVar("H", bound=Hook)


class EngineOptions(TypedDict, total=False):
    """What an engine does beside training."""

    uneven: bool | None
    progress: bool
    debug: bool
    dynamic: bool
    profile: tuple[int, int] | None
    traces: str | PathLike[str]
    checkpoint: str | PathLike[str]
    every: int | None
    keep: int | None


class Engine:
    """Trains and tests; at each event it calls hooks, which are plain functions or coroutine functions of a `State`.

    ```python
    net = await DataParallel.create(module, coll)
    engine = aiodist.Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), F.cross_entropy)

    @engine.on("epoch")
    def watch(state):
        state.stop = state.metrics["loss"] < 0.01

    await engine.train(loader, epochs=15)
    print(await engine.test(held_out))
    ```
    It is the loop that `net.step` over `data.prefetch` would be, modelled on TorchMPI's `AllReduceSGDEngine`, which is
    one of torchnet's (Collobert, van der Maaten and Joulin (2016), "Torchnet: An Open-Source Platform for (Deep)
    Learning Research"). All ranks of the net make the same calls. A step takes some 60 us more than in the bare loop.

    `net` is a `DataParallel` with an `optimizer` of torch or a driver such as `nn.PipelinedOptimizer`: synchronous SGD.
    With a client of a parameter server (`ps.Downpour`, `ps.EASGD`, `ps.AsySGInCon`) in the place of the optimizer it is
    asynchronous SGD; `net` is then the module, or the `DataParallel` of a group, whose client has `run=net.run`. Enter
    the client, `async with client:`, around `train`.

    `criterion(output, target)` returns the loss, one element; None where the network itself does. Where it has
    parameters too, the net is one of `WithCriterion(network, criterion)`. A sample is a pair of input and target, or
    `split(sample)` returns that pair. The network is called with the input: a tuple or a list is its arguments, a dict
    its keywords.

    `metrics` have names: functions of output and target of a batch, which return the mean over its samples, and
    metrics of torchmetrics. Means weigh each batch by its samples (`State.weight`). Ranks exchange what they have
    measured once an epoch, as objects. `coll` is needed for this only where `net` is a module; without it figures are
    this rank's own.

    Options: `uneven` says whether ranks may have different numbers of batches, as in `net.join()`; None: where their
    loaders do not know equal lengths. `progress` shows a bar on rank 0's terminal, elsewhere a line for each epoch.
    `debug` raises FloatingPointError for a loss, a gradient or a parameter that is not finite, with its name, rank,
    epoch and step, and MismatchError after a step after which the parameters of ranks are not the same, bit by bit; it
    costs some passes over all parameters a step. With `dynamic=False` a step raises RuntimeError unless its graph, of
    operations and parameters, is that of the first one; with True each step may have another, as a `DataParallel`
    allows. `profile=(3, 8)` writes a trace of steps 3 to 8 of each rank to the folder `traces`, by torch's profiler.
    `checkpoint` is a folder that all ranks see: `aiodist.save` writes net, optimizer and engine there every `every`
    steps, None behind each epoch, beside the next steps; the last `keep` are kept, None all. `every` needs as many
    batches on every rank: `train` raises ValueError where they may differ.

    Raises TypeError or ValueError for arguments that are none of this.
    """

    def __init__(
        self,
        net: DataParallel | nn.Module,
        optimizer: Optimizer | Driver | TrainingClient,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        *,
        coll: Communicator | None = None,
        metrics: Mapping[str, Metric] | None = None,
        split: Split | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._hooks = Hooks()
        self._net = net
        self._optimizer = optimizer
        self._stepper = self._made_stepper()
        self._plan = _plan(net, criterion, checked_metrics(metrics), split, options, self._made_saving(options))
        if self._plan.uneven and not self._stepper.joins:
            raise ValueError(
                f"uneven=True with {type(optimizer).__name__}: expected one of torch.optim's, or pipelined"
            )
        self._assembly = Assembly(self._stepper.base if coll is None else coll)
        self._position = Position()
        self._training: Training | None = None
        self._queue: Redivided | None = None
        """The loader of the last training, if it is a queue of shards."""
        self._state = self._new_state(training=True)

    def _made_stepper(self) -> Stepper:
        net, optimizer = self._net, self._optimizer
        if isinstance(optimizer, TrainingClient) and isinstance(net, DataParallel | nn.Module):
            return client_stepper(net, optimizer, self._reduced)
        if isinstance(net, DataParallel) and isinstance(optimizer, Optimizer | Driver):
            return PassStepper(net, optimizer, self._reduced)
        raise TypeError(
            f"Engine({type(net).__name__}, {type(optimizer).__name__}): expected a DataParallel and an optimizer, or "
            "a module, or DataParallel, and a client of a parameter server"
        )

    def _made_saving(self, options: EngineOptions) -> Saving | None:
        path, every, keep = (options.get(name) for name in ("checkpoint", "every", "keep"))
        if path is None:
            if every is not None or keep is not None:
                raise ValueError("every= or keep= without checkpoint=, which says where")
            return None
        if self._stepper.client is not None:
            raise ValueError("checkpoint= with a client: expected checkpoints of the parameter server")
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}: expected a number of steps, or None: behind each epoch")
        return Saving(Path(cast("str", path)), every, cast("int | None", keep), [self._net, self._optimizer], [self])

    def _new_state(self, *, training: bool) -> State:
        return State(
            net=self._net,
            network=_network(self._net),
            optimizer=self._optimizer,
            rank=self._assembly.rank,
            size=self._assembly.size,
            training=training,
        )

    def _reduced(self) -> None:
        """The gradients of a step are there; on the thread that computes."""
        if self._training is not None:
            self._training.reduced()

    # --- hooks ----------------------------------------------------------------------------------------------------

    @overload
    def on(self, event: Event) -> Callable[[H], H]: ...

    @overload
    def on(self, event: Event, hook: H) -> H: ...

    def on(self, event: Event, hook: Any = None) -> Any:
        """Have `hook(state)` called at `event`, behind those of before; return it. Without it return a decorator.

        Raises ValueError for an event that there is not, TypeError for what cannot be called.
        """
        if hook is None:
            return lambda given: self.on(event, given)
        self._hooks.add(event, hook)
        return hook

    @property
    def state(self) -> State:
        """The state of the last training, or of the one that is under way."""
        return self._state

    # --- training and testing -------------------------------------------------------------------------------------

    async def train(self, loader: Loader, *, epochs: int) -> dict[str, float]:
        """Train until there have been `epochs` epochs, those of earlier calls and of a loaded state included.

        Collective. `loader` is an iterable, a `DataLoader` too, or an async one, of which each epoch makes a pass by
        `data.prefetch`; or a `Prefetch`. It, its sampler or its dataset is told the epoch, from 0 on, where it has
        `set_epoch`. Returns the figures of the last epoch that is over, alike on all ranks.

        A rank that sets `state.stop`, or is asked to stop (`Communicator.stopping`), stops all ranks behind the same
        step: this one, if it was set before backward ended, else the next; with a driver one later. In asynchronous
        SGD, where no rank waits for another, it stops this rank at once and the others at the end of their epoch. A
        later call goes on from there.

        Raises what a hook, the loader, forward, backward or the optimizer raised on this rank; RemoteError, with the
        traceback, on the others, in the step that they are about to make or at the end of the epoch. When it is
        cancelled the others raise RemoteError or CommunicatorAborted. Raises ValueError where ranks have different
        numbers of batches and the optimizer has no way to wait. Cost: two allgathers of small objects an epoch.
        """
        if not isinstance(epochs, int) or epochs < 0:
            raise ValueError(f"epochs={epochs!r}: expected a number of epochs")
        if self._training is not None:
            raise RuntimeError("engine.train inside itself: expected one at a time")
        state = self._state
        state.stop = False
        self._queue = queue_of(loader)
        self._training = Training(self._plan, self._stepper, self._assembly, self._position, self._hooks, state)
        try:
            await self._training.run(loader, epochs)
        finally:
            self._training = None
        return dict(state.metrics)

    async def test(self, loader: Loader) -> dict[str, float]:
        """Return mean loss and metrics over the data of all ranks, without gradients and with dropout and such off.

        Collective; in a hook of "epoch" too. Each rank may have any number of batches, none too. The hooks of "start",
        "sample", "forward", "criterion" and "end" are called with a state of its own, whose `training` is False.
        Parameters are those behind all updates; with a client they are its own. Raises as `train`, on the other ranks
        when they have come to the end. Cost: one allgather of small objects.
        """
        state = self._new_state(training=False)
        return await evaluate(self._plan, self._stepper, self._assembly, self._hooks, state, loader)

    # --- going on later ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how far training has come on this rank, between two steps or in a hook of "update" or "epoch".

        It has numbers of epochs, steps and batches, the states of torch's generators, now and when the epoch began,
        what was measured in the epoch so far, and the place of a `data.ShardQueue` that is the loader. Net and
        optimizer have states of their own. Each rank saves its own.
        """
        figures = None if self._training is None else self._training.meter.figures()
        return self._position.state_dict(figures, self._queue)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have `train` go on from there: it reads on behind the batches of the epoch that were trained on.

        Training is the same as without an interruption, to the bit, if the loader gives the same batches in an epoch
        again: by `set_epoch`, or by torch's generator when its iterator is made, as `shuffle=True` does. A
        `data.ShardQueue` goes on with the records that no rank has trained on. Raises ValueError for what is no such
        state, RuntimeError while training is under way.
        """
        if self._training is not None:
            raise RuntimeError("engine.load_state_dict in a training: expected it before")
        self._position = Position.of(state)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have `train` go on from the states of another number of ranks: with the first epoch that they did not end.

        It begins anew, or with a queue of shards as loader with the records that are left of it.
        """
        self._position = Position.of_others(states, self._assembly.rank)

    async def resume(self) -> bool:
        """Load the newest checkpoint of `checkpoint=`; return False, with nothing changed, where there is none.

        Collective, before `train`. On another number of ranks training goes on with the epoch that was interrupted,
        from its beginning, or with a `data.ShardQueue` with what is left of it. Raises ValueError without
        `checkpoint=`, and what `aiodist.load` raises.
        """
        if self._plan.saving is None:
            raise ValueError("engine.resume without checkpoint=, which says where the checkpoints are")
        return await self._plan.saving.load()


def _network(net: DataParallel | nn.Module) -> nn.Module:
    module = net.module if isinstance(net, DataParallel) else net
    return module.network if isinstance(module, WithCriterion) else module


def _plan(
    net: DataParallel | nn.Module,
    criterion: Callable[[Any, Any], Tensor] | None,
    metrics: Mapping[str, Metric],
    split: Split | None,
    options: EngineOptions,
    saving: Saving | None,
) -> LoopPlan:
    """Return the arguments of an engine, checked."""
    if unknown := options.keys() - EngineOptions.__annotations__:
        raise TypeError(f"{', '.join(sorted(unknown))}: expected {', '.join(EngineOptions.__annotations__)}")
    module = net.module if isinstance(net, DataParallel) else net
    if isinstance(module, WithCriterion):
        if criterion is not None:
            raise ValueError("the net has a criterion, and another one is given: expected one of them")
        criterion = module.criterion
    if criterion is not None and not callable(criterion):
        raise TypeError(f"criterion is {type(criterion).__name__}: expected a function of output and target")
    if isinstance(criterion, nn.Module):
        known = {id(p) for p in module.parameters()}
        own = [name for name, p in criterion.named_parameters() if id(p) not in known]
        if own:
            raise ValueError(
                f"the criterion has a parameter {own[0]!r} that the net does not train: expected a net of "
                "aiodist.engine.WithCriterion(network, criterion)"
            )
    if metrics and criterion is None and split is None:
        raise ValueError("metrics without a criterion: expected `split=`, which tells what the target is")
    profile = options.get("profile")
    return LoopPlan(
        module=module,
        network=net,
        criterion=criterion,
        split=split or (whole if criterion is None else pair),
        metrics=metrics,
        uneven=options.get("uneven"),
        progress=options.get("progress", True),
        debug=options.get("debug", False),
        dynamic=options.get("dynamic", True),
        profile=None if profile is None else checked_steps(profile),
        traces=Path(options.get("traces", "traces")),
        saving=saving,
    )
