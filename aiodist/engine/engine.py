"""`Engine`: the training loop, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack, overload

from torch import nn
from torch.optim import Optimizer

from aiodist.communicator import Communicator
from aiodist.engine.batch import Criterion, Loader, Metric, Split, WithCriterion, checked_metrics, model_of
from aiodist.engine.display import check_steps
from aiodist.engine.state import Event, Hook, Hooks, Position, State
from aiodist.engine.steppers import ClientStepper, PassStepper, Stepper
from aiodist.engine.training import Assembly, EngineOptions, Training, evaluate
from aiodist.handles.calls import located
from aiodist.nn import DataParallel
from aiodist.nn.data_parallel import Driver
from aiodist.ps.training import TrainingClient
from aiodist.types import Stateful

H = TypeVar("H", bound=Hook)


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

    `net` is a `DataParallel` with an `optimizer` of torch, or a driver of which each step is one pass of all ranks, as
    `nn.PipelinedOptimizer`: synchronous SGD. Or it is a module, with a client of a parameter server (`ps.Downpour`,
    `ps.EASGD`, `ps.AsySGInCon`) in the place of the optimizer: asynchronous SGD. Enter the client, `async with
    client:`, around `train`.

    `criterion(output, target)` returns the loss, one element; None where the network itself does. Where it has
    parameters too, the net is one of `WithCriterion(network, criterion)`. A sample is a pair of input and target, or
    `split(sample)` returns that pair. The network is called with the input: a tuple or a list is its arguments, a dict
    its keywords.

    `metrics` have names: functions of output and target of a batch, which return the mean over its samples. Means weigh
    each batch by its samples (`State.weight`). Ranks exchange what they have measured once an epoch. `coll` is needed
    for this only where `net` is a module; without it figures are this rank's own.

    Options: `progress` shows a bar on rank 0's terminal, elsewhere a line for each epoch.
    `debug` raises FloatingPointError for a loss, a gradient or a parameter that is not finite, with its name, rank,
    epoch and step, and MismatchError after a step after which the parameters of ranks are not the same, bit by bit; it
    costs some passes over all parameters a step. With `dynamic=False` a step raises RuntimeError unless its graph,
    of operations and parameters, is that of the first one; with True each step may have another, as a `DataParallel`
    allows. `profile=(3, 8)` writes a trace of steps 3 to 8 of each rank to the folder `traces`, by torch's profiler.

    Raises TypeError or ValueError for arguments that are none of this.
    """

    def __init__(
        self,
        net: DataParallel | nn.Module,
        optimizer: Optimizer | Driver | TrainingClient,
        criterion: Criterion | None = None,
        *,
        coll: Communicator | None = None,
        metrics: Mapping[str, Metric] | None = None,
        split: Split | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if unknown := options.keys() - EngineOptions.__annotations__:
            raise TypeError(f"{', '.join(sorted(unknown))}: expected {', '.join(EngineOptions.__annotations__)}")
        if (profile := options.get("profile")) is not None:
            check_steps(profile)
        self._net = net
        self._optimizer = optimizer
        self._options = options
        self._hooks = Hooks()
        self._stepper: Stepper
        if isinstance(net, DataParallel) and isinstance(optimizer, Optimizer | Driver):
            self._stepper, module = PassStepper(net, optimizer), net.module
        elif isinstance(net, nn.Module) and isinstance(optimizer, TrainingClient):
            self._stepper, module = ClientStepper(net, optimizer), net
        else:
            raise TypeError(
                f"Engine({type(net).__name__}, {type(optimizer).__name__}): expected a DataParallel and an optimizer, "
                "or a module and a client of a parameter server"
            )
        per_rank = net.configure().per_rank if isinstance(net, DataParallel) else ()
        self._model = model_of(net, module, criterion, checked_metrics(metrics), split, per_rank)
        self._assembly = Assembly(self._stepper.base if coll is None else coll)
        self._position = Position()
        self._bound_to: Communicator | None = None
        """Where the last `rebind` was."""
        self._training: Training | None = None
        self._state = self._new_state(training=True)

    def _new_state(self, *, training: bool) -> State:
        module = self._model.module
        return State(
            net=self._net,
            network=module.network if isinstance(module, WithCriterion) else module,
            optimizer=self._optimizer,
            rank=self._assembly.rank,
            size=self._assembly.size,
            training=training,
        )

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

    @located
    async def train(self, loader: Loader, *, epochs: int) -> dict[str, float]:
        """Train until there have been `epochs` epochs, those of earlier calls and of a loaded state included.

        Collective. `loader` is an iterable, a `DataLoader` too, or an async one, of which each epoch makes a pass by
        `data.prefetch`; or a `Prefetch`. It, its sampler or its dataset is told the epoch, from 0 on, where it has
        `set_epoch`. Ranks may have different numbers of batches: an epoch is inside `net.join()`. Returns the figures
        of the last epoch that is over, alike on all ranks.

        A rank that sets `state.stop`, or is asked to stop (`Communicator.stopping`), stops all ranks behind the same
        step: this one, if it was set before backward ended, else the next; with a `PipelinedOptimizer` one later. In
        asynchronous SGD, where no rank waits for another, it stops this rank at once and the others at the end of their
        epoch. A later call goes on from there.

        Raises what a hook, the loader, forward, backward or the optimizer raised on this rank; RemoteError, with the
        traceback, on the others, in the step that they are about to make or at the end of the epoch. When it is
        cancelled the others raise RemoteError or CommunicatorAborted. All raise MismatchError, before a step, if
        they begin different epochs, or have different `epochs`. Cost: two allgathers of small objects an epoch.
        """
        if not isinstance(epochs, int) or epochs < 0:
            raise ValueError(f"epochs={epochs!r}: expected a number of epochs")
        if self._training is not None:
            raise RuntimeError("engine.train inside itself: expected one at a time")
        self._state.stop, self._state.epochs = False, epochs
        self._training = Training(
            self._model, self._options, self._stepper, self._assembly, self._position, self._state
        )
        try:
            await self._training.run(loader, self._hooks)
        finally:
            self._training = None
        return dict(self._state.metrics)

    @located
    async def test(self, loader: Loader) -> dict[str, float]:
        """Return mean loss and metrics over the data of all ranks, without gradients and with dropout and such off.

        Collective; in a hook of "epoch" too. Each rank may have any number of batches, none too. The hooks of "start",
        "sample", "forward", "criterion" and "end" are called with a state of its own, whose `training` is False.
        Parameters are those behind all updates; with a client they are its own. Raises as `train`, on the other ranks
        when they have come to the end. Cost: one allgather of small objects.
        """
        state = self._new_state(training=False)
        return await evaluate(self._model, self._stepper, self._assembly, self._hooks, state, loader)

    # --- with other ranks -------------------------------------------------------------------------------------------

    @located
    async def rebind(self, coll: Communicator, *state: Stateful) -> None:
        """Go on on another communicator, such as the world that `shrink` or `grow` has returned: `train` does so then.

        All ranks call it before `train`, one that joins too, which has just made net and engine. It calls
        `net.rebind(coll, optimizer, *state)`, see there, and has all ranks know how far training is. Where the engine
        is on `coll` already nothing happens. An epoch that was interrupted goes on behind the last step that was made;
        its figures are those of what is left of it. The k-th batch of a loader stands for one that all ranks share, so
        give one that divides it among the ranks of `coll`; or a `ShardQueue`, of which no record is lost or used twice,
        with `await queue.rebind(coll, net.steps_done)` behind this.

        Raises what `net.rebind` raises; at the call TypeError for an engine with a client of a parameter server, and
        RuntimeError while training is under way, or with both a scaler and a `PipelinedOptimizer`. Cost: that of
        `net.rebind`, and one allgather of small objects.
        """
        if not isinstance(self._stepper, PassStepper):
            raise TypeError("rebind of an engine with a client of a parameter server: make both anew on the new one")
        if self._training is not None:
            raise RuntimeError("engine.rebind in a training: expected it before")
        if coll is self._bound_to:
            return
        await self._stepper.rebind(coll, state)
        position = self._position.behind(self._stepper.in_net(self._position.step))
        told = await self._stepper.base.allgather_object(replace(position, random=None))
        self._position = position.furthest(told)
        self._stepper.note(None)
        self._assembly, self._bound_to = Assembly(self._stepper.base), coll
        self._state.rank, self._state.size = coll.rank, coll.size

    # --- going on later ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how far training has come on this rank, between two steps or in a hook of "update" or "epoch".

        It has numbers of epochs, steps and batches, and the states of torch's generators, now and when the epoch began.
        Net and optimizer have states of their own. Each rank saves its own: `aiodist.save(..., own=[engine])`.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have `train` go on from there: it reads on behind the batches of the epoch that were trained on.

        Training is the same as without an interruption, to the bit, if the loader gives the same batches in an epoch
        again: by `set_epoch`, or by torch's generator when its iterator is made, as `shuffle=True` does. Figures are
        those of what is left of the epoch. Raises ValueError for what is no such state, RuntimeError while training is
        under way.
        """
        if self._training is not None:
            raise RuntimeError("engine.load_state_dict in a training: expected it before")
        if state.keys() != vars(self._position).keys():
            raise ValueError(f"state with {', '.join(sorted(map(str, state)))}: expected {', '.join(vars(Position()))}")
        self._position = Position(**state)
        self._stepper.note(None)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have `train` go on from the states of another number of ranks: with the first epoch that they did not end.

        It begins anew, or with a queue of shards as loader, whose states are loaded too, with what is left of it.
        """
        epoch = min(state["epoch"] for state in states)
        self._position = Position(epoch, max(state["step"] for state in states))
        self._stepper.note(None)
